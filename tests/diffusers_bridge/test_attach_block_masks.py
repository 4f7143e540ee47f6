"""Attention whose mask is a BlockMask of torch's FlexAttention: NABLA of Kandinsky 5, and AnyFlow's causal frames."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tables import table
from tiny_denoisers import Built, forward, ready

from diffusion_runtime.attention import StepInfo
from diffusion_runtime.diffusers_bridge.attach import attach
from diffusion_runtime.diffusers_bridge.observe import ObservedAttention
from diffusion_runtime.errors import BackendUnavailableError

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def video_causal() -> Built:
    """AnyFlow FAR, whose processors insist on the name flex; a forward pass as in training, frame by frame."""
    from diffusers import AnyFlowFARTransformer3DModel

    model = AnyFlowFARTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=64,
        chunk_partition=(1, 1),
    )
    return ready(model), {
        "hidden_states": torch.randn(1, 2, 4, 8, 8),
        "timestep": torch.full((1, 2), 500.0),
        "r_timestep": torch.full((1, 2), 400.0),
        "encoder_hidden_states": torch.randn(1, 7, 16),
        "chunk_partition": [1, 1],
    }


def video_nabla() -> Built:
    """Kandinsky 5 with attention_type nabla, and the one backend of diffusers' set that can do it.

    Its mask lists every block: FlexAttention that is not compiled looks at no list.
    """
    from diffusers import Kandinsky5Transformer3DModel

    model = Kandinsky5Transformer3DModel(
        in_text_dim=16,
        in_text_dim2=8,
        time_dim=16,
        model_dim=32,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(4, 6, 6),
        attention_type="nabla",
    )
    model.set_attention_backend("flex")
    blocks = torch.eye(4, dtype=torch.bool)[None, None]
    return ready(model), {
        "hidden_states": torch.randn(1, 1, 32, 32, 4),
        "encoder_hidden_states": torch.randn(1, 7, 16),
        "timestep": torch.tensor([500.0]),
        "pooled_projections": torch.randn(1, 8),
        "visual_rope_pos": [torch.arange(1), torch.arange(16), torch.arange(16)],
        "text_rope_pos": torch.arange(7),
        "sparse_params": {"sta_mask": blocks, "P": 1.0, "to_fractal": True},
    }


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


@table("build", [video_causal, video_nabla])
def test_a_block_mask_is_served_or_refused_or_left_alone(build: Callable[[], Built]) -> None:
    torch.manual_seed(0)
    model, arguments = build()
    before = forward(model, arguments)
    # A backend that takes block masks.
    with attach(model, "reference") as handle:
        assert relative_error(forward(model, arguments), before) < 1e-5
        assert {row.backend for row in handle.report().rows} == {"reference"}
    # One that does not.
    with (
        attach(model, {"per_role": {"self": "torch_sdpa"}}),
        pytest.raises(
            BackendUnavailableError, match=r"its mask is a BlockMask; .*(\n.*)*torch_sdpa: cannot do block_mask"
        ),
    ):
        forward(model, arguments)
    # Nobody chose for it: the model's own way.
    with attach(model, {"per_role": {"cross": "reference"}}) as handle:
        assert relative_error(forward(model, arguments), before) < 1e-5
        rows = {(row.role, row.backend): row.implementation for row in handle.report().rows}
    assert rows["self", "diffusers"] == "flex"
    assert rows["cross", "reference"] == "eager float32"
    assert torch.equal(forward(model, arguments), before)


def test_blocks_that_a_mask_does_not_list_are_not_seen() -> None:
    torch.manual_seed(0)
    model, arguments = video_nabla()
    with attach(model, "reference"):
        whole = forward(model, arguments)
        few = forward(model, {**arguments, "sparse_params": {**arguments["sparse_params"], "P": 0.3}})
    assert relative_error(few, whole) > 1e-3


@table("build", [video_causal, video_nabla])
def test_in_a_pipeline_of_diffusers_own(build: Callable[[], Built]) -> None:
    torch.manual_seed(0)
    model, arguments = build()
    before = forward(model, arguments)
    for name in (None, "flex"):
        observed = ObservedAttention(SimpleNamespace(components={"transformer": model}), name, "cli")
        with observed.counting(StepInfo):
            assert relative_error(forward(model, arguments), before) < 1e-5
        assert "flex" in {row.implementation for row in observed.report().rows if row.role == "self"}
    assert torch.equal(forward(model, arguments), before)


def test_a_backend_of_diffusers_that_takes_no_block_mask_is_refused() -> None:
    torch.manual_seed(0)
    model, arguments = video_nabla()
    model.set_attention_backend("native")
    pipeline: Any = SimpleNamespace(components={"transformer": model})
    for name in (None, "native"):
        with (
            pytest.raises(
                BackendUnavailableError, match=r"'native' cannot run here: it takes no BlockMask.*; flex takes it"
            ),
            ObservedAttention(pipeline, name, "cli").counting(StepInfo),
        ):
            forward(model, arguments)
