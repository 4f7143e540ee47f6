"""The specification: attention in float32 (float64 for float64 inputs), eager, on any device.

out = softmax(scale q k^T) v, after Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, equation 1.
Every other backend is tested against it.
"""

from __future__ import annotations

import torch

from diffusion_runtime.attention.backends.capability import Capability
from diffusion_runtime.attention.backends.interface import (
    AttentionCall,
    AttentionResult,
    Availability,
    Backend,
    CallForm,
)
from diffusion_runtime.attention.backends.masks import block_mask_as_boolean
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.attention.backends.stored import StoredKeysReader, gathered_pages
from diffusion_runtime.attention.cache.stored import PageFormat, StoredKeys
from diffusion_runtime.core.hardware import DTYPES, Hardware

# Bounds the score matrix: [batch, heads, _QUERY_CHUNK, seq_k] floats are alive at a time.
_QUERY_CHUNK = 1024


@register_backend
class ReferenceBackend(Backend, StoredKeysReader):
    """Plain attention in float32. Of stored keys it is the specification: what the page table names, in its order."""

    name = "reference"
    summary = "float32 reference in plain torch; slow, exact, everywhere"
    self_check_platforms = frozenset()
    not_replayed = None
    capability = Capability(
        dtypes=frozenset((*DTYPES, "float64")),
        features=frozenset(
            {
                "key_padding",
                "gqa",
                "causal",
                "scale",
                "lse",
                "boolean_mask",
                "additive_mask",
                "block_mask",
                "cached_keys",
            }
        ),
    )

    def probe(self, hardware: Hardware) -> Availability:
        return Availability(version=hardware.torch_version)

    def timed_by_default(self, hardware: Hardware) -> bool:  # noqa: ARG002
        return False

    def expected_implementation(self, form: CallForm) -> str | None:
        return "eager float64" if form.dtype == torch.float64 else "eager float32"

    def run(self, call: AttentionCall) -> AttentionResult:
        mask = call.mask if call.block_mask is None else block_mask_as_boolean(call.block_mask)
        out, lse = reference_attention(
            call.q, call.k, call.v, visible=visible_keys(call), scale=call.scale, causal=call.causal, mask=mask
        )
        implementation = f"eager {str(lse.dtype).removeprefix('torch.')}"
        return AttentionResult(out, lse.float() if call.return_lse else None, implementation)

    def stored_refusal(self, form: PageFormat, device: torch.device) -> str | None:  # noqa: ARG002
        return None

    def run_stored(self, call: AttentionCall, stored: StoredKeys) -> AttentionResult:
        working = torch.promote_types(call.q.dtype, torch.float32)
        keys, values = gathered_pages(stored, working)
        out, lse = reference_attention(call.q, keys, values, scale=call.scale)
        implementation = f"eager {str(lse.dtype).removeprefix('torch.')}, pages of {stored.form.format.page_size}"
        return AttentionResult(out, lse if call.return_lse else None, implementation)


def visible_keys(call: AttentionCall) -> torch.Tensor | None:
    """bool [batch, seq_k], True for keys that may be attended to; None when all may."""
    if call.layout is None or not call.layout.has_padding:
        return None
    visible = torch.zeros(call.k.shape[:2], dtype=torch.bool, device="cpu")
    for sample in range(call.k.shape[0]):
        for start, stop in call.layout.key_ranges(sample):
            visible[sample, start:stop] = True
    return visible.to(call.k.device)


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    visible: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim]; visible: bool [batch, seq_k].
    mask: [batch or 1, heads or 1, seq_q or 1, seq_k], boolean (True: attend) or added to the scaled scores.

    Returns out [batch, seq_q, heads, head_dim] in q's dtype and lse [batch, heads, seq_q], natural log, in the
    working precision (float64 for float64 inputs, else float32). A query that sees no key gets 0 and -inf.
    """
    working = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    repeats = q.shape[2] // k.shape[2]
    q_bhsd = q.to(working).transpose(1, 2)
    k_bhsd = k.to(working).transpose(1, 2).repeat_interleave(repeats, dim=1)
    v_bhsd = v.to(working).transpose(1, 2).repeat_interleave(repeats, dim=1)
    if visible is not None:
        # A weight of 0 does not hide a value that is not a number.
        v_bhsd = v_bhsd.masked_fill(~visible[:, None, :, None], 0.0)
    key_index = torch.arange(k.shape[1], device=q.device)
    outs, lses = [], []
    for start in range(0, q.shape[1], _QUERY_CHUNK):
        scores = scale * q_bhsd[:, :, start : start + _QUERY_CHUNK] @ k_bhsd.transpose(-1, -2)
        if visible is not None:
            scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
        if causal:
            query_index = torch.arange(start, start + scores.shape[2], device=q.device)
            scores = scores.masked_fill(key_index > query_index[:, None], float("-inf"))
        if mask is not None:
            rows = mask if mask.shape[2] == 1 else mask[:, :, start : start + _QUERY_CHUNK]
            scores = scores.masked_fill(~rows, float("-inf")) if mask.dtype == torch.bool else scores + rows
        lse = torch.logsumexp(scores, dim=-1)
        # -inf minus -inf is not a number: rows that see nothing subtract 0 and come out as exp(-inf) = 0.
        weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
        outs.append(weights @ v_bhsd)
        lses.append(lse)
    out = torch.cat(outs, dim=2).transpose(1, 2).to(q.dtype)
    return out, torch.cat(lses, dim=2)
