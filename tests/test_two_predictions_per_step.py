"""A generation with a sampler that calls the model twice per step: progress, counts, explain, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from heun_sampler import heun  # noqa: F401 - a fixture
from tiny_models import TINY_SIZES

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.progress import Progress
from diffusion_runtime.errors import RequestError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.loading import prepare

NUM_STEPS = 3


def test_a_generation_by_heun(heun: str, tiny_wan_folder: Path) -> None:  # noqa: F811
    request = GenerationRequest(
        "a red circle",
        **{**TINY_SIZES, "num_inference_steps": NUM_STEPS, "guidance_scale": 1.0},
        negative_prompt="",
        sampler=heun,
    )
    pipeline = load_pipeline(str(tiny_wan_folder), device="cpu")
    seen: list[Progress] = []
    made = pipeline(request, on_progress=seen.append)
    assert [each.step for each in seen if each.stage == "denoise"] == list(range(NUM_STEPS + 1))
    euler = pipeline(replace(request, sampler="flow_match_euler"))
    # Two at each step but the last, which ends at the data.
    num_forwards = 2 * NUM_STEPS - 1
    assert made.attention_report.num_calls * NUM_STEPS == euler.attention_report.num_calls * num_forwards
    found = explain(prepare(RuntimeConfig(model_path=str(tiny_wan_folder), device="cpu")), pipeline.resolve(request))
    assert (found.num_steps, found.num_forwards) == (NUM_STEPS, num_forwards)
    for changes in ({"step_cache": "easycache"}, {"progressive_resolution": "dct:A=100,beta=2"}):
        with pytest.raises(RequestError, match=r"use .*flow_match_euler"):
            pipeline.resolve(replace(request, **changes))
