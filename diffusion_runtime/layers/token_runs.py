"""Runs of tokens that share a timestep: adaLN where the tokens of a first image are at timestep 0, and the rest is not.

A run is a slice of the tokens with rows of its own. One run of all tokens is computed in the passes of
layers/modulation.py, so that a video from text alone has its bits. Shapes: B batch, S tokens, D width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.kernels.fp8_rows.api import QuantizedRows
from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm, modulated_norm, modulated_norm_fp8
from diffusion_runtime.layers.linear import Linear, LinearInput, QuantizedTokens
from diffusion_runtime.layers.modulation import add_gated_, norm_for
from diffusion_runtime.parallel.sharding import SequenceSharding

# (tokens, shift, scale): rows [B, D], float32.
ShiftsAndScales = Sequence[tuple[slice, torch.Tensor, torch.Tensor]]
# (tokens, gate): rows [B, D], float32.
Gates = Sequence[tuple[slice, torch.Tensor]]


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens that share a timestep. rows: of the timestep, which every block adds to its own, [B, rows, D],
    float32. embedding: of the timestep, [B, D]."""

    tokens: slice
    rows: torch.Tensor
    embedding: torch.Tensor


# (tokens, rows of a run: [B, D] each, float32).
RowsOfRun = tuple[slice, tuple[torch.Tensor, ...]]


def rows_by_run(own: torch.Tensor, runs: Sequence[TokenRun], rows: slice = slice(None)) -> list[RowsOfRun]:
    """Return a block's own rows [rows, D] with those of the timestep added, for each run. rows: which of them."""
    return [(run.tokens, (own[rows] + run.rows[:, rows]).unbind(1)) for run in runs]


