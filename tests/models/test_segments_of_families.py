"""Videos in segments of the families that begin a clip with an image: each is a clip from the last frame of the one
before, with a prompt of its own."""

from __future__ import annotations

import dataclasses
import json
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
# Of two steps LTX-2's levels do not follow from the shift.
VALUES: Mapping[str, dict[str, Any]] = {"ltx2": {"fps": 25, "num_inference_steps": 3}}
PROMPTS = ("a red circle", "a red circle", "a blue star")
SEEDS = (1, 7, 3)
# Of a request for one segment by itself.
ALONE: Mapping[str, Any] = {"num_frames": 9, "segment_frames": None, "segment_seeds": None, "prompt_switches": None}


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
    fields |= {"num_inference_steps": 2, "image_path": picture, "segment_seeds": SEEDS, **VALUES.get(kind, {})}
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
    assert "made in 3 segments of 9 frames, each from the last frame of the one before" in media.attention_report.notes
    assert media.num_frames == 25
    assert media.recipe["request"]["prompt_switches"] == [(17, PROMPTS[2])]
    first, position, sounds = picture, 0, list[Audio]()
    for seed, prompt in zip(SEEDS, PROMPTS, strict=True):
        alone = ours(dataclasses.replace(asked, image_path=first, seed=seed, prompt=prompt, **ALONE))
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


def test_one_segment_is_redone(load_kind: Callable[[str], Pipeline], picture: str, tmp_path: Path) -> None:
    """From saved latents, its sound with it; those before it are kept."""
    ours, asked = load_kind("ltx2"), request("ltx2", picture)
    redone = dataclasses.replace(asked, segment_seeds=(1, 9, 3))
    media, files = saving(ours, asked, tmp_path)
    made: list[int] = []
    with ours.hooks.holding("on_latents", lambda latents: made.append(len(latents))):
        found = ours.finish(read_latents(files[-1]), redone)
    expected = ours(redone)
    assert len(made) == 2
    assert numpy.array_equal(found.frames, expected.frames)
    assert numpy.array_equal(found.frames[:9], media.frames[:9])
    for one in (found, expected, media):
        assert one.audio is not None
    assert numpy.array_equal(found.audio.samples, expected.audio.samples)  # type: ignore[union-attr]
    assert ours.latents(asked).shape == (1, 3 * ours.latents(dataclasses.replace(asked, **ALONE)).shape[1])


def test_a_stream_has_the_prompts_of_its_segments(load_kind: Callable[[str], Pipeline], picture: str) -> None:
    ours, asked = load_kind("ltx_video"), request("ltx_video", picture)
    media = ours(asked)
    with ours.stream(asked, keeps_frames=True) as stream:
        prompts = {chunk.first_frame: chunk.prompt for chunk in stream}
        assert numpy.array_equal(stream.media().frames, media.frames)
    assert {prompt for at, prompt in prompts.items() if at < 17} == {PROMPTS[0]}
    assert {prompt for at, prompt in prompts.items() if at >= 17} == {PROMPTS[2]}
    with ours.stream(asked) as stream:
        while stream.num_frames <= 9:
            next(stream)
        values = stream.recipe["request"]
        assert stream.num_frames <= 17
        with pytest.raises(RequestError, match="a video in segments takes its prompts before it begins: --at 5s"):
            stream.prompt("a star")
    assert values["prompt_switches"] is None
    again = ours(GenerationRequest.from_dict(values))
    assert numpy.array_equal(again.frames, media.frames[: again.num_frames])


