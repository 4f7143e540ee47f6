"""Kernel: ggml's IQ formats, blocks [blocks, bytes] to numbers: indices into grids of vectors, signs and scales apart.

A block of 256 numbers (32 in IQ4_NL) has a float16 scale, and parts with scales of 3 or 4 bits. IQ2 and IQ3: an index
is a vector of 8 or 4 magnitudes (gguf_grids.py), and a sign is a bit, or every eighth one the parity of seven. IQ1: a
vector of -1, 0 and 1 with an offset of an eighth. IQ4: an index is one of 16 numbers.
"""

from __future__ import annotations

import torch

from diffusion_runtime.kernels.gguf_fields import bit_fields, float16_at, halves, words
from diffusion_runtime.kernels.gguf_grids import grid_of

# Of IQ1: what a part adds to every number of its vectors, or takes from them.
_DELTA = 0.125


def iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    high = words(blocks[:, 34:], 2)
    scale = float16_at(blocks, 0) * (2 * ((high >> 12) & 7) + 1).float()
    above = (high[..., None] >> _shifts(0, 12, 3, blocks)) & 7
    return _iq1(blocks[:, 2:34], above.flatten(1), scale[..., None], (high >> 15)[..., None])


def iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    fields = bit_fields(blocks[:, 32:48], 4).long()
    scales = (words(blocks[:, 48:], 2)[..., None] >> _shifts(0, 12, 3, blocks)) & 7
    scale = iq1_m_scales(blocks) * (2 * scales.flatten(1) + 1).float()
    # A scale for two vectors, a sign of the offset for each.
    scale = scale.repeat_interleave(2, dim=1)
    return _iq1(blocks[:, :32], fields & 7, scale[..., None], (fields >> 3)[..., None])


def iq1_m_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Read the float16 whose bits are the highest four of the four words of scales, as float32 [blocks, 1]."""
    places = torch.arange(0, 16, 4, device=blocks.device)
    bits = ((words(blocks[:, 48:], 2) >> 12) << places).sum(-1, keepdim=True)
    # int16 has the float16's bits: what is above its range wraps.
    return bits.to(torch.int16).view(torch.float16).float()


def _iq1(low: torch.Tensor, above: torch.Tensor, scale: torch.Tensor, is_less: torch.Tensor) -> torch.Tensor:
    """low, above: the lowest 8 bits and the others of the indices, [blocks, 32]; scale, is_less: of runs of vectors,
    [blocks, runs, 1]."""
    vectors = grid_of("IQ1_S", low.device)[low.long() | (above << 8)]
    runs = vectors.reshape(len(low), scale.shape[1], -1)
    offset = torch.where(is_less == 0, _DELTA, -_DELTA)
    return scale * (runs + offset)


def iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    parts = blocks[:, 2:].reshape(-1, 8, 8)
    more = words(parts[..., 4:].flatten(1), 4)
    scale = float16_at(blocks, 0) * (0.5 + (more >> 28).float()) * 0.25
    signs = _signs_of_sevens((more[..., None] >> _shifts(0, 28, 7, blocks)) & 0x7F)
    return _signed("IQ2_XXS", parts[..., :4].flatten(1).long(), scale, signs)


def iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    found = words(blocks[:, 2:66], 2)
    scale = float16_at(blocks, 0) * (0.5 + bit_fields(blocks[:, 66:], 4).float()) * 0.25
    return _signed("IQ2_XS", found & 511, scale, _signs_of_sevens(found >> 9))


def iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    indices = blocks[:, 2:34].long() | (bit_fields(blocks[:, 66:74], 2).long() << 8)
    scale = float16_at(blocks, 0) * (0.5 + bit_fields(blocks[:, 74:], 4).float()) * 0.25
    return _signed("IQ2_S", indices, scale, bit_fields(blocks[:, 34:66], 1))


def iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    more = words(blocks[:, 66:], 4)
    scale = float16_at(blocks, 0) * (0.5 + (more >> 28).float()) * 0.5
    signs = _signs_of_sevens((more[..., None] >> _shifts(0, 28, 7, blocks)) & 0x7F)
    return _signed("IQ3_XXS", blocks[:, 2:66].long(), scale, signs)


def iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    indices = blocks[:, 2:66].long() | (bit_fields(blocks[:, 66:74], 1).long() << 8)
    scale = float16_at(blocks, 0) * (1 + 2 * bit_fields(blocks[:, 106:], 4)).float()
    return _signed("IQ3_S", indices, scale, bit_fields(blocks[:, 74:106], 1))


def _signed(kind: str, indices: torch.Tensor, scale: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """indices: of vectors, [blocks, vectors]; scale: of parts of a block, [blocks, parts]; signs: 1 for a number that
    is negative, 256 of each block."""
    magnitudes = grid_of(kind, indices.device)[indices].reshape(*scale.shape, -1)
    factors = 1.0 - 2.0 * signs.reshape(magnitudes.shape).float()
    return scale[..., None] * magnitudes * factors


def _signs_of_sevens(sevens: torch.Tensor) -> torch.Tensor:
    """Signs of eight numbers from seven bits each: the eighth makes their number even."""
    bits = (sevens.reshape(len(sevens), -1, 1) >> _shifts(0, 7, 1, sevens)) & 1
    return torch.cat([bits, bits.sum(-1, keepdim=True) & 1], dim=-1)


def iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return float16_at(blocks, 0) * _levels(halves(blocks[:, 2:]))


def iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    high = (words(blocks[:, 2:4], 2) >> _shifts(0, 16, 2, blocks)) & 3
    scales = (bit_fields(blocks[:, 4:8], 4).long() | (high << 4)) - 32
    scale = float16_at(blocks, 0) * scales.float()
    return scale[..., None] * _levels(halves(blocks[:, 8:].reshape(-1, 8, 16)))


def _levels(indices: torch.Tensor) -> torch.Tensor:
    return grid_of("IQ4_NL", indices.device)[indices.long()].squeeze(-1)


def _shifts(start: int, stop: int, step: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(start, stop, step, device=like.device)
