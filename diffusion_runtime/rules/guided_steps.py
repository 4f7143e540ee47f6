"""Steps of a request that have guidance, and CFG-zero* (denoising/zero_star.py)."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import BranchWrapper
from diffusion_runtime.denoising.zero_star import with_optimised_scale
from diffusion_runtime.errors import RequestError
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.strength import steps_left_out
from diffusion_runtime.rules.draft import filled


@dataclass(frozen=True)
class GuidedSteps:
    """Steps with guidance, and how the negative prompt's branch counts in them. shared: values of a batch, resolved."""

    shared: GenerationRequest

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of the steps from which on and before which they are guided."""
        stop = self.shared.guidance_stop
        return self.shared.guidance_start or 0.0, 1.0 if stop is None else stop

    @property
    def are_all(self) -> bool:
        """True where every step may have guidance."""
        return self.shares == (0.0, 1.0)

    def is_active(self, step: StepInfo) -> bool:
        """Return whether guidance_start and guidance_stop leave a step with guidance."""
        start, stop = self.shares
        return start <= step.index / step.num_steps < stop

    @property
    def num_zero(self) -> int:
        """First steps whose velocity is 0."""
        return self.shared.zero_init_steps or 0

    @property
    def wrappers(self) -> tuple[BranchWrapper, ...]:
        """Wrappers of the velocities of the branches."""
        name = self.shared.cfg_zero_star
        return () if name in (None, "off") else (with_optimised_scale(of_clean=name == "comfyui"),)

    def notes(self, *, is_guided: bool) -> list[str]:
        """Return what the report says of them. is_guided: whether the negative prompt's branch runs."""
        notes, (start, stop) = [], self.shares
        if is_guided and not self.are_all:
            notes.append(
                f"guidance from {start:.4g} to {stop:.4g} of the steps; the others run the prompt's pass alone"
            )
        if is_guided and self.wrappers:
            of_what = "what it predicts to be clean" if self.shared.cfg_zero_star == "comfyui" else "its velocity"
            notes.append(f"CFG-zero*: the negative prompt's branch with {of_what} scaled to be nearest to the prompt's")
        if self.num_zero:
            count = "step changes" if self.num_zero == 1 else f"{self.num_zero} steps change"
            notes.append(f"CFG-zero*: the first {count} nothing (zero_init_steps)")
        return notes

    def check(self) -> None:
        """Raises RequestError for guidance of no step, and for zero-init that leaves no step of the first stage."""
        start, num_steps = self.shares[0], filled(self.shared.num_inference_steps) - steps_left_out(self.shared)
        if self.shared.guidance_stop is not None and self.shared.guidance_stop <= start:
            raise RequestError(
                f"guidance_stop: expected more than guidance_start, {start:g}, got {self.shared.guidance_stop:g}; "
                "guidance is turned off by --guidance-scale"
            )
        count = filled(self.shared.num_inference_steps)
        if not any(self.is_active(StepInfo(index, count)) for index in range(count)):
            raise RequestError(
                f"guidance_start, guidance_stop: none of {count} steps is from {self.shares[0]:g} to "
                f"{self.shares[1]:g}, of which the last one begins at {(count - 1) / count:.3g}; guidance is turned "
                "off by --guidance-scale"
            )
        if self.num_zero and self.num_zero >= num_steps:
            raise RequestError(
                f"zero_init_steps: expected fewer than the {num_steps} steps, got {self.num_zero}; its authors take 4 "
                "% of them"
            )
