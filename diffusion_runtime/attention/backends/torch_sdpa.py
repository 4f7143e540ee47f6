"""torch.nn.functional.scaled_dot_product_attention, with padding cut off instead of masked.

A dense mask costs more than it hides (measured on an H200 at 26k tokens: 400 TF/s with a broadcast mask, 560-680 with
the padding cut off), so samples with equal lengths are computed together on the keys they really have.
"""

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
        if call.layout is None or not call.layout.has_padding:
            return _attend(call, call.q, call.k, call.v, mask=None)
        groups = _samples_by_ranges(call)
        if len(groups) == 1:
            return _attend_ranges(call, None, next(iter(groups)))
        out = torch.empty_like(call.q)
        lse = call.q.new_empty(call.q.shape[0], call.q.shape[2], call.q.shape[1], dtype=torch.float32)
        implementation = ""
        for ranges, samples in groups.items():
            result = _attend_ranges(call, samples, ranges)
            out[samples] = result.out
            if result.lse is not None:
                lse[samples] = result.lse
            implementation = implementation or result.implementation
        return AttentionResult(out, lse if call.return_lse else None, f"{implementation} by length")


_Ranges = tuple[tuple[int, int], ...]


def _samples_by_ranges(call: AttentionCall) -> dict[_Ranges, list[int]]:
    assert call.layout is not None
    groups: dict[_Ranges, list[int]] = {}
    for sample in range(call.q.shape[0]):
        groups.setdefault(call.layout.key_ranges(sample), []).append(sample)
    return groups


def _attend_ranges(call: AttentionCall, samples: list[int] | None, ranges: _Ranges) -> AttentionResult:
    """Attention of some samples (None for all) on the keys inside `ranges` alone."""
    q, k, v = (x if samples is None else x[samples] for x in (call.q, call.k, call.v))
    if not ranges:
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=torch.float32)
        return AttentionResult(torch.zeros_like(q), lse if call.return_lse else None, "no keys")
    mask = None
    if call.causal:
        # Cut-off keys shift the positions that a causal kernel counts, so this rare case says them in a mask.
        positions = torch.cat([torch.arange(start, stop, device=q.device) for start, stop in ranges])
        mask = positions <= torch.arange(q.shape[1], device=q.device)[:, None]
    if len(ranges) == 1:
        ((start, stop),) = ranges
        k, v = k[:, start:stop], v[:, start:stop]
    else:
        k, v = (torch.cat([x[:, start:stop] for start, stop in ranges], dim=1) for x in (k, v))
    return _attend(call, q, k, v, mask)


def _attend(
    call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> AttentionResult:
    """One kernel call. mask: bool [seq_q, seq_k] in which a query may see nothing, or None."""
    q_bhsd, k_bhsd, v_bhsd = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if call.return_lse:
        return _attend_with_lse(call, q_bhsd, k_bhsd, v_bhsd, mask)
    causal = call.causal and mask is None
    gqa = q.shape[2] != k.shape[2]
    kernel = torch._fused_sdp_choice(q_bhsd, k_bhsd, v_bhsd, mask, 0.0, causal, scale=call.scale, enable_gqa=gqa)
    out = F.scaled_dot_product_attention(
        q_bhsd, k_bhsd, v_bhsd, attn_mask=mask, is_causal=causal, scale=call.scale, enable_gqa=gqa
    )
    if mask is not None:
        # Not every kernel gives 0 to a query that sees nothing.
        out = out.masked_fill(~mask.any(dim=-1)[:, None], 0.0)
    return AttentionResult(out.transpose(1, 2), None, _KERNELS[kernel])


def _attend_with_lse(
    call: AttentionCall,
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    mask: torch.Tensor | None,
) -> AttentionResult:
    """The public function drops the log-sum-exp, so the operators below it are called where one returns it."""
    causal = call.causal and mask is None
    seq_q, repeats = q_bhsd.shape[2], q_bhsd.shape[1] // k_bhsd.shape[1]
    half = q_bhsd.dtype in (torch.bfloat16, torch.float16)
    if q_bhsd.is_cuda and repeats > 1:
        k_bhsd, v_bhsd = k_bhsd.repeat_interleave(repeats, 1), v_bhsd.repeat_interleave(repeats, 1)
    aligned = q_bhsd.shape[-1] % 8 == 0 and q_bhsd.shape[-1] <= 256
    if not q_bhsd.is_cuda and q_bhsd.device.type == "cpu" and q_bhsd.dtype != torch.float64 and mask is None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_bhsd, k_bhsd, v_bhsd, 0.0, causal, scale=call.scale
        )
        kernel = "flash"
    elif q_bhsd.is_cuda and half and aligned and mask is None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            q_bhsd, k_bhsd, v_bhsd, 0.0, causal, scale=call.scale
        )[:2]
        kernel = "flash"
    else:
        return _attend_with_lse_by_scores(call, q_bhsd, k_bhsd, v_bhsd, mask)
    return AttentionResult(out.transpose(1, 2), lse[..., :seq_q].float(), kernel)


def _attend_with_lse_by_scores(
    call: AttentionCall,
    q_bhsd: torch.Tensor,
    k_bhsd: torch.Tensor,
    v_bhsd: torch.Tensor,
    mask: torch.Tensor | None,
) -> AttentionResult:
    """Where no kernel returns the log-sum-exp: plain scores, in float32 at least."""
    repeats = q_bhsd.shape[1] // k_bhsd.shape[1]
    working = torch.promote_types(q_bhsd.dtype, torch.float32)
    scale = q_bhsd.shape[-1] ** -0.5 if call.scale is None else call.scale
    k_bhsd, v_bhsd = (x.to(working).repeat_interleave(repeats, 1) for x in (k_bhsd, v_bhsd))
    scores = scale * q_bhsd.to(working) @ k_bhsd.transpose(-1, -2)
    if mask is None and call.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    out = (weights @ v_bhsd).to(q_bhsd.dtype)
    return AttentionResult(out.transpose(1, 2), lse.float(), "math with lse")
