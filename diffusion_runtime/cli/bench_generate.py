"""`bench generate`: the stages of one generation, cold and warm, beside diffusers' own pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from diffusion_runtime.cli import options
from diffusion_runtime.cli.bench import HOW, WHAT, RunFlags, SizeFlags, model_parameter, report
from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.options import option
from diffusion_runtime.cli.tables import figures_table
from diffusion_runtime.errors import ConfigError

if TYPE_CHECKING:
    from diffusion_runtime.benchmark.generation_result import GenerationBenchmark

EPILOG = """[bold]Examples[/]

diffusion-runtime bench generate

diffusion-runtime bench generate /models/Wan2.1-T2V-1.3B --num-frames 33 --plot wan.png

diffusion-runtime bench generate z-image-turbo --json

diffusion-runtime bench generate flux.1-dev --quantization fp8
"""
_COLUMNS = ("seconds", "text", "denoise", "per step", "decode", "write", "together", "load")


@dataclass(frozen=True)
class ClipFlags(SizeFlags):
    """The clip that `bench generate` makes."""

    num_inference_steps: Annotated[
        int | None, option(WHAT, "Steps. Default: the model's.", "--num-inference-steps", metavar="N", min=1)
    ] = None
    preset: Annotated[str | None, option(WHAT, "As in generate.", "--preset", metavar="NAME")] = None


@dataclass(frozen=True)
class MethodFlags:
    """Flags of how `bench generate` makes the clip, in addition to the options of RuntimeConfig."""

    no_diffusers: Annotated[bool, option(HOW, "Leave out diffusers' pipeline.", "--no-diffusers")] = False
    repeats: Annotated[
        int | None, option(HOW, "Generations after the first. Default: 3.", "--repeats", metavar="N", min=1)
    ] = None
    attention_backend: Annotated[
        str | None, option(HOW, "Of ours, as in generate.", "--attention-backend", metavar="NAME")
    ] = None
    attention_backend_config: Annotated[
        str | None, option(HOW, "Its options, as in generate.", "--attention-backend-config", metavar="OPTIONS")
    ] = None
    set_values: Annotated[
        list[str] | None,
        option(HOW, "Any other value of generate's config: request.context_frames=29.", "--set", metavar="KEY=VALUE"),
    ] = None


def generate(model: str, **given: Any) -> None:
    """The stages of one generation: cold, the first in this process, and warm, the median of those after it.

    A folder is loaded with its weights, and diffusers' own pipeline on the same folder is timed beside. A published
    model has random weights at its real size: nothing is downloaded, pictures are noise. Exit code 1 when a row fails.
    """

    def draw(result: GenerationBenchmark, path: Path) -> None:
        from diffusion_runtime.benchmark.plot import plot_generation

        plot_generation(result, path)

    report(options.taken(RunFlags, given), lambda _, on_progress: _measure(model, given, on_progress), draw, show)


def _measure(model: str, given: dict[str, Any], on_progress: Callable[[str], None]) -> GenerationBenchmark:
    from diffusion_runtime.benchmark.generation import GenerationChoice, benchmark_generation
    from diffusion_runtime.cli.attention_flags import AttentionFlags
    from diffusion_runtime.cli.config_file import read_config
    from diffusion_runtime.cli.settings import lora_of_preset
    from diffusion_runtime.config import RuntimeConfig

    clip, method = options.taken(ClipFlags, given), options.taken(MethodFlags, given)
    values = dataclasses.asdict(clip)
    preset = values.pop("preset")
    further = read_config(None, method.set_values or ())
    runtime = {
        **further.runtime,
        "model_path": model,
        "attention_override": AttentionFlags(method.attention_backend, method.attention_backend_config).collect(),
        **{key: value for key, value in options.given_options(RuntimeConfig, given).items() if value is not None},
    }
    config = RuntimeConfig.from_dict({key: value for key, value in runtime.items() if value is not None})
    if (shipped := lora_of_preset(preset, config)) is not None:
        config = dataclasses.replace(config, lora=(*config.lora, shipped))
    request = {**further.settings, **{key: value for key, value in values.items() if value is not None}}
    for name in ("prompt", "negative_prompt", "seed"):
        if name in request:
            raise ConfigError(
                f"--set request.{name}: a benchmark has one of its own, which takes as long; leave it out"
            )
    choice = GenerationChoice(config, request, preset, method.repeats or 3, not method.no_diffusers)
    return benchmark_generation(choice, on_progress=on_progress)


options.set_parameters(
    generate,
    [
        model_parameter("A folder with weights, or a name of `models`: random weights."),
        *options.parameters_of(ClipFlags),
        *options.parameters_of(MethodFlags),
        *options.benchmark_parameters(HOW),
        *options.parameters_of(RunFlags, plot="Plot the stages."),
    ],
)


def show(result: GenerationBenchmark) -> None:
    """Print two rows per pipeline, cold and warm, and what the figures are of."""
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
    if result.kept_in is not None:
        console.print(Text(f"kept for --dry-run and explain in {result.kept_in}"))


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
