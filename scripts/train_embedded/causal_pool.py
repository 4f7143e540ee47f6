"""Encoded streams with a caption per segment, kept on the device and replaced little by little while training goes on.

A pool holds streams as they go on (`far=False`), or streams whose first two latent frames, the sink, are from long
before the others (`far=True`): so the model learns what a sink is when it no longer stands next to the window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diffusion_runtime.quality.shapes.captions import write_caption
from scripts.shapes.streams import (
    MAX_SEGMENTS,
    SPEED_DRIFT,
    StreamBatch,
    StreamSettings,
    at_moments,
    drifted,
    sample_streams,
)
from scripts.train_embedded.latent_pool import Encoder, TrainingBatch, latent_foreground
from scripts.train_embedded.world import CAPTION_TOKENS

CAPTIONS_PER_SEGMENT = 2
SINK_FRAMES = 2
"""Latent frames of a far stream's sink: one frame, and four."""
WARM_UP_FRAMES = 3
"""Latent frames before the window of a far stream that are encoded and thrown away: a first latent frame is of one
frame alone, and means something else than a later one."""
GAP_RANGE = (8, 240)
"""Frames between the sink and the window of a far stream: 20 s at 12 frames per second at most."""
SWITCH_ALIGNMENTS = (2, 4, 8)
"""Latent frames of which a switch falls on a multiple: the chunks that the model is trained with."""

