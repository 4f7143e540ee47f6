"""Choices by step, and sparse attention, inside diffusers' models and pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from tables import table
from tiny_denoisers import (
    EVERY,
    forward,
    image_joint,
    image_text_first,
    video_cross,
    video_joint,
    video_packed,
)

from diffusion_runtime.attention import (
    AttentionCall,
    AttentionResult,
    Availability,
    Backend,
    Capability,
    TokenLayout,
    register_backend,
)
from diffusion_runtime.attention.backends.registry import unregister_backend
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.diffusers_bridge.attach import AttachedAttention, attach
from diffusion_runtime.errors import BackendUnavailableError, ConfigError
from diffusion_runtime.report.attention_report import AttentionReport

SPARSE = {"backend": "sliding_tile_attn", "extra": {"tile_size": [1, 2, 2], "window": [3, 1, 1]}}
WHOLE = {"backend": "sliding_tile_attn", "extra": {"tile_size": [1, 2, 2], "window": [99, 99, 99]}}
SIDES = ("right", "left", "middle")


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


PADDED = [(build, padding) for build in (video_joint, video_packed, image_text_first) for padding in SIDES]


@table(("build", "padding"), [(video_cross, None), *PADDED])
def test_a_sparse_choice_changes_the_result_and_its_widest_window_does_not(
    build: Callable[..., Any], padding: str | None
) -> None:
    torch.manual_seed(0)
    model, arguments = build() if padding is None else build(padding=padding)
    dense = forward(model, arguments)
    with attach(model, {"per_role": {"self": WHOLE}}) as handle:
        handle.set_step(0, 1)
        assert relative_error(forward(model, arguments), dense) < 1e-5
    with attach(model, {"per_role": {"self": SPARSE}}) as handle:
        handle.set_step(0, 1)
        changed = relative_error(forward(model, arguments), dense)
        assert changed > 1e-3
        rows = [row for row in handle.report().rows if row.role == "self"]
    assert [row.backend for row in rows] == ["sliding_tile_attn"]
    assert rows[0].implementation.startswith("block-sparse")
    assert torch.equal(forward(model, arguments), dense)


@table(
    "name",
    [
        "MochiTransformer3DModel",
        "CogVideoXTransformer3DModel",
        "HunyuanVideo15Transformer3DModel",
        "LTX2VideoTransformer3DModel",
    ],
)
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_sparse_where_the_grid_is_known_too(name: str) -> None:
    torch.manual_seed(0)
    model, arguments = EVERY[name][0]()
    dense = forward(model, arguments)
    errors = []
    for choice in (WHOLE, SPARSE):
        with attach(model, choice) as handle:
            handle.set_step(0, 1)
            errors.append(relative_error(forward(model, arguments), dense))
    assert errors[0] < 1e-5 < 1e-3 < errors[1]


def test_a_sparse_choice_passes_over_text_and_cross_attention() -> None:
    model, arguments = video_joint()
    with attach(model, SPARSE) as handle:
        handle.set_step(0, 1)
        forward(model, arguments)
        report = handle.report()
    assert {row.role: row.backend for row in report.rows} == {
        "self": "sliding_tile_attn",
        "diffusers.text": "torch_sdpa",
    }
    assert any("diffusers.text: sliding_tile_attn not used" in note for note in report.notes)


def test_a_sparse_choice_needs_a_model_whose_grid_is_known() -> None:
    model, _ = image_joint()
    with pytest.raises(BackendUnavailableError, match=r"needs the grid of the tokens, which is known for .*Wan"):
        attach(model, SPARSE)


def test_a_choice_by_step_needs_somebody_who_knows_the_step() -> None:
    model, arguments = video_cross()
    rule = {"schedule": [{"steps": "0", "backend": "reference"}]}
    with attach(model, rule), pytest.raises(ConfigError, match="set_step"):
        forward(model, arguments)
    with attach(model, rule) as handle:
        for index in range(3):
            handle.set_step(index, 3)
            forward(model, arguments)
        assert steps_of(handle.report()) == {"reference": {"0"}, "torch_sdpa": {"1-2"}}


def steps_of(report: AttentionReport) -> dict[str, set[str]]:
    steps: dict[str, set[str]] = {}
    for row in report.rows:
        steps.setdefault(row.backend, set()).add(row.steps)
    return steps


def denoise(handle: AttachedAttention, model: Any, arguments: dict[str, Any], scheduler: Any, passes: int) -> None:
    """A loop as diffusers' pipelines have it: two guidance branches, one step of the scheduler."""
    latents = arguments["hidden_states"]
    scheduler.set_timesteps(4)
    for t in scheduler.timesteps:
        for _ in range(passes):
            with torch.no_grad():
                out = model(**{**arguments, "hidden_states": latents, "timestep": t.expand(1)}, return_dict=False)[0]
        latents = scheduler.step(out, t, latents, return_dict=False)[0]


