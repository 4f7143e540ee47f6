"""Resampling of sound by windowed sinc interpolation (Smith, "Digital Audio Resampling"), as torchaudio's default."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

# Zero crossings of the sinc on each side, and the part of the lower rate's band that is kept.
_NUM_CROSSINGS, _ROLLOFF = 6, 0.99


def resampled(samples: torch.Tensor, rate: int, new_rate: int) -> torch.Tensor:
    """Return float32 [channels, number] at another rate. samples: float32 [channels, number]."""
    if rate == new_rate:
        return samples
    common = math.gcd(rate, new_rate)
    step, num_phases = rate // common, new_rate // common
    cutoff = min(step, num_phases) * _ROLLOFF
    width = math.ceil(_NUM_CROSSINGS * step / cutoff)
    # One filter for each place of a new sample between two old ones.
    taps = torch.arange(-width, width + step, dtype=torch.float64) / step
    # In float32 as there: at 44,100 to 32,000 a second that is 4e-5 of the samples.
    phases = torch.arange(num_phases) / num_phases
    times = ((taps - phases[:, None]) * cutoff).clamp(-_NUM_CROSSINGS, _NUM_CROSSINGS)
    window = torch.cos(times * math.pi / _NUM_CROSSINGS / 2) ** 2
    filters = (torch.sinc(times) * window * (cutoff / step)).float()
    padded = F.pad(samples, (width, width + step))
    made = F.conv1d(padded[:, None], filters[:, None], stride=step)
    count = math.ceil(num_phases * samples.shape[1] / step)
    return made.transpose(1, 2).flatten(1)[:, :count]