RenderStreams = Callable[[StreamBatch, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class StreamTrainingBatch:
    """What one training step sees; F latent frames, up to G captions per sample."""

    latents: Tensor
    """[B, 16, F, h, w], normalised, the pool's dtype."""
    foreground: Tensor
    """[B, 1, F, h, w] uint8: where an object is, one latent pixel around it included."""
    token_ids: Tensor
    """[B, G, CAPTION_TOKENS] int64, 0 past the end."""
    segment: Tensor
    """[B, F] int64: the caption of each latent frame."""
    past: Tensor | None = None
    """As `latents`: what chunks see of those before them, where that is not `latents` themselves."""

    @classmethod
    def of_clips(cls, batch: TrainingBatch) -> StreamTrainingBatch:
        """Clips with one caption."""
        count, _, num_frames = batch.latents.shape[:3]
        segment = torch.zeros(count, num_frames, dtype=torch.int64, device=batch.latents.device)
        return cls(batch.latents, batch.foreground, batch.token_ids[:, None], segment)


def first_pixel_frames(num_latents: int) -> Tensor:
    """The first frame of each latent frame: 0, 1, 5, 9, ..."""
    return (4 * torch.arange(num_latents) - 3).clamp(min=0)


class StreamPool:
    """A ring of `capacity` encoded streams of one shape."""

    def __init__(
        self,
        capacity: int,
        num_latents: int,
        size: int,
        *,
        far: bool,
        encode: Encoder,
        renderer: RenderStreams,
        tokenizer: PreTrainedTokenizerFast,
        seed: int,
        device: str,
        settings: StreamSettings,
        drift: float = 0.0,
    ) -> None:
        """settings: of the streams; those for switches are the pool's own. drift: share of streams whose past, behind
        the sink, has drifted from it: so the model learns to go back to the sink's sizes, shades and speeds."""
        self.capacity, self.num_latents, self.size, self.far = capacity, num_latents, size, far
        self._encode, self._renderer, self._tokenizer = encode, renderer, tokenizer
        self._random, self._generator = Random(seed), torch.Generator(device).manual_seed(seed)
        self._settings, self._drift = settings, drift
        grid = (num_latents, size // 8, size // 8)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._latents = torch.zeros(capacity, 16, *grid, dtype=dtype, device=device)
        self._past = torch.zeros_like(self._latents) if drift else None
        self._foreground = torch.zeros(capacity, 1, *grid, dtype=torch.uint8, device=device)
        shape = (capacity, MAX_SEGMENTS, CAPTIONS_PER_SEGMENT, CAPTION_TOKENS)
        self._token_ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._segment = torch.zeros(capacity, num_latents, dtype=torch.int64, device=device)
        self._filled, self._next = 0, 0

    @torch.no_grad()
    def refresh(self, count: int) -> None:
        """Render, caption and encode `count` new streams over the oldest."""
        streams = self._sample(count)
        described = streams.attributes()
        latents, foreground = self._encoded(streams)
        rows = (torch.arange(self._next, self._next + count) % self.capacity).to(latents.device)
        self._latents[rows] = latents.to(self._latents.dtype)
        if self._past is not None:
            past, num_drifted = latents.clone(), round(self._drift * count)
            if num_drifted:
                seen, where = self._drifted_past(streams.first(num_drifted))
                past[:num_drifted] = torch.where(where, seen, past[:num_drifted])
            self._past[rows] = past.to(self._past.dtype)
        self._foreground[rows] = foreground
        self._segment[rows] = streams.segment_of_frame()[:, self._first_frames().to(latents.device)]
        texts = [
            write_caption(scene, self._random).text
            for scenes in described
            for scene in scenes
            for _ in range(CAPTIONS_PER_SEGMENT)
        ]
        encoded = self._tokenizer(texts, padding="max_length", max_length=CAPTION_TOKENS, truncation=True)
        token_ids = torch.tensor(encoded["input_ids"]).view(count, MAX_SEGMENTS, CAPTIONS_PER_SEGMENT, CAPTION_TOKENS)
        self._token_ids[rows] = token_ids.to(latents.device)
        self._next = (self._next + count) % self.capacity
        self._filled = min(self.capacity, self._filled + count)

    def _drifted_past(self, streams: StreamBatch) -> tuple[Tensor, Tensor]:
        """Latents of streams that have drifted, and where they are what is seen, [B, 1, F, 1, 1]: behind the sink.

        In every second stream objects are also too fast or too slow, within every second pair of latent frames and at
        its end where they should be: a chunk that begins there goes on from its past, at the speed of the sink. The
        pairs between, in which they get away from that place, are those of the stream itself: where a pair that is too
        fast begins its objects jump, by 2.1 frames' way at most, and where it ends they do not.
        """
        count, device = len(streams), streams.starts.device
        off = SPEED_DRIFT * (2 * torch.rand(count, generator=self._generator, device=device) - 1)
        off[::2] = 0.0
        frame = torch.arange(streams.times.shape[1], device=device)
        # Of a far stream the window begins behind sink and warm-up, as if it were that behind the sink alone.
        skipped = 1 + 4 * (WARM_UP_FRAMES - 1) if self.far else 0
        from_place = ((frame - skipped - 4) % 16 - 8).abs()
        first = frame.new_tensor(1 + 4 * (SINK_FRAMES - 1) if self.far else 0)
        moments = (frame - off[:, None] * from_place).clamp(min=first)
        latents, _ = self._encoded(drifted(at_moments(streams, moments), self._generator))
        pair = torch.arange(self.num_latents, device=device) // 2
        where = (pair > 0) & ((pair % 2 == 1) | (off == 0)[:, None])
        return latents, where[:, None, :, None, None]

    def _encoded(self, streams: StreamBatch) -> tuple[Tensor, Tensor]:
        """Latents and foreground of streams that were sampled for this pool."""
        frames, covered = self._renderer(streams, self.size)
        covered = covered.amax(dim=1)
        clip = frames.permute(0, 4, 1, 2, 3) * 2 - 1
        if not self.far:
            return self._encode(clip), latent_foreground(covered)
        sink = 1 + 4 * (SINK_FRAMES - 1)
        latents = [self._encode(clip[:, :, :sink]), self._encode(clip[:, :, sink:])[:, :, WARM_UP_FRAMES:]]
        foreground = [
            latent_foreground(covered[:, :sink]),
            latent_foreground(covered[:, sink:])[:, :, WARM_UP_FRAMES:],
        ]
        return torch.cat(latents, dim=2), torch.cat(foreground, dim=2)

    def _sample(self, count: int) -> StreamBatch:
        gap = self._random.randint(*GAP_RANGE) if self.far else 0
        alignment = self._random.choice(SWITCH_ALIGNMENTS)
        first = first_pixel_frames(self.num_latents)
        latent_switches = range(alignment, self.num_latents, alignment)
        switches = tuple(gap + int(first[latent]) for latent in latent_switches if latent > SINK_FRAMES or not self.far)
        times = torch.arange(1 + 4 * (self.num_latents - 1))
        if self.far:
            sink, warm_up = 1 + 4 * (SINK_FRAMES - 1), 1 + 4 * (WARM_UP_FRAMES - 1)
            window = times[sink:] + gap
            # Of a gap shorter than the warm-up, the first frames are the stream's first one again.
            before = (window[0] - warm_up + torch.arange(warm_up)).clamp(min=0)
            times = torch.cat([times[:sink], before, window])
        settings = replace(self._settings, switch_frames=switches)
        return sample_streams(count, self._generator, times, settings)

    def _first_frames(self) -> Tensor:
        """The first rendered frame of each latent frame."""
        first = first_pixel_frames(self.num_latents)
        if self.far:
            first[SINK_FRAMES:] += 1 + 4 * (WARM_UP_FRAMES - 1)
        return first

    def draw(self, batch: int, generator: torch.Generator) -> StreamTrainingBatch:
        """A random batch, one of each segment's captions."""
        device = generator.device
        rows = torch.randint(self._filled, (batch,), generator=generator, device=device)
        caption = torch.randint(CAPTIONS_PER_SEGMENT, (batch,), generator=generator, device=device)
        return StreamTrainingBatch(
            self._latents[rows],
            self._foreground[rows],
            self._token_ids[rows, :, caption],
            self._segment[rows],
            None if self._past is None else self._past[rows],
        )
