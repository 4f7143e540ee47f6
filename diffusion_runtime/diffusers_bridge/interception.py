"""One module's attention calls, taken over while that module runs and at no other time.

Nothing shared is changed. A processor is replaced by a twin in this module alone; while the twin runs, a torch function
mode of this thread sees torch's scaled_dot_product_attention, which is also where diffusers' dispatcher ends once the
twin asks for its native backend. Leaving the call, by an exception too, ends the mode.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from diffusion_runtime.diffusers_bridge.modules import mask_arguments, processor_of

_ABSENT = object()


@dataclass(frozen=True)
class SdpaCall:
    """The arguments of torch.nn.functional.scaled_dot_product_attention, under its own names; q_bhsd, k_bhsd, v_bhsd:
    [batch, heads, seq, head_dim]."""

    q_bhsd: torch.Tensor
    k_bhsd: torch.Tensor
    v_bhsd: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    gqa: bool

    def run_torch(self) -> torch.Tensor:
        """What torch itself makes of the call."""
        return F.scaled_dot_product_attention(
            self.q_bhsd,
            self.k_bhsd,
            self.v_bhsd,
            attn_mask=self.mask,
            dropout_p=self.dropout,
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=self.gqa,
        )


# (call, its number within one run of the module, the masks the module was given) -> out [batch, heads, seq, head_dim]
AttendCall: TypeAlias = Callable[[SdpaCall, int, Sequence[torch.Tensor]], torch.Tensor]
# Told after each run of a module how many calls were seen.
OnRun: TypeAlias = Callable[[int], None]


class _Interception(TorchFunctionMode):
    def __init__(self, attend: AttendCall, masks: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._attend = attend
        self._masks = masks
        self.num_calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = {} if kwargs is None else kwargs
        if func is not F.scaled_dot_product_attention:
            return func(*args, **named)
        call = _bind(*args, **named)
        self.num_calls += 1
        # torch takes the mode off the stack for the time of this method, so attention inside is torch's own.
        return self._attend(call, self.num_calls - 1, self._masks)


def _bind(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> SdpaCall:
    return SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


class TakenModule:
    """A module whose attention calls go to `attend` until `give_back`.

    dispatcher_backend: what its calls to diffusers' dispatcher ask for, None to leave that alone.
    """

    def __init__(self, module: nn.Module, attend: AttendCall, on_run: OnRun, dispatcher_backend: object = None) -> None:
        self._module = module
        self._attend = attend
        self._on_run = on_run
        self._active = True
        # A compiled model leaves its graph here, as dynamo does not follow the mode.
        leave_graph: Any = torch.compiler.disable
        self._run_eagerly: Callable[..., Any] = leave_graph(self._run)
        processor = processor_of(module)
        if processor is None:
            self._masks = mask_arguments(type(module).forward)
            self._before = module.__dict__.get("forward", _ABSENT)
            inner = module.forward
            self._placed: Any = self._wrapper(inner)
            module.__dict__["forward"] = self._placed
        else:
            self._masks = mask_arguments(type(processor).__call__)
            self._before = processor
            self._placed = self._twin(processor)
            if dispatcher_backend is not None and getattr(processor, "_attention_backend", _ABSENT) is not _ABSENT:
                self._placed._attention_backend = dispatcher_backend
            module.processor = self._placed

    def give_back(self) -> None:
        """Put back what was there, unless somebody has replaced ours in the meantime."""
        self._active = False
        if processor_of(self._module) is None:
            if self._module.__dict__.get("forward") is self._placed:
                if self._before is _ABSENT:
                    del self._module.__dict__["forward"]
                else:
                    self._module.__dict__["forward"] = self._before
        elif processor_of(self._module) is self._placed:
            self._module.processor = self._before

    def _wrapper(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run_eagerly(inner, args, kwargs)

        forward._taken_module = self  # type: ignore[attr-defined]
        return forward

    def _twin(self, processor: Any) -> Any:
        """A copy of a processor, of a class of its own: same name, same signature, same state."""
        kind: Any = type(processor)
        owner = self

        @functools.wraps(kind.__call__)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return owner._run_eagerly(functools.partial(kind.__call__, self), args, kwargs)

        twin = copy.copy(processor)
        # No slots beside those of `kind`: Python changes the class of an object to one of the same layout alone.
        body = {"__call__": call, "__module__": kind.__module__, "__slots__": (), "_taken_module": self}
        twin.__class__ = type(kind.__name__, (kind,), body)
        return twin

    def _run(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._active:
            return inner(*args, **kwargs)
        given = [kwargs.get(name, args[at] if at < len(args) else None) for at, name in self._masks]
        with _Interception(self._attend, [mask for mask in given if isinstance(mask, torch.Tensor)]) as seen:
            result = inner(*args, **kwargs)
        self._on_run(seen.num_calls)
        return result


def is_taken(module: nn.Module) -> bool:
    """Whether the attention of a module is already taken over."""
    processor = processor_of(module)
    placed = module.__dict__.get("forward") if processor is None else type(processor)
    return getattr(placed, "_taken_module", None) is not None
