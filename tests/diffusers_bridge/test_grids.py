"""Where the tokens of diffusers' models sit: each row of a self-attention against the latents it was made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tables import table
from tiny_denoisers import GRIDS, forward, video_packed

from diffusion_runtime.attention import TokenLayout
from diffusion_runtime.attention.backends.capability import Capability
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Availability, Backend
from diffusion_runtime.attention.backends.registry import register_backend, unregister_backend
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.diffusers_bridge.attach import attach, plan_attachment
from diffusion_runtime.diffusers_bridge.grids import TOKEN_ORDERS
from diffusion_runtime.errors import BackendUnavailableError

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


@table("name", GRIDS)
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


@table("conditions", [0, 1, 2])
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


def test_a_sparse_choice_for_a_model_without_a_known_grid_is_refused_without_weights() -> None:
    """Models whose attention modules name their heads in different ways; none of them has run."""
    import diffusers

    small: dict[str, dict[str, Any]] = {
        "Kandinsky5Transformer3DModel": {
            "in_text_dim": 16,
            "in_text_dim2": 16,
            "time_dim": 16,
            "model_dim": 32,
            "ff_dim": 32,
            "num_text_blocks": 1,
            "num_visual_blocks": 1,
            "axes_dims": (4, 6, 6),
        },
        "Krea2Transformer2DModel": {
            "in_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "timestep_embed_dim": 16,
            "text_hidden_dim": 32,
            "num_text_layers": 1,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2,
            "text_intermediate_size": 32,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 6, 6),
        },
        "AceStepTransformer1DModel": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
    }
    sparse = {"per_role": {"self": {"backend": "sliding_tile_attn", "extra": {"window": [1, 1, 1]}}}}
    for name, arguments in small.items():
        with torch.device("meta"):
            model = getattr(diffusers, name)(**arguments)
        with pytest.raises(BackendUnavailableError, match=r"needs the grid of the tokens, which is known for .*Wan"):
            plan_attachment(model, sparse, device="cpu")
        assert plan_attachment(model, "torch_sdpa", device="cpu").num_reached > 0
