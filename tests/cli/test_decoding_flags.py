"""How latents are decoded, on the command line."""

from __future__ import annotations

from pathlib import Path

from cli_support import Command


def test_flags_of_decoding(command: Command, tiny_wan_folder: Path) -> None:
    """They reach the recipe; what cannot run is refused before anything is loaded."""
    generate = ("generate", "a star", "--model-path", str(tiny_wan_folder), "--dry-run")
    runtime = command(*generate, "--vae-decode", "fast", "--vae-tiling", "on", "--json").json["runtime"]
    assert (runtime["vae_decode"], runtime["vae_tiling"]) == ("fast", "on")
    for flags, said in (
        (("--vae-decode", "quick"), "vae_decode: unknown value 'quick'"),
        (("--vae-tiling", "no"), "vae_tiling: unknown value 'no'"),
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
