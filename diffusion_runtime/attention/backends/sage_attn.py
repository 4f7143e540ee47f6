"""SageAttention: int8 scores (Zhang et al., arXiv:2410.02367; 2.x: arXiv:2411.10958). Quantised, so not exact.

Version 1.0.6, which the package index has, is Triton: it subtracts the keys' mean from k in place (we hand it a copy),
computes with v in float16 whatever it is given (values past 65504 overflow), takes three head sizes and returns no
log-sum-exp. Its kernel counts what its last block of 64 keys holds past the end as keys of score 0 and value 0: with 77
keys an error of 0.28, with 24 one of 0.50 (its own kernels, in Triton's interpreter and on an H200); the causal one
hides them, and needs whole tiles of 128. Version 2.x comes from source and has none of these limits but that on sm_86,
which runs the same kernel
before 2.2.1, and it has kernels for some chips alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import re
from collections.abc import Callable
from typing import Any

import torch

from diffusion_runtime.attention.backends.capability import Capability, HeadSizes, KeyCounts, NarrowedCapability
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
from diffusion_runtime.core.hardware import DTYPES, Hardware

_CHIPS_OF_2 = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1))
# The chip whose kernel 2.x took over from version 1, and the last version that may lack what hides the keys past the
# end: it came in August 2025 without a new number.
_TRITON_CHIP = (8, 6)
_LAST_WITH_WHOLE_BLOCKS = (2, 2, 0)
# A tenth of what int8 scores cost; 32760 keys (81 frames of 480p in Wan) are 2.4e-4 below a whole number of blocks.
# Causal calls go through whole tiles of 128 queries and read the scale of every block of 64 keys up to a tile's end:
# one past the last is whatever lies there, seen as NaN in some runs with 288 keys.
_WHOLE_BLOCKS = KeyCounts(block=64, tolerance=1e-3, causal_block=128)
# Relative errors on normally distributed inputs: 0.011 to 0.013 with values in float16, 0.034 to 0.040 with weights and
# values in fp8, as 2.x computes on sm_89 and newer.
_INT8_BOUND, _FP8_BOUND = 0.03, 0.06

_VERSION_1 = Capability(
    platforms=frozenset({"cuda"}),
    dtypes=frozenset(DTYPES),
    head_sizes=HeadSizes(only=(64, 96, 128)),
    features=frozenset({"key_padding", "gqa", "causal", "scale", "cached_keys"}),
    minimum_capability=(8, 0),
    key_counts=_WHOLE_BLOCKS,
)
_VERSION_2 = Capability(
    platforms=frozenset({"cuda"}),
    dtypes=frozenset({"bfloat16", "float16"}),
    # It pads smaller heads to 64 and computes twice the work; none is taken.
    head_sizes=HeadSizes(minimum=64, maximum=128, multiple=8),
    features=frozenset({"key_padding", "gqa", "causal", "scale", "lse", "cached_keys"}),
    minimum_capability=(8, 0),
)


def _is_version_1(version: str) -> bool:
    return version.partition(".")[0] in ("0", "1")


def _numbers(version: str) -> tuple[int, ...]:
    """`2.2.0+cu128torch2.9` as (2, 2, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _on(hardware: Hardware) -> Capability:
    version = hardware.packages.get("sageattention", "1")
    if _is_version_1(version):
        return _VERSION_1
    if hardware.capability == _TRITON_CHIP and _numbers(version) <= _LAST_WITH_WHOLE_BLOCKS:
        return dataclasses.replace(_VERSION_2, key_counts=_WHOLE_BLOCKS)
    return _VERSION_2


@functools.cache
def _kernel() -> tuple[Callable[..., Any], bool]:
    """The package's function, and whether it is that of version 1."""
    (sageattn,) = SageBackend().first_call_functions()
    return sageattn, _is_version_1(importlib.metadata.version("sageattention"))


@register_backend
class SageBackend(PackageBackend):
    """sageattention.sageattn, either version; the fields of its capability are what both can do between them."""

    name = "sage_attn"
    summary = "SageAttention, int8 scores"
    lossless = False
    options_type = RoundedOptions
    error_bound = _FP8_BOUND
    distribution = "sageattention"
    module = "sageattention"
    functions = ("sageattn",)
    install = "pip install 'diffusion-runtime[sage]'"
    capability = NarrowedCapability(
        platforms=_VERSION_2.platforms,
        dtypes=_VERSION_1.dtypes,
        head_sizes=_VERSION_2.head_sizes,
        features=_VERSION_2.features,
        minimum_capability=_VERSION_2.minimum_capability,
        key_counts=_VERSION_1.key_counts,
        narrow=_on,
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

    def is_compiled_ahead(self, hardware: Hardware) -> bool:
        return not _is_version_1(hardware.packages[self.distribution])

    def error_bound_on(self, hardware: Hardware) -> float:
        version_1 = _is_version_1(hardware.packages.get(self.distribution, "1"))
        has_fp8 = hardware.capability is not None and hardware.capability >= (8, 9)
        return _FP8_BOUND if has_fp8 and not version_1 else _INT8_BOUND

    def expected_implementation(self, form: CallForm) -> str | None:
        counts = self.capability.on_hardware(form.hardware).key_counts
        if form.k_shape[1] not in counts or (form.layout is not None and form.layout.has_padding):
            # Such calls, or some of them, run elsewhere.
            return None
        version = form.hardware.packages.get(self.distribution, "")
        return f"sageattention {1 if _is_version_1(version) else 2}"

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
