"""The specification of 8-bit attention: what is rounded and by which scale, eager, float32.

After SageAttention (arXiv:2411.10958): the keys' mean over the tokens is subtracted from them, which adds the same
number to every score of a query, and scores are products of int8 numbers. Ours: every query has a scale of its own,
every block of `block` keys one; the weights of a query are rounded relative to the highest of the block and not of all
that came before, so small ones keep their bits, in 255 steps; values are int8 around their mean, with a scale per
channel. Both products then sum exactly, in int32. On normal inputs of 8192 tokens the relative error is 0.017 with
blocks of 64 and 0.019 with 128, where weights and values in float8 (e4m3) give 0.038 and in float16 0.012.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

# Query rows times keys that are alive at a time, of one sample.
_CHUNK = 1 << 22
_TINY = 1e-30
# How the product with the values is computed: the highest weight of a block, and the highest value of a channel.
LEVELS = {"int8": (255.0, 127.0), "fp8": (448.0, 448.0), "fp16": (1.0, 1.0)}


class QuantizedQueries(NamedTuple):
    """numbers: int8 values as float32 [batch, heads, seq, head_dim]; scales: float32 [batch, heads, seq, 1], times the
    softmax scale and log2(e)."""

    numbers: torch.Tensor
    scales: torch.Tensor


class QuantizedKeys(NamedTuple):
    """numbers: int8 values as float32 [batch, kv_heads, blocks, block, head_dim], 0 past the end; scales: float32
    [batch, kv_heads, blocks]; mean: float32 [batch, kv_heads, head_dim]."""

    numbers: torch.Tensor
    scales: torch.Tensor
    mean: torch.Tensor


class QuantizedValues(NamedTuple):
    """numbers: as float32 [batch, kv_heads, blocks, block, head_dim], 0 past the end; scales and mean: float32 [batch,
    kv_heads, head_dim]."""

    numbers: torch.Tensor
    scales: torch.Tensor
    mean: torch.Tensor


def quantize_queries(q: torch.Tensor, scale: float) -> QuantizedQueries:
    """q: [batch, seq, heads, head_dim]. A row that holds NaN or inf has a scale of NaN, so that its result is NaN."""
    rows = q.float().transpose(1, 2)
    highest = rows.abs().amax(-1, keepdim=True).clamp(min=_TINY)
    numbers = (rows * (math.copysign(127.0, scale) / highest)).round()
    factor = abs(scale) * math.log2(math.e) / 127
    return QuantizedQueries(numbers, highest * factor + 0 * rows.sum(-1, keepdim=True))


def quantize_keys(k: torch.Tensor, block: int) -> QuantizedKeys:
    """k: [batch, seq, kv_heads, head_dim]. NaN or inf in a key makes every scale of its head NaN, through the mean."""
    rows = k.float().transpose(1, 2)
    mean = rows.mean(2)
    centred = in_blocks(rows - mean[:, :, None], block)
    highest = centred.abs().amax((-1, -2)).clamp(min=_TINY)
    broken = 0 * mean.sum(-1, keepdim=True)
    return QuantizedKeys((centred * (127.0 / highest)[..., None, None]).round(), highest / 127 + broken, mean)


def quantize_values(v: torch.Tensor, block: int, values: str) -> QuantizedValues:
    """v: [batch, seq, kv_heads, head_dim]; values: one of LEVELS."""
    rows = v.float().transpose(1, 2)
    mean = rows.mean(2)
    centred = rows - mean[:, :, None]
    level = LEVELS[values][1]
    highest = centred.abs().amax(2).clamp(min=_TINY)
    numbers = in_blocks(_rounded(centred * (level / highest)[:, :, None], values), block)
    return QuantizedValues(numbers, highest / level, mean)


def int8_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, values: str, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim], seq_k at least 1.

    Returns out like q and lse [batch, heads, seq_q], natural log, float32, of the scores as they were computed.
    """
    queries, keys, held = quantize_queries(q, scale), quantize_keys(k, block), quantize_values(v, block, values)
    repeats = q.shape[2] // k.shape[2]
    out = torch.empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3], device=q.device)
    lse = torch.empty(out.shape[:3], device=q.device)
    step = max(1, _CHUNK // (q.shape[2] * keys.numbers.shape[2] * block))
    for sample in range(q.shape[0]):
        of_keys = QuantizedKeys(*(x[sample].repeat_interleave(repeats, 0) for x in keys))
        of_values = QuantizedValues(*(x[sample].repeat_interleave(repeats, 0) for x in held))
        for start in range(0, q.shape[1], step):
            rows = slice(start, start + step)
            part = QuantizedQueries(*(x[sample][:, rows] for x in queries))
            out[sample][:, rows], base = _attend(part, of_keys, of_values, k.shape[1], values)
            shift = scale * (q[sample, rows].float().transpose(0, 1) * of_keys.mean[:, None]).sum(-1)
            lse[sample][:, rows] = base * math.log(2) + shift
    return out.transpose(1, 2).to(q.dtype), lse


def _attend(
    q: QuantizedQueries, k: QuantizedKeys, v: QuantizedValues, num_keys: int, values: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [heads, rows, head_dim] and the base-2 log-sum-exp [heads, rows], of one sample."""
    _, num_blocks, block, _ = k.numbers.shape
    scores = q.numbers @ k.numbers.flatten(1, 2).transpose(1, 2)
    scores = scores.view(*scores.shape[:2], num_blocks, block)
    scores = scores * (q.scales * k.scales[:, None])[..., None]
    hidden = (torch.arange(num_blocks * block, device=scores.device) >= num_keys).view(num_blocks, block)
    scores = scores.masked_fill(hidden, float("-inf"))
    tops = scores.amax(-1, keepdim=True)
    level = LEVELS[values][0]
    weights = level * torch.exp2(scores - tops)
    highest = tops.amax(2, keepdim=True)
    shares = torch.exp2(tops - highest)
    total = (weights.sum(-1, keepdim=True) * shares).sum(2)[..., 0]
    products = torch.einsum("hrbk,hbkd->hrd", _rounded(weights, values) * shares, v.numbers)
    out = products / total[..., None] * v.scales[:, None] + v.mean[:, None]
    return out, highest[:, :, 0, 0] + torch.log2(total / level)


def _rounded(x: torch.Tensor, values: str) -> torch.Tensor:
    if values == "int8":
        return x.round()
    return x.to(torch.float8_e4m3fn if values == "fp8" else torch.float16).float()


def in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """x [..., seq, head_dim] as [..., blocks, block, head_dim], with zeros past the end."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[-2] % block))
    return padded.reshape(*x.shape[:-2], -1, block, x.shape[-1])
