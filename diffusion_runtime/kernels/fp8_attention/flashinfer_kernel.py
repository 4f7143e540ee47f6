"""FlashInfer's attention in 8-bit floats: FlashAttention-3's form for sm_90, in package flashinfer-python.

nvcc compiles it at the first call. A call is one sample; the output is bfloat16, where cuDNN's is e4m3.
"""

from __future__ import annotations

import math

import torch

from diffusion_runtime.startup.importing import first_call_functions

MODULE, FUNCTION = "flashinfer", "single_prefill_with_kv_cache"


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descale: torch.Tensor, scale: float, lse: torch.Tensor | None
) -> torch.Tensor:
    """Compute reference.attend, the output rounded to bfloat16 alone: [batch, seq_q, heads, head_dim], returned.

    q: e4m3, contiguous [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim]; descale: float32 [1],
    by which a product of q and k is multiplied; lse: float32 [batch, heads, seq_q], written. Raises
    BackendUnavailableError where the package cannot be imported, and what it raises.
    """
    (single_prefill,) = first_call_functions("fp8_attn", MODULE, FUNCTION)
    if scale < 0:
        # Its running maximum is of the scores before they are scaled. -x differs from x in the first bit.
        q, scale = (q.view(torch.uint8) ^ 128).view(q.dtype), -scale
    of_heads = descale.expand(q.shape[2]).contiguous()
    outs = []
    for sample in range(q.shape[0]):
        found = single_prefill(
            q[sample],
            k[sample],
            v[sample],
            scale_q=of_heads,
            o_dtype=torch.bfloat16,
            sm_scale=scale,
            backend="fa3",
            return_lse=lse is not None,
        )
        if lse is not None:
            found, base_2 = found
            torch.mul(base_2.T, math.log(2), out=lse[sample])
        outs.append(found)
    return outs[0][None] if len(outs) == 1 else torch.stack(outs)
