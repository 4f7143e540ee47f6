"""`verify FILE`: makes a file again from its recipe, and says whether it is the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.options import option
from diffusion_runtime.core.runtime_options import WHAT, WHERE

if TYPE_CHECKING:
    from diffusion_runtime.comparison.verification import Regeneration, Verification

EPILOG = """[bold]Examples[/]

diffusion-runtime verify outputs/a-fox-running-left-in-the-snow-seed0.mp4

diffusion-runtime verify edited.png --input photo.jpg --model-path flux.1-kontext-dev

diffusion-runtime verify clip.mp4 --device cpu --json
"""
_MAX_DIFFERENCES = 50


def verify(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file that generate wrote.", show_default=False)],
    model_path: Annotated[
        str | None,
        option(
            WHAT,
            "Where the model of the recipe is. Default: the hub's cache, by its published name.",
            "--model-path",
            metavar="MODEL",
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        option(
            WHAT,
            "An image, LoRA or other file that it was made with, found by its digest; again for several.",
            "--input",
            metavar="FILE",
        ),
    ] = None,
    min_psnr: Annotated[
        float,
        option(
            WHAT,
            "On another machine: dB from which it counts as the same. Default: 30.",
            "--min-psnr",
            metavar="DB",
            min=1,
            max=100,
        ),
    ] = 30.0,
    device: Annotated[str | None, options.runtime_flag("device", WHERE)] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    log_format: options.LogFormat = None,
) -> None:
    """Verify a file: make it again from the recipe that it holds, and compare.

    To the bit on the same kind of CPU with the same versions, by PSNR elsewhere.
    Nothing that the recipe names is opened or fetched: files and models are yours.
    Exit code 7 for a file that its recipe does not make.
    """
    from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout
    from diffusion_runtime.comparison.verification import Regeneration
    from diffusion_runtime.session.batch import title_of

    terminal = Terminal(quiet=quiet, log_format=log_format)
    with terminal.log():
        regeneration = Regeneration.of(file, inputs=inputs or (), model_path=model_path, device=device or "auto")
        terminal.say(_what_is_made(regeneration))
        with terminal.progress(title_of(regeneration.request)) as view:
            result = regeneration.verify(
                min_psnr, on_stage=lambda stage: terminal.say(f"  {stage}"), on_progress=view.update
            )
    if as_json:
        put_on_stdout(json_text(result.to_dict()))
    else:
        _show(result)
    raise typer.Exit(result.exit_code)


def _what_is_made(regeneration: Regeneration) -> str:
    request, description = regeneration.request, regeneration.prepared.description
    return (
        f"making it again: {request.num_frames} frame(s) of {request.width} x {request.height} in "
        f"{request.num_inference_steps} steps with {description.config.model_path} on {description.device}"
    )


def _show(result: Verification) -> None:
    """Print the verdict, what was compared, and what is not as it was."""
    from diffusion_runtime.cli.consoles import console_on_stdout
    from diffusion_runtime.cli.tables import facts_table, plain_table
    from diffusion_runtime.comparison.verification import DIFFERENT, IDENTICAL
    from diffusion_runtime.untrusted.printable import printable

    console = console_on_stdout()
    verdict = "NOT REPRODUCED" if result.verdict == DIFFERENT else "reproduced"
    facts: list[tuple[str, object]] = [("file", result.path), ("verdict", f"{verdict}: {result.reason}")]
    if result.psnr_db is not None and result.verdict != IDENTICAL:
        worst = f"; the worst frame, {result.worst_frame}, {result.worst_psnr_db:.1f} dB"
        facts.append(
            ("frames", f"{result.num_frames}, {result.psnr_db:.1f} dB{worst if result.num_frames > 1 else ''}")
        )
    if result.sound_psnr_db is not None and result.verdict != IDENTICAL:
        facts.append(("sound", f"{result.sound_psnr_db:.1f} dB"))
    console.print(facts_table(facts, "Verification"))
    rows = [tuple(map(printable, (each.name, each.then, each.now))) for each in result.differences[:_MAX_DIFFERENCES]]
    if rows:
        console.print(plain_table(("what differs", "when it was made", "here"), rows, ""))
