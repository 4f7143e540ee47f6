"""LTX-2 from an image against diffusers' LTX2ImageToVideoPipeline on tiny weights, in float32 on the CPU.

Images are not compressed first on both sides (image_crf 0), but where a test says so: diffusers does that with PyAV,
which is no dependency; media/test_recompression.py compares the two where it is installed.
"""

from __future__ import annotations

import dataclasses
import os
import wave
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import LTX2ConditionPipeline, LTX2ImageToVideoPipeline
from diffusers.pipelines.ltx2 import pipeline_ltx2_condition as condition_module
from diffusers.pipelines.ltx2 import pipeline_ltx2_image2video as theirs_module
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from family_cases import changed
from family_parity import load_theirs, record_latents
from PIL import Image
from tables import table
from tiny_ltx2 import AUDIO_BINS, AUDIO_CHANNELS, ONE_SCALE, TINY_SIZES
from warm_python import run_python

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.cli.app import run
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.noise import initial_noise
from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.recompression import recompress
from diffusion_runtime.models.first_frame_encoder import FirstFrameConditioner
from diffusion_runtime.models.interface import ImageCondition
from diffusion_runtime.models.ltx2.condition import LTX2Conditioner
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry

SIZE = ClipSize(64, 96, 17, 25)
OFF: dict[str, Any] = {**ONE_SCALE, "image_crf": 0}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows, columns = numpy.mgrid[0:64, 0:96]
    path = tmp_path_factory.mktemp("image") / "image.png"
    Image.fromarray(numpy.stack([3 * rows, 2 * columns, 255 - rows], axis=-1).astype(numpy.uint8)).save(path)
    return str(path)


def request(image: str | None, **values: Any) -> GenerationRequest:
    fields = {
        **TINY_SIZES,
        "num_frames": 17,
        "num_inference_steps": 3,
        "guidance_scale": 3.0,
        "seed": 5,
        "image_crf": 0,
    }
    return GenerationRequest(**({"prompt": "a red circle", "image_path": image, **fields} | values))


def record_conditions(monkeypatch: pytest.MonkeyPatch) -> list[ImageCondition]:
    """Gets the condition of every generation that follows, one for each stage."""
    given: list[ImageCondition] = []
    condition = LTX2Conditioner.condition

    def keep(self: LTX2Conditioner, asked: GenerationRequest, size: ClipSize) -> ImageCondition:
        given.append(condition(self, asked, size))
        return given[-1]

    monkeypatch.setattr(LTX2Conditioner, "condition", keep)
    return given


def mixed_first(video: torch.Tensor, image: ImageCondition) -> torch.Tensor:
    """The latents as diffusers keeps them, whose first frame the image is mixed into once."""
    share, frame = image.first_strength, image.latents
    if frame.shape[2] == 0 or share == 1:
        return video
    return torch.cat([(1 - share) * video[:, :, :1] + share * frame, video[:, :, 1:]], dim=2)


def load(folder: Path) -> Pipeline:
    ours = load_pipeline(str(folder), device="cpu")
    assert isinstance(ours, Pipeline)
    return ours


