"""Recognition of a transformer in one file: the published models whose tensors it has, by names and shapes, and which
of several that have the same, by the file's metadata and name."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.model_folder import AnyFolder, read_json_in
from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.models.published import PublishedModel, published_models
from diffusion_runtime.models.published_folders import packaged_folder
from diffusion_runtime.models.registry import family_for_folder, lora_names_of_families
from diffusion_runtime.models.weight_summary import summarise_weights
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.json_text import parse_json
from diffusion_runtime.weights.transformer_files import TransformerFile, open_tensor_file

_logger = logging.getLogger(__name__)

# Keys of a file's metadata that name its model, in safetensors (modelspec) and in GGUF.
_NAMING_KEYS = ("modelspec.title", "modelspec.architecture", "general.name", "general.basename", "general.finetune")
# A hint is a name, not a text.
_MAX_HINT_CHARACTERS = 300


@dataclass(frozen=True)
class Recognised:
    """name: of the published model. others: names of those that a file fits as well. told_by: what chose between
    them: its `tensors`, its `metadata`, its `name`; empty where nothing did, and the first one is assumed. lacks: the
    word that tells it from a model without an entry, where neither metadata nor name has it."""

    name: str
    others: tuple[str, ...]
    told_by: str
    lacks: str = ""


def recognise_transformer(path: Path) -> Recognised | None:
    """Return the published model of a transformer's file; None where it is of no published size. Raises ModelLoadError
    for a file that cannot be read."""
    names = models_that_fit(path)
    if not names:
        return None
    with ExitStack() as stack:
        metadata = open_tensor_file(path, "model_path", stack).metadata
    hints = " ".join(str(metadata.get(key, ""))[:_MAX_HINT_CHARACTERS] for key in _NAMING_KEYS)
    hints += f" {_model_type(metadata)}"
    if len(names) == 1:
        published = published_of(names[0])
        word = "" if published is None else published.told_by
        return Recognised(names[0], (), "tensors", "" if word in _plain(f"{hints} {path.stem}") else word)
    for told_by, hint in (("metadata", hints), ("name", path.stem)):
        if (name := _named_in(hint, names)) is not None:
            return Recognised(name, tuple(other for other in names if other != name), told_by)
    return Recognised(names[0], tuple(names[1:]), "")


def models_that_fit(path: Path) -> list[str]:
    """Return the names of published models whose transformer has a file's tensors, of these sizes."""
    titles = summarise_weights(path).families
    with ExitStack() as stack:
        heads = open_tensor_file(path, "model_path", stack).heads
        sizes = {size for head in heads.values() for size in head.shape}
    found: list[str] = []
    # Of models with one config, one is tried.
    tried: dict[str, bool] = {}
    for model in published_models():
        place = packaged_folder(model.model_path) if model.is_download else None
        if place is None:
            continue
        config = read_json_in(place, "transformer", "config.json")
        key = str(config)
        if key not in tried:
            theirs = family_for_folder(place).weights.lora_names
            # Wan-Animate 2 has the tensors of Wan from images.
            is_of_family = not {theirs.title, theirs.shares_names_of}.isdisjoint(titles)
            tried[key] = is_of_family and _has_width(config, sizes) and fits_transformer(path, place)
        if tried[key]:
            found.append(model.name)
    return found


def _model_type(metadata: Mapping[str, Any]) -> str:
    """Return the kind of transformer that ComfyUI's files name where the tensors of several models are alike: in
    `config`, as JSON, {"transformer": {"model_type": "animate2"}}; empty for none."""
    try:
        found = parse_json(str(metadata.get("config", "{}")))["transformer"]["model_type"]
    except (DocumentError, KeyError, TypeError):
        return ""
    return found[:_MAX_HINT_CHARACTERS] if isinstance(found, str) else ""


def _has_width(config: Mapping[str, Any], sizes: Collection[int]) -> bool:
    """Return whether a transformer of a config may be among tensors of these sizes: building it takes a while."""
    heads, dim = config.get("num_attention_heads"), config.get("attention_head_dim")
    return not isinstance(heads, int) or not isinstance(dim, int) or heads * dim in sizes


def fits_transformer(path: Path, folder: AnyFolder, component: str = "transformer") -> bool:
    """Return whether a file has the tensors of a transformer of a model folder, by its json alone."""
    try:
        model = family_for_folder(folder).describe(folder)
        key = f"{component}_path"
        model = model.with_transformer_files([TransformerFile(str(path), key, component)], lora_names_of_families)
        model.weights.check(model.modules(model.build_transformer(AttentionPolicy.of_shapes())), [component])
    except (ModelLoadError, ConfigError) as error:
        _logger.debug("%s does not fit %s: %s", path, folder, error)
        return False
    return True


def published_of(name: str) -> PublishedModel | None:
    """Return the published model of a name or a hub id."""
    return next((model for model in published_models() if name in (model.name, model.model_path)), None)


def _named_in(hint: str, names: Sequence[str]) -> str | None:
    """Return the one of several models whose name a text holds most of; None where no word tells them apart."""
    text = _plain(hint)
    words: Mapping[str, set[str]] = {name: _words(name) for name in names}
    scores = {name: sum(1 if word in text else -1 for word in own) for name, own in words.items()}
    best = [name for name in names if scores[name] == max(scores.values())]
    return best[0] if len(best) == 1 and any(word in text for word in words[best[0]]) else None


def _words(name: str) -> set[str]:
    return {word for part in re.split(r"[-_ ]", name) if len(word := _plain(part)) > 1 or word.isdigit()}


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
