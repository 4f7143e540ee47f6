"""Hooks: what instruments ask of a pipeline's generations. The runtime reads this value and knows no instrument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from diffusion_runtime.core.block_stack import BlockRunner
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import OnStep, Wrapper
from diffusion_runtime.generation.saved_latents import SavedLatents


@dataclass(kw_only=True)
class Hooks:
    """Requests of instruments, each in force while its instrument runs; all of them are off by default.

    eager_reason: why no CUDA graph is replayed, for the report; None for no reason.
    counts_density: whether attention reports count the pairs that every layer computed at every step.
    on_step: called after every denoising step with its StepInfo and the latents at its end, float32
        [batch, *sample_shape] on the model's device, which it must not keep.
    wrap: wraps the guided prediction of every step; None for nothing.
    block_runner: runs the transformer's blocks in place of the requests' step cache.
    on_latents: called with the clean latents, [batch, *sample_shape].
    keep: called, before decoding, with the index of a request in its batch and what its denoising has left, whose
        tensors are the model's own on its device; of a video in segments behind each with those so far.
    """

    eager_reason: str | None = None
    counts_density: bool = False
    on_step: OnStep | None = None
    wrap: Wrapper | None = None
    block_runner: BlockRunner | None = None
    on_latents: Callable[[torch.Tensor], object] | None = None
    keep: Callable[[int, SavedLatents], object] | None = None

    @contextmanager
    def holding(self, name: str, value: object) -> Iterator[None]:
        """Context manager: set one hook, and restore its value before at the end."""
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def notify_step(self, step: StepInfo, latents: torch.Tensor) -> None:
        """Call `on_step`, if an instrument has set it."""
        if self.on_step is not None:
            self.on_step(step, latents)
