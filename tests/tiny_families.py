"""Every family's tiny folder, by one name each, for tests that hold for all of them."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy
import torch
from PIL import Image
from tiny_anima import write_tiny_anima
from tiny_flux1 import write_tiny_flux1
from tiny_flux2 import write_tiny_flux2
from tiny_flux3 import write_tiny_flux3
from tiny_hunyuan_video import write_tiny_hunyuan_video
from tiny_hunyuan_video_15 import write_tiny_hunyuan_video_15
from tiny_krea2 import write_tiny_krea2
from tiny_longcat_image import write_tiny_longcat_image
from tiny_ltx2 import write_tiny_ltx2
from tiny_ltx_video import write_tiny_ltx_video
from tiny_minimax_h3 import write_tiny_minimax_h3
from tiny_models import write_tiny_wan
from tiny_moss_image import write_tiny_moss_image
from tiny_qwen_image import write_tiny_qwen_image
from tiny_qwen_image_21 import write_tiny_qwen_image_21
from tiny_scail_2 import write_tiny_scail_2
from tiny_seedvr2 import write_tiny_seedvr2
from tiny_wan_animate_2 import write_tiny_wan_animate_2
from tiny_z_image import write_tiny_z_image

from diffusion_runtime import GenerationRequest, Pipeline
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.text_encoders.interface import TextStream

# Between them every kind of text encoder: UMT5, CLIP, T5, Mistral 3, Qwen 2.5 VL, Llama, ByT5, Gemma 3, Qwen 3,
# Qwen 3 VL, Qwen 3.5.
WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "wan": write_tiny_wan,
    "flux1": write_tiny_flux1,
    "flux2": write_tiny_flux2,
    "flux3": write_tiny_flux3,
    "qwen_image": write_tiny_qwen_image,
    "qwen_image_21": write_tiny_qwen_image_21,
    "hunyuan_video": write_tiny_hunyuan_video,
    "hunyuan_video_15": write_tiny_hunyuan_video_15,
    "ltx2": write_tiny_ltx2,
    "longcat_image": write_tiny_longcat_image,
    "ltx_video": write_tiny_ltx_video,
    "minimax_h3": write_tiny_minimax_h3,
    "z_image": write_tiny_z_image,
    "krea2": write_tiny_krea2,
    "wan_animate_2": write_tiny_wan_animate_2,
    "anima": write_tiny_anima,
    "moss_image": write_tiny_moss_image,
    "seedvr2": write_tiny_seedvr2,
    "scail_2": write_tiny_scail_2,
}


def small_request(pipeline: Pipeline, num_steps: int = 2) -> GenerationRequest:
    """64 x 64 pixels; the fewest frames of a video, where the model makes videos; the files that it needs."""
    step, remainder = pipeline.rules.sampling.geometry.frame_rule
    # Of a model that takes any number, two latent frames.
    num_frames = (step + remainder if step > 1 else 5) if makes_videos(pipeline) else 1
    needed = {name: _needed_files()[name] for name in needed_fields(pipeline)}
    return GenerationRequest(
        prompt="a red circle",
        height=64,
        width=64,
        num_frames=num_frames,
        num_inference_steps=num_steps,
        seed=3,
        **needed,
    )


def needed_fields(pipeline: Pipeline) -> frozenset[str]:
    """The fields of files that a request must set; of a model that restores an image or a video, the video's."""
    restores = pipeline.rules.sampling.restoration is not None
    return pipeline.rules.inputs.needed | (frozenset({"video_path"}) if restores else frozenset())


@functools.cache
def _needed_files(height: int = 64, width: int = 64) -> dict[str, str]:
    """A picture and a video of 17 frames, and masks of them in colours, by the field of a request that names them."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-files-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    frames = numpy.random.default_rng(0).integers(0, 256, (17, height, width, 3), dtype=numpy.uint8)
    numpy.save(folder / "video.npy", frames)
    Image.fromarray(frames[0]).save(folder / "image.png")
    masks = numpy.where(frames.mean(axis=-1, keepdims=True) > 128, (255, 255, 255), (0, 0, 255)).astype(numpy.uint8)
    numpy.save(folder / "masks.npy", masks)
    Image.fromarray(masks[0]).save(folder / "mask.png")
    names = {
        "image_path": "image.png",
        "video_path": "video.npy",
        "image_mask_path": "mask.png",
        "mask_path": "masks.npy",
    }
    return {field: str(folder / name) for field, name in names.items()}


def makes_videos(pipeline: Pipeline) -> bool:
    return pipeline.rules.sampling.geometry.temporal_factor > 1


PROMPTS = ('a red circle and the words "a star" moving left', "a star")
Given = tuple[torch.Tensor, torch.Tensor, DenoiserInputs]


def given_to(pipeline: Pipeline, size: ClipSize | None = None) -> Given:
    """Latents, unequal timesteps, and text of two lengths with noise where it is padding, so that it would show. size:
    of the clip, by default the smallest."""
    generator = torch.Generator().manual_seed(1)
    request = small_request(pipeline)
    assert request.num_frames is not None
    if size is None:
        size = ClipSize(64, 64, request.num_frames, 24)
    files = {name: _needed_files(size.height, size.width)[name] for name in needed_fields(pipeline)}
    request = dataclasses.replace(request, height=size.height, width=size.width, num_frames=size.num_frames, **files)
    settings = BatchSettings.of([pipeline.resolve(request)], pipeline.rules.sampling)
    latents = torch.randn(2, *settings.sizes.sample_shape(size), generator=generator)
    image = None
    if needed_fields(pipeline):
        image = pipeline.parts.image_conditioner.condition(settings.shared, size).repeat(2)
    text = pipeline.text_encoder.encode(PROMPTS)
    further = tuple(
        TextStream(with_noise(stream.embeddings, stream.lengths), stream.lengths) for stream in text.further
    )
    noisy = dataclasses.replace(text, embeddings=with_noise(text.embeddings, text.lengths), further=further)
    guidance = 3.5 if pipeline.rules.sampling.embeds_guidance else None
    return latents, torch.tensor([937.3, 474.65]), DenoiserInputs(noisy, size, guidance=guidance, image=image)


def with_noise(embeddings: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    noisy = embeddings.clone()
    for row, length in zip(noisy, lengths, strict=True):
        row[length:] = torch.randn(row[length:].shape, generator=torch.Generator().manual_seed(length))
    return noisy