@table(
    ("kind", "values", "message"),
    [
        (
            "ltx2",
            {"frame_conditions": ((8, "", 1.0),)},
            "frame_conditions .--condition-at.: a video in segments begins",
        ),
        ("ltx2", {"audio_path": ""}, "audio_path: each segment makes a sound of its own"),
        ("ltx2", {"image_path": None}, "segment_frames: each segment begins with an image, and the first one's is"),
        (
            "ltx_video",
            {"prompt_switches": [("30f", "a star")]},
            "--at: 30 is past the end: .*last segment begins at frame 17",
        ),
        (
            "ltx_video",
            {"prompt_switches": [("3f", "a"), ("5f", "b")]},
            "--at: 3 and 5 are the same segment, which begins at",
        ),
        (
            "ltx_video",
            {"segment_frames": None, "segment_seeds": None},
            "prompt_switches: this model makes a clip at once",
        ),
        (
            "hunyuan_video",
            {"segment_overlap": 2},
            "segment_overlap: expected 1, since this model begins with one frame",
        ),
    ],
)
def test_what_is_refused(
    load_kind: Callable[[str], Pipeline], picture: str, kind: str, values: dict[str, Any], message: str
) -> None:
    named = {
        name: ((8, picture, 1.0),) if name == "frame_conditions" else picture if value == "" else value
        for name, value in values.items()
    }
    with pytest.raises(RequestError, match=message):
        load_kind(kind).resolve(request(kind, picture, **named))


def test_a_file_that_grows_has_no_sound(load_kind: Callable[[str], Pipeline], picture: str) -> None:
    with pytest.raises(RequestError, match="stream: a file that grows has no sound, and this video has one"):
        load_kind("ltx2").stream(request("ltx2", picture))


def test_sounds_fade_into_each_other() -> None:
    """Over what they share, with weights that are 1 together; silence where one is too short, a cut at the end."""
    sounds = [Audio(numpy.full((2, 10), value, dtype=numpy.float32), 10) for value in (0.2, 0.6)]
    found = crossfaded(sounds, [0.0, 0.7], 0.3, 1.6)
    assert found.samples.shape == (2, 16)
    assert found.samples[0].tolist() == pytest.approx([0.2] * 7 + [0.3, 0.4, 0.5] + [0.6] * 6)
    short = crossfaded([sounds[0], sounds[1]], [0.0, 1.2], 0.0, 2.5)
    assert short.samples[0].tolist() == pytest.approx([0.2] * 10 + [0.0] * 2 + [0.6] * 10 + [0.0] * 3)


def test_the_dry_run_plans_the_segments(
    picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_tiny_ltx_video(tmp_path / "model")
    command = [
        "generate",
        PROMPTS[0],
        "--model-path",
        str(folder),
        "--device",
        "cpu",
        "--height",
        "64",
        "--width",
        "96",
    ]
    command += [
        "--num-frames",
        "25",
        "--segment-frames",
        "9",
        "--image-path",
        picture,
        "--at",
        "11f",
        PROMPTS[2],
        "--dry-run",
    ]
    assert run(command) == 0
    said = capsys.readouterr().err
    assert "Segments that would be made" in said
    assert "warning: made in" not in said
    assert run([*command, "--json"]) == 0
    (item,) = json.loads(capsys.readouterr().out)["items"]
    assert [(each["frames"], each["begins with"], each["prompt"]) for each in item["segments"]] == [
        ("0-8", "", PROMPTS[0]),
        ("9-16", "frame 8", PROMPTS[0]),
        ("17-24", "frame 16", PROMPTS[2]),
    ]


@pytest.mark.slow
def test_two_processes_equal_one(picture: str, tmp_path: Path) -> None:
    """HunyuanVideo's language model, which the first process has alone, sees the frame before."""
    folder = WRITERS["hunyuan_video"](tmp_path / "model")
    command = ["generate", PROMPTS[0], "--model-path", folder, "--device", "cpu", "--height", 64, "--width", 96]
    command += ["--num-frames", 25, "--segment-frames", 9, "--num-inference-steps", 2, "--image-path", picture]
    command += ["--at", "11f", PROMPTS[2], "--sampler", "flow_match_euler", "-o", "clip.npy"]
    made = {}
    for name, several in (("one", ()), ("two", ("--num-gpus", "2", "--ulysses-degree", "2"))):
        result = start(tmp_path / name, *command, *several).finish()
        assert result.code == 0, result.err
        made[name] = numpy.load(tmp_path / name / "clip.npy")
    assert abs(made["one"].astype(int) - made["two"].astype(int)).max() <= 1
