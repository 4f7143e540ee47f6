"""MiniMax-H3 of published sizes in a card of 24 GB: which parts the plan streams, and what a step takes. Nothing has
weights."""

from __future__ import annotations

from typing import Any

import pytest

from diffusion_runtime import GenerationRequest, RuntimeConfig
from diffusion_runtime.explanation.explanation import Explanation, explain
from diffusion_runtime.loading import prepare

GB = 10**9
SPARSE = {"per_role": {"self": {"backend": "video_sparse_attn", "extra": {"sparsity": 0.9}}}}


def explained(preset: str | None, **values: Any) -> Explanation:
    config = RuntimeConfig("minimax-h3", offline=True, memory_limit="24GB", **values)
    prepared = prepare(config, is_dry_run=True, plan_for="4090")
    request = prepared.rules.resolve(GenerationRequest("rain"), preset)
    return explain(prepared.planned_for([request]), request)


@pytest.fixture(scope="module")
def dense() -> Explanation:
    return explained(None)


def test_24_gb_hold_the_model_by_blocks(dense: Explanation) -> None:
    plan = dense.description.memory
    assert plan is not None
    assert plan.offload == "layers"
    assert plan.peak <= 24 * GB
    # 50 layers of the text encoder, 50 blocks of the transformer and 2 of its text.
    text, (transformer,) = plan.demand.text, plan.demand.transformers
    assert (len(text.blocks), len(transformer.blocks)) == (50, 52)
    assert text.total + transformer.total > 110 * GB
    rows = dict(plan.rows())
    for name, part in (("text encoder", text), ("transformer", transformer)):
        stay = plan.resident[part.name]
        assert 0 < stay < len(part.blocks)
        copied = plan.copied_per_pass(part)
        # Blocks of one size.
        assert copied == pytest.approx(sum(part.blocks) * (len(part.blocks) - stay) / len(part.blocks), rel=0.05)
        assert f"{stay} of {len(part.blocks)} blocks stay on the device, " in rows[f"{name}, streamed"]
        assert f"{copied / 1e9:.2f} GB are copied in every pass" in rows[f"{name}, streamed"]
    assert "GB of the weights are read once a request" in rows["transformer, streamed"]
    # Copies of 30 GB of 37,296 tokens' weights hide behind the computation, on an H200.
    assert dense.copy_seconds == pytest.approx(plan.copied_per_pass(transformer) / 55e9)
    assert 0.3 < dense.copy_seconds < dense.step_seconds < 8
    assert "of copies of streamed weights behind it" in dense.step_text


def test_fasth3_keeps_a_tenth_of_the_pairs_of_the_video(dense: Explanation) -> None:
    sparse = explained("fasth3-4", attention=SPARSE)
    assert (sparse.num_steps, sparse.num_forwards) == (4, 4)
    grid, text = 37296, sparse.num_text_tokens
    # 10 x 6 x 11 tiles of 4 x 4 x 4 tokens, of which every one keeps 66.
    assert sparse.grid == (37, 24, 42)
    rows = [row for row in sparse.schedule if row.role == "self"]
    (density,) = {density for row in rows for density in row.density}
    assert density == pytest.approx(0.1)
    (cost,) = (part for part in sparse.parts if part.name == "attention, self")
    kept = (0.1 * grid**2 + 2 * grid * text + text**2) / (grid + text) ** 2
    assert cost.kept / cost.operations == pytest.approx(kept, rel=1e-3)
    assert sparse.step_seconds < 0.75 * dense.step_seconds
    (told,) = (each for each in sparse.remarks if "no trained gate" in each)
    assert told.startswith("its weights are not here, and tell whether this holds")
