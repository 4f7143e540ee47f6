"""Videos and images restored by SeedVR2 by requests and by `upscale`: sizes, segments, sound, refusals."""

from __future__ import annotations

import dataclasses
import json
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from cli_support import Result, command_process
from PIL import Image
from saved_runs import assert_same, saving
from tables import table
from tiny_seedvr2 import write_tiny_seedvr2

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline, upscale_request
from diffusion_runtime.config import ParallelConfig, RuntimeConfig
from diffusion_runtime.denoising.segments import SegmentPlan
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.generation.saved_latents import read_latents
from diffusion_runtime.loading import prepare
from diffusion_runtime.media.ffmpeg import find_ffmpeg
from diffusion_runtime.media.reading import read_media_file
from diffusion_runtime.models.published_folders import packaged_folder
from diffusion_runtime.models.seedvr2.config import read_transformer_config
from diffusion_runtime.models.seedvr2.weights import transformer_pieces
from diffusion_runtime.streaming.generation_stream import check_streamable

NTSC = 30000 / 1001


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_seedvr2(tmp_path_factory.mktemp("seedvr2"))


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Pipeline:
    return load_pipeline(str(folder), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A picture of 26 x 20 pixels, 11 frames of that size, and a video with sound at 29.97 frames per second."""
    place = tmp_path_factory.mktemp("files")
    frames = numpy.random.default_rng(0).integers(0, 256, (11, 20, 26, 3), dtype=numpy.uint8)
    numpy.save(place / "clip.npy", frames)
    Image.fromarray(frames[0]).save(place / "photo.png")
    made = ["-f", "lavfi", "-i", "testsrc=size=32x24:rate=30000/1001:duration=0.4"]
    sound = ["-f", "lavfi", "-i", "sine=frequency=440:duration=0.4"]
    video = place / "film.mp4"
    subprocess.run([find_ffmpeg(), "-v", "error", *made, *sound, "-pix_fmt", "yuv420p", str(video)], check=True)
    return {"photo": str(place / "photo.png"), "clip": str(place / "clip.npy"), "film": str(video)}


def request(files: dict[str, str], name: str = "clip", **values: Any) -> GenerationRequest:
    return upscale_request(files[name], **values)


def test_an_image_has_any_size(pipeline: Pipeline, files: dict[str, str]) -> None:
    media = pipeline(request(files, "photo", size=(47, 37)))
    assert media.frames.shape == (1, 37, 47, 3)
    assert [(row.role, row.count) for row in media.attention_report.rows] == [("seedvr2.window", 3)]


def test_colours_are_those_of_the_file(pipeline: Pipeline, files: dict[str, str]) -> None:
    """Of random weights the means are far off; each method brings them back."""
    given = numpy.asarray(Image.open(files["photo"])).mean((0, 1))
    distances = {}
    for method in ("none", "lab", "wavelet", "adain"):
        media = pipeline(request(files, "photo", color_correction=method))
        distances[method] = float(numpy.abs(media.frames[0].mean((0, 1)) - given).max())
    assert max(distances[each] for each in ("lab", "wavelet", "adain")) < 0.6 * distances["none"]


def test_a_clip_keeps_its_number_of_frames(pipeline: Pipeline, files: dict[str, str]) -> None:
    media = pipeline(request(files, num_frames=7))
    assert media.frames.shape == (7, 40, 52, 3)
    assert "7 of its 11 frames are restored" in str(media.attention_report)


def test_segments_are_blended_where_they_share_frames(pipeline: Pipeline, files: dict[str, str]) -> None:
    """Frames that one segment has alone are those of that segment made by itself."""
    values: dict[str, Any] = {"color_correction": "wavelet", "seed": 3}
    whole = pipeline(request(files, segment_frames=6, segment_overlap=2, **values))
    assert [segment.start for segment in SegmentPlan(11, 6, 2, "blended")] == [0, 4, 5]
    first = pipeline(request(files, num_frames=6, **values)).frames
    last = pipeline(request(files, video_first_frame=5, num_frames=6, **values)).frames
    assert "made in 3 segments of 6 frames, blended over 2 frames or more" in str(whole.attention_report)
    assert numpy.array_equal(whole.frames[:4], first[:4])
    assert numpy.array_equal(whole.frames[10:], last[5:])
    second = pipeline(request(files, video_first_frame=4, num_frames=6, **values)).frames
    # A quarter of the half cosine: 0.25 of the new segment in the first of two shared frames.
    blended = 0.75 * first[4].astype(float) + 0.25 * second[0]
    assert numpy.abs(whole.frames[4] - blended).max() <= 0.51


@table(
    "num_frames, length, overlap, starts",
    [
        (5, 9, 4, [0]),
        (9, 9, 4, [0]),
        (10, 9, 4, [0, 1]),
        (14, 9, 4, [0, 5]),
        (40, 9, 0, [0, 9, 18, 27, 31]),
        (3, 1, 0, [0, 1, 2]),
    ],
)
def test_segments(num_frames: int, length: int, overlap: int, starts: list[int]) -> None:
    plan = SegmentPlan(num_frames, length, overlap, "blended")
    segments = list(plan)
    assert [segment.start for segment in segments] == starts
    assert len(plan) == len(segments)
    assert segments[-1].start + segments[-1].num_frames == num_frames
    assert all(segment.num_shared >= overlap for segment in segments[1:])


def test_sound_and_frame_rate_are_kept(pipeline: Pipeline, files: dict[str, str], tmp_path: Path) -> None:
    media = pipeline(request(files, "film", scale=1, segment_frames=9))
    assert media.fps == pytest.approx(NTSC)
    assert media.audio is not None
    assert media.audio.seconds == pytest.approx(12 / NTSC, abs=0.01)
    written = read_media_file(media.save(tmp_path / "out.mp4"))
    assert written.fps == pytest.approx(NTSC, abs=1e-3)
    assert written.audio is not None
    later = pipeline(request(files, "film", scale=1, video_first_frame=3, fps=24))
    assert later.fps == 24
    assert later.audio is None
    assert "the sound is left out" in str(later.attention_report)


def test_a_stream_without_its_sound_is_refused_by_the_rules(pipeline: Pipeline, files: dict[str, str]) -> None:
    """Before any weight is read; without a sound, or at another rate, which the report notes, it is streamed."""
    for name, values, is_refused in (("film", {}, True), ("film", {"fps": 24}, False), ("clip", {}, False)):
        asked = pipeline.resolve(request(files, name, scale=1, segment_frames=5, segment_overlap=1, **values))
        settings = pipeline.rules.settings(asked)
        if is_refused:
            with pytest.raises(RequestError, match="stream: a file that grows has no sound, and this video has one"):
                check_streamable(pipeline.rules, settings, endless=False)
        else:
            check_streamable(pipeline.rules, settings, endless=False)


@table(
    "values, told",
    [
        ({}, "this model restores a video or an image; give one: --video-path FILE or --image-path FILE"),
        ({"image_path": "photo", "video_path": "clip"}, "expected one of them, got both"),
        ({"video_path": "clip", "num_frames": 12}, "has 11 frames; expected at most that, got 12"),
        ({"video_path": "clip", "num_frames": 9, "video_first_frame": 4}, "has 7 frames from frame 4 on"),
        ({"video_path": "clip", "video_first_frame": 11}, "expected at most 10, got 11"),
        ({"video_path": "clip", "height": 40, "width": 40}, "with height 40 the width is 52"),
        ({"video_path": "clip", "height": 8, "width": 10}, "height: expected 16 or more, got 8"),
        (
            {"video_path": "clip", "segment_frames": 5, "segment_overlap": 5},
            "segment_overlap: expected 0 to 4, less than seg",
        ),
        ({"video_path": "clip", "color_correction": "hsv"}, "color_correction: unknown value 'hsv'"),
        ({"video_path": "missing.mp4"}, "missing.mp4"),
        ({"video_path": "clip", "mask_path": "photo"}, "mask_path: this model takes no mask"),
        ({"video_path": "clip", "last_image_path": "photo"}, "last_image_path: this model takes no image to end with"),
    ],
)
def test_refusals(pipeline: Pipeline, files: dict[str, str], values: dict[str, Any], told: str) -> None:
    named = {key: files.get(value, value) if isinstance(value, str) else value for key, value in values.items()}
    with pytest.raises(RequestError) as raised:
        pipeline.resolve(GenerationRequest(prompt="clip", **named))
    assert told in str(raised.value)


def test_other_models_refuse_the_fields() -> None:
    shapes = load_pipeline("shapes", device="cpu")
    with pytest.raises(RequestError, match=r"segment_frames: this model makes a video at once"):
        shapes.resolve(GenerationRequest(prompt="a star", segment_frames=9))


def test_the_authors_settings_are_the_defaults(pipeline: Pipeline, files: dict[str, str]) -> None:
    """As in projects/inference_seedvr2_3b.py: one step from timestep 1000, without guidance. The colours as in the
    programs in use."""
    resolved = pipeline.resolve(request(files, "photo"))
    assert (resolved.num_inference_steps, resolved.guidance_scale, resolved.color_correction) == (1, 1.0, "lab")
    sampler = pipeline.rules.settings(resolved).build_sampler()
    assert [step.timestep for step in sampler.steps(torch.device("cpu"))] == [1000.0]


def test_the_size_follows_the_file(pipeline: Pipeline, files: dict[str, str]) -> None:
    resolved = pipeline.resolve(GenerationRequest(prompt="clip", video_path=files["clip"]))
    assert (resolved.height, resolved.width, resolved.num_frames) == (40, 52, 11)
    resolved = pipeline.resolve(GenerationRequest(prompt="film", video_path=files["film"], height=72))
    assert (resolved.height, resolved.width, resolved.num_frames, resolved.fps) == (72, 96, 12, 30)


def test_processes_cannot_share_the_windows(folder: Path) -> None:
    parallel = ParallelConfig(num_gpus=2, ulysses_degree=2)
    with pytest.raises(ConfigError, match="run on one process"):
        prepare(RuntimeConfig(model_path=str(folder), device="cpu", parallel=parallel))


def test_a_batch_is_made_one_after_the_other(pipeline: Pipeline, files: dict[str, str]) -> None:
    requests = [request(files, "photo", seed=seed) for seed in (1, 2)]
    together = pipeline.generate(requests)
    for media, each in zip(together, requests, strict=True):
        assert numpy.array_equal(media.frames, pipeline(each).frames)
    assert not numpy.array_equal(together[0].frames, together[1].frames)


def test_a_seed_means_the_same_after_another(folder: Path, pipeline: Pipeline, files: dict[str, str]) -> None:
    """The encoder of the file draws from the seed, so that what it encoded for another is not kept."""
    fresh = load_pipeline(str(folder), device="cpu", dtype="float32")
    for seed in (1, 2):
        later = fresh(request(files, "photo", seed=seed)).frames
    assert numpy.array_equal(later, pipeline(request(files, "photo", seed=2)).frames)


def test_progress_counts_segments(pipeline: Pipeline, files: dict[str, str]) -> None:
    seen = []
    pipeline(request(files, segment_frames=5, segment_overlap=2), on_progress=seen.append)
    steps = [(each.step, each.num_steps) for each in seen if each.stage == "denoise"]
    assert steps[0] == (0, 3)
    assert steps[-1] == (3, 3)


# By the command line.
def upscale(*arguments: object, cwd: Path | None = None, **environment: str) -> Result:
    return command_process("upscale", *arguments, "--device", "cpu", cwd=cwd or Path.cwd(), **environment)


def test_the_verb_writes_a_file_with_its_recipe(
    folder: Path, files: dict[str, str], pipeline: Pipeline, tmp_path: Path
) -> None:
    out = tmp_path / "large.npy"
    made = upscale(files["clip"], "--model-path", folder, "--segment-frames", 6, "--segment-overlap", 2, "-o", out)
    assert made.out.split() == [str(out)], made.err
    assert "denoise: step 3/3" in made.said
    recipe = json.loads(out.with_suffix(".json").read_text())["recipe"]
    assert recipe["request"]["video_path"] == files["clip"]
    assert len(recipe["inputs"]["video_path"]) == 64
    again = pipeline(GenerationRequest.from_dict(recipe["request"]))
    assert numpy.array_equal(numpy.load(out), again.frames)


@table(
    "arguments, told",
    [
        (("--scale", "4"), "outputs/photo-104x80.png"),
        (("--size", "big"), "--size: expected width and height, such as 1920x1080, got 'big'"),
        (("--num-gpus", "2"), "num_gpus: upscale runs in one process"),
    ],
)
def test_what_the_verb_says(folder: Path, files: dict[str, str], arguments: tuple[str, ...], told: str) -> None:
    assert told in upscale(files["photo"], "--model-path", folder, *arguments, "--dry-run").said


@table(
    "values, told",
    [
        ({"size": (40, 40), "scale": 2}, "scale, size: expected one of them, got both"),
        ({"scale": 0}, "scale: expected a number above 0 and up to 16, got 0"),
    ],
)
def test_sizes_that_are_none(files: dict[str, str], values: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        upscale_request(files["photo"], **values)


def write_heads(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of float16 without its numbers, which take no room on the disk."""
    heads, position = {}, 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        heads[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(heads).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)


def test_a_model_is_found_in_the_folders_of_comfyui(files: dict[str, str], tmp_path: Path) -> None:
    missing = upscale(files["photo"], "--dry-run", cwd=tmp_path, HOME=str(tmp_path))
    assert missing.code == 1
    for told in ("Download these two", "seedvr2_ema_3b_fp16.safetensors", "ema_vae_fp16.safetensors", "then type: "):
        assert told in missing.said
    place = tmp_path / "ComfyUI" / "models" / "SEEDVR2"
    place.mkdir(parents=True)
    config = read_transformer_config(packaged_folder("SeedVR2-3B") or Path())
    tensors = {piece.name: piece.shape for _, each in transformer_pieces(config) for piece in each}
    write_heads(place / "seedvr2_ema_3b_fp16.safetensors", {**tensors, "blocks.0.attn.rope.rope.freqs": (21,)})
    alone = upscale(files["photo"], "--dry-run", cwd=tmp_path, HOME=str(tmp_path))
    assert "parts of seedvr2-3b are missing" in alone.said
    assert "ema_vae_fp16.safetensors, from numz/SeedVR2_comfyUI" in alone.said


def test_one_segment_is_made_anew(pipeline: Pipeline, files: dict[str, str], tmp_path: Path) -> None:
    """The others are those of before: they are blended, and each is made by itself."""
    asked = request(files, segment_frames=6, segment_overlap=2, color_correction="wavelet", seed=3)
    whole, kept = saving(pipeline, asked, tmp_path)
    redone = dataclasses.replace(asked, segment_seeds=(3, 8))
    steps: list[int] = []
    found = pipeline.finish(
        read_latents(kept[-1]), redone, on_progress=lambda at: steps.append(at.step) if at.stage == "denoise" else None
    )
    assert_same(found, pipeline(redone))
    # The one step of the second segment, behind that of the first.
    assert steps == [0, 2]
    assert numpy.array_equal(found.frames[:4], whole.frames[:4])
    assert not numpy.array_equal(found.frames, whole.frames)
