"""Keyframes that LTX-2.5 makes beside a video against diffusers' LTX2DFRPipeline, on tiny weights in float32 on the
CPU."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2LatentUpsamplePipeline
from diffusers.pipelines.ltx2 import pipeline_ltx2_dfr as theirs_module
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_dfr import LTX2DFRPipeline
from family_cases import changed
from family_parity import kept_after_steps, load_theirs, record_latents
from models.ltx2.test_image_to_video import mixed_first, record_conditions
from models.ltx2.test_second_stage import write_upsampler
from PIL import Image
from saved_runs import assert_same, finished
from tables import table
from tiny_ltx2 import VIDEO_CHANNELS

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.noise import SampleNoise, initial_noise
from diffusion_runtime.errors import RequestError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.loading import inspect_pipeline, prepare
from diffusion_runtime.models.interface import ImageCondition
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry

LEVELS, SECOND = (1.0, 0.7, 0.3), (0.8, 0.4)
# Tokens of one latent frame at 64 x 96.
AREA = 6


@pytest.fixture(scope="module")
def theirs(tiny_folder25: Path) -> LTX2DFRPipeline:
    with changed(tiny_folder25, "vae/config.json", {"scaling_factor": 1.0}):
        pipeline = load_theirs(LTX2DFRPipeline, tiny_folder25)
    pipeline.tokenizer_padding_side = "left"
    # It takes noise levels as they run.
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler()
    pipeline._callback_tensor_inputs = [*LTX2DFRPipeline._callback_tensor_inputs, "audio_latents"]
    return pipeline


def request(**values: Any) -> GenerationRequest:
    sizes = {"height": 64, "width": 96, "num_frames": 49, "fps": 24, "num_inference_steps": 3, "sigmas": LEVELS}
    off = dict.fromkeys(("guidance_scale", "audio_guidance_scale", "modality_scale"), 1.0)
    off |= {"stg_scale": 0.0, "guidance_rescale": 0.0, "image_crf": 0}
    fields: dict[str, Any] = {"prompt": "a red circle", **sizes, **off, "keyframe_interval": 24, "seed": 5}
    return GenerationRequest(**(fields | values))


def load(folder: Path, upsampler: Path | None = None) -> Pipeline:
    # What diffusers encodes is not scaled, and what it decodes is: published folders say 1.
    with changed(folder, "vae/config.json", {"scaling_factor": 1.0}):
        ours = load_pipeline(str(folder), device="cpu", upsampler_path=None if upsampler is None else str(upsampler))
    assert isinstance(ours, Pipeline)
    return ours


@pytest.fixture(scope="module")
def ours(tiny_folder25: Path) -> Pipeline:
    return load(tiny_folder25)


def packed(geometry: LTX2Geometry, latents: torch.Tensor, size: ClipSize) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of the pictures with the frames behind them, and of the sound, as diffusers has them."""
    clip = geometry.clip_of(latents, size)
    parts, (channels, *_, height, width) = geometry.parts(clip, size), geometry.video_shape(size)
    assert parts.audio is not None
    behind = latents[:, clip.shape[1] :].unflatten(1, (-1, channels, height * width)).transpose(2, 3).flatten(1, 2)
    tokens = torch.cat([parts.video.flatten(2).transpose(1, 2), behind], dim=1)
    return tokens, parts.audio.transpose(1, 2).flatten(2)


def mixed(geometry: LTX2Geometry, latents: torch.Tensor, size: ClipSize, image: ImageCondition) -> torch.Tensor:
    """Return the latents as diffusers keeps them, with the images that count in part."""
    clip = geometry.clip_of(latents, size)
    parts, behind = geometry.parts(clip, size), latents[:, clip.shape[1] :].clone()
    noised = [(each, s) for each, (_, s) in zip(image.further, image.places, strict=True) if s < 1]
    area = behind.shape[1] // len(noised)
    for index, (each, strength) in enumerate(noised[: len(noised) - image.num_generated]):
        place = behind[:, index * area : (index + 1) * area]
        place.mul_(1 - strength).add_(each.flatten(1), alpha=strength)
    return torch.cat([geometry.join(mixed_first(parts.video, image), parts.audio), behind], dim=1)


