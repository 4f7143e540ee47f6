"""Relative error of an attention result against float64, on a sample of its queries, so that it is cheap at any
length."""

from __future__ import annotations

import torch

from diffusion_runtime.attention.backends.interface import Backend
from diffusion_runtime.attention.backends.requirements import dtype_name
from diffusion_runtime.attention.measured_error import allowed_error
from diffusion_runtime.attention.self_test import attention_by_definition
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.core.token_layout import TokenLayout

_NUM_QUERIES = 64


class ExactRows:
    """softmax(q k^T / sqrt(head_dim)) v in float64 for queries spread over the sequence, every head and sample.

    q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim]; layout: of the keys.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TokenLayout) -> None:
        # float64 is known to work on CUDA and ROCm alone.
        self._device = q.device if q.device.type == "cuda" else torch.device("cpu")
        num_queries = min(_NUM_QUERIES, q.shape[1])
        self._rows = torch.linspace(0, q.shape[1] - 1, num_queries, dtype=torch.float64).long()
        repeats = q.shape[2] // k.shape[2]
        outs = []
        for sample in range(q.shape[0]):
            visible = torch.zeros(1, 1, 1, k.shape[1], dtype=torch.bool, device=self._device)
            for start, stop in layout.key_ranges(sample):
                visible[..., start:stop] = True
            rows = self._taken(q[sample : sample + 1])
            # Head by head: in float64 all keys at once may be larger than the call itself.
            for head in range(q.shape[2]):
                kv = slice(head // repeats, head // repeats + 1)
                keys, values = (x[sample : sample + 1, :, kv].to(self._device) for x in (k, v))
                out, _ = attention_by_definition(rows[:, :, head : head + 1], keys, values, visible, None)
                outs.append(out)
        shape = (q.shape[0], q.shape[2], num_queries, q.shape[3])
        # [batch, rows, heads, head_dim], as the results are.
        self._exact = torch.cat(outs).squeeze(2).reshape(shape).transpose(1, 2)

    def error_of(self, out: torch.Tensor) -> float:
        """|out - exact| / |exact| in the Frobenius norm over these queries; not finite when `out` is not."""
        return float((self._taken(out).double() - self._exact).norm() / self._exact.norm())

    def _taken(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, self._rows.to(x.device)].to(self._device)


def error_bound(backend: Backend, dtype: torch.dtype, hardware: Hardware) -> float | None:
    """Return the largest allowed error of a backend on normally distributed inputs; None if it omits pairs by
    design."""
    if backend.error_bound is None and not backend.lossless:
        return None
    return allowed_error(backend, dtype_name(dtype), hardware)
