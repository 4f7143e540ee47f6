"""`--transformer-path` on the command line; `info` of a file of weights."""

from __future__ import annotations

from pathlib import Path

import fp8_files
import torch
from cli_support import Command
from gguf_files import write_gguf
from original_names import original_tensors
from safetensors.torch import load_file, save_file


def test_the_path_reaches_the_recipe_and_what_cannot_run_is_refused(command: Command, tiny_wan_folder: Path) -> None:
    generate = ("generate", "a star", "--model-path", str(tiny_wan_folder), "--dry-run")
    weights = str(tiny_wan_folder / "transformer")
    planned = command(*generate, "--transformer-path", weights, "--json").json
    assert planned["runtime"]["transformer_path"] == weights
    # A long path is broken at the end of a line.
    assert f"transformer_path{weights}" in "".join(command(*generate, "--transformer-path", weights).said.split())
    for flags, said in (
        (("--transformer-path", "lost.safetensors"), "transformer_path: lost.safetensors: no such file"),
        (("--transformer-path", str(tiny_wan_folder)), "is the folder of a whole model"),
        (("--transformer-2-path", weights), "the model has one transformer, and no transformer_2"),
        (("--transformer-path", weights, "--backend", "diffusers"), "reads the weights of its folder"),
    ):
        result = command(*generate, *flags)
        assert result.code != 0, flags
        assert said in " ".join(result.said.split()), result.said


def test_info_says_what_a_file_of_weights_holds(command: Command, tmp_path: Path, tiny_wan_folder: Path) -> None:
    given = load_file(tiny_wan_folder / "transformer" / "diffusion_pytorch_model.safetensors")
    file = fp8_files.comfy_scaled(given)
    stored = {f"diffusion_model.{name}": tensor for name, tensor in file.stored.items()}
    save_file({**stored, "vae.conv.weight": torch.zeros(1)}, tmp_path / "a.safetensors")
    values = command("info", tmp_path / "a.safetensors", "--model-path", tiny_wan_folder, "--json").json
    assert (values["format"], values["families"], values["fits"]) == ("safetensors", ["Wan"], str(tiny_wan_folder))
    assert (values["num_tensors"], values["num_others"]) == (len(given), 1)
    assert values["kinds"]["F8_E4M3"] == sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) - 1
    assert values["scales"] == f"{values['kinds']['F8_E4M3']} per tensor"
    shown = " ".join(command("info", tmp_path / "a.safetensors").out.split())
    assert "1 tensors, which --transformer-path leaves unread" in shown
    save_file({name: each for name, each in given.items() if name != "proj_out.bias"}, tmp_path / "short.safetensors")
    refused = command("info", tmp_path / "short.safetensors", "--model-path", tiny_wan_folder)
    assert refused.code == 1
    said = " ".join(refused.said.split())
    assert "short.safetensors: the weights do not fit config.json" in said
    assert "1 of 69 tensors are missing: proj_out.bias" in said
    write_gguf(tmp_path / "b.gguf", original_tensors("z_image"), lambda _: "Q4_0")
    values = command("info", tmp_path / "b.gguf", "--json").json
    assert (values["format"], values["families"], values["scales"]) == ("GGUF", ["Z-Image"], None)
    refused = command("info", tmp_path / "b.gguf", "--model-path", tiny_wan_folder)
    assert refused.code == 1
    assert "the file is for Z-Image, and the model is Wan" in " ".join(refused.said.split())
