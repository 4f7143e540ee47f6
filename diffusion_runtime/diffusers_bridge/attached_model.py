"""One attached model: its modules are intercepted, and each forward pass is followed."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.diffusers_bridge.attending import ForwardPass, ModuleAttention
from diffusion_runtime.diffusers_bridge.denoisers import WholeGraphs, uncompiled
from diffusion_runtime.diffusers_bridge.grids import token_order
from diffusion_runtime.diffusers_bridge.interception import (
    DispatcherEntries,
    PassHook,
    TakenModule,
    is_recordable,
)
from diffusion_runtime.diffusers_bridge.module_run import AttentionModuleCall, other_mode
from diffusion_runtime.diffusers_bridge.modules import FoundModule, is_shared_by_diffusers, processor_of
from diffusion_runtime.diffusers_bridge.recorded_calls import MODELS, end_pass, record_pass
from diffusion_runtime.diffusers_bridge.unserved import unserved_reason


class Attachment(Protocol):
    """The callbacks of an attached model."""

    def begin_pass(self, denoiser: AttachedModel, arguments: dict[str, Any]) -> ForwardPass:
        """Begin a forward pass of one of the models. arguments: of its forward, by name."""

    def attend(
        self, module: ModuleAttention, now: ForwardPass, call: AttentionModuleCall, number: int, masks: Any
    ) -> torch.Tensor:
        """Return the result of one call, [batch, heads, seq_q, head_dim]."""

    def add_unserved(self, module: str, reason: str, num_calls: int) -> None:
        """Record calls of a reached module that were not intercepted."""

    def record_linear(self, module: FoundModule, step: StepInfo) -> None:
        """Count a run of linear attention."""

    def end_pass(self) -> None:
        """End a forward pass that raised no exception."""


class AttachedModel:
    """One attached model, and the forward pass that it is in. now: of the models attached together, by thread: the pass
    that runs, which may call modules that another of them shares."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        index: int,
        found: list[FoundModule],
        policy: AttentionPolicy,
        owner: Attachment,
        now: threading.local,
    ) -> None:
        self.model: Any = uncompiled(model)
        self.index = index
        self.order = token_order(self.model)
        self._name = name
        self._owner = owner
        self._now = now
        # The pass, by thread, around the model's own pass.
        self._outer = threading.local()
        self._taken: dict[ModuleAttention, TakenModule] = {}
        # Modules that were reached at first and are left alone now, with the reason.
        self._left: dict[ModuleAttention, str] = {}
        self._hooks: list[Any] = []
        self._parameters = inspect.signature(type(self.model).forward)
        self._names = tuple(self._parameters.parameters)[1:]
        # What graphs have of it.
        self.handle = MODELS.handle_of(self)
        self.modules = [ModuleAttention(module, policy) for module in found if not module.unreached]
        # No choice reaches them; they are counted, so that the report covers everything that ran.
        self._linear = [module for module in found if module.unreached and module.kind == "linear"]
        reached = {module.found.module for module in self.modules}
        breaking = {module for module in reached if not is_recordable(module)}
        self._whole_graphs = WholeGraphs(model, reached, breaking | {module.module for module in self._linear})

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks about the model as a whole, for users."""
        remarks = []
        if len(self._whole_graphs):
            remarks.append(
                f"{self._name}: {len(self._whole_graphs)} of its modules, compiled with fullgraph=True, run uncompiled "
                "while attached: no graph can hold our attention where a module without a processor attends; without "
                "fullgraph=True the rest is compiled"
            )
        if self.model.training and any(weight.requires_grad for weight in self.model.parameters()):
            remarks.append(
                f"attach: in training mode: {self._name}. The attention of this runtime is for generation: kernels of "
                "sparse backends compute no gradients and refuse inputs that require them, and calls with dropout are "
                "refused. Call eval() and generate under torch.no_grad(), or choose a dense backend such as torch_sdpa "
                "to train"
            )
        return tuple(remarks)

    def take(self, entries: DispatcherEntries) -> None:
        """Intercept the modules. entries: the values that calls to diffusers' dispatcher look up."""
        for module in self.modules:
            self._taken[module] = TakenModule(
                module.found.module,
                functools.partial(self._attend, module),
                functools.partial(self._ran, module),
                entries,
                is_in_whole_graph=self._whole_graphs.holds(module.found.module),
            )
        self._whole_graphs.set_aside()
        self._hooks += [
            module.module.register_forward_hook(PassHook(functools.partial(self._ran_linear, module)))
            for module in self._linear
        ]
        # Hooks, not a replaced forward method: offloading replaces that itself, before or after.
        self._hooks += [
            self.model.register_forward_pre_hook(PassHook(self._begin, self._record), with_kwargs=True),
            self.model.register_forward_hook(PassHook(self._end, self._record_end), always_call=True),
            self.model.register_forward_hook(PassHook(self._succeed, self._record_end)),
        ]

    def give_back(self) -> None:
        """Restore the modules. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._whole_graphs.give_back()
        for taken in reversed(self._taken.values()):
            taken.give_back()
        self._hooks, self._taken, self._left = [], {}, {}

    def _record(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the begin of a pass, as `_begin` does, while torch.compile traces the model."""
        record_pass(self.handle, {**dict(zip(self._names, args, strict=False)), **kwargs})

    @staticmethod
    def _record_end(*_: Any) -> None:
        end_pass()

    def begin_recorded(self, arguments: dict[str, Any]) -> None:
        """Begin a pass within a graph. It ends where the next one begins: a graph does not tell when it is over."""
        for module, taken in self._taken.items():
            if not taken.is_in_place():
                self._add_unserved(module, "its processor was set after the model was compiled", 1)
        self._begin(self.model, (), arguments)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = dict(self._parameters.bind_partial(model, *args, **kwargs).arguments)
        self._outer.forward_pass = self._running()
        self._now.forward_pass = self._owner.begin_pass(self, arguments)
        for module, taken in self._taken.items():
            try:
                taken.take_again()
            except Exception as error:  # any exception: copying a third-party processor may raise anything
                kind = type(processor_of(module.found.module)).__name__
                reason = f"{kind} was set in the meantime and cannot be copied: {error}"
                self._add_unserved(module, reason, 1)
            if is_shared_by_diffusers(module.found.module):
                self._left[module] = "diffusers shares its sequence between processes since"
            else:
                self._left.pop(module, None)

    def _end(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        # The results of reading masks live for one pass.
        self._now.forward_pass = getattr(self._outer, "forward_pass", ForwardPass())

    def _running(self) -> ForwardPass:
        running: ForwardPass = getattr(self._now, "forward_pass", ForwardPass())
        return running

    def _succeed(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        self._owner.end_pass()

    def _attend(
        self, module: ModuleAttention, call: AttentionModuleCall, number: int, masks: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if module in self._left:
            return call.run_own()
        other = other_mode()
        if other is not None:
            # Such as guidance that skips attention scores: its mode replaces the call.
            self._add_unserved(module, f"{other} replaces torch's attention here", 1)
            return call.run_own()
        return self._owner.attend(module, self._running(), call, number, masks)

    def _ran(self, module: ModuleAttention, num_calls: int) -> None:
        reason = self._left.get(module) or ("" if num_calls else unserved_reason(module.found))
        if reason:
            self._add_unserved(module, reason, num_calls)

    def _ran_linear(self, module: FoundModule, *_: Any) -> None:
        self._owner.record_linear(module, self._running().step or StepInfo())

    def _add_unserved(self, module: ModuleAttention, reason: str, num_calls: int) -> None:
        self._owner.add_unserved(f"{self._name}.{module.found.path}", reason, num_calls)
