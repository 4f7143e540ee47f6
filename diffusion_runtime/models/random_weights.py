"""Random weights of a transformer's real shapes, for measuring: nothing is downloaded or read.

A tensor's numbers follow from its name in the checkpoint alone, so that two models filled from the same names compute
the same, though one holds tensors together that the other holds apart.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.models.family import Model
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.models.stored_tensors import StoredRows


def draw_weight(name: str, target: torch.Tensor) -> None:
    """Write random numbers into `target`: of a variance that keeps activations in range, around 1 for norm weights.

    name: of the tensor in the checkpoint, which the numbers follow from.
    """
    generator = torch.Generator(target.device).manual_seed(zlib.crc32(name.encode()))
    mean = float(target.dim() == 1 and name.endswith("weight"))
    spread = 0.02 if target.dim() < 2 else math.prod(target.shape[1:]) ** -0.5
    numbers = torch.empty(target.shape, dtype=torch.float32, device=target.device)
    target.copy_(numbers.normal_(mean, spread, generator=generator))


@dataclass(frozen=True)
class RandomWeights:
    """A checkpoint of random numbers. folder: for messages; shapes: of every tensor that a model asks for."""

    folder: Path
    shapes: dict[str, tuple[int, ...]]
    elsewhere: Path | None = None

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        draw_weight(name, target)

    def is_changed(self, name: str) -> bool:  # noqa: ARG002
        return False

    def quantized(self, name: str) -> tuple[StoredRows, ...]:  # noqa: ARG002
        return ()


def fill_randomly(
    model: Model[Any, Any],
    transformer: DiffusionTransformer,
    device: torch.device,
    dtype: torch.dtype,
    components: Collection[str] | None = None,
) -> DiffusionTransformer:
    """Random weights for what `build_transformer` returned: in eval mode, without gradients. components: of these
    alone, None for all."""
    for component in model.modules(transformer) if components is None else components:
        pieces = model.pieces(component).values()
        shapes = {piece.name: piece.shape for several in pieces for piece in several}
        source = RandomWeights(Path(f"random/{component}"), shapes)
        model.fill_component(transformer, component, source, device, dtype)
    return transformer