@table("terms", [{}, {"modality_scale": 2.0, "guidance_rescale": 0.7, "audio_guidance_scale": 5.0}])
def test_a_generation_equals_diffusers(
    tiny_folder: Path, image: str, monkeypatch: pytest.MonkeyPatch, terms: dict[str, Any]
) -> None:
    # What diffusers encodes is not scaled, and what it decodes is: published folders say 1.
    with changed(tiny_folder, "vae/config.json", {"scaling_factor": 1.0}):
        ours, theirs = load(tiny_folder), load_theirs(LTX2ImageToVideoPipeline, tiny_folder)
    kept = record_latents(monkeypatch)
    geometry = ours.rules.sampling.geometry
    assert isinstance(geometry, LTX2Geometry)
    requests = [
        request(image, prompt=prompt, negative_prompt=other, seed=seed, **terms)
        for prompt, other, seed in (("a red circle", "a star", 5), ("a blue star moving left", "", 6))
    ]
    media = ours.generate(requests)
    noise = geometry.parts(initial_noise(geometry.sample_shape(SIZE), [5, 6]), SIZE)
    assert noise.audio is not None
    draws = [noise.video, noise.audio]
    monkeypatch.setattr(theirs_module, "randn_tensor", lambda *_, **__: draws.pop(0).clone())
    expected: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        video = tensors["latents"].transpose(1, 2).unflatten(2, geometry.video_shape(SIZE)[1:])
        audio = tensors["audio_latents"].unflatten(2, (AUDIO_CHANNELS, AUDIO_BINS)).transpose(1, 2)
        expected.append((video.clone(), audio.clone()))
        return {}

    theirs._callback_tensor_inputs = [*LTX2ImageToVideoPipeline._callback_tensor_inputs, "audio_latents"]
    frames, sound = theirs(
        image=[Image.open(image)] * 2,
        prompt=[request.prompt for request in requests],
        negative_prompt=[request.negative_prompt for request in requests],
        height=SIZE.height,
        width=SIZE.width,
        num_frames=SIZE.num_frames,
        frame_rate=float(SIZE.fps),
        num_inference_steps=3,
        guidance_scale=3.0,
        callback_on_step_end=keep,
        callback_on_step_end_tensor_inputs=["latents", "audio_latents"],
        output_type="np",
        return_dict=False,
        **{**OFF, **terms},
    )
    assert len(kept) == len(expected) == 3
    for found, (video, audio) in zip(kept, expected, strict=True):
        mine = geometry.parts(found, SIZE)
        assert mine.audio is not None
        # The first frame is the image's, which ours puts in its place at the end.
        for one, other in ((mine.video[:, :, 1:], video[:, :, 1:]), (mine.audio, audio)):
            assert (one - other).norm() <= 1e-4 * other.norm()
    for item, theirs_frames, theirs_sound in zip(media, frames, sound.numpy(), strict=True):
        assert numpy.abs(item.frames / 255 - theirs_frames).max() <= 2 / 255
        assert theirs_frames.std() > 0.02
        assert item.audio is not None
        assert numpy.abs(item.audio.samples - theirs_sound).max() <= 1e-4


