"""Videos in segments of the families that begin a clip with an image: each is a clip from the last frame of the one
before, with a prompt of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image
from saved_runs import saving
from several_processes import start
from tables import table
from tiny_hunyuan_video import write_tiny_hunyuan_video
from tiny_hunyuan_video_15 import write_tiny_hunyuan_video_15
from tiny_ltx2 import write_tiny_ltx2
from tiny_ltx_video import write_tiny_ltx_video
from tiny_models import write_tiny_wan

from diffusion_runtime import GeneratedMedia, GenerationRequest, Pipeline, RequestError, load_pipeline
from diffusion_runtime.cli.app import run
from diffusion_runtime.denoising.segments import Segment, SegmentPlan
from diffusion_runtime.generation.saved_latents import read_latents
from diffusion_runtime.media.audio import Audio, crossfaded

WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "ltx_video": write_tiny_ltx_video,
    "hunyuan_video": partial(write_tiny_hunyuan_video, image_condition="token_replace"),
    "hunyuan_video 33": partial(write_tiny_hunyuan_video, image_condition="latent_concat"),
    "hunyuan_video_15": partial(write_tiny_hunyuan_video_15, starts_from_image=True),
    "ltx2": write_tiny_ltx2,
    "wan": partial(write_tiny_wan, takes_image=True),
}
SLOW = ("hunyuan_video 33", "hunyuan_video_15", "wan")
SIZES: Mapping[str, dict[str, Any]] = {"ltx2": {"height": 64, "width": 96, "fps": 25}}
PROMPTS = ("a red circle", "a red circle", "a blue star")
SEEDS = (1, 7, 3)


@pytest.fixture(scope="module")
def load_kind(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pipeline]:
    return cache(
        lambda kind: load_pipeline(str(WRITERS[kind](tmp_path_factory.mktemp("model") / "tiny")), device="cpu")
    )


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pictures") / "first.png"
    rows, columns = numpy.mgrid[0:128, 0:192]
    Image.fromarray(numpy.stack([rows, columns, 255 - rows], axis=-1).astype(numpy.uint8)).save(path)
    return str(path)


def request(kind: str, picture: str | None, **values: Any) -> GenerationRequest:
    """3 segments of 9 frames; the second prompt is the last one's."""
    fields: dict[str, Any] = {"height": 64, "width": 96, "num_frames": 25, "segment_frames": 9, "seed": 1, "fps": 24}
    fields |= {"num_inference_steps": 2, "image_path": picture, "segment_seeds": SEEDS, **SIZES.get(kind, {})}
    fields |= {"prompt": PROMPTS[0], "prompt_switches": [("11f", PROMPTS[2])]}
    return GenerationRequest(**(fields | values))


def check_segments(kind: str, ours: Pipeline, picture: str, tmp_path: Path) -> GeneratedMedia:
    """The same to the bit as clips of which each is given the last frame of the one before, and its prompt."""
    whole = SegmentPlan.__iter__

    def first_draws(plan: SegmentPlan) -> Iterator[Segment]:
        return (dataclasses.replace(segment, num_drawn=0) for segment in whole(plan))

    asked = request(kind, picture)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentPlan, "__iter__", first_draws)
        media = ours(asked)
    assert "made in 3 segments of 9 frames, each from the last 1 of the one before" in media.attention_report.notes
    assert media.num_frames == 25
    assert media.recipe["request"]["prompt_switches"] == [(17, PROMPTS[2])]
    first, position, sounds = picture, 0, list[Audio]()
    for seed, prompt in zip(SEEDS, PROMPTS, strict=True):
        values = {"num_frames": 9, "segment_frames": None, "segment_seeds": None, "prompt_switches": None}
        alone = ours(dataclasses.replace(asked, image_path=first, seed=seed, prompt=prompt, **values))
        kept = alone.frames[1 if position else 0 :][: 25 - position]
        assert numpy.array_equal(media.frames[position : position + len(kept)], kept)
        position += len(kept)
        first = str(tmp_path / f"{seed}.png")
        Image.fromarray(alone.frames[-1]).save(first)
        if alone.audio is not None:
            sounds.append(alone.audio)
    assert position == 25
    if ours.rules.makes_sound:
        joined = crossfaded(sounds, [0, 8 / 25, 16 / 25], 1 / 25, 1.0)
        assert media.audio is not None
        assert numpy.array_equal(media.audio.samples, joined.samples)
        assert media.audio.seconds == pytest.approx(1.0)
    return media


@pytest.mark.parametrize(
    "kind", [kind if kind not in SLOW else pytest.param(kind, marks=pytest.mark.slow) for kind in WRITERS]
)
def test_each_segment_is_a_clip_from_the_last_frame_before(
    kind: str, load_kind: Callable[[str], Pipeline], picture: str, tmp_path: Path
) -> None:
    ours = load_kind(kind)
    media = check_segments(kind, ours, picture, tmp_path)
    other = ours(request(kind, picture, prompt_switches=None))
    assert not numpy.array_equal(other.frames[17:], media.frames[17:])
