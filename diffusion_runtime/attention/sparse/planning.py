"""The pattern that a sparse backend would compute, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall
from diffusion_runtime.attention.backends.registry import available_names, canonical_name, find_backend
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.attention.options import build_options
from diffusion_runtime.attention.sparse.interface import SparseBackend
from diffusion_runtime.device_guard import device_guard
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan
from diffusion_runtime.parallel.interface import AttentionInputs
from diffusion_runtime.step_info import LayerInfo, StepInfo
from diffusion_runtime.token_layout import TokenLayout


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
    backend's schedule says dense, the plan keeps everything and `is_dense` is True.

    Raises ConfigError for a backend that has no plan, options it does not have and a layout that does not fit.
    """
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
