"""The interface of a sampler: it owns the denoising loop and receives the prediction as a function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.untrusted.known_settings import Allows, whole

# (latents [batch, channels, frames, height, width], step) -> velocity of the same shape. A model may have latents of
# another shape, [batch, ...]: nothing here depends on more than elementwise operations.
Predict: TypeAlias = Callable[[torch.Tensor, StepInfo], torch.Tensor]
Wrapper: TypeAlias = Callable[[Predict], Predict]
# (latents, step, wanted branches: `cond` first, alone or with others of core/step_info.py) -> the velocity of each,
# float32.
PredictBranches: TypeAlias = Callable[[torch.Tensor, StepInfo, Sequence[str]], dict[str, torch.Tensor]]
BranchWrapper: TypeAlias = Callable[[PredictBranches], PredictBranches]
# Called after every step with the latents at its end.
OnStep: TypeAlias = Callable[[StepInfo, torch.Tensor], None]
# Fresh standard normal noise in the shape of the latents, float32, other numbers at each call.
DrawNoise: TypeAlias = Callable[[], torch.Tensor]


@dataclass(frozen=True, eq=False)
class SamplerState:
    """The place of a loop between two steps: with it, and noise drawn from where it was, the rest has the bits of a
    loop that was not interrupted.

    index: of the next step. latents: at its noise level, [batch, ...] in the loop's precision. history: what the
    sampler keeps of earlier steps by name, such as the estimates of a multistep method, of the latents' shape.
    """

    index: int
    latents: torch.Tensor
    history: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def on(self, device: torch.device) -> SamplerState:
        """Return the place with its tensors on a device."""
        history = {name: each.to(device) for name, each in self.history.items()}
        return SamplerState(self.index, self.latents.to(device), history)


class Sampler(ABC):
    """Integrates the probability flow from noise (sigma 1) to data (sigma 0). Keeps no state between calls.

    settings: keys of a folder's scheduler_config.json that it computes, each with the values for which it does;
    build_sampler refuses others.
    """

    settings: ClassVar[Mapping[str, Allows]] = {"num_train_timesteps": whole(1, 100_000)}

    @abstractmethod
    def steps(self, device: torch.device) -> tuple[StepInfo, ...]:
        """Return the steps that `sample` gives to predict for noise on a device, call after call, known before it runs:
        what depends on them alone is computed for all calls at once. Several calls of one step have its index."""

    @abstractmethod
    def from_step(self, first: int) -> Sampler:
        """Return the sampler of the steps from this one on, counted from 0 again: `start` is then given latents that
        are noised to the level of its first step already."""

    @abstractmethod
    def start(self, noise: torch.Tensor) -> SamplerState:
        """Return the place before the first step. noise: [batch, channels, frames, height, width]."""

    @abstractmethod
    def run(
        self,
        state: SamplerState,
        predict: Predict,
        on_step: OnStep | None = None,
        draw_noise: DrawNoise | None = None,
        end: int | None = None,
    ) -> SamplerState:
        """Run the steps from a place on, all that are left or those before step `end`, and return the place behind.

        predict: called up to RegisteredSampler.num_predictions_per_step times per step and at least once, in the order
            of the steps, with float32 latents; returns d latents / d sigma (noise minus data) in any floating dtype.
        on_step: called after each step; what it raises ends the loop.
        draw_noise: called between two steps by samplers that add noise (RegisteredSampler.adds_noise), which need it;
            the others leave it alone.
        """

    def sample(
        self,
        noise: torch.Tensor,
        predict: Predict,
        on_step: OnStep | None = None,
        draw_noise: DrawNoise | None = None,
    ) -> torch.Tensor:
        """Run all steps. Return the clean latents, float32, on the device of `noise`, both [batch, channels, frames,
        height, width]. The arguments are those of `run`."""
        return self.run(self.start(noise), predict, on_step, draw_noise).latents.float()


class SamplerClass(Protocol):
    """A class that request/samplers.py registers, as build_sampler calls it.

    num_steps: predictions, or steps of several predictions each; flow_shift: s of sigma = s * t / (1 + (s - 1) * t).
    options: the folder's settings, of those in `settings`. sigmas: t of every step, None for the sampler's own spacing.
    """

    settings: ClassVar[Mapping[str, Allows]]

    def __call__(
        self, *, num_steps: int, flow_shift: float, options: Mapping[str, Any], sigmas: tuple[float, ...] | None
    ) -> Sampler: ...
