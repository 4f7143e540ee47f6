"""The shift by tokens that a scheduler's file describes, against diffusers' scheduler given diffusers' own mu."""

from __future__ import annotations

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from tables import table

from diffusion_runtime.denoising.flow_schedule import token_shift
from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.errors import ModelLoadError

CLASS_NAME = "FlowMatchEulerDiscreteScheduler"


@table(
    "values",
    [
        {"use_dynamic_shifting": True},
        {"use_dynamic_shifting": True, "base_shift": 0.4, "max_shift": 0.9, "max_image_seq_len": 8192},
        {"use_dynamic_shifting": True, "base_image_seq_len": 100, "shift_terminal": 0.02},
        {"use_dynamic_shifting": True, "time_shift_type": "linear"},
        {"shift": 3.0},
    ],
)
@table("num_tokens", [24, 4096])
def test_steps_equal_diffusers(values: dict[str, object], num_tokens: int) -> None:
    scheduler = SchedulerConfig(CLASS_NAME, values)
    schedule = token_shift(scheduler)
    theirs = FlowMatchEulerDiscreteScheduler(**values)
    line = {
        name: theirs.config[name] for name in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    }
    mu = calculate_shift(
        num_tokens, line["base_image_seq_len"], line["max_image_seq_len"], line["base_shift"], line["max_shift"]
    )
    theirs.set_timesteps(sigmas=[1.0, 0.8, 0.6, 0.4, 0.2], mu=mu)
    flow_shift = schedule.flow_shift(num_tokens, 5) or scheduler.defaults["flow_shift"]
    seen: list[tuple[float, float]] = []

    def predict(latents: torch.Tensor, step: object) -> torch.Tensor:
        return torch.zeros_like(latents)

    sampler = build_sampler(
        "flow_match_euler", 5, flow_shift, scheduler.options_for("flow_match_euler"), schedule.sigmas(5)
    )
    sampler.sample(
        torch.zeros(1, 1, 1, 1, 1), predict, lambda step, _: seen.append((step.sigma or 0, step.timestep or 0))
    )
    assert [sigma for sigma, _ in seen] == pytest.approx(theirs.sigmas[:-1].tolist(), rel=1e-5)
    assert [timestep for _, timestep in seen] == pytest.approx(theirs.timesteps.tolist(), rel=1e-5)


@table(
    ("values", "told"),
    [
        ({"base_shift": None}, "base_shift: expected a number, got None"),
        ({"max_shift": True}, "max_shift: expected a number, got True"),
        ({"max_image_seq_len": 256}, "max_image_seq_len: expected more than base_image_seq_len, 256, got 256"),
        ({"time_shift_type": "cubic"}, r"time_shift_type: expected one of .*, got 'cubic'"),
    ],
)
def test_values_that_make_no_line_are_named(values: dict[str, object], told: str) -> None:
    with pytest.raises(ModelLoadError, match=told):
        token_shift(SchedulerConfig(CLASS_NAME, {"use_dynamic_shifting": True, **values}))
