"""`calibrate`: measure on a model what MagCache, TeaCache and progressive resolution need to know of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.lora_flags import pair_loras
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout, put_path_on_stdout
from diffusion_runtime.errors import OutputError, RequestError

if TYPE_CHECKING:
    from diffusion_runtime.core.progress import Progress
    from diffusion_runtime.request.generation_request import GenerationRequest
    from diffusion_runtime.session.reporter import ProgressView

SCHEMA = "diffusion_runtime.calibrate/1"
EPILOG = """[bold]Example[/]

diffusion-runtime calibrate "a cat" "a busy street" --model-path wan2.1-1.3b --num-inference-steps 50 -o wan.json

diffusion-runtime generate "a dog" --model-path wan2.1-1.3b --num-inference-steps 50 --step-cache teacache:file=wan.json
"""


def _size(text: str) -> object:
    return typer.Option(metavar="N", help=text, show_default=False)


def calibrate(
    prompts: options.Prompts = None,
    model_path: Annotated[str | None, options.runtime_flag("model_path")] = None,
    output_path: Annotated[
        str | None, typer.Option("--output-path", "-o", metavar="FILE", help="The .json to write.", show_default=False)
    ] = None,
    num_inference_steps: Annotated[int | None, _size("Steps, as many as the cache is to run with.")] = None,
    height: Annotated[int | None, _size("Pixels.")] = None,
    width: Annotated[int | None, _size("Pixels.")] = None,
    num_frames: Annotated[int | None, _size("1 makes an image.")] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(metavar="X", help="As the cache is to run with.", show_default=False)
    ] = None,
    lora: options.Lora = None,
    import_files: options.ImportFiles = None,  # noqa: ARG001 - run by the parser
    device: Annotated[str | None, options.runtime_flag("device")] = None,
    dtype: Annotated[str | None, options.runtime_flag("dtype")] = None,
    quantization: Annotated[str | None, options.runtime_flag("quantization")] = None,
    quantization_ignored_layers: Annotated[
        list[str] | None, options.runtime_flag("quantization_ignored_layers")
    ] = None,
    as_json: options.Json = False,
    log_format: options.LogFormat = None,
) -> None:
    """Measure how a model changes from step to step, for --step-cache magcache and teacache, and the spectrum of its
    latents, for --progressive-resolution.

    Each prompt is generated once. The file is refused for another model; other steps or quantization are reported.
    """
    if not prompts:
        raise RequestError('prompt: there is none; give one or several in quotes, as in calibrate "a cat" "a street"')
    if output_path is None:
        raise OutputError("--output-path: expected the file to write: -o calibration.json")
    path = Path(output_path)
    _check_target(path)
    from diffusion_runtime.media.publish import publish_text

    terminal = Terminal(log_format=log_format)
    with terminal.log():
        from diffusion_runtime.config import RuntimeConfig
        from diffusion_runtime.loading import prepare
        from diffusion_runtime.profiling.calibration import calibrate
        from diffusion_runtime.request.generation_request import GenerationRequest
        from diffusion_runtime.rules.batch_settings import BatchSettings

        loras = pair_loras((), (), lora or ()) or ()
        prepared = prepare(
            RuntimeConfig(
                model_path=model_path or RuntimeConfig.model_path,
                device=device or "auto",
                dtype=dtype or "auto",
                lora=tuple(loras),
                quantization=quantization or "none",
                quantization_ignored_layers=tuple(quantization_ignored_layers or ()),
            )
        ).inspectable
        if prepared is None:
            raise RequestError(
                "calibrate: expected a native model; a pipeline of diffusers' own has no blocks of ours: use "
                "--step-cache easycache, which takes no calibration"
            )
        rules = prepared.rules
        requests = [
            GenerationRequest(
                prompt,
                height=height,
                width=width,
                num_frames=num_frames,
                num_inference_steps=num_inference_steps,
                guidance_scale=guidance_scale,
                seed=seed,
            )
            for seed, prompt in enumerate(prompts)
        ]
        # What cannot be generated is refused before the weights load.
        BatchSettings.of([rules.resolve(request) for request in requests], rules.sampling)
        pipeline = prepared.load(lambda stage: terminal.say(f"  {stage}"))
        with contextlib.ExitStack() as shown:
            calibration = calibrate(pipeline, requests, on_progress=_progress(requests, terminal, shown))
    publish_text(path, json.dumps(calibration.to_dict(), indent=1) + "\n", "--output-path")
    if as_json:
        put_on_stdout(json_text({"schema": SCHEMA, "path": str(path), "calibration": calibration.to_dict()}))
    else:
        if not calibration.coefficients:
            terminal.say(
                f"{calibration.num_steps} steps are too few for TeaCache's coefficients; the file serves magcache alone"
            )
        if calibration.spectrum is not None:
            terminal.say(spectrum_text(calibration.spectrum))
        put_path_on_stdout(path)


def _progress(
    requests: Sequence[GenerationRequest], terminal: Terminal, shown: contextlib.ExitStack
) -> Callable[[Progress], None]:
    """An on_progress of `calibrate`, with a view for each request. shown: ends the last one."""
    views: list[ProgressView] = []

    def update(progress: Progress) -> None:
        if progress.request_index == len(views):
            shown.close()
            title = f"[{len(views) + 1}/{len(requests)}] {requests[len(views)].prompt}"
            views.append(shown.enter_context(terminal.progress(title)))
        views[-1].update(progress)

    return update


def spectrum_text(spectrum: Mapping[str, float]) -> str:
    """The flag to use, where it would be taken."""
    pairs = ",".join(f"{name}={value:.6g}" for name, value in spectrum.items())
    if spectrum["beta"] <= 0:
        return (
            f"spectrum of the latents: {pairs}: expected a beta above 0, power that falls with the frequency, which "
            "--progressive-resolution relies on; measure more prompts, at the size that the model is made for"
        )
    return f"spectrum of the latents: --progressive-resolution dct:{pairs}"


def _check_target(path: Path) -> None:
    """Check that the file can be written, before anything is generated. Raises OutputError."""
    from diffusion_runtime.session.outputs import prepare_result

    if path.exists():
        raise OutputError(f"{path} exists already; choose another --output-path, or move it")
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is no folder; make it first")
    prepare_result(path, "--output-path")
