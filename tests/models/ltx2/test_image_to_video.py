"""LTX-2 from an image against diffusers' LTX2ImageToVideoPipeline on tiny weights, in float32 on the CPU.

On their side the image is not compressed first (image_crf 0).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import LTX2ImageToVideoPipeline
from diffusers.pipelines.ltx2 import pipeline_ltx2_image2video as theirs_module
from family_cases import changed
from family_parity import load_theirs, record_latents
from PIL import Image
from tables import table
from tiny_ltx2 import AUDIO_BINS, AUDIO_CHANNELS, ONE_SCALE, TINY_SIZES
from warm_python import run_python

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.denoising.noise import initial_noise
from diffusion_runtime.models.geometry import ClipSize
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
    fields = {**TINY_SIZES, "num_frames": 17, "num_inference_steps": 3, "guidance_scale": 3.0, "seed": 5}
    return GenerationRequest(**({"prompt": "a red circle", "image_path": image, **fields} | values))


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
    geometry = ours.rules.geometry
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


def test_the_image_reaches_every_frame_and_the_report_names_its_encoder(tiny_folder: Path, image: str) -> None:
    ours = load(tiny_folder)
    plain, started = ours(request(None)), ours(request(image))
    difference = numpy.abs(plain.frames.astype(int) - started.frames.astype(int)).max(axis=(1, 2, 3))
    assert difference.min() > 2
    libraries = {part.component: part.implementation for part in started.attention_report.libraries}
    assert libraries["vae encoder"] == "AutoencoderKLLTX2Video's encoder"


def test_two_processes_that_share_the_clip_make_the_same(tiny_folder: Path, image: str, tmp_path: Path) -> None:
    """18 tokens of video, of which the first 6 are the image's: all of them, and 3 others, are on the first process."""
    values = {**TINY_SIZES, "num_frames": 17, "num_inference_steps": 2, "seed": 5, "image_path": image}
    flags = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = ["-m", "diffusion_runtime", "generate", "a red circle", "--model-path", str(tiny_folder)]
    parallel = ["--device", "cpu", "--num-gpus", "2", "--ulysses-degree", "2"]
    done = run_python(
        *(*command, *parallel, *flags, "--output-path", str(tmp_path / "two.npy")),
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        max_ranks=2,
    )
    assert done.returncode == 0, done.stderr
    one = load(tiny_folder)(request(image, num_inference_steps=2, guidance_scale=None)).frames.astype(int)
    two = numpy.load(tmp_path / "two.npy").astype(int)
    assert numpy.abs(one - two).max() <= 1
