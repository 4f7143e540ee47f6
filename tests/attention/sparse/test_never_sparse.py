"""Sparse choices that leave out nothing are said, whatever keeps them dense."""

from __future__ import annotations

from typing import Any

from tables import table

from diffusion_runtime import GenerationRequest
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.loading import prepare

VMOBA = {"backend": "vmoba_attn", "extra": {"temporal_topk": 1, "temporal_chunk_size": 1}}
SIZE = {"height": 64, "width": 64, "num_frames": 13}


def remarks(attention: Any, num_steps: int) -> tuple[str, ...]:
    rules = prepare(RuntimeConfig("shapes", device="cpu", attention_override=attention)).rules
    return rules.unused(rules.resolve(GenerationRequest("a star", num_inference_steps=num_steps, **SIZE)))


def vmoba(**extra: Any) -> dict[str, Any]:
    return {**VMOBA, "extra": {**VMOBA["extra"], **extra}}


@table(
    ("attention", "num_steps", "expected"),
    [
        (
            {"per_role": {"self": vmoba(first_full_step=4)}},
            4,
            "(steps 0-3 (first_full_step 4)); change first_full_step,",
        ),
        ({"per_role": {"self": vmoba(first_full_step=3)}}, 4, None),
        ({"per_role": {"self": vmoba(first_full_step=4)}}, 5, None),
        ({"per_role": {"self": vmoba(min_tokens=10**6)}}, 2, "(below min_tokens 1000000); change min_tokens,"),
        (
            {"default": {"backend": "vsa", "extra": {"sparsity": 0.0}}},
            2,
            "(the sparsity drops no tile); change its opt",
        ),
        ({"default": "torch_sdpa"}, 2, None),
        (
            {"per_role": {"self": vmoba()}, "schedule": [{"steps": "0-3", "role": "self", "backend": "torch_sdpa"}]},
            4,
            "self: vmoba_attn is chosen and never runs: rules of the schedule give each of its layers to others at all",
        ),
        (
            {"per_role": {"self": vmoba(first_full_step=0)}, "schedule": [{"steps": "0-3", "backend": "torch_sdpa"}]},
            5,
            None,
        ),
    ],
)
def test_a_choice_that_leaves_out_nothing(attention: Any, num_steps: int, expected: str | None) -> None:
    found = remarks(attention, num_steps)
    assert len(found) == (expected is not None), found
    if expected is not None:
        assert expected in found[0]
