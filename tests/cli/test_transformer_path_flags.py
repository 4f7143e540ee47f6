"""`--transformer-path` on the command line."""

from __future__ import annotations

from pathlib import Path

from cli_support import Command


def test_the_path_reaches_the_recipe_and_what_cannot_run_is_refused(command: Command, tiny_wan_folder: Path) -> None:
    generate = ("generate", "a star", "--model-path", str(tiny_wan_folder), "--dry-run")
    weights = str(tiny_wan_folder / "transformer")
    planned = command(*generate, "--transformer-path", weights, "--json").json
    assert planned["runtime"]["transformer_path"] == weights
    assert f"transformer_path {weights}" in " ".join(command(*generate, "--transformer-path", weights).said.split())
    for flags, said in (
        (("--transformer-path", "lost.safetensors"), "transformer_path: lost.safetensors: no such file"),
        (("--transformer-path", str(tiny_wan_folder)), "is the folder of a whole model"),
        (("--transformer-2-path", weights), "the model has one transformer, and no transformer_2"),
        (("--transformer-path", weights, "--backend", "diffusers"), "reads the weights of its folder"),
    ):
        result = command(*generate, *flags)
        assert result.code != 0, flags
        assert said in " ".join(result.said.split()), result.said
