"""Attention as one function, for anyone's model; and the pattern that a sparse backend would compute, as a value."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from typing import Any, Literal, overload

import torch

from diffusion_runtime.attention.backends.calling import check_shapes, run_backend
from diffusion_runtime.attention.backends.interface import AttentionCall
from diffusion_runtime.attention.backends.masks import check_mask
from diffusion_runtime.attention.backends.registry import (
    available_names,
    canonical_name,
    find_backend,
    num_changes,
    when_backends_change,
)
from diffusion_runtime.attention.backends.requirements import CallKind
from diffusion_runtime.attention.config import AttentionConfig, AttentionSpec
from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.attention.force import ForcedChoice, current_force
from diffusion_runtime.attention.opaque import ATTENTIONS, record_attention
from diffusion_runtime.attention.opaque_plan import PLANNERS, opaque_plan, recorded_plan
from diffusion_runtime.attention.recorded_values import CallValues, operator_values
from diffusion_runtime.attention.select import ENVIRONMENT_VARIABLE, Levels, Resolved, resolve_decision, select
from diffusion_runtime.attention.sparse.interface import SparseBackend, SparseOptions
from diffusion_runtime.core.device_guard import device_guard
from diffusion_runtime.core.options import build_options
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan
from diffusion_runtime.parallel.interface import AttentionInputs

_LAYER = LayerInfo()
_STEP = StepInfo()


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    backend: str | AttentionSpec = ...,
    options: Mapping[str, Any] | None = ...,
    layout: TokenLayout | None = ...,
    layer: LayerInfo = ...,
    step: StepInfo = ...,
    state: RequestCache | None = ...,
    gate: torch.Tensor | None = ...,
    mask: torch.Tensor | None = ...,
    scale: float | None = ...,
    causal: bool = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    backend: str | AttentionSpec = ...,
    options: Mapping[str, Any] | None = ...,
    layout: TokenLayout | None = ...,
    layer: LayerInfo = ...,
    step: StepInfo = ...,
    state: RequestCache | None = ...,
    gate: torch.Tensor | None = ...,
    mask: torch.Tensor | None = ...,
    scale: float | None = ...,
    causal: bool = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    backend: str | AttentionSpec = "auto",
    options: Mapping[str, Any] | None = None,
    layout: TokenLayout | None = None,
    layer: LayerInfo = _LAYER,
    step: StepInfo = _STEP,
    state: RequestCache | None = None,
    gate: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v by any backend.

    q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim], heads a multiple of kv_heads. backend:
    a name, several in order of preference, or `auto` for the environment's or the platform's; it is a choice for this
    layer's role by name, so one that does not serve the role is an error. options: of that backend. layout: where the
    key tokens sit, with the padding as lengths. layer, step: which they are, for sparse backends. state: what a backend
    keeps between calls and steps, such as windows and offsets on the device; pass one per request, as without one every
    call makes them again. gate: as q, for gated backends. mask: [batch or 1, heads or 1, seq_q or 1, seq_k], boolean
    (True: attend) or in q's dtype and added to the scaled scores, in addition to what layout and causal hide. -inf
    hides, a large negative number is a number; hidden keys and values must be finite. Padding is better given as the
    layout's valid_lengths, which cost nothing: a boolean mask of keys that is a plain prefix means the same, and its
    values are not looked at to find that out. scale: None is 1 / sqrt(head_dim). causal: query i sees keys 0..i.

    Returns out like q, and with return_lse also the log-sum-exp: natural log, float32, [batch, heads, seq_q]. A query
    that sees no key gives 0 and -inf. Raises BackendUnavailableError and ConfigError.

    torch.compile records one operator for a call, with fullgraph=True too; its backward pass computes the call again.
    """
    if torch.compiler.is_dynamo_compiling():
        return _record(q, k, v, backend, options, layout, layer, step, state, gate, mask, scale, causal, return_lse)
    out, lse = _attend(q, k, v, backend, options, layout, layer, step, state, gate, mask, scale, causal, return_lse)
    return out if lse is None else (out, lse)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    backend: str | AttentionSpec,
    options: Mapping[str, Any] | None,
    layout: TokenLayout | None,
    layer: LayerInfo,
    step: StepInfo,
    state: RequestCache | None,
    gate: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attention`, with None for a log-sum-exp that is not asked for."""
    check_shapes(q, k, v, layout, causal)
    if scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale)):
        raise ConfigError(f"attention: scale: expected a finite number, got {scale!r}")
    if mask is not None:
        check_mask(mask, q, k)
    spec = backend if isinstance(backend, AttentionSpec) else _spec(backend)
    if options:
        spec = AttentionSpec(spec.name, {**spec.options, **options})
    call = AttentionCall(
        AttentionInputs(q, k, v, layout, gate, mask),
        options=None,
        layer=layer,
        step=step,
        state=RequestCache() if state is None else state,
        scale=scale,
        causal=causal,
        return_lse=return_lse,
    )
    # Only a call that leaves the choice open is the environment's business.
    environment = None if spec.candidates else os.environ.get(ENVIRONMENT_VARIABLE)
    resolved = _resolve(num_changes(), spec, current_force(), environment, CallKind.of(call))
    call = call._replace(options=resolved.options, dense=resolved.dense)
    result = run_backend(resolved.backend, call)
    if not return_lse:
        return result.out, None
    assert result.lse is not None, f"{resolved.decision.backend} declares lse and returned none"
    return result.out, result.lse


def _record(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    backend: str | AttentionSpec,
    options: Mapping[str, Any] | None,
    layout: TokenLayout | None,
    layer: LayerInfo,
    step: StepInfo,
    state: RequestCache | None,
    gate: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`attention` while torch.compile traces: one operator."""
    name, given = (backend, None) if isinstance(backend, str) else (backend.name, backend.options)
    values = operator_values(layout, layer, step, state, name, given, options, scale, causal)
    out, lse = record_attention(_RECORDED_HANDLE, q, k, v, gate, mask, values, return_lse=return_lse)
    return (out, lse) if return_lse else out


class _RecordedFunction:
    """`attention` in a graph."""

    def run_recorded(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gate: torch.Tensor | None,
        mask: torch.Tensor | None,
        context: AttentionContext,
        values: CallValues | None,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute a recorded call, as RecordedAttention describes."""
        assert values is not None, "a function has no context"
        name, of_spec, options, scale, causal = values.further
        backend = AttentionSpec(name, of_spec) if of_spec else name
        where = values.layout, values.layer, values.step, context.state
        return _attend(q, k, v, backend, options, *where, gate, mask, scale, causal, return_lse)


_RECORDED_FUNCTION = _RecordedFunction()
_RECORDED_HANDLE = ATTENTIONS.handle_of(_RECORDED_FUNCTION)


@functools.lru_cache(maxsize=256)
def _spec(backend: str) -> AttentionSpec:
    return AttentionSpec(backend)


@functools.lru_cache(maxsize=1024)
def _resolve(
    registered: int, spec: AttentionSpec, forced: tuple[ForcedChoice, ...], environment: str | None, kind: CallKind
) -> Resolved:
    """registered: num_changes()."""
    del registered
    is_choice = spec.candidates or spec.options
    config = AttentionConfig(per_role={kind.role: spec}) if is_choice else AttentionConfig()
    return resolve_decision(select(kind.requirements(), Levels(forced, config=config, environment=environment)))


when_backends_change(_spec.cache_clear)
when_backends_change(_resolve.cache_clear)


def plan_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    backend: str,
    options: Mapping[str, Any] | None = None,
    layout: TokenLayout,
    layer: LayerInfo = LayerInfo(),  # noqa: B008 (frozen)
    step: StepInfo = StepInfo(),  # noqa: B008 (frozen)
    state: RequestCache | None = None,
    scale: float | None = None,
) -> SparsePlan:
    """Which (query, key) pairs `attention` with the same arguments would keep.

    q: [batch, seq, heads, head_dim]; k: [batch, seq, kv_heads, head_dim]. state: what the backend keeps between the
    steps of a request; the plan of a step depends on the steps before it for methods that warm-start. Where the
    backend's rules make a call dense, the plan keeps everything and `is_dense` is True.

    torch.compile records one operator, with fullgraph=True too. A plan of a graph keeps the same pairs, and has none of
    the hints for kernels (uniform_block_size, max_blocks_per_query, row_counts).

    Raises ConfigError for a backend that has no plan, options it does not have and a layout that does not fit.
    """
    if torch.compiler.is_dynamo_compiling():
        method, masks_rows, tail = _method_of(backend)
        pools = (options or {}).get("tail", tail) == "pooled"
        values = operator_values(layout, layer, step, state, backend, options, scale)
        made = opaque_plan(q.detach(), k.detach(), *values, masks_rows)
        return recorded_plan(made, q, k, layout, method, masks_rows, pools)
    return _plan(q, k, backend, options, layout, layer, step, state, scale)


def _method_of(backend: str) -> tuple[str, bool, str]:
    """A sparse backend's own name, SparseBackend.masks_rows and the default of its option `tail`; of any other, which
    the operator refuses, the name."""
    try:
        found = find_backend(canonical_name(backend))
    except ConfigError:
        found = None
    if not isinstance(found, SparseBackend):
        return backend, False, "none"
    assert issubclass(found.options_type, SparseOptions), "as SparseBackend asks for"
    return found.name, found.masks_rows, found.options_type.tail


# The mark of torch.compiler.assume_constant_result, whose call imports the compiler: 1.5 s of every first command.
_method_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _plan_recorded(q: torch.Tensor, k: torch.Tensor, values: CallValues) -> SparsePlan:
    """`plan_attention` by the values of a graph's call."""
    backend, options, scale = values.further
    assert values.layout is not None, "plan_attention takes no call without"
    return _plan(q, k, backend, options, values.layout, values.layer, values.step, values.state, scale)


PLANNERS.append(_plan_recorded)


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    backend: str,
    options: Mapping[str, Any] | None,
    layout: TokenLayout,
    layer: LayerInfo,
    step: StepInfo,
    state: RequestCache | None,
    scale: float | None,
) -> SparsePlan:
    """`plan_attention`."""
    name = canonical_name(backend)
    found = find_backend(name)
    if not isinstance(found, SparseBackend):
        sparse = [other for other in available_names() if isinstance(find_backend(other), SparseBackend)]
        raise ConfigError(f"plan_attention: {name} keeps every pair and has no plan; expected {', '.join(sparse)}")
    checked = build_options(found.options_type, options or {}, f"options of {name}")
    state = RequestCache() if state is None else state
    with device_guard(q.device):
        # A plan depends on queries and keys alone; the keys stand in for the values.
        return found.plan(AttentionCall(AttentionInputs(q, k, k, layout), checked, layer, step, state, scale))
