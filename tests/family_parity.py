"""What the comparisons with diffusers' transformers and pipelines share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from diffusion_runtime import GenerationRequest, Pipeline
from diffusion_runtime.attention import AttentionPolicy
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import DrawNoise, OnStep, Predict, Sampler, SamplerState
from diffusion_runtime.denoising.noise import initial_noise
from diffusion_runtime.generation.latent_denoiser import Denoised, LatentDenoiser
from diffusion_runtime.models.family import ModelFamily
from diffusion_runtime.rules.batch_settings import BatchSettings

CPU = torch.device("cpu")


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, as a part of the largest value."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def load_transformer(family: ModelFamily[Any, Any], folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Our transformer of a folder, with its weights."""
    model = family.describe(folder)
    return model.load_transformer(model.build_transformer(AttentionPolicy(dtype=dtype)), CPU, dtype)


def write_plain_scheduler(folder: Path) -> None:
    """The scheduler's file of a folder that has one with every setting left out."""
    (folder / "scheduler").mkdir(exist_ok=True)
    settings = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(settings))


class RecordingSampler(Sampler):
    """Another sampler, whose latents after every step are kept in `latents`."""

    def __init__(self, sampler: Sampler, latents: list[torch.Tensor]) -> None:
        self.sampler = sampler
        self.latents = latents

    def steps(self, device: torch.device) -> tuple[StepInfo, ...]:
        return self.sampler.steps(device)

    def from_step(self, first: int) -> RecordingSampler:
        return RecordingSampler(self.sampler.from_step(first), self.latents)

    def start(self, noise: torch.Tensor) -> SamplerState:
        return self.sampler.start(noise)

    def run(
        self,
        state: SamplerState,
        predict: Predict,
        on_step: OnStep | None = None,
        draw_noise: DrawNoise | None = None,
        end: int | None = None,
    ) -> SamplerState:
        def keep(step: StepInfo, latents: torch.Tensor) -> None:
            self.latents.append(latents.clone())

        return self.sampler.run(state, predict, keep, draw_noise, end)


def record_latents(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Gets the latents after every step of the generations that follow."""
    latents: list[torch.Tensor] = []
    build = BatchSettings.build_sampler
    monkeypatch.setattr(BatchSettings, "build_sampler", lambda settings: RecordingSampler(build(settings), latents))
    return latents


def kept_after_steps(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Gets the latents after every step of both stages."""
    kept: list[torch.Tensor] = []
    denoise = LatentDenoiser.denoise

    def recording(denoiser: LatentDenoiser, text: Any, seeds: Any, on_step: Any, *others: Any, **more: Any) -> Denoised:
        def keep(step: StepInfo, latents: torch.Tensor) -> None:
            assert step.index == len(kept)
            kept.append(latents.clone())
            on_step(step, latents)

        return denoise(denoiser, text, seeds, keep, *others, **more)

    monkeypatch.setattr(LatentDenoiser, "denoise", recording)
    return kept


def load_theirs(pipeline_class: Any, folder: Path) -> Any:
    # Without a dtype transformers would load the text encoder in the one its file is in.
    theirs = pipeline_class.from_pretrained(folder, dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    return theirs


# (requests, noise [batch, channels, frames, height, width]) -> their latents after every step, in our shape, and their
# frames in [0, 1], [batch, frames, height, width, 3].
RunTheirs = Callable[[list[GenerationRequest], torch.Tensor], tuple[list[torch.Tensor], numpy.ndarray]]


def assert_equal_runs(
    ours: Pipeline,
    requests: list[GenerationRequest],
    kept: list[torch.Tensor],
    run_theirs: RunTheirs,
    *,
    latents_within: float = 1e-4,
    frames_within: float = 2 / 255,
    num_frames_before: int = 0,
) -> None:
    """num_frames_before: latent frames of reference images before those of the clip. kept: of record_latents.
    latents_within: of their length, after every step; frames_within: of each pixel."""
    resolved = [ours.resolve(request) for request in requests]
    first = resolved[0]
    assert first.height is not None
    assert first.width is not None
    assert first.num_frames is not None
    shape = ours.rules.sampling.geometry.latent_shape(first.height, first.width, first.num_frames)
    shape = (shape[0], shape[1] + num_frames_before, *shape[2:])
    noise = initial_noise(shape, [request.seed for request in requests])
    kept.clear()
    media = ours.generate(requests)
    expected_latents, expected_frames = run_theirs(resolved, noise)
    assert len(kept) == len(expected_latents) == first.num_inference_steps
    for found, expected in zip(kept, expected_latents, strict=True):
        assert found.shape == expected.shape
        assert (found - expected).norm() <= latents_within * expected.norm()
    # The steps did something: a comparison of noise with noise would pass too.
    assert (expected_latents[-1] - noise).abs().max() > 0.5
    for item, frames in zip(media, expected_frames, strict=True):
        assert item.frames.shape == frames.shape
        assert numpy.abs(item.frames / 255 - frames).max() <= frames_within
        assert frames.std() > 0.02