@table(
    ("with_first", "values"),
    [(True, {"guidance_scale": 3.0}), (False, {"guidance_scale": 1.0, "modality_scale": 2.0, "num_frames": 25})],
)
def test_an_image_to_end_with_equals_diffusers(
    tiny_folder: Path,
    image: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    with_first: bool,
    values: dict[str, Any],
) -> None:
    """Their condition pipeline with the image at the last latent index; the flow shift counts its tokens."""
    last = str(tmp_path / "last.png")
    Image.open(image).rotate(180).save(last)
    with changed(tiny_folder, "vae/config.json", {"scaling_factor": 1.0}):
        ours, theirs = load(tiny_folder), load_theirs(LTX2ConditionPipeline, tiny_folder)
    # That of published tokenizers, which it reads once and before it sets the tiny one's.
    theirs.tokenizer_padding_side = "left"
    kept = record_latents(monkeypatch)
    geometry = ours.rules.sampling.geometry
    assert isinstance(geometry, LTX2Geometry)
    asked = request(image if with_first else None, last_image_path=last, negative_prompt="a star", **values)
    media = ours(asked)
    size = dataclasses.replace(SIZE, num_frames=asked.num_frames or 0)
    noise = geometry.parts(initial_noise(geometry.sample_shape(size), [5]), size)
    assert noise.audio is not None
    packed = noise.video.flatten(2).transpose(1, 2)
    draws = [torch.cat([packed, torch.zeros(1, 6, packed.shape[2])], dim=1), noise.audio.transpose(1, 2).flatten(2)]
    monkeypatch.setattr(condition_module, "randn_tensor", lambda *_, **__: draws.pop(0).clone())
    expected: list[torch.Tensor] = []

    def keep(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        video = tensors["latents"][:, : packed.shape[1]]
        expected.append(video.transpose(1, 2).unflatten(2, geometry.video_shape(size)[1:]).clone())
        return {}

    paths = {0: image, -1: last} if with_first else {-1: last}
    frames, _ = theirs(
        conditions=[LTX2VideoCondition(Image.open(path), index, 1.0, 0) for index, path in paths.items()],
        prompt=asked.prompt,
        negative_prompt="a star",
        height=size.height,
        width=size.width,
        num_frames=size.num_frames,
        frame_rate=float(size.fps),
        num_inference_steps=3,
        callback_on_step_end=keep,
        output_type="np",
        return_dict=False,
        **{**ONE_SCALE, "guidance_scale": asked.guidance_scale, "modality_scale": asked.modality_scale or 1.0},
    )
    assert len(kept) == len(expected) == 3
    for found, other in zip(kept, expected, strict=True):
        first = 1 if with_first else 0
        mine = geometry.parts(found, size).video[:, :, first:]
        assert (mine - other[:, :, first:]).norm() <= 1e-4 * other.norm()
    assert numpy.abs(media.frames / 255 - frames[0]).max() <= 2 / 255
    plain = ours(request(image if with_first else None, negative_prompt="a star", **values))
    assert numpy.abs(plain.frames.astype(int) - media.frames.astype(int)).max() > 2


@table(
    ("conditions", "values"),
    [
        # In full and in part, at frames that are no beginning of a latent too; the first in part, with every term.
        ({1: 1.0, 12: 0.5}, {"guidance_scale": 3.0}),
        # Rescaling measures the images that stay as they are, too.
        ({1: 1.0, 12: 0.5}, {"guidance_scale": 3.0, "guidance_rescale": 0.7}),
        ({0: 0.6, 9: 0.3, 1: 0.3}, {"guidance_scale": 3.0, "modality_scale": 2.0, "guidance_rescale": 0.7}),
        ({0: 0.7}, {"guidance_scale": 1.0}),
    ],
)
def test_images_at_frames_equal_diffusers(
    tiny_folder: Path,
    image: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    conditions: dict[int, float],
    values: dict[str, Any],
) -> None:
    """Their condition pipeline, whose indices are those of latents: frame 12 is latent 2 there, moved from frame 9."""
    paths = {}
    for frame in conditions:
        paths[frame] = str(tmp_path / f"{frame}.png")
        Image.open(image).rotate(10 * frame).save(paths[frame])
    with changed(tiny_folder, "vae/config.json", {"scaling_factor": 1.0}):
        ours, theirs = load(tiny_folder), load_theirs(LTX2ConditionPipeline, tiny_folder)
    theirs.tokenizer_padding_side = "left"
    kept, given = record_latents(monkeypatch), record_conditions(monkeypatch)
    geometry = ours.rules.sampling.geometry
    assert isinstance(geometry, LTX2Geometry)
    texts = [f"{frame}:{paths[frame]}@{strength}" for frame, strength in conditions.items()]
    asked = request(None, frame_conditions=texts, negative_prompt="a star", **values)
    media = ours(asked)
    assert set(media.recipe["inputs"]) == {"frame_conditions"}
    channels, _, height, width = geometry.video_shape(SIZE)
    noised = [frame for frame, strength in conditions.items() if frame > 0 and strength < 1]
    (length,), frame_length = geometry.sample_shape(SIZE), channels * height * width
    noise = initial_noise((length + len(noised) * frame_length,), [5])
    parts = geometry.parts(noise[:, :length], SIZE)
    assert parts.audio is not None
    packed = parts.video.flatten(2).transpose(1, 2)
    tails = dict(zip(noised, noise[:, length:].split(frame_length, dim=1), strict=False))
    behind = [
        tails[frame].unflatten(1, (channels, -1)).transpose(1, 2) if frame in tails else torch.zeros(1, 6, channels)
        for frame in conditions
        if frame > 0
    ]
    draws = [torch.cat([packed, *behind], dim=1), parts.audio.transpose(1, 2).flatten(2)]
    monkeypatch.setattr(condition_module, "randn_tensor", lambda *_, **__: draws.pop(0).clone())
    place = LTX2ConditionPipeline._prepare_keyframe_coords
    moved = {9: 12} if 12 in conditions else {}

    def placed(self: Any, pixel_frame_idx: int, **rest: Any) -> Any:
        return place(self, pixel_frame_idx=moved.get(pixel_frame_idx, pixel_frame_idx), **rest)

    monkeypatch.setattr(LTX2ConditionPipeline, "_prepare_keyframe_coords", placed)
    expected: list[torch.Tensor] = []

    def keep(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        video = tensors["latents"][:, : packed.shape[1]]
        expected.append(video.transpose(1, 2).unflatten(2, geometry.video_shape(SIZE)[1:]).clone())
        return {}

    indices = {0: 0, 1: 1, 9: 2, 12: 2}
    off = {**ONE_SCALE, **{name: value for name, value in values.items() if name in ONE_SCALE}}
    frames, _ = theirs(
        conditions=[
            LTX2VideoCondition(Image.open(paths[frame]), indices[frame], strength, 0)
            for frame, strength in conditions.items()
        ],
        prompt=asked.prompt,
        negative_prompt="a star",
        height=SIZE.height,
        width=SIZE.width,
        num_frames=SIZE.num_frames,
        frame_rate=float(SIZE.fps),
        num_inference_steps=3,
        callback_on_step_end=keep,
        output_type="np",
        return_dict=False,
        **{**off, "guidance_scale": asked.guidance_scale},
    )
    assert len(kept) == len(expected) == 3
    for found, other in zip(kept, expected, strict=True):
        mine = mixed_first(geometry.parts(found[:, :length], SIZE).video, given[0])
        assert (mine - other).norm() <= 1e-4 * other.norm()
    assert numpy.abs(media.frames / 255 - frames[0]).max() <= 2 / 255


def test_images_are_compressed_as_by_diffusers_before_they_are_scaled(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default of both sides; the image is of another size than the clip, and of odd sides."""
    rows, columns = numpy.mgrid[0:131, 0:195]
    pixels = numpy.stack([3 * rows % 256, 2 * columns % 256, (rows * columns) % 256], axis=-1).astype(numpy.uint8)
    path = str(tmp_path / "large.png")
    Image.fromarray(pixels).save(path)
    with changed(tiny_folder, "vae/config.json", {"scaling_factor": 1.0}):
        ours, theirs = load(tiny_folder), load_theirs(LTX2ImageToVideoPipeline, tiny_folder)
    assert ours.resolve(request(path, image_crf=None)).image_crf == 33
    asked: list[int] = []

    def compressed(image: numpy.ndarray, crf: int) -> numpy.ndarray:
        asked.append(crf)
        return recompress(image, crf)

    monkeypatch.setattr(theirs_module, "apply_image_conditioning_crf", compressed)
    # Its own filter is bilinear.
    theirs.video_processor.register_to_config(resample="lanczos")
    encoded: list[torch.Tensor] = []
    encode = FirstFrameConditioner.encode

    def keep(encoder: FirstFrameConditioner, image: torch.Tensor, size: ClipSize) -> ImageCondition:
        condition = encode(encoder, image, size)
        encoded.append(condition.latents)
        return condition

    monkeypatch.setattr(FirstFrameConditioner, "encode", keep)
    for crf in (None, 0):
        ours(request(path, image_crf=crf, num_inference_steps=2, guidance_scale=1.0))
    sizes = {"height": SIZE.height, "width": SIZE.width, "num_frames": SIZE.num_frames, "frame_rate": 25.0}
    steps = {**ONE_SCALE, "num_inference_steps": 2, "guidance_scale": 1.0}
    latents, _ = theirs(
        image=Image.open(path), prompt="a red circle", output_type="latent", return_dict=False, **sizes, **steps
    )
    assert asked == [33]
    # What it returns is not normalised, and its first frame is the image's.
    mean, std = (each.view(1, -1, 1, 1, 1) for each in (theirs.vae.latents_mean, theirs.vae.latents_std))
    first = (latents[:, :, :1] - mean) / std
    assert (encoded[0] - first).norm() <= 1e-4 * first.norm()
    assert (encoded[1] - first).norm() > 1e-2 * first.norm()


def test_images_at_frames_are_told_of_and_known_again(
    tiny_folder: Path, image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the plan of the command, in the recipe, and by --from, which says when one has changed."""
    changing = str(tmp_path / "changing.png")
    Image.open(image).save(changing)
    output = tmp_path / "out.mp4"
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in {**TINY_SIZES, "num_frames": 17}.items()]
    command = ["generate", "a red circle", "--model-path", str(tiny_folder), "--device", "cpu", "--guidance-scale", "1"]
    at = ["--condition-at", f"0:{image}", "--condition-at", f"9:{changing}@0.5", "--num-inference-steps", "2"]
    assert run([*command, *sizes, *at, "--dry-run"]) == 0
    assert "strength 0.5" in capsys.readouterr().err
    assert run([*command, *sizes, *at, "--output-path", str(output)]) == 0
    assert "changed" not in capsys.readouterr().err
    Image.open(image).rotate(180).save(changing)
    assert run(["generate", "--from", str(output), "--device", "cpu", "--output-path", str(tmp_path / "new.mp4")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "changing.png has changed since the file of --from was made" in said
    assert f"{Path(image).name} has changed" not in said


def test_images_at_frames_that_cannot_be(tiny_folder: Path, image: str) -> None:
    ours = load(tiny_folder)
    wrong: dict[str, dict[str, Any]] = {
        "expected frames from 0 to 16, those of the video, got 17": {"frame_conditions": [f"17:{image}"]},
        "frame 0 has an image already, image_path": {"frame_conditions": [f"0:{image}"], "image_path": image},
        "frame 9 has an image already, last_image_path": {"frame_conditions": [[9, image]], "last_image_path": image},
        "expected a strength from 0 to 1, got 1.5 for frame 3": {"frame_conditions": [f"3:{image}@1.5"]},
        "expected a strength from 0 to 1, got -1": {"frame_conditions": [f"3:{image}@-1"]},
        "expected each frame once, got frame 3 twice": {"frame_conditions": [f"3:{image}", f"3:{image}@0.2"]},
        "expected FRAME:FILE": {"frame_conditions": [image]},
        "frame_conditions: nowhere.png: no such file": {"frame_conditions": ["3:nowhere.png"]},
    }
    for message, values in wrong.items():
        with pytest.raises(RequestError, match=message):
            ours.resolve(dataclasses.replace(request(None), **values))
    with pytest.raises(RequestError, match="this model takes no images at frames of their own"):
        load_pipeline("shapes").resolve(GenerationRequest("a", frame_conditions=[f"0:{image}"]))


def test_the_image_reaches_every_frame_and_the_report_names_its_encoder(tiny_folder: Path, image: str) -> None:
    ours = load(tiny_folder)
    plain, started = ours(request(None)), ours(request(image))
    difference = numpy.abs(plain.frames.astype(int) - started.frames.astype(int)).max(axis=(1, 2, 3))
    assert difference.min() > 2
    libraries = {part.component: part.implementation for part in started.attention_report.libraries}
    assert libraries["vae encoder"] == "AutoencoderKLLTX2Video's encoder"


def test_two_processes_that_share_the_clip_make_the_same(tiny_folder: Path, image: str, tmp_path: Path) -> None:
    """18 tokens of video, of which the first 6 are the image's: all of them, and 3 others, are on the first process."""
    values = {**TINY_SIZES, "num_frames": 17, "num_inference_steps": 2, "seed": 5, "image_path": image, "image_crf": 0}
    flags = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = ["-m", "diffusion_runtime", "generate", "a red circle", "--model-path", str(tiny_folder)]
    parallel = ["--device", "cpu", "--num-gpus", "2", "--ulysses-degree", "2"]
    done = run_python(
        *(*command, *parallel, *flags, "--output-path", str(tmp_path / "two.npy")),
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        max_ranks=2,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot carry sound; it is in" in done.stderr
    load(tiny_folder)(request(image, num_inference_steps=2, guidance_scale=None)).save(tmp_path / "one.npy")
    one, two = (numpy.load(tmp_path / f"{name}.npy").astype(int) for name in ("one", "two"))
    assert numpy.abs(one - two).max() <= 1
    sounds = [read_samples(tmp_path / f"{name}.wav") for name in ("one", "two")]
    assert sounds[0].std() > 1000
    assert numpy.abs(sounds[0] - sounds[1]).max() <= 3


def read_samples(path: Path) -> numpy.ndarray:
    with wave.open(str(path), "rb") as file:
        return numpy.frombuffer(file.readframes(file.getnframes()), "<i2").astype(int)
