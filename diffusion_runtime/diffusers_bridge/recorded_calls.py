"""Attention calls of diffusers' processors as operators of a graph: what torch.compile traces of an attached module.

A processor is traced with two of its globals replaced: diffusers' dispatcher and torch's scaled_dot_product_attention
are replaced by functions here that record one operator. When the graph runs, the operator makes the same call within a
run of the module, where it is intercepted as in an eager model. So a block compiles with fullgraph=True, and one graph
serves all layers: the module reaches the operator as a handle.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from diffusion_runtime.attention.handles import HandleTable
from diffusion_runtime.attention.recorded_values import literal
from diffusion_runtime.errors import ConfigError

_DISPATCHER, _SDPA = "dispatch_attention_fn", "scaled_dot_product_attention"

# (the call, its number within one run of the module, the masks that the module was given) -> out as the call's
RunCall: TypeAlias = Callable[[Callable[[Any], torch.Tensor], int, Sequence[torch.Tensor]], torch.Tensor]


class RecordedModule(Protocol):
    """A module whose calls are recorded."""

    def run_call(
        self, call: Callable[[object], torch.Tensor], number: int, masks: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the result of one attention call, intercepted. call: makes it, with a value for the `backend` of
        diffusers' dispatcher; number: within one run of the module; masks: that the module was given."""


# The modules that compiled blocks contain.
MODULES: HandleTable[RecordedModule] = HandleTable()


@torch.library.custom_op("diffusion_runtime::module_attention", mutates_args=())
def module_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    given: Sequence[torch.Tensor],
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
    number: int,
    is_dispatched: bool,
    module: torch.Tensor,
    forward_pass: torch.Tensor,
) -> torch.Tensor:
    """Compute one attention call of a module, contiguous. q, k, v: [batch, seq, heads, head_dim] of a call to the
    dispatcher (is_dispatched), [batch, heads, seq, head_dim] of one to torch. module: its handle. forward_pass: from
    `begun_pass` in this graph, so that it runs before; 0 where the pass began outside."""

    def call(backend: Any) -> torch.Tensor:
        out: torch.Tensor
        if is_dispatched:
            from diffusers.models.attention_dispatch import dispatch_attention_fn

            out = dispatch_attention_fn(q, k, v, mask, dropout, causal, scale, gqa, backend=backend)
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=gqa)
        return out

    del forward_pass
    return MODULES.find(module).run_call(call, number, given).contiguous()


@module_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,  # noqa: ARG001
    v: torch.Tensor,
    mask: torch.Tensor | None,  # noqa: ARG001
    given: Sequence[torch.Tensor],  # noqa: ARG001
    dropout: float,  # noqa: ARG001
    causal: bool,  # noqa: ARG001
    scale: float | None,  # noqa: ARG001
    gqa: bool,  # noqa: ARG001
    number: int,  # noqa: ARG001
    is_dispatched: bool,  # noqa: ARG001
    module: torch.Tensor,  # noqa: ARG001
    forward_pass: torch.Tensor,  # noqa: ARG001
) -> torch.Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


class RecordedModel(Protocol):
    """A model whose forward passes are recorded."""

    def begin_recorded(self, arguments: dict[str, Any]) -> None:
        """Begin a forward pass. arguments: of the model's forward, by name."""


# The models that are attached to.
MODELS: HandleTable[RecordedModel] = HandleTable()


@torch.library.custom_op("diffusion_runtime::begun_pass", mutates_args=())
def begun_pass(tensors: Sequence[torch.Tensor], numbers: Sequence[int], text: str, model: torch.Tensor) -> torch.Tensor:
    """Begin a model's forward pass within a graph. tensors, numbers, text: its arguments, as `record_pass` writes them;
    model: a handle. Returns an input of the pass's attention calls, so that they run after it."""
    MODELS.find(model).begin_recorded(_read(ast.literal_eval(text), {_TENSOR: tensors, _NUMBER: numbers}))
    return torch.zeros((), dtype=torch.int64, device="cpu")


@begun_pass.register_fake
def _(
    tensors: Sequence[torch.Tensor],  # noqa: ARG001
    numbers: Sequence[int],  # noqa: ARG001
    text: str,  # noqa: ARG001
    model: torch.Tensor,  # noqa: ARG001
) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device="cpu")


# Stand for a tensor and an integer in a text, before its number. In the text itself an integer would be a constant.
_TENSOR, _NUMBER = "<tensor>", "<number>"


