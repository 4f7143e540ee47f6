"""Rolling window: several chunks are denoised together, each a step behind the one before it (Rolling Forcing, Tencent;
github.com/TencentARC/RollingForcing).

One pass over the chunks of the window, every chunk at a noise level of its own:

    x0 = x - sigma[j] * v;   x = (1 - sigma[j+1]) * x0 + sigma[j+1] * eps, eps fresh normal noise

takes each from its step j to j + 1. The first one is clean then and is committed, and the next chunk of the video
enters as noise. There are fewer chunks in the window while the video begins, and while it ends.

A commit sees as many clean frames as the window holds, and the sink; the authors' code leaves the sink out of it once
the video is longer than their cache. Positions `window` put the sink directly before the frames in sight, as they do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.chunk_samplers import ChunkedVideo, ChunkSampler, CleanChunk
from diffusion_runtime.denoising.chunks import Chunk
from diffusion_runtime.denoising.dmd import DmdSampler, renoised
from diffusion_runtime.denoising.level_sampler import precision_on


@dataclass
class _Active:
    """A chunk in the window. latents: at the noise level of its step."""

    chunk: Chunk
    latents: torch.Tensor
    step: int = 0


class RollingWindowSampler(ChunkSampler):
    """Sampler that denoises a window of as many chunks as it has steps; otherwise as PerChunkSampler. Frames have
    timesteps of their own (StepInfo.frame_timesteps); a pass counts as the step of its first chunk, and its timestep is
    that of the noisiest."""

    def __init__(self, sampler: DmdSampler, video: ChunkedVideo) -> None:
        super().__init__(video)
        self._levels = sampler.levels
        self._num_train_timesteps = sampler.num_train_timesteps
        self._window: list[_Active] = []

    @property
    def is_done(self) -> bool:
        return super().is_done and not self._window

    def next_chunk(self) -> CleanChunk:
        while not self._window or self._window[0].step < len(self._levels):
            if self._upcoming is not None:
                chunk = self._take_upcoming()
                self._window.append(_Active(chunk, self._draw(chunk, 0)))
            self._roll()
        first = self._window.pop(0)
        return CleanChunk(first.chunk, first.latents.float())

    def _roll(self) -> None:
        """Run one pass, after which every chunk in the window is a step further."""
        window, levels = self._window, (*self._levels, 0.0)
        frames = range(window[0].chunk.frames.start, window[-1].chunk.frames.stop)
        times = [
            self._num_train_timesteps * levels[active.step]
            for active in window
            for _ in range(len(active.chunk.frames))
        ]
        highest = levels[window[-1].step]
        step = StepInfo(
            window[0].step,
            len(self._levels),
            timestep=self._num_train_timesteps * highest,
            sigma=highest,
            chunk=window[0].chunk.index,
            frame_timesteps=tuple(times),
        )
        latents = torch.cat([active.latents for active in window], dim=2)
        velocities = self._video.forward(latents.float(), frames, step).to(latents.dtype)
        sizes = [len(active.chunk.frames) for active in window]
        for active, velocity in zip(window, torch.split(velocities, sizes, dim=2), strict=True):
            active.latents = active.latents - levels[active.step] * velocity
            active.step += 1
            if active.step < len(self._levels):
                fresh = self._draw(active.chunk, active.step)
                active.latents = renoised(active.latents, levels[active.step], fresh)
        if self._video.on_step is not None:
            self._video.on_step(step, torch.cat([active.latents for active in window], dim=2).float())

    def _draw(self, chunk: Chunk, draw: int) -> torch.Tensor:
        fresh = self._video.noise.draw(chunk.index, len(chunk.frames), draw)
        return fresh.to(self._video.device, precision_on(self._video.device))
