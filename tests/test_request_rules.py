"""What a model says about requests: which fields it uses, and in which the requests of one batch may differ."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from diffusion_runtime import GenerationRequest
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.options import MethodText
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.flow_schedule import ShiftByTokens
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.sampling import Sampling
from diffusion_runtime.request.fields import Blocks, ByRole, Levels, MediaFiles, Number, OneOf, Scales, Seeds
from diffusion_runtime.request.frame_conditions import FrameConditions
from diffusion_runtime.request.generation_request import REQUEST_FIELDS
from diffusion_runtime.request.prompt_switches import PromptSwitches, SeedSwitches
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.request_rules import RequestRules

DEFAULTS: dict[str, Any] = {
    "negative_prompt": "",
    "height": 32,
    "width": 32,
    "num_frames": 1,
    "fps": 1,
    "num_inference_steps": 2,
    "guidance_scale": 3.0,
    "flow_shift": 1.0,
    "sampler": "flow_match_euler",
    "guidance_mode": "batched",
}
IMAGES = RequestRules(
    defaults=DEFAULTS,
    presets={},
    sampling=Sampling(
        geometry=LatentGeometry(num_channels=4, temporal_factor=1, spatial_factor=8, patch=(1, 2, 2)),
        scheduler=SchedulerConfig("FlowMatchEulerDiscreteScheduler"),
    ),
)


def another(name: str, value: Any) -> Any:
    """A value that the field may have beside `value`."""
    check = REQUEST_FIELDS[name].check
    if isinstance(check, OneOf):
        return next(choice for choice in check.names if choice not in (value, REQUEST_FIELDS[name].off))
    if isinstance(check, MethodText):
        return next(iter(check.settings.methods))
    if isinstance(check, Levels | Scales):
        return (1.0, 0.25)
    if isinstance(check, ByRole):
        check = check.number
    if isinstance(check, Number):
        return check.maximum / 2
    if isinstance(check, Blocks):
        return (1, 2)
    if isinstance(check, PromptSwitches):
        return ((9, "a blue star"),)
    if isinstance(check, SeedSwitches):
        return ((9, 7),)
    if isinstance(check, Seeds):
        return (9, 7)
    if isinstance(check, MediaFiles):
        return ("star.png",)
    if isinstance(check, FrameConditions):
        return ((9, "star.png", 0.5),)
    if getattr(check, "maximum", None) is not None:
        return check.maximum
    return f"{value}." if check.kind is str else check.kind((value or 0) + 16)


def test_requests_of_one_batch_may_differ_in_what_is_declared_so_and_nothing_else() -> None:
    first = IMAGES.resolve(GenerationRequest("a"))
    wrong = []
    for name, declared in REQUEST_FIELDS.items():
        if name == "seconds":
            # It becomes num_frames when a request is resolved.
            continue
        other = dataclasses.replace(first, **{name: another(name, getattr(first, name))})
        try:
            BatchSettings.of([first, other], IMAGES.sampling)
            is_refused = False
        except RequestError as error:
            is_refused = str(error).startswith(f"{name}: the requests of one batch must agree")
        if is_refused == declared.differs_in_batch:
            wrong.append(name)
    assert not wrong


def test_what_only_some_models_use_is_refused_by_the_others() -> None:
    # Frames in between need weights, whatever the model.
    specific = {name for name, declared in REQUEST_FIELDS.items() if declared.refusal is not None} - {"interpolate"}
    assert {"image_path", "true_cfg_scale", "guidance_scale_2"} <= specific
    taken = []
    for name in specific:
        request = GenerationRequest("a", **{name: another(name, None)})
        with pytest.raises(
            RequestError,
            match=rf"^{name}: .*\w; (write --guidance-scale [0-9.]+|leave (it|--[a-z-]+) out"
            "( or use --model-path shapes-causal)?)$",
        ):
            IMAGES.resolve(request)
        # The one switch: nothing else has to know the field.
        rules = dataclasses.replace(IMAGES, model_fields=frozenset({name}))
        # Prompts and seeds on the way need chunks, which a model has or has not, images a file, a bound of the length
        # another one, keyframes a video, and guidance within attention a negative prompt.
        apart = ("prompt_switches", "seed_switches", "frame_conditions", "keyframe_interval", "nag_scale")
        apart += ("min_seconds", "max_seconds")
        if REQUEST_FIELDS[name].check.kind is not str and name not in apart:
            taken.append(getattr(rules.resolve(request), name))
    assert taken
    with pytest.raises(RequestError, match="image_path: this model makes images from text alone; leave it out"):
        IMAGES.resolve(GenerationRequest("a", image_path="  "))


def test_what_a_generation_does_not_use_is_said() -> None:
    def said(**values: Any) -> tuple[str, ...]:
        return IMAGES.unused(IMAGES.resolve(GenerationRequest("a", **values)))

    assert said() == ()
    assert said(negative_prompt="blue", guidance_mode="two_pass") == ()
    assert said(fps=24) == ("fps: 24 is not used: this model makes images",)
    assert said(guidance_scale=1.0, negative_prompt="blue", guidance_mode="two_pass") == (
        "negative_prompt: 'blue' is not used: no second branch of guidance runs (a scale of 1 or less)",
        "guidance_mode: 'two_pass' is not used: no second branch of guidance runs (a scale of 1 or less)",
    )
    # What the model's own defaults say was not asked for.
    assert said(guidance_scale=1.0, negative_prompt="", guidance_mode="batched", fps=1) == ()


def test_patches_of_two_latent_frames_need_nothing_of_features_that_are_not_asked_for() -> None:
    """One frame, which a keyframe adds, is no whole token there."""
    geometry = LatentGeometry(num_channels=4, temporal_factor=4, spatial_factor=8, patch=(2, 2, 2))
    sampling = dataclasses.replace(IMAGES.sampling, geometry=geometry, schedule=ShiftByTokens())
    defaults = {**DEFAULTS, "num_frames": 13, "flow_shift": None}
    rules = dataclasses.replace(IMAGES, sampling=sampling, defaults=defaults)
    resolved = rules.resolve(GenerationRequest("a"))
    assert resolved.num_frames == 13
    assert resolved.flow_shift == rules.sampling.schedule.flow_shift(2 * 2 * 2, 2)
    assert rules.unused(resolved) == ()
    with pytest.raises(RequestError, match="num_frames: expected a multiple of 8 plus 5, got 14; use 13 or 21"):
        rules.resolve(GenerationRequest("a", num_frames=14))


def test_the_second_of_two_experts_may_be_guided_alone() -> None:
    """diffusers' pipelines guide neither where the first scale is 1 or less."""
    rules = dataclasses.replace(IMAGES, model_fields=frozenset({"guidance_scale_2"}))
    request = rules.resolve(GenerationRequest("a", guidance_scale=1.0, guidance_scale_2=3.0, negative_prompt="blue"))
    settings = BatchSettings.of([request], rules.sampling)
    assert settings.guidance.is_guided
    assert [settings.guidance.cfg_scale_at(StepInfo(0, 2, expert=expert)) for expert in (0, 1)] == [1.0, 3.0]
    assert rules.unused(request) == ()