def record_pass(model: torch.Tensor, arguments: dict[str, Any]) -> None:
    """Record the begin of a forward pass while torch.compile traces; its attention calls follow."""
    tensors: list[torch.Tensor] = []
    numbers: list[int] = []
    text = literal(_written(arguments, tensors, numbers))
    _NOW.forward_pass = begun_pass([each.detach() for each in tensors], numbers, text, model)


def end_pass() -> None:
    """End the forward pass while torch.compile traces."""
    _NOW.forward_pass = _OUTSIDE


def _written(value: Any, tensors: list[torch.Tensor], numbers: list[int]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return [_TENSOR, len(tensors) - 1]
    if isinstance(value, int) and not isinstance(value, bool):
        numbers.append(value)
        return [_NUMBER, len(numbers) - 1]
    if isinstance(value, dict):
        return {key: _written(each, tensors, numbers) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_written(each, tensors, numbers) for each in value]
    return value


def _read(value: Any, given: Mapping[str, Sequence[Any]]) -> Any:
    if isinstance(value, dict):
        return {key: _read(each, given) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) == 2 and isinstance(value[0], str) and value[0] in given:
        return given[value[0]][value[1]]
    return [_read(each, given) for each in value]


# Of a pass that began outside of the graph.
_OUTSIDE = torch.zeros((), dtype=torch.int64, device="cpu")


class _Trace:
    """The module that is being traced, from its call to its return: it tells the recording functions whose call it is.

    torch.compile tracks writes to it while it traces, and restores them; a graph reads none of it.
    """

    def __init__(self) -> None:
        # An attribute from the start: a graph is guarded by the attributes that exist before it runs.
        self.module: torch.Tensor | None = None
        self.masks: tuple[torch.Tensor, ...] = ()
        self.num_calls = 0
        self.forward_pass = _OUTSIDE


_NOW = _Trace()


def recorded(function: object) -> Callable[..., Any] | None:
    """Return the `__call__` of a processor with its attention calls recorded; None where it makes none itself."""
    if not isinstance(function, types.FunctionType) or inspect.unwrap(function) is not function:
        return None
    names, known = set(function.__code__.co_names), function.__globals__
    replaced: dict[str, object] = {}
    if _DISPATCHER in names and _DISPATCHER in known:
        replaced[_DISPATCHER] = _record_dispatched
    if _SDPA in names:
        replaced |= {name: _functional() for name in names & known.keys() if known[name] is F}
    if not replaced:
        return None
    scope = {**known, **replaced}
    # Under its real name torch.compile would take the globals of the module itself, and guard those.
    scope.pop("__name__", None)
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@functools.cache
def _functional() -> types.ModuleType:
    """Return torch.nn.functional with one function replaced."""
    module = types.ModuleType(F.__name__)
    module.__dict__.update({**vars(F), _SDPA: _record_sdpa})
    return module


def call_recorded(
    function: Callable[..., Any],
    module: torch.Tensor,
    masks: tuple[torch.Tensor, ...],
    processor: object,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `function`, of `recorded`, for a module by its handle under torch.compile. masks: its own."""
    before = _NOW.module, _NOW.masks, _NOW.num_calls
    _NOW.module, _NOW.masks, _NOW.num_calls = module, masks, 0
    result = function(processor, *args, **kwargs)
    if _NOW.num_calls == 0:
        raise ConfigError("attach: a compiled attention module made no call of attention")
    _NOW.module, _NOW.masks, _NOW.num_calls = before
    return result


def _record(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
    is_dispatched: bool,
) -> torch.Tensor:
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise ConfigError("attach: a compiled module hides pairs by a BlockMask, which no operator takes")
    assert _NOW.module is not None
    number = _NOW.num_calls
    _NOW.num_calls = number + 1
    out: torch.Tensor = module_attention(
        query,
        key,
        value,
        mask,
        _NOW.masks,
        dropout,
        causal,
        scale,
        gqa,
        number,
        is_dispatched,
        _NOW.module,
        _NOW.forward_pass,
    )
    return out


def _record_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Record torch.nn.functional.scaled_dot_product_attention."""
    return _record(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, False)


def _record_dispatched(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = None,  # noqa: ARG001 - the module's own
    parallel_config: Any = None,
) -> torch.Tensor:
    """Record diffusers' dispatch_attention_fn."""
    if attention_kwargs or parallel_config is not None:
        raise ConfigError("attach: a compiled module calls diffusers' dispatcher with options that no operator takes")
    return _record(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, True)
