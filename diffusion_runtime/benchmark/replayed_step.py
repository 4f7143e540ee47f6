"""A denoising step that is replayed from a CUDA graph, captured as a generation captures it; and the steps of a
generation around it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.cuda_graphs.capture import Capture
from diffusion_runtime.denoising.cuda_graphs.captured_forward import ForwardPass
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.diffusers_bridge.sample_inputs import NEXT_TIMESTEP
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.report.attention_report import AttentionRecorder


class ReplayedStep:
    """Forward passes of one request, each with the velocity of its step. The first call runs the eager passes that
    come before a replay, too.

    make_pass: the same pass at every call, of one request. difference: relative L2 of the first replay from the eager
    pass; None before it. Raises RuntimeError where the pass is not replayed, with the reason.
    """

    def __init__(
        self, capture: Capture, model: DiffusionTransformer, make_pass: Callable[[AttentionRecorder], ForwardPass]
    ) -> None:
        self.difference: float | None = None
        self._recorder = AttentionRecorder()
        self._graphs = ForwardGraphs(capture, is_probed=False)
        self._forward = self._graphs.of_generation(
            model, self._recorder, read=model.read_inputs, refusal=model.replay_refusal()
        )
        self._make_pass = make_pass

    @property
    def pool_bytes(self) -> int:
        """Device memory that the graph holds for what is between its inputs and its result."""
        return self._graphs.capture.pool_bytes()

    def __call__(self) -> torch.Tensor:
        if self.difference is None:
            eager = self._run().float()
            # Captured.
            self._run()
            if not self._graphs.num_graphs:
                raise RuntimeError(f"the step was not captured: {self._reasons()}")
            self.difference = float((self._run().float() - eager).norm() / eager.norm())
        return self._run()

    def _run(self) -> torch.Tensor:
        return self._forward(self._make_pass(self._recorder))

    def _reasons(self) -> str:
        self._forward.report()
        found = self._recorder.report().graphs
        # The last one tells what became of the pass that was to be captured.
        return "no pass ran" if found is None else list(found.eager)[-1]


def steps_around(timestep: torch.Tensor, num_steps: int) -> tuple[StepInfo, ...]:
    """Return as many steps, the middle one at the timestep of a forward pass [batch] and the others half a timestep
    apart: what a generation computes for all of its steps before the first is then no part of the timed one."""
    at, middle = float(timestep.flatten()[0]), num_steps // 2
    return tuple(
        StepInfo(index, num_steps, timestep=at + (middle - index) / 2, next_timestep=NEXT_TIMESTEP)
        for index in range(num_steps)
    )
