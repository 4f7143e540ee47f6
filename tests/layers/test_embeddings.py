"""Patches, timesteps and text against diffusers' own layers."""

from __future__ import annotations

import torch
from diffusers.models.embeddings import get_timestep_embedding
from tables import table
from torch import nn

from diffusion_runtime.layers.embeddings import PatchEmbedding, patchify, timestep_waves, unpatchify
from diffusion_runtime.layers.linear import FeedForward

PATCHES = [(1, 2, 2), (1, 1, 1), (2, 1, 3)]


@table("patch", PATCHES)
def test_patch_embedding_is_a_convolution_whose_stride_is_its_kernel(patch: tuple[int, int, int]) -> None:
    latents = torch.randn(2, 4, 4, 6, 6)
    convolution = nn.Conv3d(4, 10, patch, patch).requires_grad_(False)
    embedding = PatchEmbedding(4, 10, patch).requires_grad_(False)
    embedding.projection.weight.copy_(convolution.weight.flatten(1))
    assert convolution.bias is not None
    embedding.projection.bias.copy_(convolution.bias)
    torch.testing.assert_close(embedding(latents), convolution(latents).flatten(2).transpose(1, 2))


@table("patch", PATCHES)
def test_unpatchify_undoes_patchify(patch: tuple[int, int, int]) -> None:
    latents = torch.randn(2, 4, 4, 6, 6)
    grid = (4 // patch[0], 6 // patch[1], 6 // patch[2])
    tokens = patchify(latents, patch)
    channels_last = tokens.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2)
    assert torch.equal(unpatchify(channels_last, grid, patch), latents)


def test_timestep_waves_equal_diffusers() -> None:
    timestep = torch.tensor([0.0, 0.5, 423.7, 1000.0])
    expected = get_timestep_embedding(timestep, 32, flip_sin_to_cos=True, downscale_freq_shift=0)
    assert torch.equal(timestep_waves(timestep, 32), expected)
    assert torch.equal(timestep_waves(timestep.long(), 32)[3], expected[3])


def test_feed_forward_has_the_tanh_form_of_gelu() -> None:
    layer = FeedForward(8, 32, 12).requires_grad_(False)
    x = torch.randn(3, 8)
    hidden = nn.functional.gelu(nn.functional.linear(x, layer.up.weight, layer.up.bias), approximate="tanh")
    expected = nn.functional.linear(hidden, layer.down.weight, layer.down.bias)
    torch.testing.assert_close(layer(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)
