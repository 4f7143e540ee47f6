"""Normal noise of a generation from per-sample seeds: the initial noise, and fresh noise between steps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch


class SampleNoise:
    """Standard normal noise of a batch, every sample drawn by its own CPU generator: a seed gives the same noise on
    every device, in every dtype, in every batch and on any number of processes.

    latent_shape: of one sample. seeds: one per sample. as_comfyui: whether noise between steps is of generators seeded
    with one more, as ComfyUI's samplers draw it on a CPU (on a GPU they do with the GPU's generator). ComfyUI draws the
    initial noise of pictures and of a sound one after the other; where the pictures' numbers are a multiple of 16, as
    in every model with sound, torch draws the same at once.
    """

    def __init__(self, latent_shape: Sequence[int], seeds: Sequence[int], *, as_comfyui: bool = False) -> None:
        self._shape = (1, *latent_shape)
        self._generators = _generators(seeds)
        self._later = _generators([(seed + 1) % 2**64 for seed in seeds]) if as_comfyui else self._generators
        self._drawn: list[tuple[int, ...]] = []

    def draw(self) -> torch.Tensor:
        """[len(seeds), *latent_shape], float32, on the CPU: the initial noise at the first call, other numbers at each
        later one."""
        return self.draw_of(self._shape[1:])

    def draw_repeated(self, length: int, stride: int) -> torch.Tensor:
        """`draw`, with the noise of the frames behind the first `length` that of frames before them, in another order
        (FreeNoise, arXiv:2310.15169): each run of `stride` frames is the run that lies `length` frames earlier,
        shuffled, by each sample's seed. The shape of a sample is (channels, frames, height, width)."""
        noise = self.draw()
        # Generators of their own: those of the noise stay where so many draws leave them, see draw_again.
        orders = [torch.Generator().manual_seed(each.initial_seed()) for each in self._generators]
        for place in range(length, noise.shape[2], stride):
            count = min(stride, noise.shape[2] - place)
            for sample, generator in zip(noise, orders, strict=True):
                order = torch.randperm(count, generator=generator) + place - length
                sample[:, place : place + count] = sample[:, order]
        return noise

    def draw_of(self, latent_shape: Sequence[int]) -> torch.Tensor:
        """`draw` in another shape."""
        self._drawn.append(tuple(latent_shape))
        drawn = torch.cat([torch.randn((1, *latent_shape), generator=generator) for generator in self._generators])
        self._generators = self._later
        return drawn

    @property
    def drawn(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that were drawn, in their order: with the seeds they say where the generators are."""
        return tuple(self._drawn)

    def draw_again(self, drawn: Sequence[Sequence[int]]) -> None:
        """Draw what was `drawn` elsewhere, so that the numbers behind it come next."""
        for shape in drawn:
            self.draw_of(shape)


def initial_noise(latent_shape: Sequence[int], seeds: Sequence[int]) -> torch.Tensor:
    """Standard normal noise [len(seeds), *latent_shape], float32, on the CPU: the first of `SampleNoise`."""
    return SampleNoise(latent_shape, seeds).draw()


class ChunkNoise:
    """Standard normal noise of a video that is made chunk by chunk, by (seed, chunk, draw) alone: the chunks of a video
    are the first ones of a longer one, in every batch and on every device.

    frame_shape: (channels, height, width) of a latent frame. seeds: one per sample. later: another seed, of all
    samples, by the chunk that it applies to first.
    """

    def __init__(
        self,
        frame_shape: tuple[int, int, int],
        seeds: Sequence[int],
        later: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._frame_shape = frame_shape
        self._seeds = tuple(seeds)
        self._later = dict(sorted(later.items()))

    def with_seed(self, chunk: int, seed: int) -> ChunkNoise:
        """Return the same noise with another seed from a chunk on, until the next one that is later."""
        return ChunkNoise(self._frame_shape, self._seeds, {**self._later, chunk: seed})

    def _seeds_of(self, chunk: int) -> tuple[int, ...]:
        seed = next((seed for first, seed in reversed(self._later.items()) if first <= chunk), None)
        return self._seeds if seed is None else (seed,) * len(self._seeds)

    def draw(self, chunk: int, num_frames: int, draw: int | str) -> torch.Tensor:
        """[len(seeds), channels, num_frames, height, width], float32, on the CPU. draw: 0 for what the chunk starts
        from, j for what is added before step j, "commit" for what the commit adds."""
        channels, height, width = self._frame_shape
        return torch.stack(
            [
                torch.randn((channels, num_frames, height, width), generator=_generator(seed, chunk, draw))
                for seed in self._seeds_of(chunk)
            ]
        )


def _generator(seed: int, chunk: int, draw: int | str) -> torch.Generator:
    """Seeded with 63 bits of a hash, so that no two of these numbers share a sequence, as sums of them would."""
    digest = hashlib.blake2b(f"{seed}:{chunk}:{draw}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _generators(seeds: Sequence[int]) -> list[torch.Generator]:
    return [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
