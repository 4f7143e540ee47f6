"""`upscale`: a video or an image restored at another size, by a model such as SeedVR2; else as `generate`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.core.runtime_options import WHAT
from diffusion_runtime.errors import ConfigError, RequestError, shown

EPILOG = """[bold]Examples[/]

diffusion-runtime upscale clip.mp4

diffusion-runtime upscale photo.jpg --scale 4 -o photo-large.png

diffusion-runtime upscale clip.mp4 --size 1920x1080 --num-frames 33 --dry-run

diffusion-runtime upscale clip.mp4 ComfyUI/models/SEEDVR2/seedvr2_ema_3b_fp16.safetensors
"""
# Request fields that have flags here.
_FIELDS = ("num_frames", "video_first_frame", "segment_frames", "segment_overlap", "color_correction")
# Flags of generate that mean nothing to a video that is there: a manifest would call it a model's work.
_LEFT_OUT = ("stream", "interactive", "attention_plot", "allow_url", "from_file", "preset", "sign", "cert")


@dataclass(frozen=True)
class _UpscaleFlags:
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A video or an image: mp4, mov, mkv, webm, gif, png, jpg.")
    ]
    model_file: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A file of the model, as --model-path. Default: one that is found.",
            show_default=False,
        ),
    ] = None
    scale: Annotated[
        float | None, options.option(WHAT, "Times the height and width of the file: 2, 1.5, 4.", "--scale", metavar="X")
    ] = None
    size: Annotated[
        str | None, options.option(WHAT, "Width and height in pixels, in place of --scale.", "--size", metavar="WxH")
    ] = None


def upscale(context: typer.Context, **given: Any) -> None:
    """Restore and upscale a video or an image with SeedVR2.

    Twice as large, with the sound and the frame rate of the file, into outputs/.
    A long video is made in segments that are blended.
    """
    from diffusion_runtime.cli.generate import as_of_generate, flags_of
    from diffusion_runtime.cli.generation import run_generate
    from diffusion_runtime.cli.launching import CommandLine
    from diffusion_runtime.cli.terminal import Terminal
    from diffusion_runtime.models.video_restoration import upscale_request
    from diffusion_runtime.parallel.process_info import read_process_info

    own, report = options.taken(_UpscaleFlags, given), options.taken(options.ReportFlags, given)
    if read_process_info() is not None or (given["num_gpus"] or 1) > 1:
        raise ConfigError(
            "num_gpus: upscale runs in one process, as the windows of its attention are not shared; for several files "
            "run it once for each GPU: CUDA_VISIBLE_DEVICES=1 diffusion-runtime upscale FILE"
        )
    terminal = Terminal(quiet=report.quiet, verbose=report.verbose, log_format=report.log_format)
    with terminal.log():
        request = upscale_request(own.file, scale=own.scale, size=_size_of(own.size))
        model_path = _model_of(own, given)
        values = {name: given[name] for name in _FIELDS}
        flags = flags_of(
            {
                **as_of_generate(given),
                "prompt": [request.prompt],
                "model_path": str(model_path),
                "height": request.height,
                "width": request.width,
                **{name: [path] for name in ("image_path", "video_path") if (path := getattr(request, name))},
                **values,
            }
        )
        output = options.taken(
            options.OutputFlags, {**as_of_generate(given), "output_path": _output_of(request, given)}
        )
        code = run_generate(flags, output, terminal, CommandLine(context.obj))
    raise typer.Exit(code)


def _size_of(text: str | None) -> tuple[int, int] | None:
    """Return width and height of a text such as 1920x1080. Raises RequestError."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,5})[xX*](\d{1,5})", text.strip())
    if found is None:
        raise RequestError(f"--size: expected width and height, such as 1920x1080, got {shown(text)}")
    return int(found.group(1)), int(found.group(2))


def _model_of(own: _UpscaleFlags, given: Mapping[str, Any]) -> str:
    """Return the model that is named, or a file of one that is found. Raises ConfigError for two, ModelLoadError for
    none."""
    if own.model_file is not None and given["model_path"] is not None:
        named = f"{shown(own.model_file)}, {shown(given['model_path'])}"
        raise ConfigError(f"model_path: expected one model, got {named}")
    chosen = own.model_file or given["model_path"]
    if chosen is not None:
        return str(chosen)
    from diffusion_runtime.models.restoration_files import find_restoration_model

    return str(find_restoration_model(own.file, given["models_dir"] or ()))


def _output_of(request: Any, given: Mapping[str, Any]) -> str | None:
    """Return the file that is written: named after the one that is read, with the size of the result."""
    if given["output_path"] is not None or len(given["seed"] or ()) > 1:
        named: str | None = given["output_path"]
        return named
    from diffusion_runtime.session.outputs import DEFAULT_FOLDER, slug

    kind = given["file_format"] or ("png" if request.image_path is not None else "mp4")
    return str(Path(DEFAULT_FOLDER) / f"{slug(request.prompt)}-{request.width}x{request.height}.{kind}")


def _parameters() -> list[inspect.Parameter]:
    """Return the flags of `generate` about the model, where it runs and what is written, and those of the file."""
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    file, *others = options.parameters_of(_UpscaleFlags)
    of_request = [*options.request_parameters("Size and steps"), *options.request_parameters(WHAT)]
    wanted = [each for each in of_request if each.name in (*_FIELDS, "seed")]
    flags = [*wanted, *options.source_parameters(), *options.run_parameters()]
    return [
        context,
        file.replace(default=inspect.Parameter.empty),
        *others,
        *(each for each in flags if each.name not in _LEFT_OUT),
    ]


options.set_parameters(upscale, _parameters())
