"""`models`, `models list`: the published models with a native implementation: short name, download, memory of the
weights."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_runtime.cli import options
from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.flag_syntax import CheckedCommand
from diffusion_runtime.cli.tables import plain_table
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout
from diffusion_runtime.errors import UsageError
from diffusion_runtime.request.generation_request import REQUEST_FIELDS

if TYPE_CHECKING:
    from diffusion_runtime.models.published import PublishedModel
    from diffusion_runtime.models.sampling_presets import SamplingPreset

SCHEMA = "diffusion_runtime.models/1"
EPILOG = """[bold]Examples[/]

diffusion-runtime models

diffusion-runtime generate "a cat" --model-path wan2.1-1.3b

diffusion-runtime models list --cached

diffusion-runtime models download wan2.1-1.3b

diffusion-runtime models --json

diffusion-runtime models convert self_forcing_dmd.pt sf --as self-forcing --base Wan2.1-T2V-1.3B-Diffusers
"""
LIST_EPILOG = """[bold]Examples[/]

diffusion-runtime models list

diffusion-runtime models list --cached --json
"""
_SHOWN_DTYPES = ("bfloat16", "float32")


models = typer.Typer(rich_markup_mode="rich", context_settings={"help_option_names": ["-h", "--help"]})


@models.callback(invoke_without_command=True, epilog=EPILOG)
def about(context: typer.Context, as_json: options.Json = False) -> None:
    """List the models that run on this project's own transformers, and what each needs.

    Any other diffusers folder runs with --backend diffusers.
    """
    if context.invoked_subcommand is None:
        show_published(as_json=as_json)
    elif as_json:
        raise UsageError(f"--json: give it behind the command: models {context.invoked_subcommand} --json")


@models.command("list", cls=CheckedCommand, epilog=LIST_EPILOG)
def list_models(
    cached: Annotated[
        bool, typer.Option("--cached", help="What is in the hub's cache instead: commits, sizes, native or not.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """List the published models, or with --cached those that were downloaded."""
    if cached:
        from diffusion_runtime.cli.cached_models import show_cached

        show_cached(as_json=as_json)
    else:
        show_published(as_json=as_json)


def show_published(*, as_json: bool) -> None:
    terminal = Terminal()
    with terminal.log():
        from diffusion_runtime.models.published import published_models
        from diffusion_runtime.models.registry import supported_transformer_classes
        from diffusion_runtime.models.sampling_presets import sampling_presets

        listed, classes, presets = published_models(), supported_transformer_classes(), sampling_presets()
    if as_json:
        put_on_stdout(json_text(_to_json_object(listed, classes, presets)))
    else:
        show(listed, presets)


def _to_json_object(
    listed: Sequence[PublishedModel], classes: Sequence[str], presets: Sequence[SamplingPreset]
) -> dict[str, Any]:
    from diffusion_runtime.models.sampling_presets import names_of, presets_of

    return {
        "schema": SCHEMA,
        "transformer_classes": list(classes),
        "models": [
            {
                "name": model.name,
                "family": model.family,
                "model_path": model.model_path,
                "makes": model.makes,
                "presets": [*model.presets, *names_of(presets_of(model.family, model.model_path))],
                "parameters": {component: round(1e9 * billions) for component, billions in model.parameters},
                "download_gb": round(model.download_gb, 3),
                "weights_gb": {dtype: round(model.memory_gb(dtype), 3) for dtype in _SHOWN_DTYPES},
                "offloaded_gb": {dtype: round(model.offloaded_gb(dtype), 3) for dtype in _SHOWN_DTYPES},
                "images": {name: "needed" if is_needed else "optional" for name, is_needed in model.images.items()},
                "parts": dict(model.parts),
            }
            for model in listed
        ],
        "sampling_presets": [
            {
                "family": preset.family,
                "model_path": preset.model,
                "name": preset.name,
                "models": preset.models,
                "source": preset.source,
                "request": dict(preset.request),
            }
            for preset in presets
        ],
    }


def _comes(model: PublishedModel) -> str:
    if not model.download_gb:
        return "inside"
    return f"{'files of yours' if model.files_alone else 'download'} {_gigabytes(model.download_gb)}"


def show(listed: Sequence[PublishedModel], presets: Sequence[SamplingPreset]) -> None:
    from rich.text import Text

    console = console_on_stdout()
    rows = [
        (
            # Three columns: the longest path and four do not fit into 80 characters.
            f"{model.model_path}\n  {f'{model.name}: ' if model.is_download else ''}{model.makes}, "
            + _comes(model)
            + _needs(model),
            *(_gigabytes(model.memory_gb(dtype)) for dtype in _SHOWN_DTYPES),
        )
        for model in listed
    ]
    console.print(plain_table(("--model-path", "bf16", "fp32"), rows, "Models"))
    for line in (
        "bf16, fp32: device memory for all weights; offloaded: in bf16 with --offload model; a generation adds its "
        "own, by its size: `generate --dry-run` says how much, and needs neither the network nor weights.",
        "A short name brings the settings and presets documented for it; the hub id does not.",
        "Any other diffusers pipeline runs with --backend diffusers.",
    ):
        console.print(Text(line))
    few_steps = [
        (
            preset.family,
            f"{preset.name}\n  {preset.models}\n  {preset.settings.replace(',', ', ').replace(',  ', ', ')}",
        )
        for preset in presets
    ]
    console.print(plain_table(("family", "--preset"), few_steps, "\nFew-step models and LoRAs"))
    console.print(Text("Taken by itself where the folder says what it is: docs/few_steps.md."))


def _needs(model: PublishedModel) -> str:
    """The lines below a model's first two: memory where parts wait, and the images that its requests name."""
    lines = [f"offloaded {_gigabytes(model.offloaded_gb('bfloat16'))}"] if model.is_download else []
    for word, is_needed in (("needs", True), ("takes", False)):
        names = [name for name, needed in model.images.items() if needed == is_needed]
        flags = [REQUEST_FIELDS[name].flag or f"--{name.replace('_', '-')}" for name in names]
        if flags:
            lines += textwrap.wrap(f"{word} {', '.join(flags)}", 58, subsequent_indent="  ", break_on_hyphens=False)
    lines += [f"takes --{name.replace('_', '-')} ({class_name})" for name, class_name in model.parts.items()]
    # Of a width that leaves room for the two columns of memory in 80 characters.
    return "".join(f"\n  {line}" for line in lines)


def _gigabytes(amount: float) -> str:
    return f"{amount:.0f} GB" if amount >= 10 else f"{amount:.1f} GB" if amount >= 0.1 else f"{1000 * amount:.0f} MB"
