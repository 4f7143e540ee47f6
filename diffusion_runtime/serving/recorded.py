"""Recorded values of a batch: densities for its reports, and a sample of the latents after every step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.generation.interface import GenerationPipeline
from diffusion_runtime.media.publish import publish_bytes
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.profiling.instruments import counted_density, watched_latents
from diffusion_runtime.serving.files import VARIANTS

# Values of a sample per step: the relative L2 distance of two samples is that of all latents within some percent.
_NUM_VALUES = 1024


@contextlib.contextmanager
def recorded(
    pipeline: GenerationPipeline, message: Mapping[str, Any], works: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """Context manager: a batch is counted and its latents are kept, as its message asks."""
    with contextlib.ExitStack() as stack:
        if message.get("return_density"):
            stack.enter_context(counted_density(pipeline))
        samples = None
        # Diffusers' own pipelines and causal models show no latents of a whole video.
        if message.get("return_latents") and isinstance(pipeline, Pipeline) and not pipeline.rules.sampling.is_causal:
            samples = LatentSamples()
            stack.enter_context(watched_latents(pipeline, samples.add))
        yield
        if samples is not None:
            samples.write([Path(work["target"]) for work in works])


class LatentSamples:
    """Values of the latents of each request at fixed places, drawn once, and the noise level, after every step."""

    def __init__(self) -> None:
        self._places: torch.Tensor | None = None
        self._steps: list[tuple[float, torch.Tensor]] = []

    def add(self, step: StepInfo, latents: torch.Tensor) -> None:
        """Add a step. latents: [batch, *sample_shape]."""
        flat = latents.detach().flatten(1)
        if self._places is None or int(self._places[-1]) >= flat.shape[1]:
            generator = torch.Generator().manual_seed(0)
            self._places = torch.randperm(flat.shape[1], generator=generator)[:_NUM_VALUES].sort().values
        values = flat[:, self._places.to(flat.device)].float().cpu()
        self._steps.append((float("nan") if step.sigma is None else step.sigma, values))

    def write(self, targets: Sequence[Path]) -> None:
        """Write a file beside each result: float32, little endian: the number of steps, then for each its noise level
        and its values. Nothing where the size changed on the way (progressive resolution)."""
        if len({values.shape for _, values in self._steps}) != 1:
            return
        for index, target in enumerate(targets):
            rows = [numpy.concatenate(([sigma], values[index].numpy())) for sigma, values in self._steps]
            content = numpy.concatenate(([len(rows)], *rows)).astype("<f4").tobytes()
            publish_bytes(target.with_name(f"{target.stem}{VARIANTS['latents']}"), content)
