"""Observes a run of a diffusers pipeline through forward hooks: its current step, and the time of each stage."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from diffusion_runtime.core.progress import OnProgress, Progress, Stage
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.diffusers_bridge.denoisers import denoisers_of, uncompiled
from diffusion_runtime.diffusers_bridge.interception import PassHook
from diffusion_runtime.diffusers_bridge.steps import StepFollower


class DenoisingObserver:
    """Context manager around one call of a pipeline. The text stage ends with the first forward pass of a denoising
    model, the decode stage begins after the last.

    step: of the current or last pass. interruption: the exception of on_progress, None for nothing.
    """

    def __init__(self, pipeline: Any, device: torch.device, on_progress: OnProgress | None) -> None:
        self._models = [uncompiled(model) for model in denoisers_of(pipeline).values()]
        self._follower = StepFollower(getattr(pipeline, "scheduler", None))
        self._device = device
        self._on_progress = on_progress
        self._hooks: list[Any] = []
        self._started = self._first = self._last = 0.0
        self._num_steps = 1
        self._last_reported = -1
        self.step = StepInfo()
        self.interruption: BaseException | None = None

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        try:
            for index, model in enumerate(self._models):
                begin, end = PassHook(self._begin_pass_of(index, model)), PassHook(self._end_pass)
                self._hooks.append(model.register_forward_pre_hook(begin, with_kwargs=True))
                self._hooks.append(model.register_forward_hook(end))
            self._report("text", 0, 1, self._started)
        except BaseException:
            # An exception of on_progress here ends the generation before __exit__ would run.
            self._remove_hooks()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def has_denoised(self) -> bool:
        """True once a denoising model has been called."""
        return self._first > 0

    def finish(self) -> dict[str, float]:
        """End the observation when the pipeline has returned, and return seconds by stage."""
        self._wait()
        ended = time.perf_counter()
        if not self._first:
            return {"denoise": ended - self._started}
        if self._last_reported < self._num_steps:
            # Only now is it known whether the last step was the last one.
            self._report("denoise", self._num_steps, self._num_steps, self._first + ended - self._last)
        self._report("decode", 1, 1, self._last)
        return {
            "text": self._first - self._started,
            "denoise": self._last - self._first,
            "decode": ended - self._last,
        }

    def _begin_pass_of(self, index: int, model: Any) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        signature = inspect.signature(type(model).forward)

        def begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = signature.bind_partial(module, *args, **kwargs).arguments
            num_steps = self._follower.begins_request()
            if num_steps is not None:
                self._num_steps, self._last_reported = num_steps, -1
            self.step = self._follower.next_pass(index, arguments.get("timestep", arguments.get("t"))) or self.step
            if not self._first:
                self._wait()
                self._first = time.perf_counter()
                self._report("text", 1, 1, self._started)
            if self.step.index > self._last_reported:
                self._last_reported = self.step.index
                self._report("denoise", self.step.index, self._num_steps, self._first)

        return begin

    def _end_pass(self, _module: Any, _args: Any, _output: Any) -> None:
        if self.step.index + 1 >= self._num_steps:
            self._wait()
        self._last = time.perf_counter()

    def _report(self, stage: Stage, step: int, num_steps: int, since: float) -> None:
        if self._on_progress is not None:
            if step:
                self._wait()
            try:
                self._on_progress(Progress(stage, step, num_steps, time.perf_counter() - since))
            except BaseException as error:
                self.interruption = error
                raise

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