@table(
    ("values", "strengths"),
    [
        ({}, {}),
        # Positions are those of 60 frames per second.
        ({"num_frames": 33, "keyframe_interval": 32, "fps": 48}, {}),
        ({"num_frames": 25}, {0: 1.0}),
        ({"num_frames": 25}, {0: 0.6, 1: 0.5}),
    ],
)
def test_a_generation_equals_diffusers(
    ours: Pipeline,
    theirs: LTX2DFRPipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    strengths: dict[int, float],
) -> None:
    path = str(tmp_path / "image.png")
    rows, columns = numpy.mgrid[0:64, 0:96]
    Image.fromarray(numpy.stack([3 * rows, 2 * columns, 255 - rows], axis=-1).astype(numpy.uint8)).save(path)
    texts = [f"{frame}:{path}@{strength}" for frame, strength in strengths.items()]
    kept, given = record_latents(monkeypatch), record_conditions(monkeypatch)
    geometry = ours.rules.sampling.geometry
    assert isinstance(geometry, LTX2Geometry)
    asked = request(**values, frame_conditions=texts or None)
    media = ours(asked)
    size = ClipSize(64, 96, len(media.frames), asked.fps or 0)
    marks = range(asked.keyframe_interval or 0, size.num_frames, asked.keyframe_interval or 1)
    noise = initial_noise(kept[0].shape[1:], [5])
    draws = list(packed(geometry, noise, size))
    monkeypatch.setattr(theirs_module, "randn_tensor", lambda *_, **__: draws.pop(0).clone())
    expected: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        expected.append((tensors["latents"].clone(), tensors["audio_latents"].clone()))
        return {}

    frames, sound, *_ = theirs(
        prompt=asked.prompt,
        conditions=[LTX2VideoCondition(Image.open(path), *each, 0) for each in strengths.items()],
        height=64,
        width=96,
        num_frames=size.num_frames,
        frame_rate=float(size.fps),
        sigmas=list(LEVELS),
        keyframe_positions=list(marks),
        callback_on_step_end=keep,
        callback_on_step_end_tensor_inputs=["latents", "audio_latents"],
        output_type="np",
        return_dict=False,
    )
    assert len(kept) == len(expected) == 3
    num_clip = geometry.video_shape(size)[1] * AREA
    for found, others in zip(kept, expected, strict=True):
        # diffusers mixes the images that count in part into its latents once.
        seen = mixed(geometry, found, size, given[0])
        for mine, other in zip(packed(geometry, seen, size), others, strict=True):
            # A first image that counts in full is put back at the end.
            first = AREA if strengths.get(0) == 1.0 and mine.shape[2] == VIDEO_CHANNELS else 0
            assert mine.shape == other.shape
            assert (mine - other)[:, first:].norm() <= 1e-4 * other.norm()
    assert expected[0][0].shape[1] == num_clip + AREA * (len(marks) + sum(frame > 0 for frame in strengths))
    assert media.audio is not None
    assert numpy.abs(media.audio.samples - sound[0].numpy()).max() <= 1e-4
    assert len(media.frames) == len(frames[0])
    said = f"{len(marks)} keyframes are denoised with the video and left out of the file, at frames {marks[0]}"
    assert said in " ".join(media.attention_report.notes)


