"""Where the tokens of diffusers' models sit: each row of a self-attention against the latents it was made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_denoisers import GRIDS, forward, video_packed

from diffusion_runtime.attention import TokenLayout
from diffusion_runtime.attention.backends.interface import (
    AttentionCall,
    AttentionResult,
    Availability,
    Backend,
    Capability,
)
from diffusion_runtime.attention.backends.registry import register_backend, unregister_backend
from diffusion_runtime.diffusers_bridge.attach import attach
from diffusion_runtime.diffusers_bridge.grids import TOKEN_ORDERS
from diffusion_runtime.hardware import Hardware

GRID = (3, 4, 5)


@pytest.fixture
def watching() -> Iterator[list[AttentionCall]]:
    """Every call that the backend `watching_grids` gets."""
    calls: list[AttentionCall] = []

    @register_backend
    class Watching(Backend):
        name = "watching_grids"
        summary = "keeps its calls"
        capability = Capability(features=frozenset({"key_padding", "scale"}))

        def probe(self, hardware: Hardware) -> Availability:
            return Availability("1")

        def run(self, call: AttentionCall) -> AttentionResult:
            calls.append(call)
            return AttentionResult(torch.zeros_like(call.q), None, "nothing")

    yield calls
    unregister_backend("watching_grids")


def first_call(model: Any, arguments: dict[str, Any], calls: list[AttentionCall]) -> AttentionCall:
    calls.clear()
    with attach(model, {"per_role": {"self": "watching_grids"}}):
        forward(model, arguments)
    return calls[0]


@pytest.mark.parametrize("name", GRIDS)
def test_every_token_stands_where_its_latents_are(name: str, watching: list[AttentionCall]) -> None:
    build, before, behind = GRIDS[name]
    model, arguments = build()
    call = first_call(model, arguments, watching)
    assert call.layout == TokenLayout(GRID, num_prefix_tokens=before, num_suffix_tokens=behind)
    for frame, row, column in ((0, 0, 0), (0, 0, 4), (0, 3, 1), (1, 2, 3), (2, 3, 4)):
        latents = arguments["hidden_states"].clone()
        frames = latents.transpose(1, 2) if latents.shape[1] == 4 else latents
        frames[:, frame, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] += torch.randn(4, 2, 2)
        other = first_call(model, {**arguments, "hidden_states": latents}, watching)
        changed = (other.q - call.q).abs().amax(dim=(0, 2, 3)) > 1e-6
        assert changed.nonzero().flatten().tolist() == [before + (frame * GRID[1] + row) * GRID[2] + column]


def coordinates(conditions: int = 0) -> torch.Tensor:
    """[2, 3, tokens] as LTXConditionPipeline gives them: pixels and seconds, after those of whole frames at 1.3 s."""
    axes = (torch.tensor([0.0, 0.04, 0.36]), 32 * torch.arange(4.0), 32 * torch.arange(5.0))
    grid = torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")])
    frame = torch.stack([torch.full((20,), 1.3), *grid[1:, :20]])
    return torch.cat([*[frame] * conditions, grid], dim=1)[None].repeat(2, 1, 1)


@pytest.mark.parametrize("conditions", [0, 1, 2])
def test_a_grid_read_off_coordinates(conditions: int, watching: list[AttentionCall]) -> None:
    model, arguments = video_packed()
    plain = {name: value for name, value in arguments.items() if name not in ("num_frames", "height", "width")}
    states = torch.randn(2, 60 + 20 * conditions, 8)
    positions = coordinates(conditions)
    call = first_call(model, {**plain, "hidden_states": states, "video_coords": positions}, watching)
    assert call.layout == TokenLayout(GRID, num_prefix_tokens=20 * conditions)


def test_one_frame_and_one_row_of_coordinates() -> None:
    read = TOKEN_ORDERS["LTXVideoTransformer3DModel"].read_grid
    whole = coordinates()
    assert read({"video_coords": whole[:, :, :20].clone()}, {}) == (1, 4, 5)
    assert read({"video_coords": whole[:, :, :5].clone()}, {}) == (1, 1, 5)
    assert read({"video_coords": None}, {}) is None
