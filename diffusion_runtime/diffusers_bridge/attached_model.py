"""One model of what is attached: its modules are taken over, and each forward pass is followed."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.diffusers_bridge.attending import ForwardPass, ModuleAttention
from diffusion_runtime.diffusers_bridge.compiled import WholeGraphs, uncompiled
from diffusion_runtime.diffusers_bridge.grids import token_order
from diffusion_runtime.diffusers_bridge.interception import (
    DispatcherEntries,
    PassHook,
    TakenModule,
)
from diffusion_runtime.diffusers_bridge.module_run import AttentionModuleCall, other_mode
from diffusion_runtime.diffusers_bridge.modules import FoundModule, is_shared_by_diffusers, processor_of
from diffusion_runtime.diffusers_bridge.unserved import unserved_reason


class Attachment(Protocol):
    """What the attached models belong to."""

    def begin_pass(self, denoiser: AttachedModel, arguments: dict[str, Any]) -> ForwardPass:
        """A forward pass of one of the models begins. arguments: of its forward, by name."""

    def attend(
        self, module: ModuleAttention, now: ForwardPass, call: AttentionModuleCall, number: int, masks: Any
    ) -> torch.Tensor:
        """The result of one call, [batch, heads, seq_q, head_dim]."""

    def add_unserved(self, module: str, reason: str, num_calls: int) -> None:
        """Calls of a reached module went past."""

    def end_pass(self) -> None:
        """A forward pass has ended without an exception."""


class AttachedModel:
    """One model of what is attached, and the forward pass that it is in."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        index: int,
        found: list[FoundModule],
        policy: AttentionPolicy,
        owner: Attachment,
    ) -> None:
        self.model: Any = uncompiled(model)
        self.index = index
        self.order = token_order(self.model)
        self._name = name
        self._owner = owner
        # Of the thread that runs the model.
        self._now = threading.local()
        self._taken: dict[ModuleAttention, TakenModule] = {}
        # Modules that are left alone although they were reached at first, and why.
        self._left: dict[ModuleAttention, str] = {}
        self._hooks: list[Any] = []
        self._parameters = inspect.signature(type(self.model).forward)
        self.modules = [ModuleAttention(module, policy) for module in found if not module.unreached]
        self._whole_graphs = WholeGraphs(model, {module.found.module for module in self.modules})

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is worth saying about the model as a whole."""
        remarks = []
        if len(self._whole_graphs):
            remarks.append(
                f"{self._name}: {len(self._whole_graphs)} of its modules, compiled with fullgraph=True, run uncompiled "
                "while attached, as a graph cannot hold attention of ours; without fullgraph=True they are compiled "
                "around it"
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
        """Begin. entries: what calls to diffusers' dispatcher ask for."""
        for module in self.modules:
            self._taken[module] = TakenModule(
                module.found.module,
                functools.partial(self._attend, module),
                functools.partial(self._ran, module),
                entries,
            )
        self._whole_graphs.set_aside()
        # Hooks, and no method of ours in the model's place: offloading puts its own there, before or after.
        self._hooks += [
            self.model.register_forward_pre_hook(PassHook(self._begin), with_kwargs=True),
            self.model.register_forward_hook(PassHook(self._end), always_call=True),
            self.model.register_forward_hook(PassHook(self._succeed)),
        ]

    def give_back(self) -> None:
        """Put back what was there. Again: harmless."""
        for hook in self._hooks:
            hook.remove()
        self._whole_graphs.give_back()
        for taken in reversed(self._taken.values()):
            taken.give_back()
        self._hooks, self._taken, self._left = [], {}, {}

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = dict(self._parameters.bind_partial(model, *args, **kwargs).arguments)
        self._now.forward_pass = self._owner.begin_pass(self, arguments)
        for module, taken in self._taken.items():
            try:
                taken.take_again()
            except Exception as error:  # whatever the copying of a stranger's processor raises
                kind = type(processor_of(module.found.module)).__name__
                reason = f"{kind} was set in the meantime and cannot be copied: {error}"
                self._add_unserved(module, reason, 1)
            if is_shared_by_diffusers(module.found.module):
                self._left[module] = "diffusers shares its sequence between processes since"
            else:
                self._left.pop(module, None)

    def _end(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        # What was read from masks goes with the pass.
        self._now.forward_pass = ForwardPass()

    def _succeed(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        self._owner.end_pass()

    def _attend(
        self, module: ModuleAttention, call: AttentionModuleCall, number: int, masks: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if module in self._left:
            return call.run_own()
        other = other_mode()
        if other is not None:
            # Such as guidance that leaves scores out: what it makes of the call is its own.
            self._add_unserved(module, f"{other} answers torch's attention here", 1)
            return call.run_own()
        return self._owner.attend(module, getattr(self._now, "forward_pass", ForwardPass()), call, number, masks)

    def _ran(self, module: ModuleAttention, num_calls: int) -> None:
        reason = self._left.get(module) or ("" if num_calls else unserved_reason(module.found))
        if reason:
            self._add_unserved(module, reason, num_calls)

    def _add_unserved(self, module: ModuleAttention, reason: str, num_calls: int) -> None:
        self._owner.add_unserved(f"{self._name}.{module.found.path}", reason, num_calls)
