"""Clips from references against diffusers' modular pipeline on tiny weights: transformer within 1e-5, latents within
1e-4; what a request with references may not say."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3Ref2VAPrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
    patchify_video_latents,
)
from family_parity import CPU, record_latents, relative
from PIL import Image
from sound_files import write_wave
from tables import table
from tiny_encoders import HIDDEN
from tiny_minimax_h3 import AUDIO_CHANNELS, CHANNELS, TINY_EDGES, TINY_SIZES

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext, AttentionPolicy
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.denoising.flow_schedule import shifted
from diffusion_runtime.denoising.noise import initial_noise
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.layers.embeddings import unpatchify
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.media.ffmpeg import find_ffmpeg
from diffusion_runtime.models.interface import DenoiserInputs, GivenMedia, ImageCondition
from diffusion_runtime.models.minimax_h3.geometry import MiniMaxH3Geometry
from diffusion_runtime.models.minimax_h3.transformer import MiniMaxH3Transformer
from diffusion_runtime.models.model_sources import open_workflow
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.text_encoders.interface import Conditions

# What importing diffusers' modular pipelines says about packages that are not here; of torch, about its weight norm.
pytestmark = pytest.mark.filterwarnings("ignore")
PATCH, NUM_STEPS = (1, 2, 2), 3
SHORT, LONG = ClipSize(64, 96, 22, 24), ClipSize(96, 64, 39, 24)


@pytest.fixture(scope="module")
def transformer(tiny_minimax_h3_folder: Path) -> MiniMaxH3Transformer:
    folder = open_workflow(tiny_minimax_h3_folder, "ref2va")
    assert isinstance(folder, ModelFolder)
    model = family_for_folder(folder).describe(folder)
    loaded = model.load_transformer(model.build_transformer(AttentionPolicy(dtype=torch.float32)), CPU, torch.float32)
    assert isinstance(loaded, MiniMaxH3Transformer)
    return loaded


@pytest.fixture(scope="module")
def of_diffusers(tiny_minimax_h3_folder: Path) -> MiniMaxH3Transformer3DModel:
    folder = tiny_minimax_h3_folder / "transformer_ref"
    return MiniMaxH3Transformer3DModel.from_pretrained(folder, dtype=torch.float32).eval()


# Kind, latent size of its pictures, moments of its sound.
IMAGE, TALL = ("image", (1, 4, 4), 0), ("image", (1, 8, 2), 0)
VIDEO, SILENT, LOUD = ("video", (7, 4, 6), 20), ("video", (12, 6, 4), 0), ("video", (7, 2, 4), 60)
SOUND = ("audio", None, 11)


def media_of(references: tuple[Any, ...]) -> tuple[GivenMedia, ...]:
    generator = torch.Generator().manual_seed(4)
    return tuple(
        GivenMedia(
            None if size is None else torch.randn(1, CHANNELS, *size, generator=generator),
            torch.randn(1, AUDIO_CHANNELS, moments, 2, generator=generator) if moments else None,
        )
        for _, size, moments in references
    )


def inputs(
    ours: MiniMaxH3Transformer, lengths: tuple[int, ...], size: ClipSize, references: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor, DenoiserInputs]:
    generator, batch = torch.Generator().manual_seed(1), len(lengths)
    latents = torch.randn(batch, *ours.geometry.sample_shape(size), generator=generator)
    text = Conditions.of(torch.randn(batch, max(lengths), HIDDEN, generator=generator), lengths)
    text = dataclasses.replace(text, picture_ranges=((1, 3),))
    none = torch.empty(1, CHANNELS, 0, size.height // 16, size.width // 16)
    image = ImageCondition(none, media=media_of(references)).repeat(batch)
    timesteps = torch.linspace(937.3, 12.0, batch + 1)[:batch]
    return latents, timesteps, DenoiserInputs(text, size, image=image)


@torch.no_grad()
def run_theirs(
    model: MiniMaxH3Transformer3DModel,
    ours: MiniMaxH3Transformer,
    references: tuple[Any, ...],
    latents: torch.Tensor,
    timesteps: torch.Tensor,
    given: DenoiserInputs,
) -> torch.Tensor:
    """One sample after the other, in the published order of the sequence and its clock."""
    found = []
    media = media_of(references)
    pictures = [each.pictures for each in media if each.pictures is not None]
    sounds = [each.sound.permute(0, 3, 2, 1).flatten(1, 2)[0] for each in media if each.sound is not None]
    kinds: Any = [SimpleNamespace(kind=kind, has_audio=moments > 0) for kind, _, moments in references]
    for index, length in enumerate(given.text.lengths):
        parts = ours.geometry.parts(latents[index : index + 1], given.size)
        assert parts.audio is not None
        video, sigma = parts.video, float(timesteps[index]) / 1000
        moments = parts.audio.permute(0, 3, 2, 1).flatten(1, 2)
        tags = torch.ones(length, dtype=torch.long)
        tags[1:3] = 0
        *layout, num_videos, num_sounds = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
            tags, kinds, pictures, sounds, *video.shape[2:], moments.shape[1] // 2, PATCH, 2, 2, 0
        )
        positions, tags, videos, of_sounds, texts = layout
        of_video, of_audio = 1 - sigma, 1 - shifted(sigma, 3 / 12)
        times = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            videos, of_sounds, num_videos, num_sounds, length, of_video, of_audio, max(of_video, 0.999), 1.0
        )
        made, sound = model(
            torch.cat([patchify_video_latents(each, PATCH) for each in (*pictures, video)])[None],
            torch.cat([*sounds, moments[0]])[None],
            given.text.embeddings[index : index + 1, :length],
            *times,
            tags,
            positions,
            videos,
            of_sounds,
            texts,
            return_dict=False,
        )
        made = unpatchify(made[:, num_videos:], ours.geometry.grid(video.shape), PATCH, channels_first=True)
        of_sides = sound[:, num_sounds:].unflatten(1, (2, -1)).permute(0, 3, 2, 1)
        found.append(-ours.geometry.join(made, of_sides))
    return torch.cat(found)


@table(
    ("lengths", "size", "references"),
    [
        ((5,), SHORT, (IMAGE,)),
        ((4, 9), LONG, (VIDEO, TALL, SOUND)),
        ((7, 3), SHORT, (SOUND, IMAGE, SILENT, SOUND, LOUD, IMAGE)),
        ((6, 6), SHORT, (LOUD, VIDEO)),
    ],
)
def test_velocities_equal_those_of_diffusers(
    transformer: MiniMaxH3Transformer,
    of_diffusers: MiniMaxH3Transformer3DModel,
    lengths: tuple[int, ...],
    size: ClipSize,
    references: tuple[Any, ...],
) -> None:
    arguments = inputs(transformer, lengths, size, references)
    expected = run_theirs(of_diffusers, transformer, references, *arguments)
    assert relative(transformer(*arguments, AttentionContext()), expected) < 1e-5
