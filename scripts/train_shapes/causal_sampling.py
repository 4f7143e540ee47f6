"""Samples streams chunk by chunk with a key-value cache, many at once: for measuring a model while it is trained.

The package's own streaming is what users run; this loop shares no code with it, and computes the same: J denoising
passes per chunk whose keys are thrown away, then one pass at timestep 0 whose keys stay.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from scripts.train_shapes.architecture import LATENT_CHANNELS, MAX_PROMPT_TOKENS, embed_prompts
from scripts.train_shapes.causal_forward import FrameInputs, causal_forward
from scripts.train_shapes.export import build_scheduler


@dataclass(frozen=True)
class StreamSampling:
    """How streams are sampled. span, sink: latent frames in sight, as in ChunkMask."""

    size: int = 128
    chunk: int = 2
    span: int | None = 6
    sink: int = 2
    first_steps: int = 12
    steps: int = 4
    first_guidance: float = 2.0
    guidance: float = 1.0
    first_shift: float = 20.0
    shift: float = 5.0
    commits: bool = True
    """False keeps the keys of the last denoising pass: a control that must fail."""

    def __str__(self) -> str:
        return (
            f"{self.size} c{self.chunk} W{self.span} S{self.sink} J{self.first_steps}/{self.steps} "
            f"g{self.first_guidance:g}/{self.guidance:g}"
        )


@dataclass
class KeyCache:
    """Keys and values [rows, heads, tokens, head_dim] by (layer, latent frame); `committing` keeps those of a pass."""

    num_tokens: int
    held: dict[int, dict[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    visible: tuple[int, ...] = ()
    keep: range | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention over the visible frames and the chunk itself."""
        of_layer = self.held.setdefault(layer, {})
        if self.keep is not None:
            for index, frame in enumerate(self.keep):
                own = slice(index * self.num_tokens, (index + 1) * self.num_tokens)
                of_layer[frame] = (k[:, :, own], v[:, :, own])
        past = [of_layer[frame] for frame in self.visible]
        keys = torch.cat([*(each for each, _ in past), k], dim=2)
        values = torch.cat([*(each for _, each in past), v], dim=2)
        return F.scaled_dot_product_attention(q, keys, values)

    def forget(self, kept: Sequence[int]) -> None:
        """Drop all frames but these."""
        for of_layer in self.held.values():
            for frame in set(of_layer) - set(kept):
                del of_layer[frame]


def visible_frames(first: int, count: int, span: int | None, sink: int) -> tuple[int, ...]:
    """The frames before `first` that a chunk of `count` frames sees."""
    oldest = 0 if span is None else max(sink, first + count - (span - sink))
    return (*range(min(sink, first)), *range(max(oldest, min(sink, first)), first))


class StreamSampler:
    """Prompts and seeds to normalised latents of streams."""

    def __init__(
        self,
        transformer: WanTransformer3DModel,
        text_encoder: UMT5EncoderModel,
        tokenizer: PreTrainedTokenizerFast,
        device: str,
    ) -> None:
        self._transformer, self._text_encoder, self._tokenizer = transformer, text_encoder, tokenizer
        self._device = device

    def _embed(self, prompts: Sequence[str]) -> Tensor:
        encoded = self._tokenizer(
            list(prompts), padding="max_length", max_length=MAX_PROMPT_TOKENS, truncation=True, return_tensors="pt"
        )
        return embed_prompts(self._text_encoder, encoded["input_ids"].to(self._device), MAX_PROMPT_TOKENS)

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[str]], seeds: Sequence[int], sampling: StreamSampling) -> Tensor:
        """[B, 16, chunks * chunk, h, w] float32. prompts: per stream, one per chunk; all of one length."""
        count, num_chunks, side = len(prompts), len(prompts[0]), sampling.size // 8
        guided, always = sampling.first_guidance > 1, sampling.guidance > 1
        cache = KeyCache((side // 2) ** 2)
        empty = self._embed([""] * count)
        made = []
        for index in range(num_chunks):
            first = index * sampling.chunk
            said = self._embed([each[index] for each in prompts])
            with_guidance = always or (index == 0 and guided)
            text = torch.cat([said, empty]) if with_guidance else said
            cache.visible = visible_frames(first, sampling.chunk, sampling.span, sampling.sink)
            shift, steps, guidance = (
                (sampling.first_shift, sampling.first_steps, sampling.first_guidance)
                if index == 0
                else (sampling.shift, sampling.steps, sampling.guidance)
            )
            latents = self._noise(seeds, index, (LATENT_CHANNELS, sampling.chunk, side, side))
            scheduler = copy.deepcopy(build_scheduler("unipc", shift))
            scheduler.set_timesteps(steps, device=self._device)
            scheduler.set_begin_index(0)
            cache.keep = None
            for step, timestep in enumerate(scheduler.timesteps):
                if not sampling.commits and step == steps - 1:
                    cache.keep = range(first, first + sampling.chunk)
                inputs = torch.cat([latents, latents]) if with_guidance else latents
                velocity = self._predict(inputs, float(timestep), first, text, cache)
                if with_guidance:
                    wanted, without = velocity.chunk(2)
                    velocity = without + guidance * (wanted - without)
                latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
            if sampling.commits:
                cache.keep = range(first, first + sampling.chunk)
                rows = torch.cat([latents, latents]) if always else latents
                self._predict(rows, 0.0, first, text[: len(rows)], cache)
            following = first + sampling.chunk
            cache.forget(visible_frames(following, sampling.chunk, sampling.span, sampling.sink))
            made.append(latents)
        return torch.cat(made, dim=2)

    def _predict(self, latents: Tensor, timestep: float, first: int, text: Tensor, cache: KeyCache) -> Tensor:
        count, num_frames = latents.shape[0], latents.shape[2]
        frames = FrameInputs(
            torch.full((count, num_frames), timestep, device=self._device),
            torch.arange(first, first + num_frames, device=self._device),
            torch.zeros(count, num_frames, dtype=torch.int64, device=self._device),
        )
        return causal_forward(self._transformer, latents, frames, text[:, None], attend=cache.attend).float()

    def _noise(self, seeds: Sequence[int], chunk: int, shape: tuple[int, ...]) -> Tensor:
        drawn = [
            torch.randn(1, *shape, generator=torch.Generator().manual_seed(1_000_003 * (seed + 1) + chunk))
            for seed in seeds
        ]
        return torch.cat(drawn).to(self._device)
