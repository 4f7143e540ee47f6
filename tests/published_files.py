"""Weight files of published sizes whose numbers take no room on the disk: a head, and a hole behind it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from original_names import as_authors

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.model_folder import read_index
from diffusion_runtime.models.published import model_of_name
from diffusion_runtime.models.published_folders import packaged_folder
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.text_encoders.encoder_size import shapes_by_config


def write_transformer_file(
    path: Path,
    name: str,
    metadata: Mapping[str, str] = MappingProxyType({}),
    *,
    rank: int | None = None,
    by_authors: bool = False,
) -> Path:
    """A safetensors file of zeros with the tensors of a published model's transformer; returns `path`. rank: of the
    modulations of MiniMax-H3, in pruned files. by_authors: whether it has its authors' names instead of diffusers'."""
    folder = _folder(name)
    family = family_for_folder(folder)
    model = family.describe(folder)
    model.build_transformer(AttentionPolicy())
    shapes = dict(model.weights.expected("transformer").shapes)
    if by_authors:
        empty = {each: torch.empty(shape, device="meta") for each, shape in shapes.items()}
        shapes = {each: tuple(made.shape) for each, made in as_authors(empty, family.weights.lora_names).items()}
    if rank is not None:
        shapes = {each: shape for each, shape in shapes.items() if "time_embedder" not in each}
        modulations = [
            each for each in shapes if each.endswith((".adaln_proj.linear.weight", "norm_out.linear.weight"))
        ]
        shapes |= {each: (shapes[each][0], rank) for each in modulations} | {"adaln_t_table": (1025, rank)}
    return _write(path, shapes, metadata)


def write_part_file(path: Path, name: str, component: str, **further: bytes) -> Path:
    """The same of the autoencoder of diffusers', or a text encoder. further: contents of tensors of bytes."""
    folder = _folder(name)
    if component == "vae":
        (module,) = (each for each in family_for_folder(folder).files.diffusers_components if each.name == component)
        shapes = {each: tuple(tensor.shape) for each, tensor in module.build(folder).state_dict().items()}
    else:
        shapes = dict(shapes_by_config(folder / component, read_index(folder)[component][1]))
    return _write(path, shapes, {}, further)


def _folder(name: str) -> Path:
    published = model_of_name(name)
    assert published is not None
    folder = packaged_folder(published.model_path)
    assert folder is not None
    return folder


def _write(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    metadata: Mapping[str, str],
    further: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    head: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, content in further.items():
        head[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [end, end + len(content)]}
        end += len(content)
    # Two bytes each, at even places.
    assert end % 2 == 0
    for tensor, shape in shapes.items():
        size = 2 * math.prod(shape)
        head[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(head).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + b"".join(further.values()))
        file.truncate(8 + len(text) + end)
    return path
