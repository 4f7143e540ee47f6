"""Checkpoints of a training in files of at most 15 MiB, from which it goes on as if it had never stopped.

Weights are float32; average, momenta and Adam's moments bfloat16, and what is stored is what training goes on with.
Each file knows its step, so that files of two checkpoints are never read as one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

MAX_FILE_BYTES = 15 * 2**20
STEM = "checkpoint"


def _files(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors in files: each as full as it can be, in order."""
    current: dict[str, Tensor] = {}
    used = 0
    for name, tensor in tensors.items():
        if current and used + tensor.nbytes > MAX_FILE_BYTES:
            yield current
            current, used = {}, 0
        current[name] = tensor
        used += tensor.nbytes
    yield current


def save_checkpoint(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, object]) -> None:
    """Write the tensors and a small state as JSON over the checkpoint that was there. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = list(_files({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}))
    metadata = {"state": json.dumps(dict(state)), "files": str(len(parts))}
    written = []
    for index, part in enumerate(parts):
        path = folder / f"{STEM}_{index}.safetensors"
        save_file(part, path.with_suffix(".partial"), metadata=metadata)
        written.append(path)
    for path in written:
        os.replace(path.with_suffix(".partial"), path)
    for path in folder.glob(f"{STEM}_*.safetensors"):
        if path not in written:
            path.unlink()


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Tensors and state of a checkpoint. Raises ValueError for files that are missing or of two checkpoints."""
    tensors: dict[str, Tensor] = {}
    states = set()
    paths = sorted(folder.glob(f"{STEM}_*.safetensors"))
    if not paths:
        raise ValueError(f"{folder}: no {STEM}_*.safetensors")
    for path in paths:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            states.add((metadata["state"], metadata["files"]))
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
    if len(states) != 1 or int(next(iter(states))[1]) != len(paths):
        raise ValueError(f"{folder}: {len(paths)} files of {len(states)} checkpoints, or some are missing")
    return tensors, json.loads(next(iter(states))[0])
