"""Weights without files: random ones of a transformer's real shapes, or those of another model in memory.

A random tensor's numbers follow from its name in the checkpoint alone, so that two models filled from the same names
compute the same, even if one joins tensors that the other keeps apart.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.models.family import Model
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.weights.parallel_reads import Finish
from diffusion_runtime.weights.stored_tensors import StoredRows
from diffusion_runtime.weights.tensor_part import WHOLE, TensorPart
from diffusion_runtime.weights.transformer_weights import RoomFor, no_room


def draw_weight(name: str, target: torch.Tensor, device: torch.device | None = None) -> None:
    """Write random numbers into `target`: of a variance that keeps activations in range, around 1 for norm weights.

    name: of the tensor in the checkpoint, which the numbers follow from. device: that generates them, None for the
    target's own; another device gives other numbers.
    """
    device = target.device if device is None else device
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    mean = float(target.dim() == 1 and name.endswith("weight"))
    spread = 0.02 if target.dim() < 2 else math.prod(target.shape[1:]) ** -0.5
    numbers = torch.empty(target.shape, dtype=torch.float32, device=device)
    # Converted where they are generated, so that half of the bytes are copied.
    target.copy_(numbers.normal_(mean, spread, generator=generator).to(target.dtype))


@dataclass(frozen=True)
class MadeWeights:
    """A checkpoint whose tensors are made on request. folder: for messages; shapes: of every tensor; make: writes the
    numbers of a tensor, by its name, into a target."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    make: Callable[[str, torch.Tensor], object] = draw_weight
    elsewhere: Path | None = None

    def copy_into(self, name: str, target: torch.Tensor, part: TensorPart = WHOLE) -> None:
        """Copy a part of a tensor, which has the numbers that it has in the whole one."""
        if part.is_whole:
            self.make(name, target)
            return
        whole = torch.empty(self.shapes[name], dtype=target.dtype, device=target.device)
        self.make(name, whole)
        target.copy_(part.of(whole))

    def begin_copy(self, name: str, target: torch.Tensor, part: TensorPart = WHOLE) -> Finish:
        self.copy_into(name, target, part)
        return lambda: None

    def is_changed(self, name: str) -> bool:  # noqa: ARG002
        return False

    def quantized(self, name: str) -> tuple[StoredRows, ...]:  # noqa: ARG002
        return ()


def taking_from(state: Mapping[str, torch.Tensor], *, frees: bool) -> Callable[[str, torch.Tensor], None]:
    """Return a `make` of the tensors of another model. frees: each tensor's memory once it is copied, where two models
    do not fit."""

    def take(name: str, target: torch.Tensor) -> None:
        target.copy_(state[name])
        if frees:
            state[name].untyped_storage().resize_(0)

    return take


def fill_randomly(
    model: Model[Any, Any],
    transformer: DiffusionTransformer,
    device: torch.device,
    dtype: torch.dtype,
    components: Collection[str] | None = None,
    *,
    make: Callable[[str, torch.Tensor], object] | None = None,
    room_for: RoomFor = no_room,
) -> DiffusionTransformer:
    """Fill the transformer from `build_transformer` with random weights: in eval mode, without gradients. components:
    of these alone, None for all. make: other numbers, as of MadeWeights. room_for: as of TransformerWeights.load; the
    numbers are generated on `device` all the same."""
    if make is None:

        def make(name: str, target: torch.Tensor) -> None:
            draw_weight(name, target, device)

    modules = model.modules(transformer)
    for component in modules if components is None else components:
        # Pieces are known of parts, too, that appear only in the names of a checkpoint (VSA's gates: 2.1 GB in Wan
        # 14B).
        pieces, built = model.weights.pieces(component), modules[component].state_dict().keys()
        shapes = {piece.name: piece.shape for name in pieces.keys() & built for piece in pieces[name]}
        source = MadeWeights(Path(f"random/{component}"), shapes, make)
        model.weights.fill(component, modules[component], source, device, dtype, room_for=room_for)
    return transformer
