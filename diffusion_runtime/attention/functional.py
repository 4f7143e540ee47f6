"""Attention as one function, for anyone's model."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, Literal, overload

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall, Question
from diffusion_runtime.attention.config import AttentionConfig, AttentionSpec
from diffusion_runtime.attention.info import LayerInfo, StepInfo
from diffusion_runtime.attention.layers import _Resolved, check_shapes, resolve_decision
from diffusion_runtime.attention.layout import TokenLayout
from diffusion_runtime.attention.policy import dtype_name
from diffusion_runtime.attention.roles import role_category
from diffusion_runtime.attention.select import ENVIRONMENT_VARIABLE, ForcedChoice, Levels, current_force, select
from diffusion_runtime.attention.state import AttentionState
from diffusion_runtime.hardware import detect_hardware

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
    state: AttentionState | None = ...,
    gate: torch.Tensor | None = ...,
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
    state: AttentionState | None = ...,
    gate: torch.Tensor | None = ...,
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
    state: AttentionState | None = None,
    gate: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v by any backend.

    q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim], heads a multiple of kv_heads.
    backend: a name, several in order of preference, or `auto` for the environment's or the platform's; it is a choice
        for this layer's role by name, so one that does not serve the role is an error. options: of that backend.
    layout: where the key tokens sit, with the padding as lengths. layer, step: which they are, for sparse backends.
    state: what a backend keeps between steps; pass one object for a whole request. gate: as q, for gated backends.
    scale: None is 1 / sqrt(head_dim). causal: query i sees keys 0..i.

    Returns out like q, and with return_lse also the log-sum-exp: natural log, float32, [batch, heads, seq_q]. A query
    that sees no key gives 0 and -inf. Raises BackendUnavailableError and ConfigError.
    """
    check_shapes(q, k, v, layout, causal)
    spec = backend if isinstance(backend, AttentionSpec) else _spec(backend)
    if options:
        spec = AttentionSpec(spec.name, {**spec.options, **options})
    needs = frozenset(
        name
        for name, needed in (
            ("causal", causal),
            ("scale", scale is not None),
            ("lse", return_lse),
            ("gate", gate is not None),
            ("key_padding", layout is not None and layout.has_padding),
        )
        if needed
    )
    resolved = _resolve(
        spec,
        current_force(),
        os.environ.get(ENVIRONMENT_VARIABLE),
        layer.role,
        q.shape[3],
        q.dtype,
        q.device,
        q.shape[2],
        k.shape[2],
        needs,
    )
    call = AttentionCall(
        q=q,
        k=k,
        v=v,
        options=resolved.options,
        layout=layout,
        layer=layer,
        step=step,
        state=AttentionState() if state is None else state,
        gate=gate,
        scale=scale,
        causal=causal,
        return_lse=return_lse,
    )
    result = resolved.backend.run(call)
    if not return_lse:
        return result.out
    assert result.lse is not None, f"{resolved.decision.backend} declares lse and returned none"
    return result.out, result.lse


@functools.lru_cache(maxsize=256)
def _spec(backend: str) -> AttentionSpec:
    return AttentionSpec(backend)


@functools.lru_cache(maxsize=1024)
def _resolve(
    spec: AttentionSpec,
    forced: tuple[ForcedChoice, ...],
    environment: str | None,
    role: str,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    num_heads: int,
    num_kv_heads: int,
    needs: frozenset[str],
) -> _Resolved:
    question = Question(
        role=role,
        category=role_category(role),
        head_dim=head_dim,
        dtype=dtype_name(dtype),
        hardware=detect_hardware(str(device)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        needs=needs,
    )
    said = spec.candidates or spec.options
    config = AttentionConfig(per_role={role: spec}) if said else AttentionConfig()
    return resolve_decision(select(question, Levels(forced, config=config, environment=environment)))
