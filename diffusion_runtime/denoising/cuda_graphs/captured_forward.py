"""One captured forward pass: its inputs and state at fixed addresses, and what a replay counts."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.fixed_state import Clones, FixedState, copy_tensors
from diffusion_runtime.attention.forward_plans import FixedPlans
from diffusion_runtime.denoising.cuda_graphs.capture import Capture
from diffusion_runtime.errors import first_line

# (latents, timestep, inputs, context) -> velocity. inputs: a frozen dataclass of the model's own kind.
Model: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Any, AttentionContext], torch.Tensor]
Agree: TypeAlias = Callable[[str | None], str | None]


@dataclass(frozen=True)
class ForwardPass:
    """Arguments of one call of a model. inputs: the same object at every step of a request and branch."""

    latents: torch.Tensor
    timestep: torch.Tensor
    inputs: Any
    context: AttentionContext

    def run(self, model: Model) -> torch.Tensor:
        return model(self.latents, self.timestep, self.inputs, self.context)


class NotReplayable(Exception):
    """A forward pass that cannot be captured, and why. velocity: what it computed and counted all the same; None where
    it has to run again."""

    def __init__(self, reason: str, velocity: torch.Tensor | None = None) -> None:
        super().__init__(reason)
        self.velocity = velocity


class CapturedForward:
    """A forward pass in a CUDA graph. first: the velocity of the pass that it was made from. agree: what several
    processes that share the pass have against it, of all of them, given what this one has.

    Raises NotReplayable where a backend declares that it cannot be replayed, where a step changes what the next one
    finds, and where the capture fails.
    """

    def __init__(
        self, capture: Capture, model: Model, given: ForwardPass, agree: Agree = lambda reason: reason
    ) -> None:
        clones, context = Clones(), given.context
        self._state, self._plans = FixedState(context.state, clones), FixedPlans()
        self._fixed = ForwardPass(
            # Contiguous, however those of a step lie: they are copied.
            given.latents.clone(memory_format=torch.contiguous_format),
            clones.of(given.timestep),
            clones.of(given.inputs),
            dataclasses.replace(context, state=self._state, plans=self._plans, cache=clones.of(context.cache)),
        )
        with context.recorder.taped() as tape:
            self.first = capture.warm_up(lambda: self._fixed.run(model))
        # What it left in the clones is missing in the request's state.
        _refuse(agree("; ".join([*self._plans.refusals, *self._state.changes]) or None))
        context.recorder.play(tape, context.step)
        self._tape = tape
        failure = None
        try:
            # It computes nothing, so nothing of it counts.
            with context.recorder.taped():
                self._replay = capture.capture(lambda: self._fixed.run(model))
        except RuntimeError as error:
            failure = f"the capture failed: {first_line(error)}"
        _refuse(agree(failure), self.first)
        self._state.close()
        self._bind(given)

    def is_bound_to(self, given: ForwardPass) -> bool:
        """Return True if the graph holds the inputs and the state of the pass's request."""
        return self._bound[0]() is given.inputs and self._bound[1]() is given.context.state

    def misfit(self, given: ForwardPass) -> str | None:
        """Return why the graph cannot be replayed for a pass of the same form, or None."""
        return None if self.is_bound_to(given) else self._state.difference(given.context.state)

    def replay(self, given: ForwardPass) -> torch.Tensor:
        """Return the velocity of a pass without a misfit, as a tensor of its own."""
        if not self.is_bound_to(given):
            copy_tensors(given.inputs, self._fixed.inputs)
            self._state.copy_from(given.context.state)
            self._bind(given)
        self._fixed.latents.copy_(given.latents)
        self._fixed.timestep.copy_(given.timestep)
        cache = given.context.cache
        # The stores of its layers are one for all passes of a video; where it writes and what it rotates by are data.
        copy_tensors(cache, self._fixed.context.cache)
        self._plans.write(given.context.step, None if cache is None else cache.plan)
        velocity = self._replay().clone()
        given.context.recorder.play(self._tape, given.context.step)
        return velocity

    def _bind(self, given: ForwardPass) -> None:
        # Weakly: a request's values end with it.
        self._bound = weakref.ref(given.inputs), weakref.ref(given.context.state)


def _refuse(reason: str | None, velocity: torch.Tensor | None = None) -> None:
    if reason is not None:
        raise NotReplayable(reason, velocity)
