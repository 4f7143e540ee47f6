"""One run of an attention module: a torch function mode intercepts every attention call that it makes.

The mode belongs to this thread and sees torch's scaled_dot_product_attention; calls to diffusers' dispatcher arrive by
an entry in its registry (dispatcher.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# torch's own function, even if torch.nn.functional has a replacement.
_SDPA: Any = torch._C._nn.scaled_dot_product_attention


@dataclass(frozen=True)
class AttentionModuleCall:
    """One attention call of a module, with the arguments of torch.nn.functional.scaled_dot_product_attention under its
    own names; q_bhsd, k_bhsd, v_bhsd: [batch, heads, seq, head_dim].

    own: name of the function that computes it without interception, a backend of diffusers' dispatcher or torch's
    function; run_own: returns its result, [batch, heads, seq_q, head_dim].
    """

    q_bhsd: torch.Tensor
    k_bhsd: torch.Tensor
    v_bhsd: torch.Tensor
    mask: torch.Tensor | BlockMask | None
    dropout: float
    causal: bool
    scale: float | None
    gqa: bool
    own: str
    run_own: Callable[[], torch.Tensor]


# (call, its number within one run of the module, the masks the module was given) -> out [batch, heads, seq, head_dim]
AttendCall: TypeAlias = Callable[[AttentionModuleCall, int, Sequence[torch.Tensor]], torch.Tensor]


class ModuleRun(TorchFunctionMode):
    """One run of a module; counts its attention calls. first_number: of its first one, where the run is one call."""

    def __init__(self, attend: AttendCall, masks: Sequence[torch.Tensor], first_number: int = 0) -> None:
        super().__init__()
        self._attend = attend
        self._masks = masks
        self._is_serving = False
        self.num_calls = first_number

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = {} if kwargs is None else kwargs
        # A module inside another one is intercepted by itself.
        if func is not _SDPA or self._is_serving or _run_now.get() is not self:
            return func(*args, **named)
        return self.serve(_bind(functools.partial(func, *args, **named), *args, **named))

    def serve(self, call: AttentionModuleCall) -> torch.Tensor:
        """Compute one call, [batch, heads, seq_q, head_dim]."""
        self.num_calls += 1
        # Computing it may call torch's function again, which is not intercepted.
        self._is_serving = True
        try:
            return self._attend(call, self.num_calls - 1, self._masks)
        finally:
            self._is_serving = False


# The innermost run of an intercepted module in this thread.
_run_now: ContextVar[ModuleRun | None] = ContextVar("attention_module_run", default=None)


@contextlib.contextmanager
def entered(run: ModuleRun) -> Iterator[None]:
    """Context manager: this thread's calls belong to `run`."""
    token = _run_now.set(run)
    try:
        with run:
            yield
    finally:
        _run_now.reset(token)


def current_run() -> ModuleRun | None:
    """Return the run of an intercepted module that this thread is in."""
    return _run_now.get()


def _bind(
    run_own: Callable[[], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionModuleCall:
    return AttentionModuleCall(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, _SDPA.__name__, run_own
    )


def other_mode() -> str | None:
    """Return another torch function mode of this thread that may replace torch's calls; None for no such mode.

    diffusers' hooks for guidance without attention scores have one; torch's own modes, such as that of a default
    device, are not counted.
    """
    stack: Callable[[], list[object]] = torch.overrides._get_current_function_mode_stack
    for mode in stack():
        kind = type(mode)
        if not isinstance(mode, ModuleRun) and not kind.__module__.startswith("torch."):
            return f"{kind.__module__}.{kind.__qualname__}"
    return None


def replaced_sdpa() -> str | None:
    """Return what replaces torch's scaled_dot_product_attention, None for torch's own function."""
    placed = F.scaled_dot_product_attention
    if placed is _SDPA:
        return None
    module, name = getattr(placed, "__module__", None), getattr(placed, "__qualname__", type(placed).__name__)
    return f"{module}.{name}" if module else str(name)
