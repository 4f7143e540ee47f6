"""Rules of a generation that stops after a step: which step, and what must not be interrupted."""

from __future__ import annotations

from collections.abc import Iterable

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.errors import RequestError
from diffusion_runtime.rules.batch_settings import BatchSettings


def check_stop(settings: BatchSettings, layers: Iterable[AttentionLayer]) -> None:
    """Check the step that a resolved request stops after, where it has one. layers: with or without weights.

    Raises RequestError for one that is not before the last, and for attention that keeps more between two steps than
    is saved.
    """
    stop, num_steps = settings.shared.stop_after_step, settings.num_steps
    if stop is None:
        return
    if stop >= num_steps:
        expected = f"1 to {num_steps - 1}" if num_steps > 1 else "two steps or more"
        raise RequestError(
            f"stop_after_step: expected {expected}, got {stop}: the request has {num_steps} steps; leave it out for all"
        )
    for layer in layers:
        # The layers of a role differ in nothing that this asks for, but for choices by layer.
        for index in range(stop):
            backend = layer.decisions.resolved_at(StepInfo(index, num_steps), None).backend
            if backend.keeps_between_steps is not None:
                raise RequestError(
                    f"stop_after_step: {backend.name} of {layer.layer.role} cannot be interrupted at step {index}: "
                    f"{backend.keeps_between_steps}; leave stop_after_step out, or choose another backend"
                )