@table("passes", [1, 2])
@table(
    "scheduler",
    [
        FlowMatchEulerDiscreteScheduler(),
        UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        DDIMScheduler(),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_steps_are_those_of_the_scheduler(scheduler: Any, passes: int) -> None:
    model, arguments = video_cross()
    rules = {"schedule": [{"steps": "0,-1", "backend": "reference"}]}
    with attach(model, rules, scheduler=scheduler) as handle:
        for _ in range(2):
            denoise(handle, model, arguments, scheduler, passes)
            report = handle.report()
            assert steps_of(report) == {"reference": {"0,3"}, "torch_sdpa": {"1-2"}}
            assert report.num_calls == 4 * 4 * passes
            handle.start_report()


@pytest.fixture
def watching() -> Iterator[list[AttentionCall]]:
    """Every call that the backend `watching` gets."""
    calls: list[AttentionCall] = []

    @register_backend
    class Watching(Backend):
        name = "watching"
        summary = "keeps its calls"
        capability = Capability(features=frozenset({"key_padding"}))

        def probe(self, hardware: Hardware) -> Availability:
            return Availability("1")

        def run(self, call: AttentionCall) -> AttentionResult:
            calls.append(call)
            return AttentionResult(torch.zeros_like(call.q), None, "nothing")

    yield calls
    unregister_backend("watching")


def test_branches_experts_and_what_lives_for_a_request(watching: list[AttentionCall]) -> None:
    (first, arguments), (second, _) = video_cross(), video_cross()
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    pipeline = SimpleNamespace(components={"transformer": first, "transformer_2": second}, scheduler=scheduler)
    with attach(pipeline, {"per_role": {"self": "watching"}}) as handle:
        assert handle.num_modules == 8
        for _ in range(2):
            scheduler.set_timesteps(2)
            for t, model in zip(scheduler.timesteps, (first, second), strict=True):
                for _ in range(3):
                    with torch.no_grad():
                        out = model(**{**arguments, "timestep": t.expand(1)}, return_dict=False)[0]
                scheduler.step(out, t, arguments["hidden_states"], return_dict=False)
    # Two layers a pass, three passes a step, two steps.
    one, two = watching[:12], watching[12:]
    passes = [(call.step.index, call.step.expert, call.step.branch) for call in one[::2]]
    branches = ("cond", "uncond", "pass 2")
    assert passes == [(0, 0, branch) for branch in branches] + [(1, 1, branch) for branch in branches]
    assert [(call.step.index, call.step.expert, call.step.branch) for call in two[::2]] == passes
    assert one[0].step.timestep == float(scheduler.timesteps[0])
    assert [call.layer.index for call in one[:2]] == [0, 1]
    assert len({id(call.state) for call in one}) == len({id(call.state) for call in two}) == 1
    assert one[0].state is not two[0].state
    assert one[0].layout == TokenLayout((3, 4, 4))


def test_steps_from_timesteps_that_were_copied() -> None:
    """Pipelines divide or convert the timestep before the model sees it."""
    model, arguments = video_cross()
    scheduler = FlowMatchEulerDiscreteScheduler()
    rules = {"schedule": [{"steps": "1", "backend": "reference"}]}
    with attach(model, rules, scheduler=scheduler) as handle:
        scheduler.set_timesteps(3)
        latents = arguments["hidden_states"]
        for t in scheduler.timesteps:
            out = model(**{**arguments, "timestep": t.expand(1).to(torch.float64) / 1000}, return_dict=False)[0]
            latents = scheduler.step(out.detach(), t, latents, return_dict=False)[0]
        assert steps_of(handle.report()) == {"reference": {"1"}, "torch_sdpa": {"0,2"}}


def test_options_for_another_number_of_steps_fail_before_the_first(tmp_path: Any) -> None:
    model, arguments = video_cross()
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    with attach(model, {"schedule": [{"steps": "0", "backend": "reference"}]}, scheduler=scheduler) as handle:
        handle.check_request(4)
        forward(model, {**arguments, "timestep": scheduler.timesteps[:1]})
        assert steps_of(handle.report()) == {"reference": {"0"}}
