"""Batched sampling with diffusers' schedulers: what WanPipeline computes, for many prompts at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from scripts.train_embedded.architecture import LATENT_CHANNELS, MAX_PROMPT_TOKENS, embed_prompts
from scripts.train_embedded.export import SamplerScheduler


@dataclass(frozen=True)
class SamplerSettings:
    """One way to sample: compared in the sweep, and one of them becomes the default."""

    num_steps: int
    guidance: float
    """1 means without guidance: one forward a step instead of two."""
    num_frames: int = 29
    size: int = 256
    prompt_tokens: int = MAX_PROMPT_TOKENS
    guidance_stop: float = 1.0
    """Share of the steps before which there is guidance, as in the request field of this name."""


class Sampler:
    """Prompts and seeds to normalised latents."""

    def __init__(
        self,
        transformer: WanTransformer3DModel,
        text_encoder: UMT5EncoderModel,
        tokenizer: PreTrainedTokenizerFast,
        device: str,
    ) -> None:
        self._transformer, self._text_encoder, self._tokenizer = transformer, text_encoder, tokenizer
        self._device = device

    def embed(self, prompts: Sequence[str], length: int) -> Tensor:
        """[B, length, 128]."""
        encoded = self._tokenizer(
            list(prompts), padding="max_length", max_length=MAX_PROMPT_TOKENS, truncation=True, return_tensors="pt"
        )
        return embed_prompts(self._text_encoder, encoded["input_ids"].to(self._device), length)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[str], seeds: Sequence[int], scheduler: SamplerScheduler, settings: SamplerSettings
    ) -> Tensor:
        """[B, 16, t, h, w] float32; noise is drawn on the CPU, one generator a seed, as the runtime does."""
        grid = (1 + (settings.num_frames - 1) // 4, settings.size // 8, settings.size // 8)
        noise = [
            torch.randn(1, LATENT_CHANNELS, *grid, generator=torch.Generator().manual_seed(seed)) for seed in seeds
        ]
        latents = torch.cat(noise).to(self._device)
        text = self.embed(prompts, settings.prompt_tokens)
        both = text
        if settings.guidance > 1:
            both = torch.cat([text, self.embed([""] * len(prompts), settings.prompt_tokens)])
        scheduler = copy.deepcopy(scheduler)
        scheduler.set_timesteps(settings.num_steps, device=self._device)
        scheduler.set_begin_index(0)
        for index, timestep in enumerate(scheduler.timesteps):
            guided = settings.guidance > 1 and index / settings.num_steps < settings.guidance_stop
            inputs, read = (torch.cat([latents, latents]), both) if guided else (latents, text)
            velocity = self._transformer(inputs, timestep.expand(len(inputs)), read, return_dict=False)[0].float()
            if guided:
                said, empty = velocity.chunk(2)
                velocity = empty + settings.guidance * (said - empty)
            latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        return latents
