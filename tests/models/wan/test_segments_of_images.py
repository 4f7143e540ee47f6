"""Videos of Wan's image-to-video models in segments, each of which begins with the last frame of the one before."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from saved_runs import saving
from tables import table
from tiny_models import write_tiny_wan

from diffusion_runtime import ConfigError, GenerationRequest, Pipeline, RequestError, RuntimeConfig, load_pipeline
from diffusion_runtime.cli.app import run
from diffusion_runtime.core.progress import StageClock
from diffusion_runtime.denoising.segments import Segment, SegmentPlan
from diffusion_runtime.errors import DeviceMemoryError
from diffusion_runtime.generation.saved_latents import read_latents
from diffusion_runtime.generation.segmented_clip import SegmentedClip
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.media.clips import inspect_clip

KINDS: dict[str, dict[str, Any]] = {
    "two experts": {"condition": "clip", "boundary_ratio": 0.9, "vae": "plain"},
    "tokens": {"condition": "clip and tokens"},
    "first frame": {"takes_image": True},
}

KIND = "two experts"


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pictures") / "first.png"
    rows, columns = numpy.mgrid[0:32, 0:64]
    Image.fromarray(numpy.stack([5 * rows, 4 * columns, 255 - rows], axis=-1).astype(numpy.uint8)).save(path)
    return str(path)


@pytest.fixture(scope="module")
def two_experts(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return load_pipeline(str(write_tiny_wan(tmp_path_factory.mktemp("wan"), **KINDS[KIND])), device="cpu")


def request(picture: str | None, **values: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"height": 32, "width": 64, "num_frames": 21, "segment_frames": 9, "seed": 1}
    fields |= {"num_inference_steps": 2, "guidance_scale": 1.0, "image_path": picture}
    return GenerationRequest("a red circle moving left", **(fields | values))


def without_earlier_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of each segment is the first of its seed, as that of a clip made on its own."""
    whole = SegmentPlan.__iter__

    def segments(plan: SegmentPlan) -> Iterator[Segment]:
        return (dataclasses.replace(segment, num_drawn=0) for segment in whole(plan))

    monkeypatch.setattr(SegmentPlan, "__iter__", segments)


