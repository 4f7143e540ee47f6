"""SageAttention 3: FP4 scores and values on Blackwell (Zhang et al., arXiv:2505.11594). Quantised, so not exact."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from diffusion_runtime.attention.backends.calling import run_elsewhere
from diffusion_runtime.attention.backends.capability import Capability, HeadSizes
from diffusion_runtime.attention.backends.interface import (
    AttentionCall,
    AttentionResult,
    Availability,
    CallForm,
    RoundedOptions,
)
from diffusion_runtime.attention.backends.key_ranges import attend_by_ranges
from diffusion_runtime.attention.backends.packages import PackageBackend
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.core.hardware import Hardware

_CHIPS = ((10, 0), (12, 0), (12, 1))


@functools.cache
def _kernel() -> Callable[..., Any]:
    from sageattn3 import sageattn3_blackwell

    return sageattn3_blackwell  # type: ignore[no-any-return]


@register_backend
class Sage3Backend(PackageBackend):
    """sageattn3.sageattn3_blackwell. It knows no scale but 1 / sqrt(head_dim) and returns no log-sum-exp.

    Grouped queries are declared and run elsewhere, as its documentation advises; the report counts them under what ran.
    """

    name = "sage_attn_3"
    summary = "SageAttention 3, FP4 on Blackwell"
    lossless = False
    options_type = RoundedOptions
    # Four bits: what its paper leaves on normally distributed inputs, with a margin.
    error_bound = 0.3
    distribution = "sageattn3"
    module = "sageattn3"
    compiled_ahead = True
    functions = ("sageattn3_blackwell",)
    install = (
        "git clone https://github.com/thu-ml/SageAttention && cd SageAttention/sageattention3_blackwell && "
        "python setup.py install"
    )
    capability = Capability(
        platforms=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_sizes=HeadSizes(only=(64, 128)),
        features=frozenset({"key_padding", "gqa", "causal", "cached_keys"}),
        minimum_capability=_CHIPS[0],
        maximum_capability=_CHIPS[-1],
    )

    def probe(self, hardware: Hardware) -> Availability:
        found = super().probe(hardware)
        if found.version is not None and hardware.capability not in (None, *_CHIPS):
            chips = ", ".join(f"sm_{major}{minor}" for major, minor in _CHIPS)
            return Availability(None, f"sageattn3 has kernels for {chips}, this is {hardware.describe()}")
        return found

    def expected_implementation(self, form: CallForm) -> str | None:
        return "sageattention 3" if form.q_shape[2] == form.k_shape[2] else None

    def run(self, call: AttentionCall) -> AttentionResult:
        if call.q.shape[2] != call.k.shape[2]:
            return run_elsewhere(call, "SageAttention 3 has no grouped queries")
        return attend_by_ranges(call, _attend)


def _attend(_call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> AttentionResult:
    # It subtracts the mean from k in place, so k is always a copy.
    q_bhsd, v_bhsd = (x.transpose(1, 2).contiguous() for x in (q, v))
    k_bhsd = k.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    out = _kernel()(q_bhsd, k_bhsd, v_bhsd, is_causal=causal)
    # Its kernel writes bfloat16 or float16 as q is.
    return AttentionResult(out.transpose(1, 2).to(q.dtype), None, "sageattention 3")
