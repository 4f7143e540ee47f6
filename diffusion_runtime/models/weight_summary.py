"""Contents of a file or a component's folder of weights, from heads alone: kind, family, format, stored dtypes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion_runtime.models.registry import lora_names_of_families
from diffusion_runtime.weights.file_kinds import kind_of
from diffusion_runtime.weights.file_parts import FilePart, parts_of
from diffusion_runtime.weights.layer_formats import find_formats
from diffusion_runtime.weights.lora.keys import parse_key
from diffusion_runtime.weights.tensor_files import SafetensorsFile, TensorFile, TensorHead
from diffusion_runtime.weights.tensor_names import families_of_tensors, transformer_tensors
from diffusion_runtime.weights.transformer_files import open_tensor_file
from diffusion_runtime.weights.weight_files import (
    COMPONENT_STEM,
    FLOAT8_KINDS,
    GGUF,
    PREFIXES,
    SAFETENSORS,
    STEMS,
    find_weight_files,
    refuse_unmarked,
)


@dataclass(frozen=True)
class WeightSummary:
    """Summary of a weight file. holds: a text encoder or an autoencoder in words, None for a transformer's weights;
    component: its folder in a model, empty for a transformer's. prefix: in front of the transformer's tensors, empty
    for none. families: that it may be for, empty for none that is known. kinds: stored kind -> number of tensors.
    formats: of quantised weights -> number of tensors; scales: of 8-bit weights, None for none. num_others: tensors of
    other components. unread: names of tensors that no component here reads."""

    path: Path
    format: str
    holds: str | None
    component: str
    families: tuple[str, ...]
    prefix: str
    num_tensors: int
    num_others: int
    kinds: Mapping[str, int]
    formats: Mapping[str, int]
    scales: str | None
    parts: tuple[WeightSummary, ...] = ()
    unread: tuple[str, ...] = ()


def holds_weights(path: str) -> bool:
    """Return whether a file holds weights rather than a LoRA. Raises ModelLoadError for a safetensors file that cannot
    be read."""
    if path.endswith(GGUF):
        return True
    place = Path(path)
    if place.is_dir():
        return (place / "config.json").is_file() and not (place / "adapter_config.json").exists()
    if not path.endswith(SAFETENSORS) or not place.is_file():
        return False
    with contextlib.closing(SafetensorsFile(place)) as file:
        return bool(file.heads) and not any(parse_key(name) for name in file.heads)


def _files_of(path: Path) -> list[Path]:
    """Return the files of a component's folder, or the one file. Raises ModelLoadError."""
    if not path.is_dir():
        return [path]
    stems = [stem for stem in STEMS.values() if any(each.name.startswith(stem) for each in path.glob("*.safetensors"))]
    return find_weight_files(path, stems[0] if stems else COMPONENT_STEM)


def summarise_weights(path: Path) -> WeightSummary:
    """Summarise a file. Raises ModelLoadError for one that cannot be read or is stored in an unsupported way."""
    parts = _parts_in(path)
    if not parts:
        with contextlib.ExitStack() as stack:
            return _summary(path, [open_tensor_file(each, "FILE", stack) for each in _files_of(path)])
    summaries = []
    for part in parts:
        with contextlib.closing(SafetensorsFile(path, part.prefix)) as file:
            heads = file.heads if part.prefix else {name: file.heads[name] for name in part.names}
            if not part.prefix or (part.kind is None and not part.is_transformer):
                summaries.append(dataclasses.replace(_left_over(path, heads, part), prefix=part.prefix))
                continue
            refuse_unmarked(path, {name: head.kind for name, head in heads.items()})
            summary = _summary(path, [file])
            if part.kind is not None:
                summary = dataclasses.replace(summary, holds=part.kind.title, component=part.kind.component)
            summaries.append(dataclasses.replace(summary, prefix=part.prefix))
    of_transformer = [each for each, part in zip(summaries, parts, strict=True) if part.is_transformer]
    return dataclasses.replace((of_transformer or summaries)[0], parts=tuple(summaries))


def _parts_in(path: Path) -> tuple[FilePart, ...]:
    if not path.name.endswith(SAFETENSORS) or path.is_dir():
        return ()
    with contextlib.closing(SafetensorsFile(path)) as file:
        return parts_of(tuple(file.heads))


def _left_over(path: Path, heads: Mapping[str, TensorHead], part: FilePart) -> WeightSummary:
    holds, component = ("what no component here reads", "")
    if part.kind is not None:
        holds, component = part.kind.title, part.kind.component
    kinds = dict(Counter(head.kind for head in heads.values()).most_common())
    unread = () if component else tuple(f"{part.prefix}{name}" for name in heads)
    return WeightSummary(path, "safetensors", holds, component, (), "", len(heads), 0, kinds, {}, None, unread=unread)


def _summary(path: Path, files: Sequence[TensorFile]) -> WeightSummary:
    found = find_formats(files)
    heads = {name: head for file in files for name, head in file.heads.items()}
    kind = kind_of(tuple(heads))
    names = transformer_tensors(tuple(heads)) if kind is None else tuple(heads)
    weights = [name for name in names if name not in found.unread]
    formats = {name: layer.format for name, layer in found.of.items() if name in names}
    shapes = {name: formats[name].shape(head.shape) if name in formats else head.shape for name, head in heads.items()}
    prefix = next((prefix for prefix in PREFIXES if names and names[0].startswith(prefix)), "")
    return WeightSummary(
        path=path,
        format="GGUF" if files[0].is_gguf else "safetensors",
        holds=None if kind is None else kind.title,
        component="" if kind is None else kind.component,
        families=()
        if kind is not None
        else families_of_tensors({name: shapes[name] for name in weights}, lora_names_of_families()),
        prefix=prefix,
        num_tensors=len(weights),
        num_others=len(heads) - len(names),
        kinds=dict(Counter(heads[name].kind for name in weights).most_common()),
        formats=dict(Counter(each.title for each in formats.values()).most_common()),
        scales=_scales_text(
            [place.num_numbers for layer in found.of.values() for place in layer.beside.values()],
            has_float8=any(heads[name].kind in FLOAT8_KINDS for name in weights),
        ),
        unread=tuple(sorted(heads.keys() - names)),
    )


def _scales_text(sizes: Sequence[int], *, has_float8: bool) -> str | None:
    """Describe the scales of 8-bit weights. sizes: how many numbers each scale has."""
    by_row = sum(size > 1 for size in sizes)
    counted = [
        f"{number} {how}" for number, how in ((len(sizes) - by_row, "per tensor"), (by_row, "per row")) if number
    ]
    return ", ".join(counted) or ("none: a plain cast" if has_float8 else None)
