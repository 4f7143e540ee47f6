"""Encoded clips with their captions, kept on the device and replaced little by little while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diffusion_runtime.quality.shapes.captions import write_caption
from diffusion_runtime.quality.shapes.scene import SceneBatch, SceneSettings, sample_scenes

CAPTION_TOKENS = 40
"""Every caption fits; embeddings are zero-padded to the model's own length later."""
CAPTIONS_PER_CLIP = 4

Renderer = Callable[[SceneBatch, int, int], tuple[Tensor, Tensor]]
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
    ) -> None:
        self.capacity, self.num_frames, self.size = capacity, num_frames, size
        self._encode, self._renderer, self._tokenizer = encode, renderer, tokenizer
        self._random, self._generator = Random(seed), torch.Generator(device).manual_seed(seed)
        self._settings = SceneSettings(two_object_fraction=two_object_fraction)
        grid = (1 + (num_frames - 1) // 4, size // 8, size // 8)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._latents = torch.zeros(capacity, 16, *grid, dtype=dtype, device=device)
        self._foreground = torch.zeros(capacity, 1, *grid, dtype=torch.uint8, device=device)
        self._token_ids = torch.zeros(capacity, CAPTIONS_PER_CLIP, CAPTION_TOKENS, dtype=torch.int64, device=device)
        self._filled, self._next = 0, 0

    @torch.no_grad()
    def refresh(self, count: int) -> None:
        """Render, caption and encode `count` new clips over the oldest."""
        scenes = sample_scenes(count, self._generator, self._settings)
        frames, covered = self._renderer(scenes, self.num_frames, self.size)
        latents = self._encode(frames.permute(0, 4, 1, 2, 3) * 2 - 1)
        rows = (torch.arange(self._next, self._next + count) % self.capacity).to(latents.device)
        self._latents[rows] = latents.to(self._latents.dtype)
        self._foreground[rows] = latent_foreground(covered)
        self._token_ids[rows] = self._captions(scenes).to(latents.device)
        self._next = (self._next + count) % self.capacity
        self._filled = min(self.capacity, self._filled + count)

    def _captions(self, scenes: SceneBatch) -> Tensor:
        image = self.num_frames == 1
        texts = [
            write_caption(scene, self._random, image=image).text
            for scene in scenes.attributes()
            for _ in range(CAPTIONS_PER_CLIP)
        ]
        encoded = self._tokenizer(texts, padding="max_length", max_length=CAPTION_TOKENS, truncation=True)
        return torch.tensor(encoded["input_ids"]).view(len(scenes), CAPTIONS_PER_CLIP, CAPTION_TOKENS)

    def draw(self, batch: int, generator: torch.Generator) -> TrainingBatch:
        """A random batch, one of each clip's captions."""
        device = generator.device
        rows = torch.randint(self._filled, (batch,), generator=generator, device=device)
        caption = torch.randint(CAPTIONS_PER_CLIP, (batch,), generator=generator, device=device)
        return TrainingBatch(self._latents[rows], self._foreground[rows], self._token_ids[rows, caption])


def latent_foreground(covered: Tensor) -> Tensor:
    """Pixel coverage [B, T, H, W] to latent resolution [B, 1, t, H / 8, W / 8] uint8, one latent pixel wider."""
    cells = F.max_pool2d(covered, 8)
    first, rest = cells[:, :1], cells[:, 1:]
    if rest.shape[1]:
        first = torch.cat([first, rest.unflatten(1, (-1, 4)).amax(dim=2)], dim=1)
    return (F.max_pool2d(first, 3, stride=1, padding=1) > 0.02).to(torch.uint8)[:, None]
