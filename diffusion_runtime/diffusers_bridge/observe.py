"""diffusers' own attention, left alone or given another of diffusers' backends, and counted like ours."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from diffusion_runtime.attention.info import StepInfo
from diffusion_runtime.attention.report import AttentionRecorder, AttentionReport
from diffusion_runtime.diffusers_bridge.attach import UnreachedModule, listed
from diffusion_runtime.diffusers_bridge.denoisers import denoisers_of
from diffusion_runtime.diffusers_bridge.dispatcher import check_dispatcher_backend, dispatcher_entry
from diffusion_runtime.diffusers_bridge.interception import SdpaCall, TakenModule
from diffusion_runtime.diffusers_bridge.modules import FoundModule, find_attention_modules, processor_of
from diffusion_runtime.errors import BackendUnavailableError

_ABSENT = object()
_NO_DISPATCHER = "its processor does not ask diffusers' dispatcher"


class ObservedAttention:
    """The attention modules of a pipeline. name: the backend of diffusers' that they are to take, None for their own.

    source: the level that said so. others: modules that the name does not reach. Raises BackendUnavailableError for a
    name that cannot run here, or that reaches no module.
    """

    def __init__(self, pipeline: Any, name: str | None, source: str) -> None:
        self._name = name
        self._source = source
        self._recorder = AttentionRecorder()
        self._found = [
            (component, module)
            for component, model in denoisers_of(pipeline).items()
            for module in find_attention_modules(model)
        ]
        self.others = tuple(
            UnreachedModule(component, module.path, module.processor, _NO_DISPATCHER)
            for component, module in self._found
            if name is not None and not self._is_reached(module)
        )
        if name is None:
            return
        check_dispatcher_backend(name)
        if len(self.others) == len(self._found):
            raise BackendUnavailableError(
                f"diffusers' attention backend {name!r} reaches none of the {len(self._found)} attention modules: "
                f"{listed(self.others)}. Backends of ours, such as torch_sdpa, reach those that torch computes",
                [(name, self.others[0].reason)] if self.others else [],
            )

    @property
    def reach(self) -> str:
        total = len(self._found)
        if self._name is None:
            return f"attention modules: {total}, all with diffusers' own attention, as no backend was chosen"
        text = f"attention modules reached: {total - len(self.others)} of {total}"
        return text + (f"; diffusers' own attention stays in {listed(self.others)}" if self.others else "")

    @contextlib.contextmanager
    def counting(self, step: Callable[[], StepInfo]) -> Iterator[None]:
        """While the pipeline runs. step: says which step it is in."""
        with contextlib.ExitStack() as stack:
            entry = None if self._name is None else stack.enter_context(dispatcher_entry(self._name))
            for _, module in self._found:
                reached = self._is_reached(module)
                count = functools.partial(self._count, module, reached, step)
                taken = TakenModule(module.module, _run_torch, count, entry if reached else None)
                stack.callback(taken.give_back)
            yield

    def start_report(self) -> None:
        """Begin a new report."""
        self._recorder = AttentionRecorder()

    def report(self) -> AttentionReport:
        report = self._recorder.report()
        return AttentionReport(report.rows, report.libraries, (self.reach, *report.notes))

    def _is_reached(self, module: FoundModule) -> bool:
        return self._name is not None and _asks_dispatcher(module)

    def _count(self, module: FoundModule, reached: bool, step: Callable[[], StepInfo], num_calls: int) -> None:
        if reached:
            implementation, source, reason = f"{self._name}", self._source, f"{self._name} of diffusers"
        else:
            implementation = "scaled_dot_product_attention" if num_calls else module.processor
            source, reason = "platform", "diffusers' own attention"
        self._recorder.record(
            module.layer, step(), backend="diffusers", implementation=implementation, source=source, reason=reason
        )


def _asks_dispatcher(module: FoundModule) -> bool:
    return getattr(processor_of(module.module), "_attention_backend", _ABSENT) is not _ABSENT


def _run_torch(call: SdpaCall, _number: int, _masks: Sequence[torch.Tensor]) -> torch.Tensor:
    return call.run_torch()
