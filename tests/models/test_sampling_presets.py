"""Few-step settings: each preset against the published table of noise levels, and what recognises a model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import table

from diffusion_runtime import GenerationRequest
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.flow_schedule import token_shift
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.loading import inspect_pipeline, load_pipeline
from diffusion_runtime.models.registry import supported_transformer_classes
from diffusion_runtime.models.sampling import Sampling
from diffusion_runtime.models.sampling_presets import presets_of, recognise, recognise_lora, sampling_presets
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.presets import PresetRules
from diffusion_runtime.rules.request_rules import RequestRules

EULER, UNIPC = "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"
# The scheduler settings of published folders; Qwen-Image's and LTX-2's shift follows the size and ends above 0.
QWEN = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192} | {
    "shift_terminal": 0.02, "time_shift_type": "exponential"
}  # fmt: skip
LTX = {**QWEN, "base_shift": 0.95, "max_shift": 2.05, "shift_terminal": 0.1}
SCHEDULERS = {
    "wan": SchedulerConfig(UNIPC, {"flow_shift": 3.0}),
    "flux1": SchedulerConfig(EULER, {"shift": 1.0, "use_dynamic_shifting": False}),
    "flux3": SchedulerConfig(EULER, {"shift": 6.93}),
    "qwen_image": SchedulerConfig(EULER, QWEN),
    "qwen_image_21": SchedulerConfig(EULER, {"shift": 1.0}),
    "z_image": SchedulerConfig(EULER, {"shift": 3.0}),
    "anima": SchedulerConfig(EULER, {"shift": 3.0}),
    "krea2": SchedulerConfig(EULER, {**QWEN, "max_shift": 1.15, "max_image_seq_len": 6400, "shift_terminal": None}),
    "ltx2": SchedulerConfig(EULER, LTX),
    "ltx_video": SchedulerConfig(EULER, {"shift": 1.0}),
    "hunyuan_video": SchedulerConfig(EULER, {"shift": 17.0}),
    "hunyuan_video_15": SchedulerConfig(EULER, {"shift": 5.0}),
    "scail_2": SchedulerConfig(UNIPC, {"flow_shift": 3.0}),
    "minimax_h3": SchedulerConfig("MiniMaxH3Scheduler", {"shift": 12.0}),
}


def even(num_steps: int, shift: float) -> list[float]:
    """1, 1 - 1/n, ... after the shift."""
    return [shift * t / (1 + (shift - 1) * t) for t in (1 - index / num_steps for index in range(num_steps))]


def rcm(first: float, num_steps: int = 4) -> list[float]:
    return [math.sin(a) / (math.sin(a) + math.cos(a)) for a in (math.atan(first), 1.5, 1.4, 1.0)[:num_steps]]


LIGHTX2V = [1.0, 0.9375, 5 / 6, 0.625]
LTX_DISTILLED = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875]
TABLE: dict[tuple[str, str], tuple[str, list[float]]] = {
    ("wan", "fastwan-3"): ("dmd", [1.0, 0.757, 0.522]),
    # The same levels: Self-Forcing's list is warped by a shift of 5, too.
    ("wan", "self-forcing-4"): ("dmd", LIGHTX2V),
    ("wan", "self-forcing-8"): (
        "dmd",
        [12 * t / (1 + 11 * t) for t in (1.0, 0.85, 0.7, 0.55, 0.35, 0.275, 0.2, 0.125)],
    ),
    ("wan", "distill-4"): ("flow_match_euler", LIGHTX2V),
    ("wan", "lightning-4"): ("flow_match_euler", LIGHTX2V),
    ("wan", "turbowan-4"): ("rcm", rcm(80)),
    ("wan", "turbowan-3"): ("rcm", rcm(80, 3)),
    ("wan", "turbowan-2"): ("rcm", rcm(80, 2)),
    ("wan", "turbowan-1"): ("rcm", rcm(80, 1)),
    ("wan", "turbowan2.2-4"): ("rcm", rcm(200)),
    ("flux1", "schnell"): ("flow_match_euler", [1.0, 0.75, 0.5, 0.25]),
    ("qwen_image", "lightning-4"): ("flow_match_euler", even(4, 3.0)),
    ("qwen_image", "lightning-8"): ("flow_match_euler", even(8, 3.0)),
    ("z_image", "turbo-8"): ("flow_match_euler", even(8, 3.0)),
    ("qwen_image_21", "qwen-turbo-8"): (
        "flow_match_euler",
        [1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568],
    ),
    ("krea2", "turbo-8"): ("flow_match_euler", even(8, math.exp(1.15))),
    ("anima", "anima-turbo-8"): ("flow_match_euler", even(8, 3.0)),
    ("ltx2", "ltx-distilled"): ("flow_match_euler", LTX_DISTILLED),
    ("flux3", "klein-16"): ("flow_match_euler", even(16, 6.93)),
    ("ltx_video", "ltxv-distilled"): (
        "flow_match_euler",
        [1.0, 0.993, 0.987, 0.981, 0.975, 0.909, 0.725, 0.00003],
    ),
    ("hunyuan_video", "fasthunyuan-6"): ("flow_match_euler", even(6, 17.0)),
    ("hunyuan_video_15", "step-distill-8"): ("flow_match_euler", even(8, 7.0)),
    ("hunyuan_video_15", "step-distill-12"): ("flow_match_euler", even(12, 7.0)),
    ("hunyuan_video_15", "step-distill-4"): ("flow_match_euler", even(4, 7.0)),
    ("hunyuan_video_15", "distill-4"): ("flow_match_euler", LIGHTX2V),
    # UniPC's levels begin just below 1, and would end at 1 of 1,000.
    ("scail_2", "distill-8"): ("unipc", [1 - 1e-6, *(1 - index * 0.999 / 8 for index in range(1, 8))]),
    ("minimax_h3", "minimax-turbo-8"): ("flow_match_euler", even(8, 6.0)),
    ("minimax_h3", "minimax-turbo-4"): ("flow_match_euler", even(4, 6.0)),
    ("minimax_h3", "fasth3-4"): ("flow_match_euler", [12 * t / (1 + 11 * t) for t in (0.999, 0.749, 0.5, 0.25)]),
    # As FastVideo serves them.
    ("minimax_h3", "fasth3-8"): (
        "flow_match_euler",
        [0.9999, 0.985788, 0.967575, 0.943168, 0.909091, 0.857143, 0.769231, 0.588235],
    ),
}
# Its shift is the model's own and follows the size.
BY_SIZE = {("flux2", "klein-4")}


def rules_of(family: str) -> RequestRules:
    scheduler, presets = SCHEDULERS[family], presets_of(family)
    requests = {each.name: {k: v for k, v in each.request.items() if k != "first_chunk_frames"} for each in presets}
    defaults = {"height": 64, "width": 64, "num_frames": 1, "fps": 1, "guidance_mode": "batched", "negative_prompt": ""}
    return RequestRules(
        defaults={**defaults, "num_inference_steps": 50, "guidance_scale": 5.0, **scheduler.defaults},
        presets=requests,
        sampling=Sampling(
            geometry=LatentGeometry(num_channels=4, spatial_factor=8, temporal_factor=4, patch=(1, 2, 2)),
            scheduler=scheduler,
            schedule=token_shift(scheduler),
            guidance_offset=1.0 if family in ("z_image", "krea2") else 0.0,
        ),
        preset_rules=PresetRules(known=presets),
    )


def steps_of(rules: RequestRules, request: GenerationRequest) -> list[StepInfo]:
    """The steps that a resolved request runs."""
    seen: list[StepInfo] = []
    BatchSettings.of([request], rules.sampling).build_sampler().sample(
        torch.zeros(1, 1, 1, 1, 1),
        lambda latents, _: latents,
        lambda step, _: seen.append(step),
        lambda: torch.zeros(1, 1, 1, 1, 1),
    )
    return seen


def test_every_preset_is_in_the_table_and_of_a_family_that_loads() -> None:
    published = [preset for preset in sampling_presets() if preset.model is None]
    assert {(preset.family, preset.name) for preset in published} == {*TABLE, *BY_SIZE}
    assert len(supported_transformer_classes()) >= len({preset.family for preset in sampling_presets()})


@table("key", TABLE)
def test_noise_levels_are_those_of_the_table(key: tuple[str, str]) -> None:
    rules, (sampler, sigmas) = rules_of(key[0]), TABLE[key]
    request = rules.resolve(GenerationRequest("a"), key[1])
    assert request.sampler == sampler
    assert not rules.is_guided(request) or "guidance_scale" not in rules.presets[key[1]]
    steps = steps_of(rules, request)
    assert [step.sigma for step in steps] == pytest.approx(sigmas, abs=1e-6)
    # float32 timesteps of diffusers' schedulers.
    # Those of UniPC are whole numbers.
    times = [math.floor(1000 * sigma) if sampler == "unipc" else 1000 * sigma for sigma in sigmas]
    assert [step.timestep for step in steps] == pytest.approx(times, abs=1e-3)
    assert [step.next_timestep for step in steps] == [*(step.timestep for step in steps[1:]), 0.0]
    if key[1] == "self-forcing-8":
        # Its other value is of a key-value cache, which these rules have none of: test_causal.py has a folder with one.
        return
    assert key[1] in (rules.sampling_preset(request) or "").split(", ")
    # What ran is what a recipe repeats.
    repeated = GenerationRequest.from_dict(json.loads(json.dumps(request.to_dict())))
    assert rules.resolve(repeated) == request
    assert rules.unused(repeated) == ()


def test_a_fixed_shift_replaces_a_dynamic_one_and_the_stretch_is_turned_off() -> None:
    rules = rules_of("qwen_image")
    one = steps_of(rules, rules.resolve(GenerationRequest("a", num_inference_steps=5, flow_shift=3.0)))
    other = steps_of(
        rules, rules.resolve(GenerationRequest("a", num_inference_steps=5, flow_shift=3.0, shift_terminal=0.0))
    )
    assert one[-1].sigma == pytest.approx(0.02, abs=1e-6)
    assert [step.sigma for step in other] == pytest.approx(even(5, 3.0), abs=1e-6)


def test_explicit_levels_before_and_after_the_shift() -> None:
    rules = rules_of("ltx2")
    plain = rules.resolve(GenerationRequest("a", sigmas="1,0.5"))  # type: ignore[arg-type]
    before = rules.resolve(GenerationRequest("a", sigmas_before_shift=(1.0, 0.5), flow_shift=3.0))
    assert [step.sigma for step in steps_of(rules, plain)] == pytest.approx([1.0, 0.5])
    assert [step.sigma for step in steps_of(rules, before)] == pytest.approx([1.0, 0.75])
    stretched = rules.resolve(dataclasses.replace(before, shift_terminal=0.1))
    assert [step.sigma for step in steps_of(rules, stretched)] == pytest.approx([1.0, 0.1])
    assert plain.num_inference_steps == before.num_inference_steps == 2
    assert rules.unused(dataclasses.replace(plain, flow_shift=3.0)) == (
        "flow_shift: 3.0 is not used: sigmas are the noise levels as they run",
    )


@table(
    ("values", "preset", "message"),
    [
        (
            {"sigmas": (1.0, 0.5), "num_inference_steps": 3, "sampler": "dmd"},
            None,
            "sigmas: expected 3 noise levels.* 2",
        ),
        (
            {"sigmas": (1.0, 0.5), "sampler": "unipc"},
            None,
            "unipc spaces its own .*euler or flow_map_euler or dmd or rcm",
        ),
        ({"sigmas": (1.0, 0.5)}, None, "sigmas: unipc spaces its own"),
        ({"shift_terminal": 0.1}, None, "shift_terminal: unipc does not stretch.* set sampler to flow_match_euler"),
        ({"num_inference_steps": 2}, "turbowan-4", "preset turbowan-4 has 4 noise levels, got 2 steps.*--sigmas"),
        ({"sampler": "unipc"}, "fastwan-3", "sampler: preset fastwan-3 has noise levels of its own"),
        (
            {},
            "turbo-8",
            "preset: 'turbo-8' is for krea2 and z_image models; this model has distill-4, fastwan-3, lightning-4",
        ),
        ({}, "fastwan", "preset: unknown name 'fastwan'. Did you mean 'fastwan-3'"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_what_to_type(
    values: dict[str, Any], preset: str | None, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        rules_of("wan").resolve(GenerationRequest("a", **values), preset)


# --- models that say what they are ------------------------------------------------------------------------------------


def edit(folder: Path, name: str, **values: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def test_a_folder_that_says_what_it_is_gets_its_preset_and_says_so(
    tiny_wan_copy: Callable[[], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = edit(tiny_wan_copy(), "model_index.json", _class_name="WanDMDPipeline")
    pipeline = load_pipeline(str(folder))
    with caplog.at_level("INFO", logger="diffusion_runtime"):
        media = pipeline(GenerationRequest("a red circle", height=32, width=32, num_frames=1))
    request = media.recipe["request"]
    assert (request["sampler"], request["sigmas"], request["num_inference_steps"]) == ("dmd", [1.0, 0.757, 0.522], 3)
    assert request["guidance_scale"] == 1.0
    assert media.recipe["sampling_preset"] == "fastwan-3"
    note = "sampling preset: fastwan-3 (model_index.json: _class_name is 'WanDMDPipeline')"
    assert note in media.attention_report.notes
    assert note in caplog.messages
    assert [record.levelname for record in caplog.records if "few steps" in record.message] == []
    caplog.clear()
    media = pipeline(
        GenerationRequest("a red circle", height=32, width=32, num_frames=1, num_inference_steps=7, guidance_scale=5.0)
    )
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "made for few steps (model_index.json: _class_name is 'WanDMDPipeline'), and run with 7 steps, classifier-free "
        "guidance: use --preset fastwan-3 (sampler dmd, num_inference_steps 3, sigmas 1,0.757,0.522, guidance_scale 1)"
    ]
    assert "sampling_preset" not in media.recipe


@table("model_path", [".", "../fastwan2.1/", "fastwan2.1", "org/FastWan2.1-T2V-1.3B-Diffusers"])
def test_a_name_is_recognised_however_the_path_is_written(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "fastwan2.1"
    folder.mkdir()
    monkeypatch.chdir(folder)
    found = recognise("wan", folder, model_path)
    assert found is not None
    assert found.presets[0].name == "fastwan-3"


def test_a_folder_cannot_redefine_a_sampling_preset(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = tiny_wan_copy()

    def give(name: str) -> None:
        presets = {name: {"num_inference_steps": 9}}
        (folder / "generation.json").write_text(json.dumps({"max_text_tokens": 16, "presets": presets}))

    give("distill-4")
    with pytest.raises(
        ModelLoadError,
        match=r"generation.json: key 'presets.distill-4': .* preset of LightX2V .*; give .* another name",
    ):
        inspect_pipeline(RuntimeConfig(str(folder), device="cpu"))
    # A name of an embedded model's own presets is free in other folders.
    give("fast")
    assert inspect_pipeline(RuntimeConfig(str(folder), device="cpu")).rules.presets["fast"] == {
        "num_inference_steps": 9
    }


def test_seeds_of_a_batch_equal_single_runs(tiny_wan_copy: Callable[[], Path]) -> None:
    pipeline = load_pipeline(str(edit(tiny_wan_copy(), "model_index.json", _class_name="WanDMDPipeline")))
    requests = [GenerationRequest("a red circle", height=32, width=32, num_frames=1, seed=seed) for seed in (3, 4)]
    together = pipeline.generate(requests)
    for request, media in zip(requests, together, strict=True):
        # Bytes of frames: a batch is rounded otherwise than one sample.
        difference = abs(media.frames.astype(int) - pipeline(request).frames.astype(int)).max()
        assert difference <= 1


@table(
    ("path", "names"),
    [
        ("Wan2.2-Lightning_T2V-A14B-4steps-lora_HIGH.safetensors", ["lightning-4"]),
        ("Wan21_T2V_14B_lightx2v_cfg_step_distill_lora_rank64.safetensors", ["distill-4"]),
        ("style.safetensors", []),
    ],
)
def test_a_lora_is_recognised_by_its_name(path: str, names: list[str]) -> None:
    found = recognise_lora("wan", f"/loras/{path}")
    assert [preset.name for preset in (found.presets if found else ())] == names


def test_a_few_step_lora_with_many_steps_is_one_warning() -> None:
    rules, few_steps = rules_of("qwen_image"), recognise_lora("qwen_image", "a-Lightning-4steps.safetensors")
    rules = dataclasses.replace(rules, preset_rules=dataclasses.replace(rules.preset_rules, few_steps=few_steps))
    (remark,) = rules.unused(rules.resolve(GenerationRequest("a")))
    assert remark.startswith(
        "made for few steps (the LoRA a-Lightning-4steps.safetensors), and run with 50 steps, class"
    )
    assert "--preset lightning-4 (" in remark
    assert "shift_terminal 0" in remark
    assert rules.unused(rules.resolve(GenerationRequest("a"), "lightning-4")) == ()
