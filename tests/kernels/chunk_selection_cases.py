"""Chunk selection in Triton against the reference; run under the interpreter as a script, or imported on a GPU.

TRITON_INTERPRET=1 python tests/kernels/chunk_selection_cases.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from sparse_oracle import random_qkv  # noqa: E402

from diffusion_runtime.attention import TokenLayout  # noqa: E402
from diffusion_runtime.kernels.block_sparse.row_masks import packed_bits  # noqa: E402
from diffusion_runtime.kernels.chunk_selection import (  # noqa: E402
    SelectionRule,
    chunk_row_mask_reference,
    chunk_row_mask_triton,
)

# A number of one foreign chunk is a constant to Triton.
RULES = ((1, 0.0), (3, 0.0), (None, 0.3))
# Two foreign chunks as one of several; thresholds that keep every chunk, and the highest alone.
MORE_RULES = ((2, 0.0), (None, 0.0), (None, 0.999))


def inputs(kind: str, num_chunks: int, dtype: torch.dtype, device: str, num_tokens: int = 30) -> list[torch.Tensor]:
    """q [2, tokens, 4, 24], means [2, 2, C, 24], an order with two tokens of text, and the chunks of its rows.

    `ties`: small whole numbers, many gates alike; `exact`: whole numbers whose products are exact in any order, so that
    devices agree; `equal`: no gate differs from another; `broken`: a NaN in a query, and one of each sign in the means.
    """
    layout = TokenLayout((1, 1, num_tokens), num_prefix_tokens=2)
    q = random_qkv(layout, batch=2, num_heads=4, head_dim=24)[0]
    means = random_qkv(TokenLayout((1, 1, num_chunks)), batch=2, num_heads=2, head_dim=24, seed=4)[0].transpose(1, 2)
    if kind == "ties":
        q, means = q.round().clamp(-1, 1), means.round().clamp(-1, 1)
    elif kind == "exact":
        q, means = (8 * q).round(), (64 * means).round()
    elif kind == "equal":
        # Whole numbers, whose sums are exact in any order.
        q, means = q.round(), torch.ones_like(means)
    elif kind == "broken":
        q, means = (8 * q).round(), (64 * means).round()
        q[0, 9, 1, 3] = float("nan")
        means[1, 0, 2, 5], means[1, 1, 4, 0] = float("nan"), -torch.tensor(float("nan"))
    order = torch.cat([2 + torch.arange(num_tokens).flip(0), torch.arange(2)]).to(torch.int32)
    chunk_of_row = torch.arange(num_tokens) * num_chunks // num_tokens
    return [q.to(device, dtype), means.float().contiguous().to(device), order.to(device), chunk_of_row.to(device)]


def check(
    kind: str,
    num_chunks: int,
    dtype: torch.dtype,
    device: str,
    num_tokens: int = 30,
    rules: tuple[tuple[int | None, float], ...] = RULES + MORE_RULES,
) -> None:
    """The same bits as the reference's on the same device."""
    q, means, order, chunk_of_row = inputs(kind, num_chunks, dtype, device, num_tokens)
    for top, threshold in rules:
        got = chunk_row_mask_triton(q, means, order, chunk_of_row, top=top, threshold=threshold)
        expected = chunk_row_mask_reference(q, means, order, chunk_of_row, SelectionRule("query_head", top, threshold))
        assert torch.equal(got, expected), (kind, num_chunks, dtype, top, threshold)


def main() -> None:
    """Ties, NaN, more chunks than bits of a word, and bfloat16, whose means are split in three."""
    check("random", 7, torch.float32, "cpu")
    for kind in ("ties", "equal", "broken"):
        check(kind, 7, torch.float32, "cpu", rules=RULES)
    check("random", 40, torch.bfloat16, "cpu", rules=RULES)
    # Bit 31 of a word, which makes it negative.
    assert (packed_bits(torch.ones(1, 32, dtype=torch.bool)) == -1).all()
    print("ok")


if __name__ == "__main__":
    main()
