"""EasyCache around the denoising models of a diffusers pipeline: a reused forward pass is skipped."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.step_cache.easycache import ReuseDecision
from diffusion_runtime.diffusers_bridge.denoisers import denoisers_of, is_compiled_wrapper
from diffusion_runtime.diffusers_bridge.steps import StepFollower
from diffusion_runtime.errors import RequestError
from diffusion_runtime.report.attention_report import AttentionRecorder, StepRow
from diffusion_runtime.request.step_cache_options import EasyCacheOptions, StepCacheSettings

_ABSENT = object()


class CachedDenoisers:
    """Context manager around one call of a pipeline. The first pass of a step decides for its other passes, so the
    guidance branches of a step are reused together, as one batch or one after the other.

    settings: None leaves the models as they are. Passes raise RequestError for a model whose input or output is not one
    tensor of latents.
    """

    def __init__(self, pipeline: Any, settings: StepCacheSettings | None) -> None:
        self._settings = settings
        self._models = {} if settings is None else denoisers_of(pipeline)
        self._follower = StepFollower(getattr(pipeline, "scheduler", None))
        self._recorder = AttentionRecorder()
        self._before: list[tuple[nn.Module, object]] = []
        self._changes: dict[str, torch.Tensor] = {}
        self._step = StepInfo(expert=-1)
        self._error: float | None = None

    @property
    def steps(self) -> tuple[StepRow, ...]:
        """The steps that were computed and reused."""
        return self._recorder.report().steps

    def __enter__(self) -> Self:
        for name, model in self._models.items():
            if is_compiled_wrapper(model):
                raise self._refusal(f"{name} is compiled")
        for index, model in enumerate(self._models.values()):
            self._before.append((model, model.__dict__.get("forward", _ABSENT)))
            model.__dict__["forward"] = self._cached(index, model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for model, before in self._before:
            if before is _ABSENT:
                model.__dict__.pop("forward", None)
            else:
                model.__dict__["forward"] = before
        self._before.clear()
        self._changes.clear()

    def _cached(self, index: int, model: nn.Module) -> Callable[..., Any]:
        forward = model.forward
        signature = inspect.signature(type(model).forward)
        rebuild: Callable[[torch.Tensor], Any] | None = None

        # Signature and name are read by diffusers' pipelines.
        @functools.wraps(forward)
        def cached(*args: Any, **kwargs: Any) -> Any:
            nonlocal rebuild
            arguments = signature.bind_partial(model, *args, **kwargs).arguments
            latents = list(arguments.values())[1]
            if not isinstance(latents, torch.Tensor):
                raise self._refusal(f"{type(model).__name__} takes no single tensor of latents")
            step = self._next_pass(index, arguments.get("timestep", arguments.get("t")), latents)
            if self._error is not None and rebuild is not None and step.branch in self._changes:
                self._recorder.record_reused(step, (step.branch,), self._method, self._error)
                change = self._changes[step.branch]
                return rebuild((_of_shape(latents, change).float() + change).to(latents.dtype))
            output = forward(*args, **kwargs)
            whole = _whole(output)
            if whole is None or not _fits(latents, whole.tensor):
                raise self._refusal(f"{type(model).__name__} returns more or other than one tensor like its latents")
            rebuild = whole.rebuild
            self._recorder.record_computed(step, (step.branch,))
            if step.branch == "cond":
                self._decision.add_computed(whole.tensor)
            self._changes[step.branch] = whole.tensor.float() - _of_shape(latents, whole.tensor).float()
            return output

        return cached

    @property
    def _method(self) -> str:
        assert self._settings is not None
        return self._settings.method

    @functools.cached_property
    def _decision(self) -> ReuseDecision:
        assert self._settings is not None
        assert isinstance(self._settings.options, EasyCacheOptions)
        return ReuseDecision(self._settings.options)

    def _next_pass(self, index: int, timestep: object, latents: torch.Tensor) -> StepInfo:
        """Return the step of a pass that begins now; its first pass decides whether the step is reused."""
        starts = self._follower.begins_request() is not None
        step = self._follower.next_pass(index, timestep)
        if step is None:
            raise self._refusal("the pipeline's scheduler does not show the step of a forward pass")
        if starts or step.expert != self._step.expert:
            self._decision.drop()
            self._changes.clear()
        if step.branch == "cond":
            self._error = self._decision.reuse(latents, step)
        self._step = step
        return step

    def _refusal(self, reason: str) -> RequestError:
        return RequestError(f"step_cache: {self._method} cannot be used here: {reason}; leave it out")


@dataclass(frozen=True)
class _Whole:
    """The one tensor of a model's output, and the function that builds an output of that form from another tensor."""

    tensor: torch.Tensor
    rebuild: Callable[[torch.Tensor], Any]


def _whole(output: Any) -> _Whole | None:
    """Return the one tensor of an output; None for an output of several tensors or none."""
    if isinstance(output, torch.Tensor):
        return _Whole(output, lambda tensor: tensor)
    if isinstance(output, tuple) and len(output) == 1 and isinstance(output[0], torch.Tensor):
        return _Whole(output[0], lambda tensor: (tensor,))
    if isinstance(output, dict) and len(output) == 1:
        # diffusers' BaseOutput.
        ((name, tensor),) = output.items()
        return (
            _Whole(tensor, lambda tensor: type(output)(**{name: tensor})) if isinstance(tensor, torch.Tensor) else None
        )
    return None


def _fits(latents: torch.Tensor, velocity: torch.Tensor) -> bool:
    """Return whether the velocity has the latents' shape, or that of their channels before an image's."""
    if latents.ndim != velocity.ndim:
        return False
    differing = [pair for pair in zip(latents.shape, velocity.shape, strict=True) if pair[0] != pair[1]]
    return not differing or (len(differing) == 1 and differing[0][0] > differing[0][1])


def _of_shape(latents: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return latents[tuple(slice(size) for size in like.shape)]
