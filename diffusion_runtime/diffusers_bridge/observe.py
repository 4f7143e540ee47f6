"""diffusers' own attention, unchanged or with another of diffusers' backends, counted in our attention report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.diffusers_bridge.attach import UnreachedModule, listed
from diffusion_runtime.diffusers_bridge.denoisers import denoisers_of, uncompiled
from diffusion_runtime.diffusers_bridge.dispatcher import RegistryEntries, check_dispatcher_backend
from diffusion_runtime.diffusers_bridge.interception import (
    TakenModule,
    asks_dispatcher,
    take_again_before_each_pass,
)
from diffusion_runtime.diffusers_bridge.module_run import AttentionModuleCall
from diffusion_runtime.diffusers_bridge.modules import FoundModule, computer_of, find_in_models, processor_of
from diffusion_runtime.diffusers_bridge.unserved import CallCount, unserved_reason
from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.report.attention_report import AttentionRecorder, AttentionReport

_logger = logging.getLogger("diffusion_runtime.diffusers_bridge")

_OWN = "diffusers' own attention"
_NO_DISPATCHER = "its processor does not ask diffusers' dispatcher"


class ObservedAttention:
    """Attention modules of a pipeline, counted. name: the diffusers backend they are to use, None for their own.

    source: the level that chose it. others: modules that the name does not reach. Raises BackendUnavailableError for a
    name that cannot run here, or that reaches no module.
    """

    def __init__(self, pipeline: Any, name: str | None, source: str) -> None:
        self._name = name
        self._source = source
        self._recorder = AttentionRecorder()
        self._calls = CallCount()
        self._models = denoisers_of(pipeline)
        found = find_in_models(self._models)
        self._found = [(component, module) for component, modules in found.items() for module in modules]
        self.others = tuple(
            UnreachedModule(component, module.path, module.processor, _NO_DISPATCHER)
            for component, module in self._found
            if name is not None and not asks_dispatcher(processor_of(module.module))
        )
        self._beyond = {(other.component, other.path) for other in self.others}
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
        """Context manager: count calls while the pipeline runs. step: returns the current step."""
        with contextlib.ExitStack() as stack:
            entries = stack.enter_context(RegistryEntries(self._name))
            taken: dict[str, list[TakenModule]] = {}
            for component, module in self._found:
                count = functools.partial(self._count, module, step)
                ran = functools.partial(self._ran, component, module, step)
                taken.setdefault(component, []).append(TakenModule(module.module, count, ran, entries))
                stack.callback(taken[component][-1].give_back)
            for component, model in self._models.items():
                stack.callback(take_again_before_each_pass(uncompiled(model), taken.get(component, ())).remove)
            yield
        if self._name is not None and self._calls.num_unserved:
            _logger.warning(self._calls.describe())
            if not self._calls.num_served:
                raise BackendUnavailableError(
                    f"diffusers' attention backend {self._name!r} served no call: {self._calls.describe()}",
                    [(self._name, "no call came to it")],
                )

    def start_report(self, *, counts_density: bool = False) -> None:
        """Begin a new report. counts_density: unused, as diffusers does not tell what it keeps."""
        self._recorder = AttentionRecorder(counts_density=counts_density)
        self._calls = CallCount()

    def report(self) -> AttentionReport:
        report = self._recorder.report()
        notes = filter(None, (self.reach, self._calls.describe(), *report.notes))
        return dataclasses.replace(report, notes=tuple(notes))

    def _count(
        self,
        module: FoundModule,
        step: Callable[[], StepInfo],
        call: AttentionModuleCall,
        _number: int,
        _masks: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        is_chosen = self._name is not None and call.own == self._name
        self._record(module, step(), call.own, is_chosen)
        if is_chosen:
            self._calls.num_served += 1
        return call.run_own()

    def _ran(self, component: str, module: FoundModule, step: Callable[[], StepInfo], num_calls: int) -> None:
        if num_calls == 0:
            self._record(module, step(), computer_of(module.module).__name__, False)
        if self._is_planned(component, module) and (num_calls == 0 or not asks_dispatcher(processor_of(module.module))):
            self._calls.add_unserved(f"{component}.{module.path}", unserved_reason(module), num_calls)

    def _record(self, module: FoundModule, step: StepInfo, implementation: str, is_chosen: bool) -> None:
        source, reason = (self._source, f"{self._name} of diffusers") if is_chosen else ("platform", _OWN)
        self._recorder.record(
            module.layer,
            step,
            backend="diffusers",
            implementation=implementation,
            source=source,
            reason=reason,
            kept=(),
            kind=module.kind,
        )

    def _is_planned(self, component: str, module: FoundModule) -> bool:
        """Return whether the named backend is to compute this module."""
        return self._name is not None and (component, module.path) not in self._beyond
