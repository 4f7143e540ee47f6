"""Whose flow shift runs: the folder's scheduler's, its sampling preset's, or that of the model's authors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.z_image.pipeline_z_image import calculate_shift, get_default_z_image_sigmas
from published_configs import write_published
from tables import table

from diffusion_runtime import GenerationRequest
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.denoising.schedule_loop import ScheduleSampler
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.sampling_presets import sampling_presets
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.request_rules import RequestRules

SCHEDULER = "scheduler/scheduler_config.json"


def rules_of(folder: Path, name: str, **changes: dict[str, Any]) -> RequestRules:
    """Of a published folder with other values in some of its json files."""
    write_published(folder, name)
    for file, values in changes.items():
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return inspect_pipeline(RuntimeConfig(str(folder), device="cpu")).rules


def sigmas_of(rules: RequestRules, request: GenerationRequest) -> list[float]:
    sampler = BatchSettings.of([request], rules.sampling).build_sampler()
    assert isinstance(sampler, ScheduleSampler)
    return [float(sigma) for sigma in sampler.scheduler("cpu").sigmas]  # type: ignore[arg-type]


def test_a_dynamic_shift_is_not_taken_for_a_fixed_one_of_the_same_number(tmp_path: Path) -> None:
    """Z-Image's scheduler with use_dynamic_shifting has a shift of 3 as well, which diffusers does not run."""
    rules = rules_of(tmp_path / "z", "Z-Image-Turbo", **{SCHEDULER: {"use_dynamic_shifting": True}})
    assert rules.preset_rules.few_steps is None
    for height, width, steps in ((512, 512, 8), (1024, 1024, 8), (1024, 1536, 30)):
        request = rules.resolve(GenerationRequest("a", height=height, width=width, num_inference_steps=steps))
        # As ZImagePipeline does.
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(
            json.loads((tmp_path / "z" / SCHEDULER).read_text()) | {"use_dynamic_shifting": True}
        )
        mu = calculate_shift(height * width // 256, 256, 4096, 0.5, 1.15)
        scheduler.set_timesteps(sigmas=get_default_z_image_sigmas(steps), mu=mu)
        assert request.flow_shift == pytest.approx(math.exp(mu))
        theirs = [float(sigma) for sigma in scheduler.sigmas]
        assert sigmas_of(rules, request) == pytest.approx(theirs, abs=1e-6)
        assert rules.sampling_note(request) is None


@table(
    ("values", "shift", "note"),
    [
        ({}, 7.0, "flow_shift: 7 of the sampling preset step-distill-8 runs; the folder's scheduler says 5"),
        ({"num_inference_steps": 12}, 7.0, "says 5"),
        # Its guidance alone, and its steps alone.
        ({"num_inference_steps": 30}, 7.0, "says 5"),
        ({"guidance_scale": 6.0}, 7.0, "says 5"),
        (
            {"num_inference_steps": 30, "guidance_scale": 6.0},
            5.0,
            "flow_shift: 5 of the folder's scheduler runs; the sampling preset step-distill-8 says 7, for other "
            "steps and guidance",
        ),
        ({"flow_shift": 3.0}, 3.0, None),
    ],
)
def test_a_preset_s_shift_runs_with_its_steps_or_its_guidance_and_a_note_says_whose(
    values: dict[str, Any], shift: float, note: str | None, tmp_path: Path
) -> None:
    name = "HunyuanVideo-1.5-Diffusers-480p_t2v"
    rules = rules_of(tmp_path / "h", name, **{"transformer/config.json": {"use_meanflow": True}})
    request = rules.resolve(GenerationRequest("a", **values))
    assert request.flow_shift == shift
    said = rules.sampling_note(request) or ""
    assert ("flow_shift" in said) == (note is not None)
    assert (note or "") in said
    # A recipe says the shift by itself, and is repeated.
    assert rules.resolve(request) == request


def test_a_preset_that_says_what_the_folder_does_needs_no_note(tmp_path: Path) -> None:
    rules = rules_of(tmp_path / "z", "Z-Image-Turbo")
    assert rules.preset_rules.shift_choice is None
    request = rules.resolve(GenerationRequest("a"))
    assert request.flow_shift == 3.0
    assert rules.sampling_note(request) == (
        f"sampling preset: turbo-8 ({SCHEDULER}: shift is 3.0, use_dynamic_shifting is False)"
    )


def test_a_fixed_preset_over_a_shift_that_follows_the_size(tmp_path: Path) -> None:
    """Qwen-Image-Lightning's checkpoint in a folder of its base's scheduler."""
    rules = rules_of(tmp_path / "Qwen-Image-Lightning-4steps", "Qwen-Image")
    distilled = rules.resolve(GenerationRequest("a"))
    assert (distilled.flow_shift, distilled.num_inference_steps) == (3.0, 4)
    assert "flow_shift: 3 of the sampling preset lightning-4, with its shift_terminal of 0, runs" in (
        rules.sampling_note(distilled) or ""
    )
    assert "says a shift that follows the size" in (rules.sampling_note(distilled) or "")
    whole = rules.resolve(GenerationRequest("a", num_inference_steps=50, guidance_scale=4.0))
    tokens = 1328 * 1328 // 256
    assert whole.flow_shift == pytest.approx(math.exp(0.5 + (0.9 - 0.5) * (tokens - 256) / (8192 - 256)))
    assert "of the folder's scheduler runs; the sampling preset lightning-4 says 3" in (
        rules.sampling_note(whole) or ""
    )
    # The level that the schedule ends at is the folder's again as well; 0 turns the stretch off.
    assert (distilled.shift_terminal, whole.shift_terminal) == (0.0, None)
    assert sigmas_of(rules, whole)[-2] == pytest.approx(0.02)
    own = rules.resolve(GenerationRequest("a", num_inference_steps=50, guidance_scale=4.0, flow_shift=5.0))
    assert (own.flow_shift, own.shift_terminal) == (5.0, None)
    said = rules.resolve(GenerationRequest("a", num_inference_steps=50, guidance_scale=4.0, shift_terminal=0.1))
    assert (said.flow_shift, said.shift_terminal) == (whole.flow_shift, 0.1)
    for request in (distilled, whole, own, said):
        assert rules.resolve(request) == request


def test_image_to_video_with_the_shift_of_fasthunyuan_is_not_fasthunyuan(tmp_path: Path) -> None:
    """Its authors recommend 17 for steps of which there are 50."""
    shifted = {SCHEDULER: {"shift": 17.0}}
    assert rules_of(tmp_path / "i2v", "HunyuanVideo-I2V", **shifted).preset_rules.few_steps is None
    fast = rules_of(tmp_path / "fast", "HunyuanVideo", **shifted)
    assert fast.preset_rules.few_steps is not None
    assert fast.resolve(GenerationRequest("a")).num_inference_steps == 6


def test_no_preset_is_recognised_by_a_lone_number() -> None:
    for preset in sampling_presets():
        for sign in preset.recognised_by:
            shifted = [values for values in sign.values() if isinstance(values, dict) and "shift" in values]
            assert all("use_dynamic_shifting" in values for values in shifted), preset.name


def test_a_note_of_levels_that_are_not_shifted_is_left_out(tmp_path: Path) -> None:
    name = "HunyuanVideo-1.5-Diffusers-480p_t2v"
    rules = rules_of(tmp_path / "h", name, **{"transformer/config.json": {"use_meanflow": True}})
    request = rules.resolve(GenerationRequest("a", sigmas=(1.0, 0.5)))
    assert "flow_shift" not in (rules.sampling_note(request) or "")
