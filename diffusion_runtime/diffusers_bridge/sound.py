"""Reads the audio of a diffusers pipeline's result."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from diffusion_runtime.media.audio import Audio


def sound_of(result: Any, pipeline: Any) -> tuple[Audio | None, list[str]]:
    """The sound of the first sample, None when there is none or it cannot be written, and remarks about that.

    Pipelines return samples alone; the sample rate is known where a vocoder has one.
    """
    audio = getattr(result, "audio", None)
    if audio is None:
        return None, []
    vocoder = getattr(pipeline, "vocoder", None)
    sample_rate = None if vocoder is None else vocoder.config.get("output_sampling_rate")
    samples = audio.detach().float().cpu().numpy() if isinstance(audio, torch.Tensor) else numpy.asarray(audio)
    if samples.ndim == 3:
        samples = samples[0]
    if type(sample_rate) is not int or samples.ndim != 2:
        return None, ["the pipeline made sound as well, which is not written: its sample rate is unknown"]
    return Audio(numpy.ascontiguousarray(samples.astype(numpy.float32).clip(-1.0, 1.0)), sample_rate), []
