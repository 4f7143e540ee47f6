"""The samplers against the definition of the flow and against a loop written out with diffusers' schedulers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from heun_sampler import NAME as HEUN
from heun_sampler import heun  # noqa: F401 - a fixture
from tables import table

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.dpm_solver import DpmSolver
from diffusion_runtime.denoising.flow_match_euler import EulerSolver
from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.denoising.schedule_loop import run_schedule
from diffusion_runtime.denoising.unipc import UniPCSolver
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.request.samplers import SAMPLERS as REGISTERED

# Those that add noise of their own at every step are in test_dmd.py. Heun's, which calls the model twice per step, is
# registered for each test.
SAMPLERS = [*(name for name, sampler in REGISTERED.items() if not sampler.adds_noise), HEUN]
every_sampler = table("name", SAMPLERS)
pytestmark = pytest.mark.usefixtures("heun")


def noise_and_target() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, 4, 2, 3, 3, generator=generator), torch.randn(2, 4, 2, 3, 3, generator=generator)


def curved_velocity(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
    """A velocity that depends on latents and time in a way no solver integrates exactly."""
    assert step.timestep is not None
    return torch.sin(3 * latents) + 0.5 * latents * (step.timestep / 1000)


@every_sampler
@table("num_steps", [1, 2, 5])
def test_straight_flow_ends_at_the_data(name: str, num_steps: int) -> None:
    noise, target = noise_and_target()
    sampler = build_sampler(name, num_steps, 3.0, {})
    latents = sampler.sample(noise, lambda latents, step: noise - target)
    # What a schedule that begins below 1 takes for data is left of the noise.
    first = sampler.steps(noise.device)[0].sigma
    assert first is not None
    left = target + (1 - first) * (noise - target)
    if name == "unipc_sigma":
        # It ends at a noise level of 0.001, and brings the signal to 1.
        left = (0.999 * target + 0.001 * noise) / 0.999
    torch.testing.assert_close(latents, left, atol=2e-5, rtol=0)
    assert first > 0.999


def test_timesteps_that_round_to_the_same_number_are_all_taken() -> None:
    """UniPC's are whole numbers; the first two of this schedule are both 999."""
    noise, target = noise_and_target()
    timesteps: list[float | None] = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        timesteps.append(step.timestep)
        return noise - target

    latents = build_sampler("unipc", 200, 8.0, {}).sample(noise, predict)
    assert timesteps[:2] == [999.0, 999.0]
    assert len(timesteps) == 200
    torch.testing.assert_close(latents, target, atol=2e-5, rtol=0)


@table("name", ["flow_match_euler", "unipc"])
def test_latents_equal_a_loop_written_out_with_diffusers(name: str) -> None:
    noise, _ = noise_and_target()
    if name == "unipc":
        scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    else:
        scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    scheduler.set_timesteps(7)
    expected, latents = [], noise
    for index, timestep in enumerate(scheduler.timesteps):
        velocity = curved_velocity(latents, StepInfo(index, 7, float(timestep)))
        latents = scheduler.step(velocity, timestep, latents).prev_sample
        expected.append(latents)

    seen: list[tuple[StepInfo, torch.Tensor]] = []
    result = build_sampler(name, 7, 5.0, {}).sample(noise, curved_velocity, lambda *step: seen.append(step))
    assert torch.equal(result, expected[-1])
    assert len(seen) == len(expected)
    for (_, ours), theirs in zip(seen, expected, strict=True):
        assert torch.equal(ours, theirs)


def settings_of_solvers() -> Iterator[tuple[Any, Any, dict[str, Any], int, list[float] | None]]:
    """Our class, diffusers' class, settings, number of steps, noise levels."""
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    for order, steps, shift in itertools.product((1, 2, 3), (1, 2, 3, 12), (1.0, 20.0)):
        other = {"num_train_timesteps": 50, "disable_corrector": [0, 2], "lower_order_final": order == 3}
        for more in ({}, other):
            settings = {**flow, "solver_order": order, "flow_shift": shift, **more}
            yield UniPCSolver, UniPCMultistepScheduler, settings, steps, None
    for order, steps, shift in itertools.product((1, 2), (1, 2, 3, 12, 16), (1.0, 20.0)):
        for more in ({}, {"num_train_timesteps": 50, "lower_order_final": False, "euler_at_final": order == 1}):
            settings = {**flow, "solver_order": order, "flow_shift": shift, **more}
            yield DpmSolver, DPMSolverMultistepScheduler, settings, steps, None
    for steps, shift, levels in itertools.product((2, 3, 12), (1.0, 7.5), (None, [0.9, 0.7, 0.2])):
        for more in ({}, {"num_train_timesteps": 50}, {"shift_terminal": 0.1}):
            if levels is None or steps == len(levels):
                yield EulerSolver, FlowMatchEulerDiscreteScheduler, {"shift": shift, **more}, steps, levels


