"""`info`: what a file is."""

from __future__ import annotations

from typing import Annotated

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.errors import UsageError

EPILOG = """[bold]Examples[/]

diffusion-runtime info outputs/a-fox-running-left-in-the-snow-seed0.mp4

diffusion-runtime info style.safetensors --model-path wan2.1-1.3b
"""


def info(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file that generate wrote, a LoRA, or weights.", show_default=False)
    ],
    model_path: Annotated[
        str | None,
        typer.Option(
            "--model-path", metavar="MODEL", help="With a LoRA or weights: whether they fit.", show_default=False
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show what a file is: how it was made, or which model a LoRA or weights are for."""
    from diffusion_runtime.cli.info import run_info, run_latents_info
    from diffusion_runtime.cli.lora_info import is_lora_path, run_lora_info
    from diffusion_runtime.cli.modular_info import is_modular_path, run_modular_info
    from diffusion_runtime.cli.weights_info import is_weights_path, run_weights_info
    from diffusion_runtime.media.formats import LATENTS_SUFFIX

    if file.endswith(LATENTS_SUFFIX):
        raise typer.Exit(run_latents_info(file, as_json=as_json))
    if model_path is None and is_modular_path(file):
        raise typer.Exit(run_modular_info(file, as_json=as_json))
    if is_weights_path(file):
        raise typer.Exit(run_weights_info(file, model_path, as_json=as_json))
    if is_lora_path(file):
        raise typer.Exit(run_lora_info(file, model_path, as_json=as_json))
    if model_path is not None:
        raise UsageError(f"--model-path: {file} is no LoRA file, and no weights; leave the option out")
    raise typer.Exit(run_info(file, as_json=as_json))
