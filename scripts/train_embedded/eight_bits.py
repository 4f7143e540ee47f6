"""States of networks in 8-bit safetensors files: what the next training starts from, small enough for the repository.

Weights of two or more dimensions are int8 with one scale per output channel, everything else is float16.

    python -m scripts.train_embedded.eight_bits transformer.pt transformer.safetensors
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_SCALE = ".scale"


def save_eight_bits(state: dict[str, Tensor], path: Path, notes: dict[str, Any] | None = None) -> None:
    """Write a state; `notes` come back with it and must be JSON."""
    stored = {}
    for name, value in state.items():
        wide = value.detach().float().cpu()
        if wide.ndim < 2:
            stored[name] = wide.half()
            continue
        scale = wide.flatten(1).abs().amax(dim=1).clamp(min=1e-8) / 127
        rows = scale.view(-1, *[1] * (wide.ndim - 1))
        stored[name] = (wide / rows).round().to(torch.int8).contiguous()
        stored[name + _SCALE] = scale
    save_file(stored, path, metadata={"notes": json.dumps(notes or {})})


def load_eight_bits(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state in float32 and the notes."""
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        notes: dict[str, Any] = json.loads(file.metadata()["notes"])
    state = {}
    for name, value in stored.items():
        if name.endswith(_SCALE):
            continue
        scale = stored.get(name + _SCALE)
        wide = value.float()
        state[name] = wide if scale is None else wide * scale.view(-1, *[1] * (wide.ndim - 1))
    return state, notes


def load_parts(path: Path) -> dict[str, dict[str, Tensor]]:
    """Return the states of `transformer`, `text_encoder` and `heads` that `main` joined, each under its own names."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in load_eight_bits(path)[0].items():
        part, _, key = name.partition(".")
        parts.setdefault(part, {})[key] = value
    return parts


def main() -> None:
    """Write a transformer.pt, which holds the states of several parts, as one 8-bit file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path, help="transformer.pt")
    parser.add_argument("file", type=Path, help="transformer.safetensors, as --init takes it")
    arguments = parser.parse_args()
    parts: dict[str, dict[str, Tensor]] = torch.load(arguments.parts, map_location="cpu", weights_only=True)
    save_eight_bits(
        {f"{part}.{name}": value for part, state in parts.items() for name, value in state.items()}, arguments.file
    )


if __name__ == "__main__":
    main()
