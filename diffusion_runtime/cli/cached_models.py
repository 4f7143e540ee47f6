"""`models list --cached`: the models in the hub's cache: revision, size, native or passthrough, and what one lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.tables import plain_table
from diffusion_runtime.cli.terminal import Terminal, json_text, put_on_stdout
from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.untrusted.printable import printable

if TYPE_CHECKING:
    from diffusion_runtime.models.hub import CachedModel

SCHEMA = "diffusion_runtime.cached_models/1"


def show_cached(*, as_json: bool) -> None:
    """On standard output, a row per revision."""
    terminal = Terminal()
    with terminal.log():
        from diffusion_runtime.models.hub import cache_path, cached_models

        models, damaged = cached_models()
        cache = cache_path()
    if as_json:
        values = [
            {
                "model_path": model.hub_id,
                "commit": model.commit,
                "refs": list(model.refs),
                "num_bytes": model.num_bytes,
                "folder": str(model.folder),
                "pipeline": model.pipeline,
                "runs": _runs(model),
                "lacks": model.lacks,
            }
            for model in models
        ]
        put_on_stdout(json_text({"schema": SCHEMA, "cache": str(cache), "models": values, "damaged": damaged}))
        return
    from rich.text import Text

    console = console_on_stdout()

    def row(model: CachedModel) -> tuple[str, str, str]:
        revision = f"{', '.join((*model.refs, model.commit[:12]))}"
        runs = _runs(model) if model.lacks is None else f"{_runs(model)}: {model.lacks}"
        return f"{model.hub_id}\n  {revision}", size_text(model.num_bytes), runs

    if models:
        console.print(plain_table(("model, revision", "size", "runs"), map(row, models), "In the hub's cache"))
    else:
        console.print("There is no model in the hub's cache: `diffusion-runtime models download NAME` puts one there.")
    console.print(Text(f"{cache}: `hf cache rm` and `hf cache prune` make room."), soft_wrap=True)
    for line in damaged:
        console.print(Text(printable(f"damaged: {line}")), soft_wrap=True)


def _runs(model: CachedModel) -> str:
    if model.pipeline is None:
        return "no diffusers folder"
    runs = "native" if model.is_native else "passthrough"
    return runs if model.lacks is None else f"{runs}, incomplete"
