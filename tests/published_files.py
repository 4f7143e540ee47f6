"""Weight files of published sizes whose numbers take no room on the disk: a head, and a hole behind it."""

from __future__ import annotations

import json
from pathlib import Path

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.models.published import model_of_name
from diffusion_runtime.models.published_folders import packaged_folder
from diffusion_runtime.models.registry import family_for_folder


def write_transformer_file(path: Path, name: str) -> Path:
    """A safetensors file of zeros with the tensors of a published model's transformer; returns `path`."""
    published = model_of_name(name)
    assert published is not None
    folder = packaged_folder(published.model_path)
    assert folder is not None
    model = family_for_folder(folder).describe(folder)
    model.build_transformer(AttentionPolicy())
    head, end = {}, 0
    for tensor, shape in model.weights.expected("transformer").shapes.items():
        size = 2
        for length in shape:
            size *= length
        head[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(head).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path
