"""Encoded clips with their captions, kept on the device and replaced little by little while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from scripts.train_embedded.object_labels import (
    TOUCHED,
    latent_frames,
    object_map,
    scene_labels,
    token_labels,
)
from scripts.train_embedded.world import CAPTION_TOKENS, SHAPES, World
from scripts.train_embedded.world_parts import Renderer

CAPTIONS_PER_CLIP = 4

Encoder = Callable[[Tensor], Tensor]
"""clip [B, 3, T, H, W] in -1 to 1 -> normalised latents [B, 16, t, h, w]."""


@dataclass(frozen=True)
class TrainingBatch:
    """What one training step sees."""

    latents: Tensor
    """[B, 16, t, h, w], normalised, the pool's dtype."""
    foreground: Tensor
    """[B, 1, t, h, w] uint8: where an object is, one latent pixel around it included."""
    token_ids: Tensor
    """[B, CAPTION_TOKENS] int64, 0 past the end."""
    token_labels: Tensor
    """[B, CAPTION_TOKENS, n] int16: what the words say of the object that they are about."""
    cells: Tensor
    """[B, t, h / 2, w / 2] uint8: which object is at each token of the transformer."""
    slots: Tensor
    """[B, 2, n] int16: the attributes of those objects."""


class LatentPool:
    """A ring of `capacity` encoded clips of one shape."""

    def __init__(
        self,
        capacity: int,
        num_frames: int,
        size: int,
        *,
        encode: Encoder,
        renderer: Renderer,
        tokenizer: PreTrainedTokenizerFast,
        seed: int,
        device: str,
        two_object_fraction: float,
        world: World = SHAPES,
    ) -> None:
        self.capacity, self.num_frames, self.size = capacity, num_frames, size
        self._encode, self._renderer, self._tokenizer = encode, renderer, tokenizer
        self._random, self._generator = Random(seed), torch.Generator(device).manual_seed(seed)
        self._world, self._two_object_fraction = world, two_object_fraction
        grid = (1 + (num_frames - 1) // 4, size // 8, size // 8)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._latents = torch.zeros(capacity, 16, *grid, dtype=dtype, device=device)
        self._foreground = torch.zeros(capacity, 1, *grid, dtype=torch.uint8, device=device)
        self._token_ids = torch.zeros(capacity, CAPTIONS_PER_CLIP, CAPTION_TOKENS, dtype=torch.int64, device=device)
        self._token_labels = torch.zeros(
            capacity, CAPTIONS_PER_CLIP, CAPTION_TOKENS, len(world.vocabulary), dtype=torch.int16, device=device
        )
        self._cells = torch.zeros(capacity, grid[0], size // 16, size // 16, dtype=torch.uint8, device=device)
        self._slots = torch.zeros(capacity, 2, len(world.vocabulary), dtype=torch.int16, device=device)
        self._filled, self._next = 0, 0

    @torch.no_grad()
    def refresh(self, count: int) -> None:
        """Render, caption and encode `count` new clips over the oldest."""
        scenes = self._world.sample(count, self._generator, self._two_object_fraction)
        # Read before rendering: this waits for the device, which then renders while the captions are written.
        described = scenes.attributes()
        frames, covered = self._renderer(scenes, self.num_frames, self.size)
        latents = self._encode(frames.permute(0, 4, 1, 2, 3) * 2 - 1)
        rows = (torch.arange(self._next, self._next + count) % self.capacity).to(latents.device)
        self._latents[rows] = latents.to(self._latents.dtype)
        self._foreground[rows] = latent_foreground(covered.amax(dim=1))
        self._cells[rows] = object_map(covered)
        self._slots[rows] = scene_labels(scenes, image=self.num_frames == 1, attributes=tuple(self._world.vocabulary))
        token_ids, labels = self._captions(described)
        self._token_ids[rows] = token_ids.to(latents.device)
        self._token_labels[rows] = labels.to(latents.device)
        self._next = (self._next + count) % self.capacity
        self._filled = min(self.capacity, self._filled + count)

    def _captions(self, described: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Token ids [count, CAPTIONS_PER_CLIP, CAPTION_TOKENS] and their labels, with n more at the end."""
        image = self.num_frames == 1
        captions = [
            self._world.write_caption(scene, self._random, image)
            for scene in described
            for _ in range(CAPTIONS_PER_CLIP)
        ]
        encoded = self._tokenizer(
            [caption.text for caption in captions],
            padding="max_length",
            max_length=CAPTION_TOKENS,
            truncation=True,
            return_offsets_mapping=True,
        )
        shape = (len(described), CAPTIONS_PER_CLIP, CAPTION_TOKENS)
        labels = token_labels(captions, encoded, self._world.vocabulary)
        return torch.tensor(encoded["input_ids"]).view(shape), labels.view(*shape, -1)

    def draw(self, batch: int, generator: torch.Generator) -> TrainingBatch:
        """A random batch, one of each clip's captions."""
        device = generator.device
        rows = torch.randint(self._filled, (batch,), generator=generator, device=device)
        caption = torch.randint(CAPTIONS_PER_CLIP, (batch,), generator=generator, device=device)
        return TrainingBatch(
            self._latents[rows],
            self._foreground[rows],
            self._token_ids[rows, caption],
            self._token_labels[rows, caption],
            self._cells[rows],
            self._slots[rows],
        )


def latent_foreground(covered: Tensor) -> Tensor:
    """Pixel coverage [B, T, H, W] to latent resolution [B, 1, t, H / 8, W / 8] uint8, one latent pixel wider."""
    cells = latent_frames(F.max_pool2d(covered, 8))
    return (F.max_pool2d(cells, 3, stride=1, padding=1) > TOUCHED).to(torch.uint8)[:, None]
