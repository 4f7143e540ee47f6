"""Noise levels whose shift follows the size of the clip, against diffusers' dynamic shifting."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from tables import table

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.flow_schedule import FlowSchedule, LinearQuadraticSigmas, ShiftByTokens
from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig


def sigmas_of(schedule: FlowSchedule, config: SchedulerConfig, num_tokens: int, num_steps: int) -> list[float]:
    """What a sampler of ours hands to the model."""
    shift = schedule.flow_shift(num_tokens, num_steps)
    assert shift is not None
    options = config.options_for("flow_match_euler")
    sampler = build_sampler("flow_match_euler", num_steps, shift, options, schedule.sigmas(num_steps))
    seen: list[float] = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        assert step.sigma is not None
        assert step.timestep == pytest.approx(1000 * step.sigma, rel=1e-5)
        seen.append(step.sigma)
        return torch.zeros_like(latents)

    sampler.sample(torch.zeros(1, 1, 1, 1, 1), predict)
    return seen


@table("num_tokens", [64, 256, 1560, 4096, 9000])
@table("settings", [{}, {"shift_terminal": 0.02}, {"time_shift_type": "linear"}])
def test_sigmas_equal_those_of_diffusers(num_tokens: int, settings: dict[str, object]) -> None:
    values = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0, **settings}
    theirs = FlowMatchEulerDiscreteScheduler(**values)
    num_steps = 7
    mu = calculate_shift(num_tokens, 256, 4096, 0.5, 1.15)
    theirs.set_timesteps(sigmas=[1 - index / num_steps for index in range(num_steps)], mu=mu)
    schedule = ShiftByTokens(is_exponential=settings.get("time_shift_type") != "linear")
    ours = sigmas_of(schedule, SchedulerConfig("FlowMatchEulerDiscreteScheduler", values), num_tokens, num_steps)
    torch.testing.assert_close(torch.tensor(ours), theirs.sigmas[:-1], atol=1e-6, rtol=1e-6)


def test_the_line_goes_through_both_points() -> None:
    schedule = ShiftByTokens(base_tokens=100, max_tokens=1100, base_log_shift=0.2, max_log_shift=1.2)
    assert schedule.flow_shift(100, 5) == pytest.approx(math.exp(0.2))
    assert schedule.flow_shift(600, 5) == pytest.approx(math.exp(0.7))
    assert schedule.flow_shift(1100, 5) == pytest.approx(math.exp(1.2))


def test_a_fixed_shift_says_nothing() -> None:
    assert FlowSchedule().flow_shift(4096, 50) is None
    assert FlowSchedule().sigmas(50) is None


def test_a_line_and_a_parabola_are_those_of_diffusers() -> None:
    from diffusers.pipelines.ltx.pipeline_ltx_condition import linear_quadratic_schedule

    for num_steps in (1, 2, 3, 4, 7, 10, 30, 50):
        found = LinearQuadraticSigmas().sigmas(num_steps)
        assert found == pytest.approx(linear_quadratic_schedule(num_steps).tolist(), abs=1e-6)
        assert found[0] == 1.0
