"""SageAttention: int8 scores (Zhang et al., arXiv:2410.02367; 2.x: arXiv:2411.10958). Quantised, so not exact.

Version 1.0.6, which the package index has, is Triton: it subtracts the keys' mean from k in place (we hand it a copy),
computes with v in float16 whatever it is given (values past 65504 overflow), takes three head sizes and returns no
log-sum-exp. Version 2.x comes from source and has none of these limits, but kernels for some chips alone.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

from diffusion_runtime.attention.backends.interface import (
    AttentionCall,
    AttentionResult,
    Availability,
    Capability,
    HeadSizes,
)
from diffusion_runtime.attention.backends.key_ranges import attend_by_ranges
from diffusion_runtime.attention.backends.narrowing import NarrowedCapability
from diffusion_runtime.attention.backends.packages import PackageBackend
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.hardware import DTYPES, Hardware

_CHIPS_OF_2 = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))

_VERSION_1 = Capability(
    platforms=frozenset({"cuda"}),
    dtypes=frozenset(DTYPES),
    head_sizes=HeadSizes(only=(64, 96, 128)),
    features=frozenset({"key_padding", "gqa", "causal", "scale"}),
    minimum_capability=(8, 0),
)
_VERSION_2 = Capability(
    platforms=frozenset({"cuda"}),
    dtypes=frozenset({"bfloat16", "float16"}),
    # It pads smaller heads to 64 and computes twice the work; none is taken.
    head_sizes=HeadSizes(minimum=64, maximum=128, multiple=8),
    features=frozenset({"key_padding", "gqa", "causal", "scale", "lse"}),
    minimum_capability=(8, 0),
)


def _is_version_1(version: str) -> bool:
    return version.partition(".")[0] in ("0", "1")


def _on(hardware: Hardware) -> Capability:
    return _VERSION_1 if _is_version_1(hardware.packages.get("sageattention", "1")) else _VERSION_2


@functools.cache
def _kernel() -> tuple[Callable[..., Any], bool]:
    """The package's function, and whether it is that of version 1."""
    from sageattention import sageattn

    return sageattn, _is_version_1(importlib.metadata.version("sageattention"))


@register_backend
class SageBackend(PackageBackend):
    """sageattention.sageattn, either version; the fields of its capability are what both can do between them."""

    name = "sage_attn"
    summary = "SageAttention, int8 scores"
    lossless = False
    # What its papers leave on normally distributed inputs, with a margin.
    error_bound = 0.06
    distribution = "sageattention"
    module = "sageattention"
    install = "pip install 'diffusion-runtime[sage]'"
    capability = NarrowedCapability(
        platforms=_VERSION_2.platforms,
        dtypes=_VERSION_1.dtypes,
        head_sizes=_VERSION_2.head_sizes,
        features=_VERSION_2.features,
        minimum_capability=_VERSION_2.minimum_capability,
        on=_on,
    )

    def probe(self, hardware: Hardware) -> Availability:
        found = super().probe(hardware)
        if found.version is None:
            return found
        if "triton" not in hardware.packages:
            return Availability(None, "sageattention needs triton and does not bring it", self.install)
        if not _is_version_1(found.version) and hardware.capability not in (None, *_CHIPS_OF_2):
            chips = ", ".join(f"sm_{major}{minor}" for major, minor in _CHIPS_OF_2)
            reason = f"sageattention {found.version} has kernels for {chips}, this is {hardware.describe()}"
            return Availability(None, reason, "pip install sageattention==1.0.6, which runs through Triton")
        return found

    def run(self, call: AttentionCall) -> AttentionResult:
        return attend_by_ranges(call, _attend)


def _attend(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> AttentionResult:
    function, version_1 = _kernel()
    # Kernels of both versions want the head dimension without gaps.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if version_1:
        out = function(q, k.clone(), v, tensor_layout="NHD", is_causal=causal, sm_scale=call.scale)
        return AttentionResult(out, None, "sageattention 1")
    if call.return_lse and q.shape[2] != k.shape[2]:
        # Builds of 2.x differ in whether the keys' mean, which corrects the log-sum-exp, meets every query head.
        repeats = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    result = function(q, k, v, tensor_layout="NHD", is_causal=causal, sm_scale=call.scale, return_lse=call.return_lse)
    if not call.return_lse:
        return AttentionResult(result, None, "sageattention 2")
    return AttentionResult(result[0], result[1].float(), "sageattention 2")
