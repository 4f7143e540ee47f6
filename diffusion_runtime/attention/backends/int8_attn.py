"""8-bit attention of our own: int8 scores with smoothed keys, values in int8 or float16 (kernels/int8_attention).

From a plain install: Triton on CUDA from sm_80 on. A CPU runs the eager formula, which simulates the rounding in
float32: it shows what the rounding costs, and is slower than the other backends there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from diffusion_runtime.attention.backends.capability import AttentionRequirements, Capability, HeadSizes
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Availability, CallForm
from diffusion_runtime.attention.backends.key_ranges import attend_by_ranges
from diffusion_runtime.attention.backends.packages import ImportingBackend
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.kernels.int8_attention.api import int8_attention
from diffusion_runtime.kernels.int8_attention.triton import HEAD_SIZES, MINIMUM_CAPABILITY, refusal_of
from diffusion_runtime.startup.importing import import_failure

_INSTALL_TRITON = "pip install 'diffusion-runtime[sparse]'"

_CAPABILITY = Capability(
    platforms=frozenset({"cpu", "cuda"}),
    head_sizes=HeadSizes(only=HEAD_SIZES),
    features=frozenset({"key_padding", "gqa", "scale", "lse", "cached_keys"}),
    minimum_capability=MINIMUM_CAPABILITY,
)


@dataclass(frozen=True)
class Int8Options:
    """values: what the product of weights and values is computed in. int8 is faster, float16 more precise (relative
    errors of 0.017 and 0.012 on normal inputs)."""

    values: Literal["int8", "fp16"] = "int8"


@register_backend
class Int8Backend(ImportingBackend):
    """Quantises q, k and v of every call; padding is cut off before, so it has no part in scales and means."""

    name = "int8_attn"
    summary = "8-bit attention of our own: int8 scores and values"
    options_type = Int8Options
    lossless = False
    # Of the log-sum-exp of a few keys, too, which is off by what single scores are.
    error_bound = 0.03
    distributions = ("triton",)
    self_check_platforms: ClassVar[frozenset[str]] = frozenset()
    # Scales, means and 8-bit tensors are made on the device by every call, of sizes that its shapes decide.
    not_replayed = None
    capability = _CAPABILITY

    def probe(self, hardware: Hardware) -> Availability:
        if hardware.platform == "cuda" and "triton" not in hardware.packages:
            return Availability(None, "its kernel needs triton", _INSTALL_TRITON)
        return Availability(version=hardware.packages.get("triton", hardware.torch_version))

    def imported(self, requirements: AttentionRequirements) -> Availability:
        if requirements.hardware.platform == "cuda":
            failure = import_failure("triton")
            if failure is not None:
                return Availability(None, f"triton is installed and cannot be imported: {failure}", _INSTALL_TRITON)
        return self.probe(requirements.hardware)

    def timed_by_default(self, hardware: Hardware) -> bool:
        return hardware.platform == "cuda"

    def expected_implementation(self, form: CallForm) -> str | None:
        reason = refusal_of(form.hardware, form.q_shape[3], form.dtype, form.options.values)
        return f"int8 {'triton' if reason is None else 'reference'}, {form.options.values} values"

    def run(self, call: AttentionCall) -> AttentionResult:
        return attend_by_ranges(call, _attend)


def _attend(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> AttentionResult:
    assert not causal, "the capability does not have it"
    options: Int8Options = call.options
    result = int8_attention(q, k, v, scale=call.scale, return_lse=call.return_lse, values=options.values)
    return AttentionResult(result.out, result.lse, f"int8 {result.implementation}, {options.values} values")
