"""Modulation by timestep and modality: video, text and sound have rows of their own out of one projection.

Pictures and text are at the video's timestep, the sound at its own, so that the conditioning is of two timesteps, one
after the other: [batch, 2 * time_dim]. Shapes: B batch, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from diffusion_runtime.layers.modulation import BlockModulation, Modulation
from diffusion_runtime.layers.token_runs import Gates, ShiftsAndScales

VIDEO, TEXT, AUDIO = range(3)
_NUM_MODALITIES = 3
# Shift, scale and gate of the attention, then of the feed-forward.
_NUM_ROWS = 6


class TimeTable(nn.Module):
    """The conditioning of pruned weights: a few numbers at evenly spaced times from 0 to 1, and lines between them, in
    place of the timestep's network and its activation."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(size, rank))

    def forward(self, time: torch.Tensor) -> torch.Tensor:
        """Map times [N] to [N, rank], of the table's dtype."""
        place = time.float().clamp(0, 1) * (len(self.table) - 1)
        before = place.floor().clamp(max=len(self.table) - 2)
        share = (place - before).to(self.table.dtype)
        first = before.long()
        return torch.lerp(self.table[first], self.table[first + 1], share[:, None])


class ModalityModulation(BlockModulation):
    """Rows of a block: six of the video, six of the text and six of the sound."""

    def __init__(self, dim: int, time_dim: int) -> None:
        super().__init__(dim, _NUM_ROWS * _NUM_MODALITIES, in_dim=time_dim)

    def stacked(self, conditioning: torch.Tensor) -> torch.Tensor:
        """Map [B, 2 * time_dim] to [18, B, D]."""
        video, audio = _of_both(self, conditioning)
        return torch.cat([video[: _NUM_ROWS * AUDIO], audio[_NUM_ROWS * AUDIO :]])


class OutModulation(Modulation):
    """Shift and scale of the last norm: the video's, then the sound's."""

    def __init__(self, dim: int, time_dim: int) -> None:
        super().__init__(dim, 2, in_dim=time_dim)
        # What `stacked` makes of one projection for two timesteps.
        self.num_rows = 4

    def stacked(self, conditioning: torch.Tensor) -> torch.Tensor:
        """Map [B, 2 * time_dim] to [4, B, D]."""
        return torch.cat(_of_both(self, conditioning))


def _of_both(modulation: Modulation, conditioning: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return all rows at each of the two timesteps, [rows, B, D]."""
    rows: torch.Tensor = modulation.projection(torch.unflatten(conditioning, -1, (2, -1)))
    return torch.unflatten(rows, -1, (-1, modulation.dim)).permute(1, 2, 0, 3).unbind()


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens of one modality. is_given: of an image, a video or a sound that the clip is made from, at the
    timestep of those."""

    tokens: slice
    modality: int
    is_given: bool = False


@dataclass(frozen=True)
class SpanRows:
    """Rows of one half of a block, the attention's or the feed-forward's, for each span of its tokens."""

    shifts: ShiftsAndScales
    gates: Gates


def rows_of_spans(spans: Sequence[Span], rows: torch.Tensor, given: torch.Tensor | None) -> tuple[SpanRows, SpanRows]:
    """Return the rows of the attention, and of the feed-forward. rows, given: [18, B, D] of a block, at the timesteps
    of the step and of what is given."""

    def half(first: int) -> SpanRows:
        shifts, gates = [], []
        for span in spans:
            own = given if span.is_given else rows
            assert own is not None, "tokens of an image without their rows"
            place = _NUM_ROWS * span.modality + first
            shifts.append((span.tokens, own[place], own[place + 1]))
            gates.append((span.tokens, own[place + 2]))
        return SpanRows(shifts, gates)

    return half(0), half(3)