@pytest.mark.parametrize(
    "kind", [KIND, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != KIND)]
)
def test_each_segment_is_a_clip_from_the_last_frame_before(
    kind: str, tmp_path: Path, picture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one seed each: the same to the bit as clips of which each is given the last frame of the one before."""
    pipeline = load_pipeline(str(write_tiny_wan(tmp_path / "model", **KINDS[kind])), device="cpu")
    side = 16 * pipeline.rules.sampling.geometry.spatial_factor // 8
    size = {"height": side, "width": 2 * side}
    with monkeypatch.context() as patch:
        without_earlier_draws(patch)
        media = pipeline(request(picture, segment_seeds=(1, 7, 3), **size))
    assert "made in 3 segments of 9 frames, each from the last frame of the one before" in media.attention_report.notes
    assert media.num_frames == 21
    first, position = picture, 0
    for seed in (1, 7, 3):
        alone = pipeline(request(first, num_frames=9, segment_frames=None, seed=seed, **size))
        kept = alone.frames[1 if position else 0 :][: 21 - position]
        assert numpy.array_equal(media.frames[position : position + len(kept)], kept)
        position += len(kept)
        first = str(tmp_path / f"{seed}.png")
        Image.fromarray(alone.frames[-1]).save(first)
    assert position == 21


def test_noise_goes_on_from_segment_to_segment(two_experts: Pipeline, picture: str) -> None:
    media = two_experts(request(picture))
    same = two_experts(request(picture, segment_seeds=(1, 1, 1)))
    assert numpy.array_equal(media.frames, same.frames)
    other = two_experts(request(picture, segment_seeds=(1, 9)))
    assert numpy.array_equal(media.frames[:9], other.frames[:9])
    assert not numpy.array_equal(media.frames[9:], other.frames[9:])
    # A clip that is no longer than a segment is made at once, as without the field.
    short = two_experts(request(picture, num_frames=9))
    assert numpy.array_equal(short.frames, two_experts(request(picture, num_frames=9, segment_frames=None)).frames)
    assert numpy.array_equal(short.frames, media.frames[:9])


def test_one_segment_is_redone_from_the_saved_latents(two_experts: Pipeline, picture: str, tmp_path: Path) -> None:
    asked, redone = request(picture), request(picture, segment_seeds=(1, 9, 1))
    _, files = saving(two_experts, asked, tmp_path)
    saved = read_latents(files[-1])
    steps: list[int] = []
    with two_experts.hooks.holding("on_latents", lambda latents: steps.append(latents.shape[2])):
        found = two_experts.finish(saved, redone)
    assert len(steps) == 2
    assert numpy.array_equal(found.frames, two_experts(redone).frames)


@table(
    ("values", "message"),
    [
        ({"segment_frames": 10}, "segment_frames: expected a multiple of 4 plus 1, got 10"),
        ({"segment_overlap": 5}, "segment_overlap: expected 1, since this model begins with one frame, got 5"),
        (
            {"segment_frames": None, "segment_seeds": (1, 2)},
            "segment_seeds: the video is made at once; give --segment-f",
        ),
        ({"segment_frames": None, "segment_overlap": 1}, "segment_overlap: the video is made at once"),
        ({"segment_seeds": (1, 2, 3, 4)}, "segment_seeds: expected at most 3"),
        ({"num_frames": 9, "segment_seeds": (4,)}, "segment_seeds: the video is one segment, whose seed is --seed"),
        ({"context_frames": 5}, "context_frames: "),
        ({"stop_after_step": 1}, "stop_after_step: this video is made in segments"),
    ],
)
def test_what_segments_do_not_take(two_experts: Pipeline, picture: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        two_experts.resolve(request(picture, **values))


def test_segments_begin_with_an_image(tmp_path: Path, picture: str) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(write_tiny_wan(tmp_path / "one", **KINDS["first frame"])))).rules
    with pytest.raises(RequestError, match="segment_frames: each segment begins with an image, and the first one's is"):
        rules.resolve(request(None, height=64, width=128))
    rules = inspect_pipeline(RuntimeConfig(str(write_tiny_wan(tmp_path / "two", **KINDS["tokens"])))).rules
    assert rules.resolve(request(picture)).segment_frames == 9
    text = inspect_pipeline(RuntimeConfig(str(write_tiny_wan(tmp_path / "text")))).rules
    with pytest.raises(RequestError, match="segment_frames: "):
        text.resolve(request(None))


def test_a_stream_gives_the_frames_of_the_video(two_experts: Pipeline, picture: str) -> None:
    asked = request(picture)
    media = two_experts(asked)
    with two_experts.stream(asked, keeps_frames=True) as stream:
        chunks = list(stream)
        streamed = stream.media()
    assert [chunk.first_frame for chunk in chunks] == [0, *numpy.cumsum([len(each.frames) for each in chunks])[:-1]]
    assert numpy.array_equal(streamed.frames, media.frames)
    assert streamed.recipe == media.recipe
    assert streamed.attention_report.num_calls == media.attention_report.num_calls
    assert {"text", "denoise", "decode"} <= streamed.timings.keys()
    # One that is left, or fails, leaves the pipeline free.
    with two_experts.stream(asked) as stream:
        next(stream)
        for refused in (lambda: stream.prompt("a star"), lambda: stream.fork()):
            with pytest.raises(RequestError, match="in segments"):
                refused()
        with pytest.raises(ConfigError, match="keeps_frames=True"):
            stream.media()
    assert next(stream, None) is None
    assert numpy.array_equal(two_experts(asked).frames, media.frames)
    for wrong, message in (
        (request(picture, num_frames=9), "this model makes a clip at once.* give --segment-frames, fewer than --num"),
        (request(picture, interpolate=2), "interpolate: "),
    ):
        with pytest.raises(RequestError, match=message):
            two_experts.stream(wrong)
    with pytest.raises(RequestError, match="a video in segments has an end"):
        two_experts.stream(asked, endless=True)


def test_a_file_grows_segment_by_segment(
    tmp_path: Path, picture: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Playable whatever ends it, and repeated from its recipe with one segment made anew."""
    monkeypatch.chdir(tmp_path)
    folder = write_tiny_wan(tmp_path / "model", **KINDS[KIND])
    command = [
        "generate",
        "a red circle",
        "--model-path",
        str(folder),
        "--device",
        "cpu",
        "--height",
        "32",
        "--width",
        "64",
    ]
    command += ["--num-frames", "21", "--segment-frames", "9", "--num-inference-steps", "1", "--image-path", picture]
    assert run([*command, "--stream", "whole.mp4"]) == 0, capsys.readouterr().err
    assert "first frames after" in capsys.readouterr().err
    assert inspect_clip("whole.mp4", "", 99).num_frames == 21
    assert run(["generate", "--from", "whole.mp4", "-o", "again.npy"]) == 0
    assert run([*command, "-o", "plain.npy"]) == 0
    assert numpy.array_equal(numpy.load("again.npy"), numpy.load("plain.npy"))
    assert run(["generate", "--from", "whole.mp4", "--segment-seeds", "0,9", "-o", "redone.npy"]) == 0
    redone, plain = numpy.load("redone.npy"), numpy.load("plain.npy")
    assert numpy.array_equal(redone[:9], plain[:9])
    assert not numpy.array_equal(redone[9:], plain[9:])
    real, calls = SegmentedClip._decoded, []

    def failing(self: SegmentedClip, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise DeviceMemoryError("no room")
        return real(self, *given)

    monkeypatch.setattr(SegmentedClip, "_decoded", failing)
    assert run([*command, "--stream", "cut.mp4"]) == DeviceMemoryError.exit_code
    assert "no room" in (said := capsys.readouterr().err)
    assert "9 frames" in said
    assert inspect_clip("cut.mp4", "", 99).num_frames == 9


def test_the_recipe_of_a_stream_that_was_left_repeats_its_frames(two_experts: Pipeline, picture: str) -> None:
    asked = request(picture, segment_seeds=(1, 7, 3))
    whole = two_experts(asked)
    with two_experts.stream(asked) as stream:
        while stream.num_frames <= 9:
            next(stream)
        made, values = stream.num_frames, stream.recipe["request"]
    assert (values["num_frames"], values["segment_seeds"]) == (made, [1, 7])
    assert made < 21
    again = two_experts(GenerationRequest.from_dict(values))
    assert numpy.array_equal(again.frames, whole.frames[:made])
    # Of a part of the first segment: fewer frames are a shorter clip, of other noise.
    with two_experts.stream(request(picture)) as stream:
        made = len(next(stream).frames)
        values = stream.recipe["request"]
    assert made < 9
    again = two_experts(GenerationRequest.from_dict(values))
    assert numpy.array_equal(again.frames[:made], two_experts(request(picture)).frames[:made])


@pytest.mark.parametrize("overlap", [1, 2, 5])
def test_frames_that_no_segment_shares_are_dropped_while_it_is_decoded(
    overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 9 frames each in chunks of 2: a part of a chunk is shared, one, and several.
    chunks: list[weakref.ref[torch.UntypedStorage]] = []
    num_alive, begins = [], []

    def decoded(_: SegmentedClip, segment: Segment, before: torch.Tensor, __: float) -> Iterator[torch.Tensor]:
        begins.append(before)
        for first in range(0, 9, 2):
            numbers = torch.arange(segment.start + first, segment.start + min(first + 2, 9))
            chunk = numbers.div(255).view(1, -1, 1, 1, 1).expand(1, -1, 2, 2, 3).contiguous()
            chunks.append(weakref.ref(chunk.untyped_storage()))
            yield chunk
            del chunk
            num_alive.append(sum(each() is not None for each in chunks))

    monkeypatch.setattr(SegmentedClip, "_decoded", decoded)
    plan = SegmentPlan(21, 9, overlap, "continued")
    run: Any = SimpleNamespace(settings=SimpleNamespace(segments=plan))
    nothing: Any = None
    clip = SegmentedClip(run, nothing, nothing, StageClock(torch.device("cpu"), None))
    frames = torch.cat([each[0] for each in clip.stream().chunks])
    assert frames[:, 0, 0, 0].tolist() == list(range(21))
    shared = [(before[0, :, 0, 0] + 1).mul(127.5).round().tolist() for before in begins[1:]]
    assert shared == [list(range(each.start, each.start + overlap)) for each in list(plan)[1:]]
    assert max(num_alive) <= -(-overlap // 2) + 2
