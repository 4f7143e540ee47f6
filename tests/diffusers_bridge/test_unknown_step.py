"""A model attached to without its pipeline: a choice that does not go by step runs, others say what is missing."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_denoisers import forward, video_cross

from diffusion_runtime.diffusers_bridge.attach import attach
from diffusion_runtime.errors import ConfigError

WINDOW = {"tile_size": [1, 2, 2], "window": [3, 1, 1]}


def chosen(backend: str, **options: Any) -> dict[str, Any]:
    return {"per_role": {"self": {"backend": backend, "extra": options}}}


def test_only_a_choice_that_goes_by_step_needs_the_step() -> None:
    model, arguments = video_cross()
    for choice in (
        chosen("sliding_tile_attn", **WINDOW),
        chosen("video_sparse_attn", sparsity=0.5),
        chosen("vmoba_attn", first_full_step=0),
    ):
        with attach(model, choice) as handle:
            assert forward(model, arguments).isfinite().all()
            assert {row.backend for row in handle.report().rows if row.role == "self"} == {
                choice["per_role"]["self"]["backend"]
            }
    for choice in (
        chosen("sliding_tile_attn", **WINDOW, skip_time_steps=1),
        chosen("video_sparse_attn", sparsity=0.5, dense_first_steps=1),
        chosen("sparse_video_gen_2_attn"),
        {"schedule": [{"steps": "0-1", "role": "self", "backend": "reference"}]},
    ):
        with attach(model, choice), pytest.raises(ConfigError, match="the step is unknown here"):
            forward(model, arguments)
