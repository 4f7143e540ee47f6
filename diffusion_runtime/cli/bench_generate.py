"""`bench generate`: the stages of one generation, cold and warm, beside diffusers' own pipeline."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.bench import check_result_place, progress_line, write_results
from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.tables import figures_table
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout

if TYPE_CHECKING:
    from diffusion_runtime.benchmark.generation_result import GenerationBenchmark

EPILOG = """[bold]Examples[/]

diffusion-runtime bench generate

diffusion-runtime bench generate /models/Wan2.1-T2V-1.3B --num-frames 33 --plot wan.png

diffusion-runtime bench generate z-image-turbo --json

diffusion-runtime bench generate flux.1-dev --quantization fp8 --compile regional
"""
_WHAT, _HOW = "What to measure", "How it is computed"
_COLUMNS = ("seconds", "text", "denoise", "per step", "decode", "write", "together", "load")


def _option(panel: str, text: str, name: str, metavar: str | None = None, **limits: Any) -> Any:
    return typer.Option(name, help=text, metavar=metavar, show_default=False, rich_help_panel=panel, **limits)


def generate(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A folder with weights, or a name of `models`: random weights."),
    ] = "shapes",
    height: Annotated[int | None, _option(_WHAT, "Pixels. Default: the model's.", "--height", "N", min=1)] = None,
    width: Annotated[int | None, _option(_WHAT, "Pixels. Default: the model's.", "--width", "N", min=1)] = None,
    num_frames: Annotated[
        int | None, _option(_WHAT, "Frames. Default: the model's.", "--num-frames", "N", min=1)
    ] = None,
    num_inference_steps: Annotated[
        int | None, _option(_WHAT, "Steps. Default: the model's.", "--num-inference-steps", "N", min=1)
    ] = None,
    preset: Annotated[str | None, _option(_WHAT, "As in generate.", "--preset", "NAME")] = None,
    no_diffusers: Annotated[bool, _option(_HOW, "Leave out diffusers' pipeline.", "--no-diffusers")] = False,
    repeats: Annotated[
        int | None, _option(_HOW, "Generations after the first. Default: 3.", "--repeats", "N", min=1)
    ] = None,
    attention_backend: Annotated[
        str | None, _option(_HOW, "Of ours, as in generate.", "--attention-backend", "NAME")
    ] = None,
    attention_backend_config: Annotated[
        str | None, _option(_HOW, "Its options, as in generate.", "--attention-backend-config", "OPTIONS")
    ] = None,
    quantization: Annotated[
        str | None, _option(_HOW, "Of ours: none, fp8, fp8-all, int8.", "--quantization", "MODE")
    ] = None,
    compile_mode: Annotated[str | None, _option(_HOW, "Of ours: off, regional.", "--compile", "MODE")] = None,
    cuda_graphs: Annotated[str | None, _option(_HOW, "Of ours: auto, off, on.", "--cuda-graphs", "MODE")] = None,
    offload: Annotated[
        str | None, _option(_HOW, "Of a folder's weights: auto, none, model, layers.", "--offload", "MODE")
    ] = None,
    memory_limit: Annotated[str | None, _option(_HOW, "Of ours, as in generate.", "--memory-limit", "SIZE")] = None,
    vae_decode: Annotated[str | None, _option(_HOW, "Of ours: exact, fast.", "--vae-decode", "MODE")] = None,
    import_files: options.ImportFiles = None,  # noqa: ARG001 - run by the parser
    device: options.Device = None,
    dtype: options.Dtype = None,
    output_path: Annotated[
        Path | None,
        typer.Option(
            "--output-path",
            "-o",
            help="Write the results as JSON.",
            metavar="FILE.json",
            show_default=False,
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    plot: Annotated[Path | None, _option(options.OUTPUT, "Plot the stages.", "--plot", "FILE.png")] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    log_format: options.LogFormat = None,
) -> None:
    """The stages of one generation: cold, the first in this process, and warm, the median of those after it.

    A folder is loaded with its weights, and diffusers' own pipeline on the same folder is timed beside. A published
    model has random weights at its real size: nothing is downloaded, pictures are noise. Exit code 1 when a row fails.
    """
    terminal = Terminal(quiet=quiet, log_format=log_format)
    with terminal.log():
        from diffusion_runtime.benchmark.generation import GenerationChoice, benchmark_generation
        from diffusion_runtime.benchmark.plot import check_plotting, plot_generation
        from diffusion_runtime.cli.attention_flags import AttentionFlags
        from diffusion_runtime.cli.settings import lora_of_preset
        from diffusion_runtime.config import RuntimeConfig

        if plot is not None:
            check_plotting(plot)
        for path in (output_path, plot):
            check_result_place(path)
        values = {
            "height": height,
            "width": width,
            "num_frames": num_frames,
            "num_inference_steps": num_inference_steps,
        }
        runtime = {
            "model_path": model,
            "attention_override": AttentionFlags(attention_backend, attention_backend_config).collect(),
            "quantization": quantization,
            "compile": compile_mode,
            "cuda_graphs": cuda_graphs,
            "offload": offload,
            "memory_limit": memory_limit,
            "vae_decode": vae_decode,
            "device": device,
            "dtype": dtype,
        }
        config = RuntimeConfig.from_dict({key: value for key, value in runtime.items() if value is not None})
        if (shipped := lora_of_preset(preset, config)) is not None:
            config = dataclasses.replace(config, lora=(*config.lora, shipped))
        choice = GenerationChoice(
            config,
            {key: value for key, value in values.items() if value is not None},
            preset,
            repeats or 3,
            not no_diffusers,
        )
        with progress_line(terminal) as on_progress:
            result = benchmark_generation(choice, on_progress=on_progress)
        write_results(result, output_path, plot, lambda path: plot_generation(result, path), terminal)
    if as_json:
        put_on_stdout(json_text(result.to_dict()))
    else:
        show(result)
    raise typer.Exit(result.exit_code)


def show(result: GenerationBenchmark) -> None:
    """Two rows per pipeline, cold and warm, and what the figures are of."""
    from rich.text import Text

    console = console_on_stdout()
    console.print(Text(f"{result.device}, {result.dtype}"))
    console.print(Text(f"\n{result.model}", style="bold"))
    console.print(figures_table(_COLUMNS, _cells(result)), soft_wrap=True)
    console.print()
    for row in result.rows:
        if row.state != "measured":
            console.print(Text(f"{row.name}: {row.state}: {row.reason}"))
        for line in row.ran if row.name == "ours" else ():
            console.print(Text(line))
    for remark in result.remarks:
        console.print(Text(remark))


def _cells(result: GenerationBenchmark) -> list[tuple[str, ...]]:
    num_steps = int(result.request.get("num_inference_steps") or 1)
    cells = []
    for row in result.rows:
        for when, run, load_s in (("cold", row.cold, row.load_s), ("warm", row.warm, None)):
            if run:
                denoise = run.get("denoise")
                per_step = None if denoise is None else denoise / num_steps
                values = (
                    run.get("text"), denoise, per_step, run.get("decode"), run.get("write"), sum(run.values()), load_s
                )  # fmt: skip
                cells.append((f"{row.name}, {when}", *map(_seconds, values)))
    return cells


def _seconds(value: float | None) -> str:
    """Milliseconds matter: a stage of a small model takes a few."""
    return "-" if value is None else f"{value:.3f}"
