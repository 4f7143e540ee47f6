"""xformers' memory-efficient attention (Lefaudeux et al., 2022). Since 0.0.34 its kernels are torch's and flash-attn's.

`import xformers.ops` fails where flash-attn-4 is installed without flash-attn: it takes any package called flash_attn
for FlashAttention-2. That is seen here without importing either.

Masks in general are not declared: only its CUTLASS kernel takes them, which is torch's `efficient` and wants them laid
out its own way.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from diffusion_runtime.attention.backends.capability import Capability, HeadSizes
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Availability, CallForm
from diffusion_runtime.attention.backends.key_ranges import attend_by_ranges
from diffusion_runtime.attention.backends.packages import PackageBackend
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.core.hardware import Hardware


@functools.cache
def _operators() -> ModuleType:
    import xformers.ops

    return xformers.ops  # type: ignore[no-any-return]


@register_backend
class XformersBackend(PackageBackend):
    """xformers.ops.memory_efficient_attention_forward, grouped queries as a fifth dimension."""

    name = "xformers"
    summary = "xformers' memory-efficient attention"
    distribution = "xformers"
    module = "xformers.ops"
    compiled_ahead = True
    functions = (
        "LowerTriangularMask",
        "memory_efficient_attention_forward",
        "memory_efficient_attention_forward_requires_grad",
    )
    install = "pip install 'diffusion-runtime[xformers]'"
    capability = Capability(
        platforms=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_sizes=HeadSizes(minimum=8, maximum=256, multiple=8),
        features=frozenset({"key_padding", "gqa", "causal", "scale", "lse", "cached_keys"}),
        minimum_capability=(8, 0),
    )

    def probe(self, hardware: Hardware) -> Availability:
        found = super().probe(hardware)
        packages = hardware.packages
        if found.version is not None and "flash-attn-4" in packages and "flash-attn" not in packages:
            return Availability(
                None,
                f"xformers {found.version} cannot be imported where flash-attn-4 is installed without flash-attn",
                "choose fa4, which is faster; or pip uninstall flash-attn-4; or pip install flash-attn",
            )
        return found

    def expected_implementation(self, form: CallForm) -> str | None:  # noqa: ARG002
        return "xformers"

    def run(self, call: AttentionCall) -> AttentionResult:
        return attend_by_ranges(call, _attend)


def _attend(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> AttentionResult:
    operators = _operators()
    bias = operators.LowerTriangularMask() if causal else None
    shape, kv_heads = q.shape, k.shape[2]
    repeats = shape[2] // kv_heads
    if repeats > 1:
        # [batch, seq, groups, heads of a group, head_dim]; a stride of 0 repeats the keys without a copy.
        q = q.reshape(*shape[:2], kv_heads, repeats, shape[3])
        k, v = (x[:, :, :, None].expand(-1, -1, -1, repeats, -1) for x in (k, v))
    if not call.return_lse:
        out = operators.memory_efficient_attention_forward(q, k, v, bias, 0.0, call.scale)
        return AttentionResult(out.reshape(shape), None, "xformers")
    out, lse = operators.memory_efficient_attention_forward_requires_grad(q, k, v, bias, 0.0, call.scale)
    if repeats > 1:
        lse = lse.flatten(1, 2)
    # Its CUTLASS kernel rounds rows up to a multiple of 32.
    return AttentionResult(out.reshape(shape), lse[..., : shape[1]].float(), "xformers")
