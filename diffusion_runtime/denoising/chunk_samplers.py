"""Chunk samplers: the loop over the chunks of a causal video, around the sampler of each.

For each chunk: denoise it, where every forward pass overwrites the chunk's keys in the cache, then commit it: one pass
over the clean frames at timestep 0 leaves the keys that later chunks attend to (CausVid, arXiv:2412.07772;
Self-Forcing, arXiv:2506.08009). Few-step models re-noise between the steps (denoising/dmd.py), others have a fresh
solver per chunk.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch

from diffusion_runtime.attention.cache.history import CompressedHistory
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.chunks import Chunk, commits_of
from diffusion_runtime.denoising.initial_latents import InitialLatents
from diffusion_runtime.denoising.interface import OnStep, Sampler
from diffusion_runtime.denoising.noise import ChunkNoise

_NUM_TRAIN_TIMESTEPS = 1000

# (latents [batch, channels, frames, height, width], which latent frames these are, step) -> velocity of that shape,
# which is not read after a commit.
ForwardFrames: TypeAlias = Callable[[torch.Tensor, range, StepInfo], torch.Tensor]


@dataclass(frozen=True)
class CleanChunk:
    """latents: float32, [batch, channels, frames of the chunk, height, width]."""

    chunk: Chunk
    latents: torch.Tensor


@dataclass
class Commit:
    """The pass that leaves a chunk's final keys. noise_level: sigma in [0, 1) of what is committed (context noise);
    num_steps: denoising steps by the index of a chunk."""

    forward: ForwardFrames
    noise: ChunkNoise
    noise_level: float = 0.0
    num_steps: Callable[[int], int] = lambda _: 1

    def __call__(self, clean: CleanChunk) -> None:
        """Commit the chunk that has just become clean."""
        self._encode(self.forward, clean, clean.chunk.index)

    def again(self, chunks: Sequence[CleanChunk]) -> None:
        """Commit chunks again in their order, for example under another prompt."""
        for clean in chunks:
            self(clean)

    def fork(self, forward: ForwardFrames, compress: ForwardFrames, noise: ChunkNoise) -> Commit:  # noqa: ARG002
        """Return the commit of another video that continues from here. compress: a pass in large patches."""
        return Commit(forward, noise, self.noise_level, self.num_steps)

    def _encode(self, forward: ForwardFrames, clean: CleanChunk, index: int) -> None:
        """index: of the chunk that has just become clean, whose last step this counts as: its noise level is next to
        it."""
        latents, sigma = clean.latents, self.noise_level
        if sigma > 0:
            fresh = self.noise.draw(clean.chunk.index, len(clean.chunk.frames), "commit").to(latents)
            latents = (1 - sigma) * latents + sigma * fresh
        num_steps = self.num_steps(index)
        step = StepInfo(
            num_steps - 1,
            num_steps,
            timestep=_NUM_TRAIN_TIMESTEPS * sigma,
            sigma=sigma,
            next_timestep=0.0,
            chunk=index,
            phase="commit",
        )
        forward(latents, clean.chunk.frames, step)


class HistoryCommit(Commit):
    """The passes of a model whose older frames are in larger patches (attention/cache/history.py): over the chunk that
    is now too old, in large patches, then over the last ones again. compress: a pass in large patches."""

    def __init__(self, commit: Commit, compress: ForwardFrames, history: CompressedHistory) -> None:
        super().__init__(commit.forward, commit.noise, commit.noise_level, commit.num_steps)
        self._compress = compress
        self._history = history
        self._recent: tuple[CleanChunk, ...] = ()

    def __call__(self, clean: CleanChunk) -> None:
        kept = self._recent[-self._history.full_chunks :]
        self._recent = (*kept, clean)
        self.again(self._recent)

    def again(self, chunks: Sequence[CleanChunk]) -> None:
        for clean, kind in commits_of(chunks, self._history):
            forward = self._compress if kind == "compress" else self.forward
            self._encode(forward, clean, chunks[-1].chunk.index)

    def fork(self, forward: ForwardFrames, compress: ForwardFrames, noise: ChunkNoise) -> HistoryCommit:
        twin = HistoryCommit(super().fork(forward, compress, noise), compress, self._history)
        twin._recent = self._recent
        return twin


@dataclass(frozen=True)
class ChunkedVideo:
    """Input of chunk samplers. chunks: of the video, in order, possibly without end. device: of the latents. on_step:
    called after every denoising pass with the latents at its end. initial: those of the whole video, which each chunk
    starts from; None for noise alone."""

    chunks: Iterable[Chunk]
    forward: ForwardFrames
    noise: ChunkNoise
    commit: Commit
    device: torch.device
    on_step: OnStep | None = None
    initial: InitialLatents | None = None


class ChunkSampler(ABC):
    """Makes the chunks of one video. It keeps what one chunk leaves for the next."""

    def __init__(self, video: ChunkedVideo) -> None:
        self._video = video
        self._chunks: Iterator[Chunk] = iter(video.chunks)
        self._upcoming = next(self._chunks, None)

    @property
    def is_done(self) -> bool:
        """True once the last chunk has been made."""
        return self._upcoming is None

    @abstractmethod
    def next_chunk(self) -> CleanChunk:
        """Denoise and return the next chunk. Not after the last one; the one before must have been committed."""

    def commit(self, clean: CleanChunk) -> None:
        """Leave the final keys of a chunk that next_chunk returned: before the next one, and not after the last."""
        self._video.commit(clean)

    @property
    def next_index(self) -> int:
        """Index of the next chunk of the video, which must exist."""
        assert self._upcoming is not None
        return self._upcoming.index

    @property
    def can_fork(self) -> bool:
        """True if the sampler keeps nothing between two chunks."""
        return False

    def fork(self, video: ChunkedVideo) -> Self:
        """Return a sampler of another video with the same chunks from the next one on, which must exist. Requires
        `can_fork`."""
        assert self.can_fork
        following = self.next_index
        twin = copy.copy(self)
        twin._video = video
        twin._chunks = (chunk for chunk in video.chunks if chunk.index > following)
        return twin

    def _take_upcoming(self) -> Chunk:
        """Take the next chunk of the video, which must exist."""
        chunk = self._upcoming
        assert chunk is not None, "the last chunk has been made"
        self._upcoming = next(self._chunks, None)
        return chunk


class PerChunkSampler(ChunkSampler):
    """One chunk after the other, each by the same sampler, which keeps nothing between two calls. first: of the first
    chunk, where it has one of its own."""

    def __init__(self, sampler: Sampler, video: ChunkedVideo, first: Sampler | None = None) -> None:
        super().__init__(video)
        self._sampler = sampler
        self._first = sampler if first is None else first

    @property
    def can_fork(self) -> bool:
        return True

    def next_chunk(self) -> CleanChunk:
        chunk = self._take_upcoming()
        num_draws = 0

        def draw_noise() -> torch.Tensor:
            nonlocal num_draws
            num_draws += 1
            return self._video.noise.draw(chunk.index, len(chunk.frames), num_draws)

        def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
            return self._video.forward(latents, chunk.frames, dataclasses.replace(step, chunk=chunk.index))

        def on_step(step: StepInfo, latents: torch.Tensor) -> None:
            if self._video.on_step is not None:
                self._video.on_step(dataclasses.replace(step, chunk=chunk.index), latents)

        start = self._video.noise.draw(chunk.index, len(chunk.frames), 0).to(self._video.device)
        sampler = self._first if chunk.index == 0 else self._sampler
        if self._video.initial is None:
            return CleanChunk(chunk, sampler.sample(start, predict, on_step, draw_noise))
        initial, level = self._video.initial.of_frames(chunk.frames), sampler.steps(start.device)[0].sigma
        assert level is not None
        made = sampler.sample(initial.noised(start, level), initial.kept(predict), on_step, draw_noise)
        return CleanChunk(chunk, initial.settled(made))
