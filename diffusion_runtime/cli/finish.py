"""`finish`: what --save-latents has left, to its end; else as `generate --from` the same file."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.core.runtime_options import WHAT
from diffusion_runtime.request.fields import SIZE

EPILOG = """[bold]Examples[/]

diffusion-runtime finish outputs/a-blue-star-seed1.latents.safetensors

diffusion-runtime finish outputs/*.latents.safetensors --num-gpus 2

diffusion-runtime finish FILE.latents.safetensors --num-inference-steps 30

diffusion-runtime finish FILE.latents.safetensors --upsampler-path FOLDER

diffusion-runtime finish FILE.latents.safetensors --segment-seeds 0,9,0
"""
# Request fields that have flags here: of what comes after the steps that are done.
_FIELDS = (
    "stop_after_step",
    "num_inference_steps",
    "second_stage_sigmas",
    "second_stage_sampler",
    "adain_factor",
    "tone_map_compression_ratio",
    "segment_seeds",
    "decode_timestep",
    "decode_noise_scale",
    "interpolate",
)
# Flags of generate that mean nothing to what has begun.
_LEFT_OUT = ("stream", "interactive", "attention_plot", "profile", "resume", "from_file", "preset")


@dataclass(frozen=True)
class _FinishFlags:
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Files that end in .latents.safetensors, of one model.")
    ]
    allow_changes: Annotated[
        bool,
        options.option(
            WHAT,
            "Go on although the model, its weights or other values are not those of the steps before.",
            "--allow-changes",
        ),
    ] = False


def finish(context: typer.Context, **given: Any) -> None:
    """Go on from saved latents: the steps that are left, then decode.

    What comes out is what one whole run makes, to the bit.
    A file is read as one of a stranger: of another model, or other weights, it is refused.
    """
    from diffusion_runtime.cli.generate import as_of_generate, flags_of, run_flags
    from diffusion_runtime.cli.launching import CommandLine

    own = options.taken(_FinishFlags, given)
    every = as_of_generate(given)
    flags = replace(
        flags_of({**every, "prompt": None}),
        begins=tuple(map(Path, own.files)),
        allow_changes=own.allow_changes,
    )
    run_flags(flags, every, CommandLine(context.obj))


def _parameters() -> list[inspect.Parameter]:
    """Return the flags of `generate` about the model, where it runs and what is written, and those of the files."""
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    files, *others = options.parameters_of(_FinishFlags)
    wanted = [each for each in options.request_parameters(SIZE) if each.name in _FIELDS]
    flags = [*wanted, *options.source_parameters(), *options.run_parameters()]
    return [
        context,
        files.replace(default=inspect.Parameter.empty),
        *others,
        *(each for each in flags if each.name not in _LEFT_OUT),
    ]


options.set_parameters(finish, _parameters())
