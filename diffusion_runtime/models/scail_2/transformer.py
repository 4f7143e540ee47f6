"""The SCAIL-2 transformer on our attention layers, for inference.

    latents, mask of known frames -> tokens of the clip ---+
    driving video at half the size, its mask -> tokens ----+-> Wan's blocks, full attention -> velocity of the clip
    images, their masks -> tokens -------------------------+

All tokens are at one timestep. Images are before the clip in time; in place of characters of the video they are at its
beginning, 120 rows below. The driving video is at the clip's times, 120 columns to the right, and each of its tokens
has the mean rotation of the four tokens that it covers, which shortens it. Frames that are known stay as they are. The
tokens behind the clip's are text to attention layers: attended to by all, and whole on every process. Shapes as in
wan/transformer.py.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import Streams
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.token_layout import Extent, TokenLayout
from diffusion_runtime.layers.embeddings import PatchEmbedding
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.rope import position_rotations, split_head_dim
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.scail_2.config import Scail2Config
from diffusion_runtime.models.wan.transformer import WanTransformer

# Rows and columns between what is in one place and what is beside it.
SHIFT = 120


class Scail2Transformer(WanTransformer):
    """The whole denoiser.

    inputs.image.latents: [B, mask channels + channels, frames, height, width], known frames behind a mask of them.
    inputs.image.further: the driving video, of half the height and width, and the images, a frame each and the first
    one last; both are latents before those of their masks.
    """

    config: Scail2Config

    def __init__(self, config: Scail2Config, geometry: LatentGeometry, policy: AttentionPolicy) -> None:
        super().__init__(config, geometry, policy)
        self.driving_embedding = PatchEmbedding(config.in_channels, config.dim, config.patch)
        self.mask_embedding = PatchEmbedding(config.mask_channels, config.dim, config.patch)

    def patches(self, latents: torch.Tensor, context: AttentionContext) -> tuple[torch.Tensor, tuple[int, int, int]]:
        tokens, grid = super().patches(latents, context)
        # The clip's own mask is empty.
        empty = latents.new_zeros(1, self.config.mask_channels, *self.config.patch)
        return tokens + self.mask_embedding(empty), grid

    def streams(self, x: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext) -> Streams:
        given = cached_for_prompt("given tokens", inputs.image, context, lambda: self._given(inputs))
        return (torch.cat([x, given], dim=1),)

    def layout_of(self, grid: Extent, inputs: DenoiserInputs, context: AttentionContext) -> TokenLayout:
        num_given = sum(math.prod(self.geometry.grid(each.shape)) for each in _further(inputs))
        plain = super().layout_of(grid, inputs, context)
        return dataclasses.replace(plain, num_suffix_tokens=num_given, num_given_tokens=num_given)

    def _given(self, inputs: DenoiserInputs) -> torch.Tensor:
        """Return the tokens of the driving video and of the images, [B, tokens, D]."""
        tokens = []
        for embedding, each in zip((self.driving_embedding, self.patch_embedding), _further(inputs), strict=True):
            numbers = each.to(self.out.weight.dtype)
            latents, mask = numbers.tensor_split([self.config.num_channels], dim=1)
            known = torch.ones_like(latents[:, : self.config.condition_channels])
            tokens.append(embedding(torch.cat([latents, known], dim=1)) + self.mask_embedding(mask))
        return torch.cat(tokens, dim=1)

    def _with_image(self, latents: torch.Tensor, image: ImageCondition | None) -> torch.Tensor:
        """Return latents with the known frames in them, before the mask of these."""
        assert image is not None, "the condition is made of every request"
        own = image.latents.to(latents.device, latents.dtype)
        mask, known = own.tensor_split([self.config.condition_channels], dim=1)
        return torch.cat([torch.where(mask[:, :1] > 0, known, latents), mask], dim=1)

    def settle(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        return self._with_image(latents, inputs.image)[:, : self.config.num_channels]

    def _rotations(self, grid: Extent, inputs: DenoiserInputs, context: AttentionContext) -> torch.Tensor:
        num_images, replaces = _further(inputs)[1].shape[2], inputs.request.character_mode == "replace"
        device = self.out.weight.device

        def turned(*axes: range) -> torch.Tensor:
            return position_rotations(axes, split_head_dim(self.config.head_dim), device)

        def compute() -> torch.Tensor:
            frames, height, width = grid
            # The first image is the last of them; a character of the video is replaced at its own times.
            start = num_images - replaces
            times, rows = range(start, start + frames), range(height)
            of_clip = context.sharding.shard(turned(times, rows, range(width)), 0)
            beside = turned(times, rows, range(SHIFT, SHIFT + width)).view(frames, height // 2, 2, width // 2, 2, -1)
            row = SHIFT if replaces else 0
            images = turned(range(num_images), range(row, row + height), range(width))
            return torch.cat([of_clip, beside.mean(dim=(2, 4)).flatten(0, 2), images])

        return cached_for_request("rotations", (grid, num_images, replaces), context, compute)


def _further(inputs: DenoiserInputs) -> tuple[torch.Tensor, ...]:
    assert inputs.image is not None, "the condition is made of every request"
    return inputs.image.further
