"""Step caching on known velocities: EasyCache against its formula, the gate of guidance, expert switches, settings."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import pytest
import torch
from tables import table

from diffusion_runtime import GenerationRequest
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.flow_match_euler import FlowMatchEulerSampler
from diffusion_runtime.denoising.guidance import predict_branches, with_guidance
from diffusion_runtime.denoising.interface import BranchWrapper, Predict
from diffusion_runtime.denoising.step_cache.cfg_gate import cfg_gate
from diffusion_runtime.denoising.step_cache.easycache import SAMPLING_STRIDE, easycache
from diffusion_runtime.denoising.step_cache.requested import StepCache
from diffusion_runtime.errors import RequestError
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.generation_request import GUIDANCE_MODES
from diffusion_runtime.request.step_cache_options import EasyCacheOptions, StepCacheSettings

SHAPE = (1, 3, 2, 4, 5)
NUM_STEPS = 20
BRANCH_OFFSET = {"cond": 0.3, "uncond": -0.2}


def velocity_of(latents: torch.Tensor, step: StepInfo, branch: str) -> torch.Tensor:
    """A smooth field that differs by branch and expert, and bends more and more towards the end."""
    time = step.index / step.num_steps
    return torch.sin(latents * (1 + time) + BRANCH_OFFSET[branch] * (1 + 3 * time**2) + step.expert)


def counting_predict(calls: list[tuple[int, str]]) -> Predict:
    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        calls.append((step.index, step.branch))
        if step.branch != "both":
            return velocity_of(latents, step, step.branch)
        cond, uncond = latents.chunk(2)
        return torch.cat([velocity_of(cond, step, "cond"), velocity_of(uncond, step, "uncond")])

    return predict


def noise(seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def run(
    wrappers: Sequence[BranchWrapper],
    *,
    mode: str = "batched",
    scale: float = 3.0,
    num_steps: int = NUM_STEPS,
    expert: Callable[[int], int] = lambda index: 0,
    seed: int = 0,
) -> tuple[torch.Tensor, list[tuple[int, str]]]:
    calls: list[tuple[int, str]] = []
    guided = with_guidance(counting_predict(calls), scale, mode, wrappers=wrappers)

    def of_expert(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        return guided(latents, dataclasses.replace(step, expert=expert(step.index)))

    return FlowMatchEulerSampler(num_steps, 3.0).sample(noise(seed), of_expert), calls


def cache(**options: Any) -> BranchWrapper:
    return easycache(EasyCacheOptions(**options), lambda *_: None)


def formula(options: EasyCacheOptions, num_steps: int, scale: float) -> tuple[numpy.ndarray[Any, Any], list[int]]:
    """The paper's algorithm in float64: the latents after the last step, and the steps that were computed."""
    sigmas: list[float] = []

    def spy(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        assert step.sigma is not None
        sigmas.append(step.sigma)
        return latents

    FlowMatchEulerSampler(num_steps, 3.0).sample(noise(), spy)
    sigmas.append(0.0)
    x = noise().double()
    computed: list[int] = []
    changes: dict[str, torch.Tensor] = {}
    error, rate = 0.0, None
    x_before = x_computed = v_computed = x

    def mean(y: torch.Tensor) -> float:
        return float(y.flatten()[::SAMPLING_STRIDE].abs().mean())

    for index in range(num_steps):
        step = StepInfo(index, num_steps)
        always = index < math.ceil(options.warmup * num_steps) or index == num_steps - 1 or rate is None
        if not always:
            error += rate * mean(x - x_before) / mean(v_computed)
        if not always and error < options.threshold:
            velocity = {branch: x + change for branch, change in changes.items()}
        else:
            velocity = {branch: velocity_of(x, step, branch) for branch in BRANCH_OFFSET}
            if computed:
                rate = mean(velocity["cond"] - v_computed) / mean(x - x_computed)
            changes = {branch: value - x for branch, value in velocity.items()}
            x_computed, v_computed, error = x, velocity["cond"], 0.0
            computed.append(index)
        x_before = x
        guided = velocity["uncond"] + scale * (velocity["cond"] - velocity["uncond"])
        x = x + (sigmas[index + 1] - sigmas[index]) * guided
    return x.numpy(), computed


@table("mode", GUIDANCE_MODES)
@table("options", [EasyCacheOptions(t, w) for t in (0.05, 0.12, 0.3) for w in (0.0, 0.25)])
def test_easycache_is_its_formula(options: EasyCacheOptions, mode: str) -> None:
    latents, calls = run([easycache(options, lambda *_: None)], mode=mode)
    expected, computed = formula(options, NUM_STEPS, 3.0)
    assert [index for index, branch in calls if branch != "uncond"] == computed
    assert 2 < len(computed) < NUM_STEPS, "the case decides nothing"
    numpy.testing.assert_allclose(latents.numpy(), expected, atol=2e-5)


@table("mode", GUIDANCE_MODES)
def test_a_threshold_of_zero_changes_no_bit(mode: str) -> None:
    plain, calls = run([], mode=mode)
    cached, calls_cached = run([cache(threshold=0.0, warmup=0.0)], mode=mode)
    assert torch.equal(plain, cached)
    assert calls == calls_cached


def test_the_first_steps_and_the_last_are_computed() -> None:
    _, calls = run([cache(threshold=10.0, warmup=0.21)])
    assert [index for index, _ in calls] == [0, 1, 2, 3, 4, NUM_STEPS - 1]


def test_another_expert_starts_anew() -> None:
    """Two of its steps are computed before one can be reused, and its first does not reuse what the other made."""
    _, calls = run([cache(threshold=10.0, warmup=0.1)], expert=lambda index: int(index >= 11))
    assert [index for index, _ in calls] == [0, 1, 11, 12, NUM_STEPS - 1]


def test_interleaved_requests_decide_as_alone() -> None:
    """State belongs to a request: the reference keeps it on the class, and two requests share it."""

    def steps_of(seed: int, computed: list[int]) -> Iterator[None]:
        calls: list[tuple[int, str]] = []
        wrapped = cache(threshold=0.1, warmup=0.1)(predict_branches(counting_predict(calls), "batched"))
        x = noise(seed) * (1 + 4 * seed)
        for index in range(NUM_STEPS):
            x = x - 0.05 * wrapped(x, StepInfo(index, NUM_STEPS), ("cond", "uncond"))["cond"]
            yield
        computed += [index for index, _ in calls]

    alone: list[list[int]] = [[], []]
    together: list[list[int]] = [[], []]
    for seed in (0, 1):
        list(steps_of(seed, alone[seed]))
    list(itertools.zip_longest(*(steps_of(seed, together[seed]) for seed in (0, 1))))
    assert alone[0] != alone[1], "the requests decide alike: the case shows nothing"
    assert together == alone


@table("mode", GUIDANCE_MODES)
def test_the_gate_reuses_the_last_difference(mode: str) -> None:
    calls: list[tuple[int, str]] = []
    gated = cfg_gate(0.5, lambda *_: None)(predict_branches(counting_predict(calls), mode))
    x, y = noise(1), noise(2)
    before = gated(x, StepInfo(9, NUM_STEPS), ("cond", "uncond"))
    calls.clear()
    after = gated(y, StepInfo(10, NUM_STEPS), ("cond", "uncond"))
    assert calls == [(10, "cond")]
    assert torch.equal(after["cond"], velocity_of(y, StepInfo(10, NUM_STEPS), "cond"))
    torch.testing.assert_close(after["cond"] - after["uncond"], before["cond"] - before["uncond"])


def test_the_gate_drops_the_difference_at_an_expert_switch() -> None:
    _, calls = run([cfg_gate(0.5, lambda *_: None)], mode="two_pass", expert=lambda index: int(index >= 15))
    assert [index for index, branch in calls if branch == "uncond"] == [*range(10), 15]


def test_the_report_counts_by_branch_and_expert() -> None:
    recorder = AttentionRecorder()
    request = GenerationRequest("-", step_cache="easycache:threshold=0.1,warmup=0.1", cfg_gate=0.5)
    _, calls = run(
        StepCache.of(request, ProcessMesh(), recorder).wrappers, mode="two_pass", expert=lambda index: int(index >= 15)
    )
    rows = {(row.branch, row.expert): row for row in recorder.report().steps}
    assert set(rows) == {("cond", 0), ("uncond", 0), ("cond", 1), ("uncond", 1)}
    for (branch, expert), row in rows.items():
        mine = [index for index, called in calls if called == branch and (index >= 15) == bool(expert)]
        assert row.num_computed == len(mine)
        assert row.num_computed + row.num_reused == (5 if expert else 15)
    assert rows["uncond", 1].num_computed == 1
    assert set(rows["uncond", 0].reused_by) == {"easycache", "cfg_gate"}
    assert 0 < (rows["cond", 0].largest_error or 0) < 0.1
    text = str(recorder.report())
    assert "cond, expert 0: " in text
    assert "reused by easycache" in text
    assert recorder.report().to_dict()["steps"][0]["reused_by"] == ["easycache"]


def test_without_a_cache_nothing_is_wrapped_or_counted() -> None:
    recorder = AttentionRecorder()
    for request in (GenerationRequest("-"), GenerationRequest("-", step_cache="none", cfg_gate=1.0)):
        assert StepCache.of(request, ProcessMesh(), recorder).wrappers == ()
    assert recorder.report().steps == ()


@table(
    ("text", "message"),
    [
        ("easycash", r"step_cache: unknown value 'easycash'.*'easycache'"),
        ("", "step_cache: unknown value"),
        ("none:threshold=1", "step_cache: none takes no options, got 'threshold=1'; leave them out"),
        ("easycache:treshold=0.1", r"step_cache: easycache: unknown option 'treshold'.*'threshold'"),
        ("easycache:threshold", r"step_cache: easycache: expected key=value,... got 'threshold'"),
        ("easycache:threshold=a", r"step_cache: easycache.threshold: expected float, got 'a'"),
        ("easycache:threshold=-1", r"step_cache: easycache: threshold: expected a number from 0 to 10, got -1"),
        ("easycache:threshold=nan", r"step_cache: easycache.threshold: expected float, got 'nan'"),
        ("easycache:warmup=1.5", r"step_cache: easycache: warmup: expected a share of the steps from 0 to 1, got 1.5"),
        ("easycache:threshold=1,threshold=2", "step_cache: easycache: threshold is given twice"),
        (3, "step_cache: expected one of easycache"),
    ],
)
def test_settings_that_cannot_be_are_refused(text: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GenerationRequest("a", step_cache=text)


def test_settings_go_through_their_text() -> None:
    for text in ("easycache", "easycache:threshold=0.1,warmup=0.3,force=true", "easycache: threshold = 1e-3"):
        settings = StepCacheSettings.parse(text)
        assert settings is not None
        assert StepCacheSettings.parse(settings.text) == settings
    assert StepCacheSettings.parse("none") is None
