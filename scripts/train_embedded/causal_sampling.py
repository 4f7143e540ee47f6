"""Samples streams chunk by chunk with a key-value cache, many at once: for measuring a model while it is trained.

The package's own streaming is what users run; this loop shares no code with it, and computes the same: J denoising
passes per chunk whose keys are thrown away, then one pass at timestep 0 whose keys stay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from scripts.train_embedded.architecture import LATENT_CHANNELS, MAX_PROMPT_TOKENS, embed_prompts
from scripts.train_embedded.causal_forward import FrameInputs, causal_forward
from scripts.train_embedded.export import SamplerScheduler, build_scheduler

_COMMIT_DRAWS = 500_000
"""The noise of commits, behind that of any chunk."""
_STEP_DRAWS = 10_000
"""And that of steps, from one step's to the next one's: 200 s of latent frames, two per chunk, are 300 chunks."""


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
    first_sampler: str = "dmd"
    """`dmd` estimates the data and adds fresh noise at every step, `unipc` does not."""
    sampler: str = "unipc"
    guides_new_prompts: bool = True
    """Whether the first chunk of a new prompt is guided, as the video's first chunk is."""
    commits: bool = True
    """False keeps the keys of the last denoising pass: a control that must fail."""
    kv_cache_dtype: str = "auto"
    """`fp8_e4m3` keeps committed keys and values in 8 bits."""
    commit_noise: float = 0.0
    """Noise level, 0 to 1, of what is committed; the pass is at 1000 times that timestep. 0.5 is a control."""
    position_offset: int = 0
    """Latent frames by which the positions of committed keys are off: a control that must fail."""

    def __str__(self) -> str:
        changed = (
            "" if self.guides_new_prompts else " no guidance of new prompts",
            "" if self.commits else " no commit",
            "" if self.kv_cache_dtype == "auto" else f" {self.kv_cache_dtype}",
            f" commit noise {self.commit_noise:g}" if self.commit_noise else "",
            f" positions off by {self.position_offset}" if self.position_offset else "",
        )
        return (
            f"{self.size} c{self.chunk} W{self.span} S{self.sink} J{self.first_steps}/{self.steps} "
            f"{self.first_sampler}/{self.sampler} "
            f"g{self.first_guidance:g}/{self.guidance:g}{''.join(changed)}"
        )


