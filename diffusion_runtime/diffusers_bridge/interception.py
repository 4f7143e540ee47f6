"""Intercepts the attention calls of one module, only while that module runs.

A processor is replaced by a twin (a copy of a derived class) in this module alone; a module without one gets its
forward replaced. Where a twin calls diffusers' dispatcher, it looks up an entry of ours. When the run ends, by an
exception too, everything is restored (module_run.py).
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from diffusion_runtime.diffusers_bridge.denoisers import outside_graphs
from diffusion_runtime.diffusers_bridge.module_run import AttendCall, ModuleRun, entered
from diffusion_runtime.diffusers_bridge.modules import mask_arguments, processor_of
from diffusion_runtime.diffusers_bridge.recorded_calls import MODULES, call_recorded, recorded

_ABSENT = object()
# Called after each run of a module with the number of intercepted calls.
OnRun: TypeAlias = Callable[[int], None]
# (position, name) of the mask arguments of a module or processor.
MaskPlaces: TypeAlias = tuple[tuple[int, str], ...]


class DispatcherEntries(Protocol):
    """Supplies the values that processors pass to diffusers' dispatcher; see dispatcher.py."""

    def entry_for(self, processor: Any) -> object:
        """Return the value for a processor's `_attention_backend`, if it has one."""


class TakenModule:
    """A module whose attention calls go to `attend` until `give_back`.

    entries: the values that its calls to diffusers' dispatcher look up, None to leave that unchanged.
    is_in_whole_graph: whether it is a part of a graph that must not break. A copy of the module, by deepcopy or pickle,
    has its own attention.
    """

    def __init__(
        self,
        module: nn.Module,
        attend: AttendCall,
        on_run: OnRun,
        entries: DispatcherEntries | None = None,
        *,
        is_in_whole_graph: bool = False,
    ) -> None:
        self.module = module
        self._attend = attend
        self._on_run = on_run
        self._entries = entries
        self._active = True
        # What compiled blocks hold of it.
        self.handle = MODULES.handle_of(self)
        self._is_in_whole_graph = is_in_whole_graph
        # The last intercepted processor, and its twin.
        self._taken: tuple[Any, Any] | None = None
        processor = processor_of(module)
        if processor is None:
            module.__dict__["forward"] = _TakenForward(self, module)
        else:
            self._place_twin(processor)

    def take_again(self) -> None:
        """Intercept a processor that was set in the meantime.

        Perturbed-attention guidance sets one within a call of its pipeline, and scripts do.
        """
        processor = processor_of(self.module)
        if self._active and processor is not None and _taking_of(processor) is None:
            self._place_twin(processor)

    def is_in_place(self) -> bool:
        """Return whether the module's calls come here, and no processor was set in the meantime."""
        processor = processor_of(self.module)
        return processor is None or _taking_of(processor) is not None

    def give_back(self) -> None:
        """Restore the module, unless other code has replaced ours in the meantime."""
        self._active = False
        processor = processor_of(self.module)
        if processor is not None:
            taking = _taking_of(processor)
            if taking is not None and taking.owner is self:
                self.module.processor = taking.before
            return
        placed = self.module.__dict__.get("forward")
        if isinstance(placed, _TakenForward) and placed.owner is self:
            placed.remove()

    def run(
        self,
        inner: Callable[..., Any],
        own: Callable[..., Any],
        masks: MaskPlaces,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the module. inner: the function that computes it, own: the same after `give_back`; masks: the mask
        arguments."""
        if not self._active:
            return own(*args, **kwargs)
        given = [kwargs.get(name, args[at] if at < len(args) else None) for at, name in masks]
        run = ModuleRun(self._attend, [mask for mask in given if isinstance(mask, torch.Tensor)])
        with entered(run):
            result = inner(*args, **kwargs)
        self._on_run(run.num_calls)
        return result

    def run_call(
        self, call: Callable[[object], torch.Tensor], number: int, masks: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        taken = self._taken
        if not self._active or taken is None:
            processor = processor_of(self.module) if taken is None else taken[0]
            return call(getattr(processor, "_attention_backend", None))
        run = ModuleRun(self._attend, masks, number)
        with entered(run):
            result = call(getattr(taken[1], "_attention_backend", None))
        self._on_run(run.num_calls - number)
        return result

    def _place_twin(self, processor: Any) -> None:
        if self._taken is None or self._taken[0] is not processor:
            self._taken = (processor, self._twin(processor))
        self.module.processor = self._taken[1]

    def _twin(self, processor: Any) -> Any:
        """Return a copy of a processor with a class of its own: same name, same signature, same state."""
        twin = copy.copy(processor)
        kind: Any = getattr(type(processor), "_class_before", type(processor))
        taking = _Taking(self, processor, twin)
        if hasattr(twin, "__dict__"):
            twin.__class__ = _twin_class(kind)
            twin._taking = taking
            twin._handle, twin._is_in_whole_graph = self.handle, self._is_in_whole_graph
        else:
            # The class of an object without a __dict__ is the only place left.
            twin.__class__ = type(kind.__name__, (_twin_class(kind),), {"__slots__": (), "_taking": taking})
        if self._entries is not None and asks_dispatcher(processor):
            twin._attention_backend = self._entries.entry_for(processor)
        return twin


@dataclass(frozen=True, eq=False)
class _Taking:
    """The owner of a twin, and the original processor."""

    owner: TakenModule
    before: Any
    twin: Any


def _taking_of(processor: Any) -> _Taking | None:
    # An object built from the class of a twin, or a copy of its state, is not a twin itself.
    taking: _Taking | None = getattr(processor, "_taking", None)
    return None if taking is None or taking.twin is not processor else taking


@functools.lru_cache(maxsize=64)
def _twin_class(kind: Any) -> Any:
    """Return the class of twins of `kind` processors, one for all of them: dynamo compiles once per class."""
    masks = mask_arguments(kind.__call__)
    function = _recorded_of(kind)

    # A graph break where calls cannot be recorded: dynamo does not trace the function mode.
    @outside_graphs
    def run(twin: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        taking, inner = _taking_of(twin), functools.partial(kind.__call__, twin)
        if taking is None:
            return inner(*args, **kwargs)
        return taking.owner.run(inner, taking.before, masks, args, kwargs)

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # An operator has no gradients: where they are recorded, a graph that may break does so.
        if (
            function is not None
            and self._handle is not None
            and torch.compiler.is_dynamo_compiling()
            and (self._is_in_whole_graph or not torch.is_grad_enabled())
        ):
            given = [kwargs.get(name, args[at] if at < len(args) else None) for at, name in masks]
            tensors = tuple([mask for mask in given if isinstance(mask, torch.Tensor)])
            return call_recorded(function, self._handle, tensors, self, args, kwargs)
        return run(self, args, kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        taking = _taking_of(self)
        return kind.__reduce_ex__(self, protocol) if taking is None else (_itself, (taking.before,))

    # No slots in addition to those of `kind`: Python can change an object's class only to one of the same layout.
    body = {
        "__call__": call,
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
        "__slots__": (),
        "_class_before": kind,
        "_handle": None,
        "_is_in_whole_graph": False,
    }
    return type(kind.__name__, (kind,), body)


def is_recordable(module: nn.Module) -> bool:
    """Return whether torch.compile can record a module's attention calls as operators without a graph break."""
    processor = processor_of(module)
    kind: Any = getattr(type(processor), "_class_before", type(processor))
    return processor is not None and _recorded_of(kind) is not None


def _recorded_of(kind: Any) -> Callable[..., Any] | None:
    # An object without a __dict__ has no room for a handle.
    return recorded(kind.__call__) if kind.__dictoffset__ else None


class _TakenForward:
    """Replaces a module's forward; copies of the module get a forward of their own."""

    def __init__(self, owner: TakenModule, module: nn.Module) -> None:
        self.owner = owner
        self._module = module
        self._before = module.__dict__.get("forward", _ABSENT)
        self._inner = module.forward
        self._masks = mask_arguments(type(module).forward)
        functools.update_wrapper(self, self._inner)

    @outside_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.owner.run(self._inner, self._inner, self._masks, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_own_forward, (self._module,)) if self._before is _ABSENT else (_itself, (self._before,))

    def remove(self) -> None:
        if self._before is _ABSENT:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = self._before


class PassHook:
    """A hook of a model; deepcopies and pickles of the model get one that does nothing. recorded: what torch.compile
    traces instead; None for a graph break."""

    def __init__(self, function: Callable[..., None], recorded: Callable[..., None] | None = None) -> None:
        # Hooks of a compiled model may be traced, and ours cannot be.
        self._function = outside_graphs(function)
        self._recorded = recorded

    def __call__(self, *args: Any) -> None:
        if self._recorded is not None and torch.compiler.is_dynamo_compiling():
            self._recorded(*args)
        else:
            self._function(*args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PassHook, (_do_nothing, _do_nothing)


def take_again_before_each_pass(model: nn.Module, taken: Sequence[TakenModule]) -> RemovableHandle:
    """Install and return a hook that intercepts processors set meanwhile, before each run of the model."""

    def take_again(*_: Any) -> None:
        for module in taken:
            module.take_again()

    return model.register_forward_pre_hook(PassHook(take_again))


def asks_dispatcher(processor: Any) -> bool:
    """Return whether a processor has an attribute for the backend of diffusers' dispatcher."""
    return getattr(processor, "_attention_backend", _ABSENT) is not _ABSENT


def is_taken(module: nn.Module) -> bool:
    """Return whether the attention of a module is already intercepted."""
    processor = processor_of(module)
    if processor is None:
        return isinstance(module.__dict__.get("forward"), _TakenForward)
    return _taking_of(processor) is not None


def _do_nothing(*_: Any) -> None:
    return None


def _itself(value: Any) -> Any:
    return value


def _own_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)
