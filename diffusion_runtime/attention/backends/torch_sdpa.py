"""torch.nn.functional.scaled_dot_product_attention, with the kernel that torch chooses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diffusion_runtime.attention.backends.interface import (
    AttentionCall,
    AttentionResult,
    Availability,
    Backend,
    Capability,
)
from diffusion_runtime.attention.backends.key_ranges import attend_by_ranges
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.hardware import DTYPES, Hardware

# What torch answers when asked which kernel it takes; the numbers are those of its SDPBackend enum.
_KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


@register_backend
class TorchSdpaBackend(Backend):
    """What torch ships: its own choice of kernel, which the report names."""

    name = "torch_sdpa"
    aliases = ("torch",)
    summary = "torch's scaled_dot_product_attention"
    capability = Capability(
        dtypes=frozenset((*DTYPES, "float64")),
        features=frozenset({"key_padding", "gqa", "causal", "scale", "lse"}),
    )

    def probe(self, hardware: Hardware) -> Availability:
        return Availability(version=hardware.torch_version)

    def run(self, call: AttentionCall) -> AttentionResult:
        return attend_by_ranges(call, _attend)


def _attend(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> AttentionResult:
    q_bhsd, k_bhsd, v_bhsd = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if call.return_lse:
        return _attend_with_lse(call, q_bhsd, k_bhsd, v_bhsd, causal)
    gqa = q.shape[2] != k.shape[2]
    kernel = torch._fused_sdp_choice(q_bhsd, k_bhsd, v_bhsd, None, 0.0, causal, scale=call.scale, enable_gqa=gqa)
    out = F.scaled_dot_product_attention(q_bhsd, k_bhsd, v_bhsd, is_causal=causal, scale=call.scale, enable_gqa=gqa)
    return AttentionResult(out.transpose(1, 2), None, _KERNELS[kernel])


def _attend_with_lse(
    call: AttentionCall,
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    causal: bool,
) -> AttentionResult:
    """The public function drops the log-sum-exp, so the operators below it are called where one returns it."""
    seq_q, repeats = q_bhsd.shape[2], q_bhsd.shape[1] // k_bhsd.shape[1]
    half = q_bhsd.dtype in (torch.bfloat16, torch.float16)
    if q_bhsd.is_cuda and repeats > 1:
        k_bhsd, v_bhsd = k_bhsd.repeat_interleave(repeats, 1), v_bhsd.repeat_interleave(repeats, 1)
    aligned = q_bhsd.shape[-1] % 8 == 0 and q_bhsd.shape[-1] <= 256
    if not q_bhsd.is_cuda and q_bhsd.device.type == "cpu" and q_bhsd.dtype != torch.float64:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_bhsd, k_bhsd, v_bhsd, 0.0, causal, scale=call.scale
        )
        kernel = "flash"
    elif q_bhsd.is_cuda and half and aligned:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            q_bhsd, k_bhsd, v_bhsd, 0.0, causal, scale=call.scale
        )[:2]
        kernel = "flash"
    else:
        return _attend_with_lse_by_scores(call, q_bhsd, k_bhsd, v_bhsd, causal)
    return AttentionResult(out.transpose(1, 2), lse[..., :seq_q].float(), kernel)


def _attend_with_lse_by_scores(
    call: AttentionCall,
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    causal: bool,
) -> AttentionResult:
    """Where no kernel returns the log-sum-exp: plain scores, in float32 at least."""
    repeats = q_bhsd.shape[1] // k_bhsd.shape[1]
    working = torch.promote_types(q_bhsd.dtype, torch.float32)
    scale = q_bhsd.shape[-1] ** -0.5 if call.scale is None else call.scale
    k_bhsd, v_bhsd = (x.to(working).repeat_interleave(repeats, 1) for x in (k_bhsd, v_bhsd))
    scores = scale * q_bhsd.to(working) @ k_bhsd.transpose(-1, -2)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    # Every row sees at least one key, so no log-sum-exp is infinite.
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])
    out = (weights @ v_bhsd).to(q_bhsd.dtype)
    return AttentionResult(out.transpose(1, 2), lse.float(), "math with lse")
