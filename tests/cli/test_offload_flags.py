"""`--offload` and `--memory-limit` on the command line: the plan that is shown, and what is refused before loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cli_support import Command


def notes_of(item: dict[str, Any]) -> list[str]:
    notes: list[str] = item["attention_report"]["notes"]
    return notes


def test_the_plan_is_shown_and_what_does_not_fit_is_refused(command: Command, tiny_wan_folder: Path) -> None:
    generate = ("generate", "a star", "--model-path", str(tiny_wan_folder), "--device", "cpu")
    shown = command(*generate, "--dry-run")
    assert "Memory that it would take" in shown.said
    assert "none (no limit known)" in shown.said
    memory = command(*generate, "--dry-run", "--memory-limit", "64GB", "--json").json["memory"]
    assert (memory["offload"], memory["limit"]) == ("none", 64 * 10**9)
    assert memory["peak"] == max(memory["phases"].values())
    assert memory["weights"]["transformer"] > 0
    # Without a limit nothing is refused; more frames take more.
    larger = command(*generate, "--dry-run", "--num-frames", "161", "--json").json["memory"]
    assert larger["activations"]["denoise"] > 5 * memory["activations"]["denoise"] / 4
    small = ("--height", "64", "--width", "64", "--num-frames", "5", "--num-inference-steps", "1")
    made = command(
        "generate", "a star", "--model-path", "shapes", "--device", "cpu", "--memory-limit", "36MB", *small, "--json"
    ).json
    (item,) = made["items"]
    assert any("layers (none would take" in note and "read from its files" in note for note in notes_of(item))
    assert {"import", "read", "text", "denoise", "decode", "move", "write"} <= item["timings"].keys()
    assert item["peak_memory"]["machine"] > 0
    for flags, code, said in (
        (("--memory-limit", "1MB"), 4, "more than the 1 MB there are"),
        (("--memory-limit", "12"), 2, "memory_limit: expected a number with a unit, such as 12GB"),
        (("--offload", "layers"), 2, "the memory of cpu is the machine's"),
        (("--offload", "layer"), 2, "Did you mean 'layers'"),
        (("--backend", "diffusers", "--memory-limit", "1GB"), 2, "leave out --offload and --memory-limit"),
    ):
        result = command(*generate, *flags)
        assert result.code == code, (flags, result.said)
        assert said in " ".join(result.said.split()), result.said
        assert "loading the" not in result.said
