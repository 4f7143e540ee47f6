"""One module's attention calls, taken over while that module runs and at no other time.

A processor is replaced by a twin in this module alone, and what is without one by its forward. Where a twin asks
diffusers' dispatcher, it asks for an entry of ours. Leaving the run, by an exception too, ends it all (module_run.py).
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

from diffusion_runtime.diffusers_bridge.compiled import outside_graphs
from diffusion_runtime.diffusers_bridge.module_run import AttendCall, ModuleRun, entered
from diffusion_runtime.diffusers_bridge.modules import mask_arguments, processor_of

_ABSENT = object()
# Told after each run of a module how many calls were seen.
OnRun: TypeAlias = Callable[[int], None]
# (position, name) of the arguments of a module or processor that carry masks.
MaskPlaces: TypeAlias = tuple[tuple[int, str], ...]


class DispatcherEntries(Protocol):
    """Gives processors what they are to ask diffusers' dispatcher for; see dispatcher.py."""

    def entry_for(self, processor: Any) -> object:
        """The value for a processor's `_attention_backend`, for one that has it."""


class TakenModule:
    """A module whose attention calls go to `attend` until `give_back`.

    entries: what its calls to diffusers' dispatcher ask for, None to leave that alone. A copy of the module, by
    deepcopy or pickle, has its own attention.
    """

    def __init__(
        self, module: nn.Module, attend: AttendCall, on_run: OnRun, entries: DispatcherEntries | None = None
    ) -> None:
        self.module = module
        self._attend = attend
        self._on_run = on_run
        self._entries = entries
        self._active = True
        # The last processor that was taken over, and its twin.
        self._taken: tuple[Any, Any] | None = None
        processor = processor_of(module)
        if processor is None:
            module.__dict__["forward"] = _TakenForward(self, module)
        else:
            self._place_twin(processor)

    def take_again(self) -> None:
        """Take over a processor that somebody has set in the meantime.

        Perturbed-attention guidance does that within a call of its pipeline, and scripts do.
        """
        processor = processor_of(self.module)
        if self._active and processor is not None and _taking_of(processor) is None:
            self._place_twin(processor)

    def give_back(self) -> None:
        """Put back what was there, unless somebody has replaced ours in the meantime."""
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
        """One run of the module. inner: what computes it, own: the same after `give_back`; masks: which arguments."""
        if not self._active:
            return own(*args, **kwargs)
        given = [kwargs.get(name, args[at] if at < len(args) else None) for at, name in masks]
        run = ModuleRun(self._attend, [mask for mask in given if isinstance(mask, torch.Tensor)])
        with entered(run):
            result = inner(*args, **kwargs)
        self._on_run(run.num_calls)
        return result

    def _place_twin(self, processor: Any) -> None:
        if self._taken is None or self._taken[0] is not processor:
            self._taken = (processor, self._twin(processor))
        self.module.processor = self._taken[1]

    def _twin(self, processor: Any) -> Any:
        """A copy of a processor, of a class of its own: same name, same signature, same state."""
        twin = copy.copy(processor)
        kind: Any = getattr(type(processor), "_class_before", type(processor))
        taking = _Taking(self, processor, twin)
        if hasattr(twin, "__dict__"):
            twin.__class__ = _twin_class(kind)
            twin._taking = taking
        else:
            # The class of an object without a __dict__ is the one place that is left.
            twin.__class__ = type(kind.__name__, (_twin_class(kind),), {"__slots__": (), "_taking": taking})
        if self._entries is not None and asks_dispatcher(processor):
            twin._attention_backend = self._entries.entry_for(processor)
        return twin


@dataclass(frozen=True, eq=False)
class _Taking:
    """Whose twin of what a processor is."""

    owner: TakenModule
    before: Any
    twin: Any


def _taking_of(processor: Any) -> _Taking | None:
    # One that was made of the class of a twin, or is a copy of its state, is none.
    taking: _Taking | None = getattr(processor, "_taking", None)
    return None if taking is None or taking.twin is not processor else taking


@functools.lru_cache(maxsize=64)
def _twin_class(kind: Any) -> Any:
    """The class of twins of processors of class `kind`. One for all of them: dynamo compiles once for each class."""
    masks = mask_arguments(kind.__call__)

    # A compiled model leaves its graph here, as dynamo does not follow the mode.
    @outside_graphs
    def run(twin: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        taking, inner = _taking_of(twin), functools.partial(kind.__call__, twin)
        if taking is None:
            return inner(*args, **kwargs)
        return taking.owner.run(inner, taking.before, masks, args, kwargs)

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        taking = _taking_of(self)
        return kind.__reduce_ex__(self, protocol) if taking is None else (_itself, (taking.before,))

    # No slots beside those of `kind`: Python changes the class of an object to one of the same layout alone.
    body = {
        "__call__": call,
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
        "__slots__": (),
        "_class_before": kind,
    }
    return type(kind.__name__, (kind,), body)


class _TakenForward:
    """Stands in the place of a module's forward; copies of the module get a forward of their own."""

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
    """A hook of a model; copies of the model, by deepcopy or pickle, get one that does nothing."""

    def __init__(self, function: Callable[..., None]) -> None:
        # Hooks of a compiled model may be traced, and none of ours can be.
        self._function = outside_graphs(function)

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PassHook, (_do_nothing,)


def take_again_before_each_pass(model: nn.Module, taken: Sequence[TakenModule]) -> RemovableHandle:
    """Take over processors that were set in the meantime, as often as the model runs. Returns the hook."""

    def take_again(*_: Any) -> None:
        for module in taken:
            module.take_again()

    return model.register_forward_pre_hook(PassHook(take_again))


def asks_dispatcher(processor: Any) -> bool:
    """Whether a processor says which backend of diffusers' dispatcher its calls go to."""
    return getattr(processor, "_attention_backend", _ABSENT) is not _ABSENT


def is_taken(module: nn.Module) -> bool:
    """Whether the attention of a module is already taken over."""
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
