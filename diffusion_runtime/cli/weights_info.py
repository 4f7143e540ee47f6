"""`info FILE` of a file or a component's folder of weights: what it holds, and whether it fits a model."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion_runtime.cli.consoles import console_on_stdout
from diffusion_runtime.cli.flag_syntax import WEIGHT_SUFFIXES
from diffusion_runtime.cli.tables import facts_table
from diffusion_runtime.cli.terminal import json_text, put_on_stdout
from diffusion_runtime.weights.weight_files import listed

if TYPE_CHECKING:
    from diffusion_runtime.models.recognised_files import Recognised
    from diffusion_runtime.models.weight_summary import WeightSummary

SCHEMA = "diffusion_runtime.weights/1"


def is_weights_path(path: str) -> bool:
    """Return whether a path names weights rather than a LoRA or a generated file. Raises ModelLoadError for a
    safetensors file that cannot be read."""
    if not path.endswith(WEIGHT_SUFFIXES) and not os.path.isfile(os.path.join(path, "config.json")):
        return False
    from diffusion_runtime.models.weight_summary import holds_weights

    return holds_weights(path)


def run_weights_info(path: str, model_path: str | None, *, as_json: bool) -> int:
    """Print the facts of a file of weights on standard output. model_path: None for the file alone.

    Raises ModelLoadError for a file that cannot be read, and for one that is not for the model's transformer.
    """
    from diffusion_runtime.models.recognised_files import recognise_transformer
    from diffusion_runtime.models.weight_summary import summarise_weights

    summary = summarise_weights(Path(path))
    of_transformer = any(part.families for part in summary.parts or (summary,)) and Path(path).is_file()
    model = recognise_transformer(Path(path)) if of_transformer else None
    if model_path is not None:
        parts = [part for part in summary.parts if part.component or part.holds is None] or [summary]
        for component in dict.fromkeys(part.component for part in parts):
            _check_fit(path, model_path, component)
    if as_json:
        values = {**dataclasses.asdict(summary), "path": path, "fits": None if model_path is None else model_path}
        values["model"] = None if model is None else model.name
        put_on_stdout(json_text({"schema": SCHEMA, **values}))
        return 0
    facts: list[tuple[str, object]] = [("file", path), ("format", summary.format)]
    for part in summary.parts or (summary,):
        facts += _facts_of(part)
    if of_transformer and model is None:
        facts.append(("model", "of no published size; --like FOLDER runs it with the settings of a diffusers folder"))
    if model is not None:
        facts += [
            ("model", _named(model)),
            ("run it", f'diffusion-runtime generate "PROMPT" {shlex.quote(path)}'),
        ]
    if model_path is not None:
        facts.append(("fits", model_path))

    console_on_stdout().print(facts_table(facts, "Weights"))
    return 0


def _named(model: Recognised) -> str:
    if not model.told_by:
        return f"{' or '.join((model.name, *model.others))}, which have the same tensors; --like NAME chooses"
    if model.lacks:
        return f"{model.name} if it is {model.lacks}, which its name does not say; --like {model.name} takes it so"
    others = f"; {' or '.join(model.others)} by its tensors alone" if model.others else ""
    return f"{model.name}, by its {model.told_by}{others}"


def _facts_of(summary: WeightSummary) -> list[tuple[str, object]]:
    """Return the rows of a table about one component."""
    facts: list[tuple[str, object]] = [("holds", summary.holds or "weights of a transformer")]
    if summary.holds is None:
        facts.append(("family", " or ".join(summary.families) or "none that is known here"))
    facts += [
        ("tensors", summary.num_tensors),
        ("stored as", ", ".join(f"{kind} ({count})" for kind, count in summary.kinds.items())),
    ]
    if summary.formats:
        facts.append(("quantised", ", ".join(f"{title} ({count})" for title, count in summary.formats.items())))
    if summary.scales is not None:
        facts.append(("scales", summary.scales))
    if summary.prefix:
        facts.append(("prefix", summary.prefix))
    if summary.num_others:
        facts.append(("other parts", f"{summary.num_others} tensors, which --transformer-path leaves unread"))
    if summary.unread:
        facts.append(("names", listed(summary.unread)))
    return facts


def _check_fit(path: str, model_path: str, component: str) -> None:
    """component: `vae` or `text_encoder`, whose first or second one it may be; empty for a transformer's weights."""
    from diffusion_runtime.attention.policy import AttentionPolicy
    from diffusion_runtime.core.model_folder import ModelFolder
    from diffusion_runtime.models.model_sources import find_configs
    from diffusion_runtime.models.modular_folder import open_folder
    from diffusion_runtime.models.part_files import check_part
    from diffusion_runtime.models.registry import family_for_folder, lora_names_of_families
    from diffusion_runtime.weights.transformer_files import TransformerFile

    folder = open_folder(ModelFolder(find_configs(model_path).path))
    family = family_for_folder(folder)
    if component:
        check_part(folder, path, component, family.files.diffusers_components)
        return
    model = family.describe(folder)
    model = model.with_transformer_files([TransformerFile(path, "FILE", "transformer")], lora_names_of_families)
    model.weights.check(model.modules(model.build_transformer(AttentionPolicy.of_shapes())), ["transformer"])