# Of DPMSolverMultistepScheduler, which gives numpy a tensor.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_our_solvers_give_the_bits_of_diffusers() -> None:
    noise, _ = noise_and_target()
    device = torch.device("cpu")
    for solver, scheduler_class, settings, steps, levels in settings_of_solvers():
        extra = () if levels is None else (levels,)
        for start in (0, steps // 2):
            ours, theirs = solver(settings, steps, device, *extra), scheduler_class(**settings)
            theirs.set_timesteps(**({"num_inference_steps": steps} if levels is None else {"sigmas": levels}))
            assert torch.equal(ours.timesteps, theirs.timesteps), settings
            assert torch.equal(ours.sigmas, theirs.sigmas), settings
            found, expected = (
                run_schedule(each, steps, noise, curved_velocity, None, range(start, steps)) for each in (ours, theirs)
            )
            assert found.numpy().tobytes() == expected.numpy().tobytes(), (settings, steps, start)


def test_heun_is_of_second_order() -> None:
    noise, _ = noise_and_target()
    exact = build_sampler("flow_match_euler", 4000, 3.0, {}).sample(noise, curved_velocity)
    errors = [
        float((build_sampler(name, 40, 3.0, {}).sample(noise, curved_velocity) - exact).norm())
        for name in ("flow_match_euler", HEUN)
    ]
    assert errors[1] < errors[0] / 3


@every_sampler
def test_steps_say_where_they_are(name: str) -> None:
    noise, _ = noise_and_target()
    asked: list[StepInfo] = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        asked.append(step)
        return latents

    sampler = build_sampler(name, 6, 3.0, {"num_train_timesteps": 500})
    sampler.sample(noise, predict)
    assert sampler.steps(noise.device) == tuple(asked)
    by_step = [list(calls) for _, calls in itertools.groupby(asked, lambda step: step.index)]
    assert all(len(calls) <= REGISTERED[name].num_predictions_per_step for calls in by_step)
    asked = [calls[0] for calls in by_step]
    assert [step.index for step in asked] == list(range(6))
    assert {step.num_steps for step in asked} == {6}
    for step in asked:
        assert step.timestep is not None
        assert step.sigma is not None
        # UniPC rounds its timesteps down to whole numbers.
        assert step.timestep == pytest.approx(500 * step.sigma, abs=1.0)
    assert [step.next_timestep for step in asked] == [*(step.timestep for step in asked[1:]), 0.0]
    # Of DPM-Solver's 500 training timesteps the first is the second highest.
    assert asked[0].sigma == pytest.approx(1.0, abs=1e-3 if name == "dpmpp_2m" else 1e-5)
    assert all(one.sigma > two.sigma for one, two in itertools.pairwise(asked))  # type: ignore[operator]


@every_sampler
def test_flow_shift_moves_the_steps_towards_noise(name: str) -> None:
    noise, _ = noise_and_target()

    def middle_sigma(flow_shift: float) -> float:
        sigmas: list[float | None] = []
        sampler = build_sampler(name, 5, flow_shift, {})
        sampler.sample(noise, lambda latents, step: latents, lambda step, latents: sigmas.append(step.sigma))
        assert sigmas[2] is not None
        return sigmas[2]

    assert middle_sigma(1.0) < middle_sigma(3.0) < middle_sigma(8.0)


@every_sampler
def test_latents_stay_float32_behind_a_bfloat16_model(name: str) -> None:
    noise, _ = noise_and_target()
    dtypes = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        dtypes.append(latents.dtype)
        return latents.to(torch.bfloat16)

    result = build_sampler(name, 3, 1.0, {}).sample(noise, predict)
    assert {*dtypes, result.dtype} == {torch.float32}


@every_sampler
def test_a_sampler_may_be_used_again_and_leaves_the_noise_alone(name: str) -> None:
    noise, _ = noise_and_target()
    before = noise.clone()
    sampler = build_sampler(name, 4, 3.0, {})
    first = sampler.sample(noise, curved_velocity)
    assert torch.equal(first, sampler.sample(noise, curved_velocity))
    assert torch.equal(noise, before)


@every_sampler
def test_an_interruption_in_on_step_ends_the_loop(name: str) -> None:
    noise, _ = noise_and_target()
    calls = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        calls.append(step.index)
        return latents

    def stop_after_two(step: StepInfo, latents: torch.Tensor) -> None:
        if step.index == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_sampler(name, 5, 3.0, {}).sample(noise, predict, stop_after_two)
    assert sorted(set(calls)) == [0, 1]
    assert len(calls) <= 2 * REGISTERED[name].num_predictions_per_step


def test_folder_settings_change_the_result() -> None:
    noise, _ = noise_and_target()
    second_order = build_sampler("unipc", 5, 3.0, {"solver_order": 2}).sample(noise, curved_velocity)
    third_order = build_sampler("unipc", 5, 3.0, {"solver_order": 3}).sample(noise, curved_velocity)
    assert not torch.allclose(second_order, third_order)


@every_sampler
def test_a_setting_that_the_sampler_does_not_compute_is_a_load_error(name: str) -> None:
    for key, value in (("from_the_future", 1), ("use_karras_sigmas", True), ("num_train_timesteps", "many")):
        with pytest.raises(
            ModelLoadError, match=rf"key '{key}': .* is not supported by the sampler {name}; .* --backend"
        ):
            build_sampler(name, 2, 3.0, {key: value})


def test_unknown_sampler_names_the_nearest() -> None:
    with pytest.raises(RequestError, match="unipc"):
        build_sampler("unipcc", 2, 3.0, {})


def test_one_step_cannot_start_at_full_noise_and_end_elsewhere() -> None:
    with pytest.raises(RequestError, match=r"num_inference_steps: expected 2 or more, got 1: .* \(shift_terminal\)"):
        build_sampler("flow_match_euler", 1, 3.0, {"shift_terminal": 0.1})
    assert build_sampler("flow_match_euler", 1, 3.0, {"shift_terminal": None})
    assert build_sampler("flow_match_euler", 2, 3.0, {"shift_terminal": 0.1})
