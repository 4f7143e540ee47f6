"""How latents are decoded, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from cli_support import Command
from tiny_flux1 import write_tiny_flux1


def test_flags_of_decoding(command: Command, tiny_wan_folder: Path) -> None:
    """They reach the recipe; what cannot run is refused before anything is loaded."""
    generate = ("generate", "a star", "--model-path", str(tiny_wan_folder), "--dry-run")
    runtime = command(*generate, "--vae-decode", "fast", "--vae-tiling", "on", "--json").json["runtime"]
    assert (runtime["vae_decode"], runtime["vae_tiling"]) == ("fast", "on")
    for flags, said in (
        (("--vae-decode", "quick"), "vae_decode: unknown value 'quick'"),
        (("--vae-tiling", "no"), "vae_tiling: unknown value 'no'"),
        (("--vae-tiling", "512:400"), "expected an overlap of at most half the size, got"),
        (
            ("--vae-tiling", "512x512"),
            "expected SIZE or SIZE:OVERLAP in pixels, from 64 to 99999, such as 512:64, or one of",
        ),
        (
            ("--vae-tiling", "100:36"),
            "sizes and overlaps of wan models are multiples of 8: 100 is near 96, 36 is near 32",
        ),
        (("--vae-tiling", "on", "--backend", "diffusers"), "diffusers' own pipeline decodes with its own module"),
        (("--vae-tiling", "on", "--vae-decoder", "tiny"), "vae_tiling: on is for the model's own decoder"),
        (("--vae-decode", "fast", "--backend", "diffusers"), "diffusers' own pipeline decodes with its own module"),
        (("--vae-decoder", "tiny", "--backend", "diffusers"), "diffusers' own pipeline decodes with its own module"),
        (("--vae-decoder", "tiny", "--vae-decode", "fast"), "fast is a mode of the model's own decoder"),
        (("--vae-decoder", "tiny"), "taew2_1.safetensors is missing; download"),
    ):
        result = command(*generate, *flags)
        assert result.code != 0, flags
        assert said in " ".join(result.said.split()), result.said


def test_auto_decodes_in_tiles_where_a_whole_decode_does_not_fit(tmp_path: Path, command: Command) -> None:
    """A FLUX.1 autoencoder that is wide in the plan alone: nothing of it is loaded."""
    folder = write_tiny_flux1(tmp_path)
    file = folder / "vae" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "block_out_channels": [256, 256]}))
    generate = ("generate", "a cat", "--seed", "1", "--model-path", str(folder), "--height", "1024", "--width", "1024")
    generate = (*generate, "--num-inference-steps", "1", "--dry-run", "--json")

    def planned(*flags: str) -> tuple[str, int, list[str]]:
        plan = command(*generate, *flags).json
        memory = plan["memory"]
        return plan["runtime"]["vae_tiling"], memory["activations"]["decode"], memory["notes"]

    chosen, whole, notes = planned("--memory-limit", "9GB")
    assert (chosen, notes) == ("auto", [])
    chosen, tiled, notes = planned("--memory-limit", "3GB")
    assert chosen == "on"
    assert len(notes) == 1
    assert "a whole decode does not fit: the plan decodes in tiles (vae_tiling: on), slower" in notes[0]
    assert tiled < whole / 2
    # At this size the middle block, which attends to the whole, takes the most.
    assert planned("--memory-limit", "3GB", "--vae-tiling", "256") == ("256", tiled, [])
    refused = command(*generate, "--memory-limit", "3GB", "--vae-tiling", "off")
    assert refused.code == 4
    assert "--vae-tiling on (" in refused.json["error"], refused.json
