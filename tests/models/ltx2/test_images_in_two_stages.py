"""Images at frames of an LTX-2 clip in two stages, against diffusers' LTX2ConditionPipeline, its upsampler and the
pipeline again, on tiny weights in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2ConditionPipeline, LTX2LatentUpsamplePipeline
from diffusers.pipelines.ltx2 import pipeline_ltx2_condition as condition_module
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from family_cases import changed
from family_parity import kept_after_steps, load_theirs
from models.ltx2.test_image_to_video import mixed_first, record_conditions
from models.ltx2.test_second_stage import HALF, LEVELS, SIZE, load, packed, request, write_upsampler
from PIL import Image
from saved_runs import assert_same, finished
from tables import table
from tiny_ltx2 import ONE_SCALE

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.media.images import read_image
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry


@pytest.fixture(scope="module")
def upsampler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_upsampler(tmp_path_factory.mktemp("upsampler") / "latent_upsampler")


@table(
    ("conditions", "second"),
    [
        # In part in both stages: the first frame, and one behind the clip.
        ({0: 0.7, 1: 0.4}, None),
        # As ComfyUI's templates have it: in part, then in full.
        ({0: 0.7}, 1.0),
        # In full, then in part, so that the second stage alone denoises a frame behind the clip.
        ({0: 0.7, 1: 1.0}, 0.5),
    ],
)
def test_images_in_part_of_two_stages_equal_diffusers(
    tiny_folder: Path,
    upsampler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    conditions: dict[int, float],
    second: float | None,
) -> None:
    paths = {}
    for frame in conditions:
        rows, columns = numpy.mgrid[0:128, 0:192]
        pixels = numpy.stack([rows, columns, 255 - rows - 40 * frame], axis=-1).astype(numpy.uint8)
        paths[frame] = str(tmp_path / f"{frame}.png")
        Image.fromarray(pixels).save(paths[frame])
    with changed(tiny_folder, "vae/config.json", {"scaling_factor": 1.0}):
        ours, theirs = load(tiny_folder, upsampler), load_theirs(LTX2ConditionPipeline, tiny_folder)
    theirs.tokenizer_padding_side = "left"
    kept, given = kept_after_steps(monkeypatch), record_conditions(monkeypatch)
    geometry = ours.rules.sampling.geometry
    assert isinstance(geometry, LTX2Geometry)
    texts = [f"{frame}:{paths[frame]}@{strength}" for frame, strength in conditions.items()]
    media = ours(request(frame_conditions=texts, second_stage_strength=second, image_crf=0))
    of_second = conditions if second is None else dict.fromkeys(conditions, second)
    noise, draws = None, list[torch.Tensor]()
    for size, strengths in ((HALF, conditions), (SIZE, of_second)):
        channels, _, height, width = geometry.video_shape(size)
        length, frame_length = geometry.sample_shape(size)[0], channels * height * width
        noised = [frame for frame, strength in strengths.items() if frame > 0 and strength < 1]
        shape = (length + len(noised) * frame_length,)
        noise = SampleNoise(shape, [5]) if noise is None else noise
        drawn = noise.draw_of(shape)
        tails = dict(zip(noised, drawn[:, length:].split(frame_length, dim=1), strict=False))
        none = torch.zeros(1, frame_length)
        behind = [tails.get(each, none).unflatten(1, (channels, -1)).transpose(1, 2) for each in conditions if each > 0]
        video, audio = packed(geometry, drawn[:, :length], size)
        draws += [torch.cat([video, *behind], dim=1), audio]
    monkeypatch.setattr(condition_module, "randn_tensor", lambda *_, **__: draws.pop(0).clone())
    expected: list[torch.Tensor] = []

    def keep(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        expected.append(tensors["latents"].clone())
        return {}

    def stage(size: ClipSize, strengths: dict[int, float], **values: Any) -> Any:
        # Its own filter is another one.
        images = {at: Image.fromarray(read_image(path, size.height, size.width)) for at, path in paths.items()}
        asked = [LTX2VideoCondition(images[each], each, share, 0) for each, share in strengths.items()]
        return theirs(
            conditions=asked,
            prompt="a red circle",
            height=size.height,
            width=size.width,
            num_frames=size.num_frames,
            frame_rate=float(size.fps),
            guidance_scale=3.0,
            callback_on_step_end=keep,
            return_dict=False,
            **ONE_SCALE,
            **values,
        )

    small, sound = stage(HALF, conditions, num_inference_steps=2, output_type="latent")
    larger = LTX2LatentUpsamplePipeline(theirs.vae, LTX2LatentUpsamplerModel.from_pretrained(upsampler))(
        latents=small, height=64, width=96, num_frames=9, output_type="latent", return_dict=False
    )[0]
    theirs.scheduler = FlowMatchEulerDiscreteScheduler()
    levels = {"num_inference_steps": 3, "sigmas": list(LEVELS), "noise_scale": LEVELS[0]}
    frames, _ = stage(SIZE, of_second, latents=larger, audio_latents=sound, output_type="np", **levels)
    assert not draws
    assert len(kept) == len(expected) == 5
    for index, (found, other) in enumerate(zip(kept, expected, strict=True)):
        size, image = (HALF, given[0]) if index < 2 else (SIZE, given[1])
        video = geometry.parts(found, size).video
        # At strength 1 the frame that is put back wherever it is read has no value of its own.
        first = 1 if image.first_strength == 1 else 0
        mine = mixed_first(video, image)[:, :, first:]
        theirs_video = other[:, : video[0, 0].numel()].transpose(1, 2).unflatten(2, video.shape[2:])[:, :, first:]
        assert (mine - theirs_video).norm() <= 1e-4 * theirs_video.norm()
    assert numpy.abs(media.frames / 255 - frames[0]).max() <= 2 / 255


@table(
    "values",
    [
        {"second_stage_seed": 9, "second_stage_sampler": "euler_ancestral"},
        {"noise": "comfyui", "second_stage_sampler": "euler_ancestral"},
        {"strengths": {0: 0.7, 1: 1.0}, "second_stage_strength": 0.5},
    ],
)
def test_drafts_whose_stages_differ_are_finished(
    tiny_folder: Path, upsampler: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    """Left in either stage and between them: noise of a stage's own, images that count otherwise."""
    path = str(tmp_path / "image.png")
    Image.fromarray(numpy.full((128, 192, 3), 99, dtype=numpy.uint8)).save(path)
    strengths = values.pop("strengths", {})
    texts = [f"{frame}:{path}@{strength}" for frame, strength in strengths.items()] or None
    ours, asked = load(tiny_folder, upsampler), request(frame_conditions=texts, **values)
    whole = ours(asked)
    # Behind step 3 there is noise left to draw.
    for stop in (1, 2, 3):
        assert_same(finished(ours, asked, stop, tmp_path), whole)
