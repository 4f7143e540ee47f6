"""RIFLEx (Zhao et al., arXiv:2502.15894): clips longer than a model was trained on, by one slower rotary frequency.

A model repeats a clip after the period of one frequency of its positions in time, the intrinsic one. It is lowered so
that the whole clip lies within 90 % of its period, as in the authors' code; the others stay:

    pace_k = 0.9 * 2 * pi / L      of L latent frames, where L is more than the period 2 * pi / pace_k

Frequencies are counted from 1, the quickest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from diffusion_runtime.request.generation_request import GenerationRequest

# Share of the period within which the clip is to lie.
SHARE = 0.9
# The authors' indices, by (channels, theta): of Wan 2.1 and of HunyuanVideo.
_PUBLISHED = {(44, 10000.0): 6, (16, 256.0): 4}


@dataclass(frozen=True)
class TemporalFrequencies:
    """Rotary frequencies of the positions in time. num_channels: of a head that carry them, two for each frequency;
    theta: frequency k, from 1, turns by theta ** (-2 (k - 1) / num_channels) a latent frame."""

    num_channels: int
    theta: float

    def __len__(self) -> int:
        return self.num_channels // 2

    def period(self, index: int) -> float:
        """Return the latent frames of a whole turn of frequency `index`, counted from 1."""
        return float(2 * math.pi * self.theta ** (2 * (index - 1) / self.num_channels))

    def intrinsic(self, num_trained: int) -> int:
        """Return the index of the intrinsic frequency. num_trained: latent frames that the model was trained on.

        Where its authors have not published it, it is the one whose period is nearest to twice the trained length, as a
        ratio: RIFLEx's authors look for it there, and the rule gives all indices that they published.
        """
        published = _PUBLISHED.get((self.num_channels, self.theta))
        return self.nearest(2 * num_trained) if published is None else published

    def nearest(self, length: float) -> int:
        """Return the index of the frequency whose period is nearest to a number of latent frames, as a ratio."""
        return min(range(1, len(self) + 1), key=lambda index: abs(math.log(self.period(index) / length)))


def lowered_index(request: GenerationRequest) -> int | None:
    """Return the index of the frequency that a resolved request lowers; None without RIFLEx."""
    return request.riflex_index if request.riflex == "on" else None


def lowered(paces: torch.Tensor, index: int | None, num_frames: int) -> torch.Tensor:
    """Return paces [frequencies], radians a latent frame, float64, with that of `index` lowered for a clip of
    num_frames latent frames; unchanged for None, and for a clip within its period."""
    if index is None or num_frames * float(paces[index - 1]) <= 2 * math.pi:
        return paces
    changed = paces.clone()
    changed[index - 1] = SHARE * 2 * math.pi / num_frames
    return changed
