"""Rendered clips and their latents, kept on the device and replaced little by little, for a decoder that trains alone.

The encoder stays as it is, so a clip is rendered and encoded once and seen about four times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scripts.train_embedded.architecture import LATENT_CHANNELS
from scripts.train_embedded.clip_vae import WholeClipVae
from scripts.train_embedded.train_vae import clip_to_frames, training_clips
from scripts.train_embedded.vae_buckets import Bucket
from scripts.train_embedded.world import World

POOL_BATCHES = 32
"""Batches in the pool. Of 29 frames of 256 x 256 a clip takes 8.1 MB, and the pool 1.0 GB at batches of four."""
USES, REFRESHED_BATCHES = 4, 2
"""How often a clip is seen on average, and how many batches are replaced at once."""
REFRESH_EVERY = USES * REFRESHED_BATCHES
"""Steps of a bucket between two refreshes of its pool."""


@dataclass(frozen=True)
class DecoderBatch:
    """What one training step sees; tensors that stay where they are, so that a CUDA graph finds them."""

    frames: Tensor
    """[B, T, H, W, 3] uint8."""
    things: Tensor
    """[B, T, H, W] bool: where a thing is."""
    latents: Tensor
    """[B, 16, t, h, w] float32: means of the posterior, not normalised."""


def empty_batch(count: int, bucket: Bucket, device: str) -> DecoderBatch:
    """Return zeros for `count` clips of a bucket's shape."""
    place = (count, bucket.num_frames, bucket.size, bucket.size)
    grid = (1 + (bucket.num_frames - 1) // 4, bucket.size // 8, bucket.size // 8)
    return DecoderBatch(
        torch.zeros(*place, 3, dtype=torch.uint8, device=device),
        torch.zeros(*place, dtype=torch.bool, device=device),
        torch.zeros(count, LATENT_CHANNELS, *grid, device=device),
    )


class DecoderPool:
    """A ring of POOL_BATCHES batches of one bucket."""

    def __init__(self, bucket: Bucket, vae: WholeClipVae, world: World, device: str, seed: int) -> None:
        self._rendered = replace(bucket, batch=REFRESHED_BATCHES * bucket.batch)
        self._vae, self._world, self._device = vae, world, device
        self._renderer = world.renderer(device == "cuda")
        self._generator = torch.Generator(device).manual_seed(seed)
        self.held = empty_batch(POOL_BATCHES * bucket.batch, bucket, device)
        self._next, self._draws = 0, 0

    def fill(self) -> None:
        """Replace every clip."""
        for _ in range(POOL_BATCHES // REFRESHED_BATCHES):
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Render and encode new clips over the oldest."""
        clip, covered = training_clips(self._rendered, self._generator, self._renderer, self._world)
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._device == "cuda"):
            latents, _ = self._vae.encode(clip)
        rows = slice(self._next, self._next + len(clip))
        self.held.frames[rows] = clip_to_frames(clip)
        self.held.things[rows] = covered > 0.5
        self.held.latents[rows] = latents.float()
        self._next = (self._next + len(clip)) % len(self.held.frames)

    @torch.no_grad()
    def draw(self, into: DecoderBatch) -> None:
        """Write a random batch into these tensors; every REFRESH_EVERY draws the pool is refreshed first."""
        if self._draws and self._draws % REFRESH_EVERY == 0:
            self.refresh()
        self._draws += 1
        rows = torch.randint(len(self.held.frames), (len(into.frames),), generator=self._generator, device=self._device)
        torch.index_select(self.held.frames, 0, rows, out=into.frames)
        torch.index_select(self.held.things, 0, rows, out=into.things)
        torch.index_select(self.held.latents, 0, rows, out=into.latents)