class Fp8Codes:
    """float8_e4m3fn codes of tensors [rows, heads, tokens, head_dim]: x = code * scale + mean, where scale, per row and
    head, and mean, per row, head and place (of keys alone), are those of the first tensor. Larger ones saturate."""

    def __init__(self, first: Tensor, *, centred: bool) -> None:
        wide = first.float()
        self._mean = wide.mean(dim=2, keepdim=True) if centred else torch.zeros_like(wide[:, :, :1])
        largest = (wide - self._mean).abs().amax(dim=(2, 3), keepdim=True)
        self._scale = (1.25 * largest / 448).clamp_min(torch.finfo(torch.float32).tiny)

    def encode(self, x: Tensor) -> Tensor:
        """The codes of x."""
        return ((x.float() - self._mean) / self._scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    def decode(self, codes: Tensor) -> Tensor:
        """float32 numbers of codes."""
        return codes.float() * self._scale + self._mean


@dataclass
class KeyCache:
    """Keys and values [rows, heads, tokens, head_dim] by (layer, latent frame).

    visible: the past frames of the next pass. keep: the frames of it, where its keys are to stay; rows: how many of
    its rows, None for all. in_fp8: what stays is kept in 8 bits; a pass's own keys are as they were computed.
    """

    num_tokens: int
    held: dict[int, dict[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    visible: tuple[int, ...] = ()
    keep: range | None = None
    rows: int | None = None
    in_fp8: bool = False
    codes: dict[int, tuple[Fp8Codes, Fp8Codes]] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention over the visible frames and the chunk itself."""
        of_layer = self.held.setdefault(layer, {})
        if self.keep is not None:
            kept = self._stored(layer, k[: self.rows], v[: self.rows])
            for index, frame in enumerate(self.keep):
                own = slice(index * self.num_tokens, (index + 1) * self.num_tokens)
                of_layer[frame] = (kept[0][:, :, own], kept[1][:, :, own])
        past = [self._read(layer, of_layer[frame], k.dtype) for frame in self.visible]
        keys = torch.cat([*(each for each, _ in past), k], dim=2)
        values = torch.cat([*(each for _, each in past), v], dim=2)
        return F.scaled_dot_product_attention(q, keys, values)

    def _stored(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not self.in_fp8:
            return k, v
        if layer not in self.codes:
            self.codes[layer] = Fp8Codes(k, centred=True), Fp8Codes(v, centred=False)
        of_keys, of_values = self.codes[layer]
        return of_keys.encode(k), of_values.encode(v)

    def _read(self, layer: int, held: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if not self.in_fp8:
            return held
        of_keys, of_values = self.codes[layer]
        return of_keys.decode(held[0]).to(dtype), of_values.decode(held[1]).to(dtype)

    def forget(self, kept: Sequence[int]) -> None:
        """Drop all frames but these."""
        for of_layer in self.held.values():
            for frame in set(of_layer) - set(kept):
                del of_layer[frame]


def visible_frames(first: int, count: int, span: int | None, sink: int) -> tuple[int, ...]:
    """The frames before `first` that a chunk of `count` frames sees."""
    oldest = 0 if span is None else max(sink, first + count - (span - sink))
    return (*range(min(sink, first)), *range(max(oldest, min(sink, first)), first))


class Renoising:
    """Noise levels s t / (1 + (s - 1) t) of linear t, and a step from one to the next: the data that a velocity says,
    with fresh noise."""

    def __init__(self, shift: float, steps: int, device: str) -> None:
        linear = torch.linspace(1.0, 0.0, steps + 1, device=device)
        self._levels = shift * linear / (1 + (shift - 1) * linear)

    @property
    def timesteps(self) -> Tensor:
        return 1000 * self._levels[:-1]

    def step(self, velocity: Tensor, index: int, latents: Tensor, fresh: Tensor) -> Tensor:
        data, following = latents - self._levels[index] * velocity, self._levels[index + 1]
        return (1 - following) * data + following * fresh


def _solver(shift: float, steps: int, device: str) -> SamplerScheduler:
    """A fresh UniPC."""
    scheduler = copy.deepcopy(build_scheduler("unipc", shift))
    scheduler.set_timesteps(steps, device=device)
    scheduler.set_begin_index(0)
    return scheduler


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
    def sample(
        self,
        prompts: Sequence[Sequence[str]],
        seeds: Sequence[int],
        sampling: StreamSampling,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Tensor:
        """[B, 16, chunks * chunk, h, w] float32. prompts: per stream, one per chunk; all of one length. is_over: asked
        before every chunk but the first; the streams end there when it says so."""
        count, num_chunks, side = len(prompts), len(prompts[0]), sampling.size // 8
        guided, always = sampling.first_guidance > 1, sampling.guidance > 1
        cache = KeyCache((side // 2) ** 2, rows=None if always else count, in_fp8=sampling.kv_cache_dtype == "fp8_e4m3")
        empty = self._embed([""] * count)
        made = []
        for index in range(num_chunks):
            if index and is_over():
                break
            first = index * sampling.chunk
            said = self._embed([each[index] for each in prompts])
            with_guidance = always or (index == 0 and guided)
            # Whose prompt is new: guided too, from the keys of the branch that has any.
            new = [index > 0 and each[index] != each[index - 1] for each in prompts]
            of_new = None
            if sampling.guides_new_prompts and guided and any(new) and not with_guidance:
                of_new = torch.tensor(new, device=self._device)[:, None, None, None, None]
            text = torch.cat([said, empty]) if with_guidance else said
            cache.visible = visible_frames(first, sampling.chunk, sampling.span, sampling.sink)
            shift, steps, guidance = (
                (sampling.first_shift, sampling.first_steps, sampling.first_guidance)
                if index == 0
                else (sampling.shift, sampling.steps, sampling.guidance)
            )
            latents = self._noise(seeds, index, (LATENT_CHANNELS, sampling.chunk, side, side))
            adds_noise = (sampling.sampler if index else sampling.first_sampler) == "dmd"
            solver = Renoising(shift, steps, self._device) if adds_noise else _solver(shift, steps, self._device)
            cache.keep = None
            for step, timestep in enumerate(solver.timesteps):
                if not sampling.commits and step == steps - 1:
                    cache.keep = range(first, first + sampling.chunk)
                inputs = torch.cat([latents, latents]) if with_guidance else latents
                velocity = self._predict(inputs, float(timestep), first, text, cache)
                if of_new is not None:
                    cache.keep = None
                    without = self._predict(inputs, float(timestep), first, empty, cache)
                    guided_velocity = without + sampling.first_guidance * (velocity - without)
                    velocity = torch.where(of_new, guided_velocity, velocity)
                if with_guidance:
                    wanted, without = velocity.chunk(2)
                    velocity = without + guidance * (wanted - without)
                if isinstance(solver, Renoising):
                    fresh = self._noise(seeds, (step + 1) * _STEP_DRAWS + index, tuple(latents.shape[1:]))
                    latents = solver.step(velocity, step, latents, fresh)
                else:
                    latents = solver.step(velocity, timestep, latents, return_dict=False)[0]
            if sampling.commits:
                cache.keep = range(first, first + sampling.chunk)
                level = sampling.commit_noise
                committed = latents
                if level:
                    fresh = self._noise(seeds, _COMMIT_DRAWS + index, tuple(latents.shape[1:]))
                    committed = (1 - level) * latents + level * fresh
                rows = torch.cat([committed, committed]) if always else committed
                self._predict(rows, 1000 * level, first + sampling.position_offset, text[: len(rows)], cache)
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
