"""Classifier-free guidance as a wrapper around a prediction."""

from __future__ import annotations

import pytest
import torch
from tables import table

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.guidance import extrapolate, rescaled, with_guidance
from diffusion_runtime.denoising.guidance_terms import GuidanceTerms, PartScales, with_guidance_terms
from diffusion_runtime.denoising.interface import Predict
from diffusion_runtime.errors import RequestError
from diffusion_runtime.request.generation_request import GUIDANCE_MODES

CONDITION = {"cond": 2.0, "uncond": -1.0}


def recording_predict(calls: list[tuple[str, int]]) -> Predict:
    """A velocity whose value depends on the branch; `calls` gets each branch and batch size."""

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        calls.append((step.branch, latents.shape[0]))
        if step.branch != "both":
            return latents * CONDITION[step.branch]
        half = latents.shape[0] // 2
        return torch.cat([latents[:half] * CONDITION["cond"], latents[half:] * CONDITION["uncond"]])

    return predict


@table(("mode", "expected_calls"), [("batched", [("both", 6)]), ("two_pass", [("cond", 3), ("uncond", 3)])])
def test_both_modes_give_the_formula(mode: str, expected_calls: list[tuple[str, int]]) -> None:
    latents = torch.randn(3, 4, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    calls: list[tuple[str, int]] = []
    guided = with_guidance(recording_predict(calls), 4.0, mode)(latents, StepInfo(1, 5, timestep=700.0, sigma=0.7))
    # uncond + 4 (cond - uncond) = (-1 + 4 * 3) x = 11 x
    torch.testing.assert_close(guided, 11.0 * latents)
    assert calls == expected_calls


@table("scale", [0.0, 0.5, 1.0])
@table("mode", ["batched", "two_pass"])
def test_a_scale_of_one_or_less_runs_no_negative_branch(scale: float, mode: str) -> None:
    calls: list[tuple[str, int]] = []
    latents = torch.ones(2, 4, 1, 2, 2)
    guided = with_guidance(recording_predict(calls), scale, mode)(latents, StepInfo())
    assert torch.equal(guided, 2.0 * latents)
    assert calls == [("cond", 2)]


@table("mode", ["batched", "two_pass"])
def test_the_step_reaches_the_prediction_whole(mode: str) -> None:
    asked: list[StepInfo] = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        asked.append(step)
        return latents

    with_guidance(predict, 3.0, mode)(torch.ones(1, 1, 1, 1, 1), StepInfo(2, 9, timestep=5.0, sigma=0.1))
    assert {(step.index, step.num_steps, step.timestep, step.sigma) for step in asked} == {(2, 9, 5.0, 0.1)}


@table("mode", ["batched", "two_pass"])
def test_half_precision_predictions_are_combined_in_float32(mode: str) -> None:
    predict = recording_predict([])
    latents = torch.full((1, 1, 1, 1, 1), 1.001)
    guided = with_guidance(lambda x, step: predict(x, step).to(torch.bfloat16), 7.0, mode)(latents, StepInfo())
    assert guided.dtype == torch.float32
    assert guided.item() == pytest.approx(-1 + 7 * 3)


def test_an_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(RequestError, match="two_pass"):
        with_guidance(recording_predict([]), 3.0, "two-pass")


@table("mode", GUIDANCE_MODES)
def test_a_scale_of_each_step_and_a_combination_of_the_models_own(mode: str) -> None:
    """Steps whose scale is 1 or less run one branch; `combine` sees both velocities in float32."""
    branches: list[str] = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        branches.append(step.branch)
        one = latents if step.branch != "both" else latents.chunk(2)[0]
        parts = {"cond": [one + 1], "uncond": [one - 1], "both": [one + 1, one - 1]}
        return torch.cat(parts[step.branch]).to(torch.bfloat16)

    def combine(cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
        assert cond.dtype == uncond.dtype == torch.float32
        return 10 * scale * cond + uncond

    guided = with_guidance(predict, lambda step: (1.0, 3.0)[step.index], mode, combine)
    latents = torch.zeros(1, 1, 1, 1, 1)
    assert guided(latents, StepInfo(0, 2)).item() == 1.0
    assert branches == ["cond"]
    branches.clear()
    assert guided(latents, StepInfo(1, 2)).item() == 29.0
    assert branches == (["both"] if mode == "batched" else ["cond", "uncond"])


def test_pictures_and_sound_are_guided_in_some_steps() -> None:
    """Each with its own scale in a step that has guidance; no pass of the negative prompt in another."""
    ran: list[tuple[int, str]] = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        ran.append((step.index, step.branch))
        return torch.full_like(latents, {"cond": 5.0, "uncond": 2.0}[step.branch])

    def split(latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return latents[:, :1], latents[:, 1:]

    def join(video: torch.Tensor, audio: torch.Tensor) -> torch.Tensor:
        return torch.cat([video, audio], dim=1)

    terms = GuidanceTerms(PartScales(3.0, 0.0, 1.0, 0.0), PartScales(5.0, 0.0, 1.0, 0.0))
    made = with_guidance_terms(predict, terms, split, join, "two_pass", is_active=lambda step: step.index == 0)
    found = [made(torch.zeros(1, 2), StepInfo(index, 2, sigma=0.5)).tolist() for index in range(2)]
    # 5 + (3 - 1) * 3 and 5 + (5 - 1) * 3.
    assert found == [[[11.0, 17.0]], [[5.0, 5.0]]]
    assert ran == [(0, "cond"), (0, "uncond"), (1, "cond")]


def test_a_share_of_the_guided_velocity_gets_the_conditional_ones_deviation() -> None:
    generator = torch.Generator().manual_seed(0)
    cond, uncond = (torch.randn(2, 3, 4, generator=generator) for _ in range(2))
    plain = extrapolate(cond, uncond, 5.0)
    assert rescaled(extrapolate, 0.0) is extrapolate
    whole, part = (rescaled(extrapolate, share)(cond, uncond, 5.0) for share in (1.0, 0.25))
    # Sample by sample, and in the direction of before.
    for found, before, given in zip(whole, plain, cond, strict=True):
        assert found.std() == pytest.approx(float(given.std()), rel=1e-5)
        assert torch.allclose(found / found.std(), before / before.std(), atol=1e-5)
    assert torch.allclose(part, 0.25 * whole + 0.75 * plain, atol=1e-6)
