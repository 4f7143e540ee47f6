"""Which tokens of a sequence a process holds, and the checks of its tensors' shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.interface import AttentionInputs


@dataclass(frozen=True)
class Slices:
    """A grid of num_tokens cut into num_slices, between text that every process holds.

    length: tokens per slice; the last slices hold fewer, or none, and are padded.
    """

    num_tokens: int
    num_slices: int
    length: int
    num_prefix: int
    num_suffix: int

    @property
    def num_text(self) -> int:
        return self.num_prefix + self.num_suffix

    def num_real(self, first: int, count: int) -> int:
        """Tokens of the grid in `count` slices from `first` on."""
        return min(max(self.num_tokens - first * self.length, 0), count * self.length)


def slices_of(inputs: AttentionInputs, num_slices: int) -> Slices:
    """Raises ConfigError unless q, k, v and the gate have the rows of one slice of the layout and its text, and the
    mask has those rows and the columns of the whole sequence."""
    if not inputs.q.dim() == inputs.k.dim() == inputs.v.dim() == 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (inputs.q, inputs.k, inputs.v))
        raise ConfigError(f"attention: expected q, k and v [batch, seq, heads, head_dim], got {shapes}")
    rows, layout = inputs.q.shape[1], inputs.layout
    if layout is None:
        slices = Slices(rows * num_slices, num_slices, rows, 0, 0)
    else:
        total = layout.num_grid_tokens
        slices = Slices(total, num_slices, -(-total // num_slices), layout.num_prefix_tokens, layout.num_suffix_tokens)
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "gate": inputs.gate}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape[1] != slices.length + slices.num_text:
            raise ConfigError(
                f"attention over a sequence that {num_slices} processes share: expected {name} to hold "
                f"{slices.length} of {slices.num_tokens} grid tokens and {slices.num_text} text tokens, got "
                f"{tensor.shape[1]} rows; cut the grid's tokens, and the rotations alike, with context.sharding.shard, "
                "and leave the text whole"
            )
    total = slices.num_tokens + slices.num_text
    if inputs.mask is not None and not (inputs.mask.dim() == 4 and set(inputs.mask.shape[2:]) <= {1, total}):
        raise ConfigError(
            f"attention over a sequence that {num_slices} processes share: expected a mask [batch or 1, heads or 1, "
            f"{total} or 1, {total}] over the whole sequence, got {list(inputs.mask.shape)}"
        )
    return slices


def rows(x: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Tokens start to start + length - 1 of x [batch, seq, ...]."""
    return x.narrow(1, start, length)


def around(prefix: torch.Tensor, grid: torch.Tensor, suffix: torch.Tensor) -> torch.Tensor:
    """Text before, grid, text after, without a copy where there is no text."""
    parts = [part for part in (prefix, grid, suffix) if part.shape[1]]
    return torch.cat(parts, dim=1) if len(parts) > 1 else (parts[0] if parts else grid)