def embedding_by_run(own: torch.Tensor, runs: Sequence[TokenRun]) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Shift and scale of the last norm for each run: a model's own [2, D] with the timestep's embedding added."""
    added = [(run.tokens, (own + run.embedding[:, None].float()).unbind(1)) for run in runs]
    return [(tokens, shift, scale) for tokens, (shift, scale) in added]


# (timestep [B]) -> its rows and its embedding, as TimestepModulation gives them.
TimestepRows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def token_runs(
    timestep: torch.Tensor,
    rows_of: TimestepRows,
    grid: tuple[int, int, int],
    sharding: SequenceSharding,
    *,
    first_timestep: torch.Tensor | None,
) -> tuple[TokenRun, ...]:
    """Return the runs of the grid's tokens that this process holds: one, or two if the first frame, an image, has a
    timestep of its own. timestep, first_timestep: [B]. The tokens of an image are a contiguous range in raster order
    alone."""
    if first_timestep is None:
        # Of any length, so that one compiled block serves clips of every size.
        return (TokenRun(slice(None), *rows_of(timestep)),)
    num_tokens, num_image_tokens = math.prod(grid), grid[1] * grid[2]
    parts = (
        (sharding.local(slice(0, num_image_tokens), num_tokens), first_timestep),
        (sharding.local(slice(num_image_tokens, num_tokens), num_tokens), timestep),
    )
    return tuple(TokenRun(tokens, *rows_of(time)) for tokens, time in parts if tokens.start < tokens.stop)


def frame_runs(
    grid: tuple[int, int, int], sharding: SequenceSharding, timesteps: Sequence[float] | None
) -> list[tuple[slice, int]]:
    """Neighbouring frames of one timestep: those of their tokens that this process holds, and the first of the frames.

    timesteps: of each frame of the grid, in raster order; None where the host does not know them: every frame is a run,
    as asking the device would wait for it.
    """
    per_frame, start, runs = grid[1] * grid[2], 0, []
    for _, group in itertools.groupby(range(grid[0]) if timesteps is None else timesteps):
        stop = start + len(list(group))
        runs.append((sharding.local(slice(start * per_frame, stop * per_frame), math.prod(grid)), start))
        start = stop
    return [(tokens, frame) for tokens, frame in runs if tokens.start < tokens.stop]


def modulated_by_run(x: torch.Tensor, norm: Norm, runs: ShiftsAndScales) -> torch.Tensor:
    """norm(x) * (1 + scale) + shift of x [B, S, D], a new tensor, by the rows of each run."""
    if len(runs) == 1:
        ((_, shift, scale),) = runs
        return modulated_norm(x, norm, shift=shift, scale=scale)
    out = torch.empty_like(x)
    for tokens, shift, scale in runs:
        modulated_norm(x[:, tokens], norm, shift=shift, scale=scale, out=out[:, tokens])
    return out


def modulated_for(layers: Sequence[Linear], x: torch.Tensor, norm: Norm, runs: ShiftsAndScales) -> LinearInput:
    """modulated_by_run as the input of `layers`: see norm_for."""
    if len(runs) == 1:
        ((_, shift, scale),) = runs
        return norm_for(layers, x, norm, shift=shift, scale=scale)
    return _in_passes(layers, x, norm, runs, [None] * len(runs))


def _in_passes(
    layers: Sequence[Linear], x: torch.Tensor, norm: Norm, runs: ShiftsAndScales, branches: Sequence[Branch | None]
) -> LinearInput:
    """Return norm_for of each run in a pass of its own. branches: of the tokens of each run, added to x first."""
    passes = list(zip(runs, branches, strict=True))
    if not all(layer.takes_quantized(x) for layer in layers):
        out = torch.empty_like(x)
        for (tokens, shift, scale), branch in passes:
            modulated_norm(x[:, tokens], norm, shift=shift, scale=scale, branch=branch, out=out[:, tokens])
        return out
    made = [
        modulated_norm_fp8(x[:, tokens], norm, shift=shift, scale=scale, branch=branch)
        for (tokens, shift, scale), branch in passes
    ]
    # [batch, tokens, ...] of each run, one after the other.
    values = torch.cat([torch.unflatten(each.values.view(torch.uint8), 0, (len(x), -1)) for each in made], dim=1)
    scales = torch.cat([torch.unflatten(each.scales, 0, (len(x), -1)) for each in made], dim=1)
    joined = QuantizedRows(values.flatten(0, 1).view(made[0].values.dtype), scales.flatten(0, 1))
    return QuantizedTokens(joined, x.shape)


def add_gated_by_run_(x: torch.Tensor, branch: torch.Tensor, gates: Gates) -> None:
    """x += branch * gate, by the gate of each run. x, branch: [B, S, D]."""
    if len(gates) == 1:
        add_gated_(x, branch, gates[0][1])
        return
    for tokens, gate in gates:
        add_gated_(x[:, tokens], branch[:, tokens], gate)


def normed_after_branch(
    x: torch.Tensor,
    branch: torch.Tensor,
    gates: Gates | None,
    norm: Norm,
    *,
    layers: Sequence[Linear],
    shifts: ShiftsAndScales | None = None,
) -> LinearInput:
    """norm(x) after x += branch * gate, by the gate of each run; in one pass where there is one. gates: None for 1.
    layers: whose input it is, see norm_for. shifts: of the norm's result, for each run; None for none."""
    if (gates is None or len(gates) == 1) and (shifts is None or len(shifts) == 1):
        shift, scale = (None, None) if shifts is None else shifts[0][1:]
        added = Branch(branch, None if gates is None else gates[0][1])
        return norm_for(layers, x, norm, shift=shift, scale=scale, branch=added)
    if shifts is not None and gates is not None and [run[0] for run in shifts] == [run[0] for run in gates]:
        return _in_passes(layers, x, norm, shifts, [Branch(branch[:, tokens], gate) for tokens, gate in gates])
    if gates is None:
        x.add_(branch)
    else:
        add_gated_by_run_(x, branch, gates)
    return norm_for(layers, x, norm) if shifts is None else modulated_for(layers, x, norm, shifts)