def test_two_stages_carry_the_keyframes_as_by_diffusers(
    tiny_folder25: Path, theirs: LTX2DFRPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = LTX2LatentUpsamplerModel(in_channels=VIDEO_CHANNELS, mid_channels=32, num_blocks_per_stage=1)
    network.save_pretrained(tmp_path / "latent_upsampler")
    ours = load(tiny_folder25, tmp_path / "latent_upsampler")
    kept, geometry = kept_after_steps(monkeypatch), ours.rules.sampling.geometry
    assert isinstance(geometry, LTX2Geometry)
    media = ours(request(height=128, width=192, num_frames=25, second_stage_sigmas=SECOND))
    size = ClipSize(128, 192, 25, 24)
    half = dataclasses.replace(size, height=64, width=96)
    shapes = [
        (geometry.sample_shape(each)[0] + VIDEO_CHANNELS * area,) for each, area in ((half, AREA), (size, 4 * AREA))
    ]
    drawn = SampleNoise(shapes[0], [5])
    first, second = drawn.draw(), drawn.draw_of(shapes[1])
    draws = [*packed(geometry, first, half), *packed(geometry, second, size)]
    monkeypatch.setattr(theirs_module, "randn_tensor", lambda *_, **__: draws.pop(0).clone())
    expected: list[torch.Tensor] = []

    def keep(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        expected.append(tensors["latents"].clone())
        return {}

    values: dict[str, Any] = {
        "prompt": "a red circle",
        "num_frames": 25,
        "frame_rate": 24.0,
        "callback_on_step_end": keep,
        "output_type": "latent",
        "return_dict": False,
    }
    small, sound, keyframes, marks = theirs(height=64, width=96, sigmas=list(LEVELS), **values)
    assert marks == [24]
    upsample = LTX2LatentUpsamplePipeline(vae=theirs.vae, latent_upsampler=network)
    larger, more = (
        upsample(latents=each, height=64, width=96, output_type="latent", return_dict=False)[0]
        for each in (small, keyframes)
    )
    theirs(
        height=128,
        width=192,
        latents=larger,
        audio_latents=sound,
        keyframes_latents=more,
        keyframe_positions=marks,
        sigmas=list(SECOND),
        **values,
    )
    assert len(kept) == len(expected) == 5
    for (found, other), of_size in zip(
        zip(kept, expected, strict=True), itertools.chain([half] * 3, [size] * 2), strict=True
    ):
        mine = packed(geometry, found, of_size)[0]
        other = other[:, : mine.shape[1]]
        assert (mine - other).norm() <= 1e-4 * other.norm()
    assert media.frames.shape == (25, 128, 192, 3)


@table(
    ("values", "told"),
    [
        (
            {"keyframe_interval": 16},
            "keyframe_interval: expected 24 or 32 frames, got 16; use --keyframe-interval 24 or",
        ),
        ({"num_frames": 41}, "num_frames: expected a multiple of keyframe_interval, 24, plus 1, got 41; use 25 or 49"),
        ({"num_frames": 9}, "got 9; use 25$"),
        ({"num_frames": 49, "keyframe_interval": 32}, "got 49; use 33 or 65"),
    ],
)
def test_what_has_no_whole_intervals_is_refused_before_any_work(
    tiny_folder25: Path, tiny_folder: Path, values: dict[str, Any], told: str
) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(tiny_folder25))).rules
    with pytest.raises(RequestError, match=told):
        rules.resolve(request(**values))
    with pytest.raises(RequestError, match="keyframe_interval: this model makes no keyframes beside a video, as LTX"):
        inspect_pipeline(RuntimeConfig(str(tiny_folder))).rules.resolve(request(stg_scale=None))


def test_lengths_are_whole_intervals_and_the_plan_counts_the_keyframes(tiny_folder25: Path) -> None:
    prepared = prepare(RuntimeConfig(str(tiny_folder25), device="cpu", memory_limit="8GB"))
    rules = prepared.rules
    length = {"num_frames": None}
    assert rules.resolve(request(**length, seconds=1.6)).num_frames == 49
    # 20 s at most, which the duration head chooses from.
    longest = rules.resolve(request(**length, keyframe_interval=32))
    assert (longest.num_frames, longest.max_seconds) == (449, 20.0)
    assert rules.of_length(longest, 3.2).num_frames == 65
    plain, made = (rules.resolve(request(keyframe_interval=each)) for each in (None, 24))
    assert made.generated_keyframes == (24, 48)
    # The flow shift of a schedule without levels of its own follows the tokens, and so do the costs of a step.
    free = [rules.resolve(request(keyframe_interval=each, sigmas=None)) for each in (None, 24)]
    assert free[0].flow_shift < free[1].flow_shift  # type: ignore[operator]
    assert [explain(prepared, each).num_text_tokens for each in (plain, made)] == [0, 2 * AREA]


def test_drafts_with_keyframes_are_finished(tiny_folder25: Path, tmp_path: Path) -> None:
    """Left in either stage and between them."""
    ours = load(tiny_folder25, write_upsampler(tmp_path / "latent_upsampler"))
    asked = request(height=128, width=192, num_frames=25, second_stage_sigmas=SECOND)
    whole = ours(asked)
    for stop in (1, 3, 4):
        assert_same(finished(ours, asked, stop, tmp_path), whole)
