"""`calibrate`: measure on a model what the step cache MagCache and progressive resolution need to know of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout, put_path_on_stdout
from diffusion_runtime.errors import OutputError, RequestError

SCHEMA = "diffusion_runtime.calibrate/1"
EPILOG = """[bold]Example[/]

diffusion-runtime calibrate "a cat" "a busy street" --model-path wan2.1-1.3b --num-inference-steps 50 -o wan.json

diffusion-runtime generate "a dog" --model-path wan2.1-1.3b --num-inference-steps 50 --step-cache magcache:file=wan.json
"""


def _size(text: str) -> object:
    return typer.Option(metavar="N", help=text, show_default=False)


def calibrate(
    prompts: options.Prompts = None,
    model_path: options.ModelPath = None,
    output_path: Annotated[
        str | None, typer.Option("--output-path", "-o", metavar="FILE", help="The .json to write.", show_default=False)
    ] = None,
    num_inference_steps: Annotated[int | None, _size("Steps; the file is for so many alone.")] = None,
    height: Annotated[int | None, _size("Pixels.")] = None,
    width: Annotated[int | None, _size("Pixels.")] = None,
    num_frames: Annotated[int | None, _size("1 makes an image.")] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
) -> None:
    """Measure how a model's residuals change from step to step, for --step-cache magcache, and the spectrum of its
    latents, for --progressive-resolution.

    Each prompt is generated once. The file is refused for another model or number of steps.
    """
    if not prompts:
        raise RequestError('prompt: there is none; give one or several in quotes, as in calibrate "a cat" "a street"')
    if output_path is None:
        raise OutputError("--output-path: expected the file to write: -o calibration.json")
    path = Path(output_path)
    if path.exists():
        raise OutputError(f"{path} exists already; choose another --output-path, or move it")
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is no folder; make it first")
    terminal = Terminal()
    with terminal.log():
        from diffusion_runtime.loading import load_pipeline
        from diffusion_runtime.pipeline import Pipeline
        from diffusion_runtime.request import GenerationRequest

        pipeline = load_pipeline(model_path or "shapes", device=device or "auto", dtype=dtype or "auto")
        if not isinstance(pipeline, Pipeline):
            raise RequestError("calibrate: expected a native model; a pipeline of diffusers' own has no blocks of ours")
        requests = [
            GenerationRequest(
                prompt,
                height=height,
                width=width,
                num_frames=num_frames,
                num_inference_steps=num_inference_steps,
                seed=seed,
            )
            for seed, prompt in enumerate(prompts)
        ]
        calibration = pipeline.calibrate(requests)
    path.write_text(json.dumps(calibration.to_dict(), indent=1) + "\n")
    if as_json:
        put_on_stdout(json_text({"schema": SCHEMA, "path": str(path), "calibration": calibration.to_dict()}))
    else:
        if calibration.spectrum is not None:
            pairs = ",".join(f"{name}={value:.6g}" for name, value in calibration.spectrum.items())
            terminal.say(f"spectrum of the latents: --progressive-resolution dct:{pairs}")
        put_path_on_stdout(path)
