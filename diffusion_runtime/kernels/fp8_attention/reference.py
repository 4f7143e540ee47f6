"""The specification of attention in 8-bit floats (e4m3): what is made even, what is rounded, eager, float32.

e4m3 keeps 3 bits of the mantissa, which errs by 2.6e-2 of a number's size on average, from 2^-6 to 448 alike. So a
scale need only keep numbers in that range; what lowers the error is making numbers smaller, all of it exact:

- The keys' mean over the tokens is subtracted from them, which adds the same number to every score of a query.
- The values' mean is subtracted from them and added to the output, which is rounded as well.
- An orthogonal matrix turns queries and keys alike: where a few channels are far larger than the rest in both, their
  product's rounding error is spread and so smaller (QuaRot, arXiv:2404.00456; FlashAttention-3, arXiv:2407.08608).

Queries and keys share a scale per tensor, which the kernel demands; every head's keys are divided, and its queries
multiplied, by a number that gives both the same largest norm. Values have a scale per channel, which the output keeps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Query rows times keys that are alive at a time, of one sample.
_CHUNK = 1 << 22
_TINY = 1e-10
# The largest number of e4m3.
HIGHEST = 448.0
E4M3 = torch.float8_e4m3fn


class QuantizedInputs(NamedTuple):
    """q, k, v: e4m3, [batch, seq, heads, head_dim]; descale: float32 [1], by which a product of q and k is multiplied;
    k_mean, v_mean, v_scales: float32 [batch, kv_heads, head_dim]; v times v_scales plus v_mean is what was rounded."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    descale: torch.Tensor
    k_mean: torch.Tensor
    v_mean: torch.Tensor
    v_scales: torch.Tensor


def rotation(head_dim: int) -> torch.Tensor:
    """Return an orthogonal matrix [head_dim, head_dim] of 1 and -1, to be divided by sqrt(head_dim): Sylvester's
    Hadamard matrix, its rows with the signs of the Rudin-Shapiro sequence, so that equal numbers in all channels are
    spread as well.

    head_dim: a power of two.
    """
    index = torch.arange(head_dim)
    both = index[:, None] & (index ^ (index[:, None] >> 1))
    bits = torch.stack([(both >> bit) & 1 for bit in range(head_dim.bit_length())]).sum(0)
    return (1 - 2 * (bits % 2)).float()


def quantize(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> QuantizedInputs:
    """q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim]. NaN and inf reach the results."""
    repeats = q.shape[2] // k.shape[2]
    queries, keys, values = q.float(), k.float(), v.float()
    k_mean, v_mean = keys.mean(1), values.mean(1)
    # A bound of the centred keys' norms that needs one pass over them.
    k_norm = keys.norm(dim=-1).amax(1) + k_mean.norm(dim=-1)
    q_norm = queries.norm(dim=-1).amax(1).unflatten(1, (-1, repeats)).amax(2)
    k_norm, q_norm = k_norm.clamp(min=_TINY), q_norm.clamp(min=_TINY)
    product = HIGHEST**2 / (q_norm * k_norm).amax()
    of_q, of_k = (product * k_norm / q_norm).sqrt(), (product * q_norm / k_norm).sqrt()
    centred = values - v_mean[:, None]
    v_scales = centred.abs().amax(1).clamp(min=_TINY) / HIGHEST
    keys = keys - k_mean[:, None]
    turn = rotation(q.shape[3]).to(q.device)
    # The factors of the product in bfloat16, as on a GPU.
    queries, keys = (x.bfloat16().float() @ turn * q.shape[3] ** -0.5 for x in (queries, keys))
    return QuantizedInputs(
        rounded(queries * of_q.repeat_interleave(repeats, 1)[:, None, :, None]),
        rounded(keys * of_k[:, None, :, None]),
        rounded(centred / v_scales[:, None]),
        (1 / product).reshape(1),
        k_mean,
        v_mean,
        v_scales,
    )


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return x as e4m3; what lies outside becomes the highest number, and NaN stays NaN."""
    return x.clamp(-HIGHEST, HIGHEST).to(E4M3)


def attend(inputs: QuantizedInputs, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 out [batch, seq_q, heads, head_dim], in units of v_scales and less v_mean, and lse [batch, heads,
    seq_q], natural log, float32, of the scores as they were computed: what cuDNN's kernel returns.

    Weights are rounded relative to the highest of their query, which has 448; their sum is of the numbers before.
    """
    q, k, v = (x.float().transpose(1, 2) for x in inputs[:3])
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
    step = max(1, _CHUNK // (q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], step):
        rows = slice(start, start + step)
        scores = q[:, :, rows] @ k.transpose(2, 3) * (scale * inputs.descale)
        highest = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - highest)
        total = weights.sum(-1, keepdim=True)
        out[:, :, rows] = rounded(weights * HIGHEST).float() @ v / (HIGHEST * total)
        lse[:, :, rows] = (highest + total.log())[..., 0]
    return rounded(out.transpose(1, 2)), lse


def restore(out: torch.Tensor, inputs: QuantizedInputs, dtype: torch.dtype) -> torch.Tensor:
    """Return the output of `attend` with the values' scales and mean, [batch, seq_q, heads, head_dim]."""
    repeats = out.shape[2] // inputs.v_mean.shape[1]
    scales, mean = (x.repeat_interleave(repeats, 1)[:, None] for x in (inputs.v_scales, inputs.v_mean))
    return (out.float() * scales + mean).to(dtype)


def fp8_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim], seq_k at least 1.

    Returns out like q and lse [batch, heads, seq_q], natural log, float32, of the scores as they were computed.
    """
    inputs = quantize(q, k, v)
    out, lse = attend(inputs, scale)
    mean = inputs.k_mean.repeat_interleave(q.shape[2] // k.shape[2], 1)
    shift = scale * (q.float() * mean[:, None]).sum(-1).transpose(1, 2)
    return restore(out, inputs, q.dtype), lse + shift
