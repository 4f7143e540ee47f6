"""`info FILE.safetensors`: what a LoRA file is, for which family, and how many of its keys a model takes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.tables import facts_table
from diffusion_runtime.cli.terminal import json_text, put_on_stdout
from diffusion_runtime.untrusted.printable import printable
from diffusion_runtime.weights.lora.shipped import SHIPPED_LORAS

if TYPE_CHECKING:
    from diffusion_runtime.weights.lora.binding import Lora
    from diffusion_runtime.weights.lora.reading import LoraFile

SCHEMA = "diffusion_runtime.lora/1"
_NUM_SHOWN = 20


def is_lora_path(path: str) -> bool:
    """Return whether a path names a LoRA rather than a generated file."""
    if path in SHIPPED_LORAS:
        return True
    suffixes = (".safetensors", ".sft")
    return path.endswith(suffixes) or (
        os.path.isdir(path) and any(name.endswith(suffixes) for name in os.listdir(path))
    )


def run_lora_info(path: str, model_path: str | None, *, as_json: bool) -> int:
    """Print the facts of a LoRA file on standard output. model_path: None for the file alone.

    Raises ModelLoadError for a file that cannot be used, and for one that does not fit the model.
    """
    from diffusion_runtime.models.registry import lora_names_of_families
    from diffusion_runtime.weights.lora.detection import families_of
    from diffusion_runtime.weights.lora.reading import read_lora_file

    file = read_lora_file(path, "FILE")
    families = families_of(file.modules, lora_names_of_families())
    lora = None if model_path is None else _bound(file, model_path)
    values = _values(file, families, lora)
    if as_json:
        put_on_stdout(json_text({"schema": SCHEMA, **values}))
    else:
        _show(file, values)
    return 0


def _bound(file: LoraFile, model_path: str) -> Lora:
    from diffusion_runtime.config import LoraConfig
    from diffusion_runtime.core.model_folder import ModelFolder
    from diffusion_runtime.models.model_sources import find_configs
    from diffusion_runtime.models.modular_folder import open_folder
    from diffusion_runtime.models.registry import family_for_folder, lora_names_of_families
    from diffusion_runtime.weights.lora.binding import bind

    folder = open_folder(ModelFolder(find_configs(model_path).path))
    target = family_for_folder(folder).describe(folder).lora_target(lora_names_of_families)
    # Both experts of a model have the same layers.
    component = "auto" if len(target.shapes) == 1 else "transformer"
    return bind(file, LoraConfig(str(file.path), component=component), target)


def _values(file: LoraFile, families: tuple[str, ...], lora: Lora | None) -> dict[str, Any]:
    hint = file.few_step_hint
    return {
        "path": str(file.path),
        "format": [names.value for names in file.names],
        "kinds": list(file.kinds),
        "families": list(families),
        "ranks": list(file.ranks),
        "components": sorted({module.component or "transformer" for module in file.modules}),
        "num_modules": len(file.modules),
        "num_keys": file.num_keys,
        "unknown_keys": list(file.unknown),
        "few_steps": None if hint is None else {"num_steps": hint.num_steps, "source": hint.source},
        "num_applied": None if lora is None else lora.num_applied,
        "remarks": [] if lora is None else list(lora.remarks),
    }


def _show(file: LoraFile, values: dict[str, Any]) -> None:
    from rich.text import Text

    console = console_on_stdout()
    hint = file.few_step_hint
    facts: list[tuple[str, object]] = [
        ("file", values["path"]),
        ("format", ", ".join(values["format"]) or "unknown"),
        ("holds", ", ".join(values["kinds"]) or "nothing that is known here"),
        ("family", " or ".join(values["families"]) or "none that is known here"),
        ("rank", ", ".join(map(str, values["ranks"])) or "none"),
        ("for", ", ".join(values["components"])),
        ("modules", values["num_modules"]),
        ("keys", values["num_keys"]),
    ]
    if values["num_applied"] is not None:
        facts.append(("applied", f"{values['num_applied']} of {values['num_keys']} keys"))
    if hint is not None:
        steps = "a few steps" if hint.num_steps is None else f"{hint.num_steps} steps"
        facts.append(("distilled", f"probably, for {steps} without guidance: {hint.source}"))
    console.print(facts_table(facts, "LoRA"))
    if keys := file.unknown:
        more = f" and {len(keys) - _NUM_SHOWN} more" if len(keys) > _NUM_SHOWN else ""
        console.print(Text(printable(f"Unknown keys: {', '.join(keys[:_NUM_SHOWN])}{more}")))
    for remark in values["remarks"]:
        console.print(Text(printable(remark)))
