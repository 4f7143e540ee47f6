"""State that a stream and its forks share, and state that each of them has for itself: its progress and its prompts."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.denoising.chunks import ChunkPlan
from diffusion_runtime.generation.chunk_decoding import DecodedChunk, DecodingThread
from diffusion_runtime.generation.one_generation import SharedGeneration
from diffusion_runtime.generation.prompt_encoding import EncodedPrompts
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.generation_request import GenerationRequest


@dataclass(frozen=True, eq=False)
class BegunChunk:
    """A chunk that is denoised. decoded: waits for its frames, or makes them."""

    first_frame: int
    prompt: str
    decoded: Callable[[], DecodedChunk]


@dataclass(frozen=True, eq=False)
class StreamSource:
    """Parts of the pipeline that a stream and its forks share.

    fps: frames per second. plan: how the video is cut; temporal_factor: frames of a latent frame. encoder: makes what
    encodes another prompt, whose attention a recorder counts; count_products: the same of quantised layers. recipe: but
    for the request. guard: around every computation, on any thread. thread: decodes in parallel with denoising, None
    for decoding in line. generation: the pipeline's, ended with the last stream.
    """

    decoder: LatentDecoder
    device: torch.device
    fps: int
    plan: ChunkPlan
    temporal_factor: int
    encoder: Callable[[AttentionRecorder], Callable[[str | None], EncodedPrompts]]
    count_products: Callable[[AttentionRecorder], None]
    recipe: Mapping[str, Any]
    guard: Callable[[], AbstractContextManager[None]]
    thread: DecodingThread | None
    generation: SharedGeneration


@dataclass
class StreamPlace:
    """Progress of one stream: frames delivered, prompts so far and to come.

    request: resolved, with the prompt of the first chunk. prompt: of the chunk that was begun last; scheduled: those to
    come, by frame; typed: those for the next chunk; switches: those that came, by frame. seeds: of the noise from a
    frame on, all of them. notes: of the prompts. num_frames, num_chunks: handed out; num_begun: frames of the chunks
    that are denoised, handed out or not. ahead: a chunk that is begun. kept: the frames handed out, None where they are
    not kept.
    """

    request: GenerationRequest
    prompt: str
    notes: list[str]
    scheduled: deque[tuple[int, str]]
    seeds: tuple[tuple[int, int], ...] = ()
    kept: list[numpy.ndarray] | None = None
    typed: deque[str] = field(default_factory=deque)
    switches: list[tuple[int, str]] = field(default_factory=list)
    num_frames: int = 0
    num_chunks: int = 0
    num_begun: int = 0
    ahead: BegunChunk | None = None

    @classmethod
    def start(cls, request: GenerationRequest, notes: Sequence[str], *, keeps_frames: bool) -> StreamPlace:
        """Return the place before the first chunk."""
        scheduled = deque((int(at), prompt) for at, prompt in request.prompt_switches or ())
        seeds = tuple((int(at), seed) for at, seed in request.seed_switches or ())
        return cls(request, request.prompt, list(notes), scheduled, seeds, [] if keeps_frames else None)

    def fork(self, seed: int | None = None) -> StreamPlace:
        """Return the same place for a video that continues alone. seed: from the next chunk on, None for the same."""
        request, seeds = self.request, dict(self.seeds)
        if seed is not None and self.num_begun == 0:
            request = dataclasses.replace(request, seed=seed)
        elif seed is not None:
            seeds[self.num_begun] = seed
        return dataclasses.replace(
            self,
            request=request,
            seeds=tuple(sorted(seeds.items())),
            notes=list(self.notes),
            scheduled=deque(self.scheduled),
            kept=None if self.kept is None else list(self.kept),
            typed=deque(self.typed),
            switches=list(self.switches),
        )
