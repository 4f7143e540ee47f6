"""RIFLEx: the frequency that is lowered, against its formula in float64, and which one it is for a model."""

from __future__ import annotations

import math

import torch
from tables import table

from diffusion_runtime.layers.riflex import TemporalFrequencies
from diffusion_runtime.layers.rope import position_rotations

CPU = torch.device("cpu")
# (channels, theta, latent frames that it was trained on, the authors' index): Wan 2.1, HunyuanVideo, CogVideoX.
PUBLISHED = [(44, 10000.0, 21, 6), (16, 256.0, 33, 4), (16, 10000.0, 13, 2)]


@table("channels, theta, trained, index", PUBLISHED)
def test_the_rule_gives_the_indices_that_the_authors_published(
    channels: int, theta: float, trained: int, index: int
) -> None:
    frequencies = TemporalFrequencies(channels, theta)
    assert frequencies.nearest(2 * trained) == index
    assert frequencies.intrinsic(trained) == index
    assert trained < frequencies.period(index) < 3 * trained


@table("channels, theta, index, frames", [(44, 10000.0, 6, 66), (16, 256.0, 4, 51), (24, 10000.0, 2, 29)])
def test_one_frequency_turns_through_nine_tenths_of_a_turn(
    channels: int, theta: float, index: int, frames: int
) -> None:
    split, axes = (channels, 4, 6), (range(frames), range(2), range(3))
    found = position_rotations(axes, split, CPU, theta, lowered_index=index).view(frames, 2, 3, -1)
    paces = theta ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    paces[index - 1] = 0.9 * 2 * math.pi / frames
    angles = torch.outer(torch.arange(frames, dtype=torch.float64), paces)
    expected = torch.polar(torch.ones_like(angles), angles)
    of_time = found[:, 1, 2, : channels // 2].to(torch.complex128)
    assert float((of_time - expected).abs().max()) < 1e-5
    # Of the other frequencies, and of the other axes, nothing changes.
    plain = position_rotations(axes, split, CPU, theta).view(found.shape)
    others = [each for each in range(found.shape[-1]) if each != index - 1]
    assert torch.equal(found[..., others], plain[..., others])
    assert not torch.allclose(found[..., index - 1], plain[..., index - 1], atol=0.1)


@table("channels, theta, index, frames", [(44, 10000.0, 6, 50), (16, 256.0, 4, 50), (24, 10000.0, 12, 29)])
def test_nothing_changes_within_the_period(channels: int, theta: float, index: int, frames: int) -> None:
    axes, split = (range(frames), range(2), range(2)), (channels, 4, 4)
    plain = position_rotations(axes, split, CPU, theta)
    assert torch.equal(position_rotations(axes, split, CPU, theta, lowered_index=index), plain)
