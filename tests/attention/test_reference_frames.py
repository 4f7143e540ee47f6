"""Attention to a clip and to the frames of a reference, against one call under the mask that describes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tables import table

from diffusion_runtime.attention import AttentionContext, AttentionPolicy, LayerInfo, TokenLayout, attention
from diffusion_runtime.attention.cache.reference import ReferenceFrames
from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.attention.reference_frames import ReferenceFrameAttention
from diffusion_runtime.attention.roles import register_role
from diffusion_runtime.errors import BackendUnavailableError, ConfigError

# Frames, rows, columns; the first two frames have no reference.
GRID, NUM_BEFORE, HEADS, HEAD_DIM = (5, 2, 3), 2, 3, 16
PER_FRAME = GRID[1] * GRID[2]
ROLE = "test.reference"


def layer_of(choice: Any = None) -> ReferenceFrameAttention:
    register_role(ROLE, "cross")
    how = {} if choice is None else {"config": AttentionConfig.parse(choice)}
    policy = AttentionPolicy(environment=None, **how)
    return ReferenceFrameAttention(HEADS, HEAD_DIM, layer=LayerInfo(4, 5), policy=policy, reference_role=ROLE)


def heads(batch: int, num_frames: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, num_frames * PER_FRAME, HEADS, HEAD_DIM, generator=generator) for _ in range(3)]


def mask() -> torch.Tensor:
    """[queries, keys of grid and reference]: a frame sees all of the grid, and its frame of the reference."""
    frames = torch.arange(GRID[0]).repeat_interleave(PER_FRAME)
    of_reference = frames[frames >= NUM_BEFORE]
    own = torch.ones(len(frames), len(frames), dtype=torch.bool)
    return torch.cat([own, frames[:, None] == of_reference[None]], dim=1)


@table("choice", [None, "reference", {"self": "torch_sdpa", ROLE: "reference"}, {"self": "reference"}])
@table("batch", [1, 2])
def test_it_equals_a_call_under_a_mask(choice: Any, batch: int) -> None:
    layer, context = layer_of({"per_role": choice} if isinstance(choice, dict) else choice), AttentionContext()
    reference, (q, k, v) = heads(1, GRID[0] - NUM_BEFORE, 1), heads(batch, GRID[0], 2)
    grid = TokenLayout((GRID[0] - NUM_BEFORE, *GRID[1:]))
    writing = dataclasses.replace(context, layout=grid, reference=ReferenceFrames(is_written=True))
    # The pass of the reference is a self-attention.
    torch.testing.assert_close(layer(*reference, writing), attention(*reference), atol=1e-5, rtol=0)
    reading = ReferenceFrames(is_written=False, num_before=NUM_BEFORE)
    found = layer(q, k, v, dataclasses.replace(context, layout=TokenLayout(GRID), reference=reading))
    keys, values = (
        torch.cat([own, of.expand(batch, -1, -1, -1)], 1) for own, of in zip((k, v), reference[1:], strict=True)
    )
    expected = attention(q.double(), keys.double(), values.double(), backend="reference", mask=mask()[None, None])
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)
    # The mask matters.
    assert (found.double() - attention(q.double(), keys.double(), values.double())).abs().max() > 0.01
    counted = {row.role: row.count for row in context.recorder.report().rows}
    assert counted == {"self": 2, ROLE: 1}


def test_a_sparse_method_serves_the_clip() -> None:
    """Tiles of one frame, each of which sees itself: with the reference, a frame sees two."""
    tiles = {"backend": "sliding_tile_attn", "extra": {"window": [1, 1, 1], "tile_size": [1, *GRID[1:]]}}
    layer, context = layer_of({"per_role": {"self": tiles}}), AttentionContext()
    reference, (q, k, v) = heads(1, GRID[0] - NUM_BEFORE, 1), heads(2, GRID[0], 2)
    grid = TokenLayout((GRID[0] - NUM_BEFORE, *GRID[1:]))
    layer(*reference, dataclasses.replace(context, layout=grid, reference=ReferenceFrames(is_written=True)))
    reading = ReferenceFrames(is_written=False, num_before=NUM_BEFORE)
    found = layer(q, k, v, dataclasses.replace(context, layout=TokenLayout(GRID), reference=reading))
    keys, values = (
        torch.cat([own, of.expand(2, -1, -1, -1)], 1) for own, of in zip((k, v), reference[1:], strict=True)
    )
    frames = torch.arange(GRID[0]).repeat_interleave(PER_FRAME)
    own = frames[:, None] == frames[None]
    seen = torch.cat([own, mask()[:, len(frames) :]], dim=1)[None, None]
    expected = attention(q.double(), keys.double(), values.double(), backend="reference", mask=seen)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=0)


def test_a_backend_without_log_sum_exp_is_refused_when_the_layer_is_built() -> None:
    for choice in ("flex_attn", {"per_role": {ROLE: "flex_attn"}}):
        with pytest.raises(BackendUnavailableError, match=r"cannot do lse|no C\+\+ compiler"):
            layer_of(choice)


def test_frames_that_do_not_fit_are_named() -> None:
    layer, context = layer_of(), AttentionContext()
    writing = ReferenceFrames(is_written=True)
    layer(*heads(1, 2, 1), dataclasses.replace(context, layout=TokenLayout((2, *GRID[1:])), reference=writing))
    reading = ReferenceFrames(is_written=False, num_before=NUM_BEFORE)
    with pytest.raises(ConfigError, match="reference frames: expected keys of one sample with 3 frames, got"):
        layer(*heads(1, GRID[0], 2), dataclasses.replace(context, layout=TokenLayout(GRID), reference=reading))
