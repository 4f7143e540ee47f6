"""How many bytes a forward pass sends, by formula, for every way to share it.

With U processes along the Ulysses axis, R along the ring, C = ceil(grid tokens / (U R)) tokens a slice, H query heads
and G key heads of d numbers, e bytes per number, a layer of self-attention over one sample sends, from each process:

    Ulysses, in    C (U - 1) / U (H + 2 G) d e      q, k and v, of its slice; H more with a gate
    Ulysses, out   (C + text) (U - 1) / U H d e     its heads of the others' slices, and of the text
    ring           (R - 1) 2 U C G / U d e          keys and values of one block, handed on R - 1 times

So what Ulysses sends shrinks with the number of processes, and what a ring sends does not (Fang and Zhao,
arXiv:2405.07719, table 2). Fewer key heads than U are replicated, and heads that do not divide make some processes send
more: the functions count whole heads, and give the busiest process.
"""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.parallel.ulysses import check_head_count, share_heads


@dataclass(frozen=True)
class ForwardShape:
    """One forward pass of a transformer.

    batch: samples at a time, both guidance branches counted where they run as one batch. num_layers: with
    self-attention over the sequence. num_text_tokens: in that self-attention. num_kv_heads: None for num_heads.
    bytes_per_number: of activations, 2 for bfloat16. has_gate: whether a gate is sent with q, k and v. out_channels:
    numbers per grid token of the output; out_bytes_per_number: of the prediction that guidance reads.
    """

    num_grid_tokens: int
    num_layers: int
    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    num_text_tokens: int = 0
    batch: int = 1
    bytes_per_number: int = 2
    has_gate: bool = False
    out_channels: int = 64
    out_bytes_per_number: int = 4


@dataclass(frozen=True)
class CommunicationVolume:
    """Bytes that the busiest process sends to others in one forward pass, by cause."""

    all_to_all: int
    ring: int
    gather: int
    branches: int

    @property
    def total(self) -> int:
        return self.all_to_all + self.ring + self.gather + self.branches


def communication_volume(
    shape: ForwardShape, *, ulysses: int = 1, ring: int = 1, branches: int = 1, num_head_groups: int = 1
) -> CommunicationVolume:
    """What sharing a forward pass by these degrees costs. All of 1 costs nothing.

    Ulysses alone is ring=1, ring attention alone ulysses=1, USP both. num_head_groups: as in UlyssesExchange; it counts
    where groups share a key head. Raises ConfigError for more Ulysses processes than heads.
    """
    check_head_count(shape.num_heads, ulysses)
    num_kv_heads = shape.num_heads if shape.num_kv_heads is None else shape.num_kv_heads
    groups = share_heads(shape.num_heads, num_kv_heads, ulysses, num_head_groups)
    slice_length = -(-shape.num_grid_tokens // (ulysses * ring))
    a_token_head = shape.batch * shape.head_dim * shape.bytes_per_number
    gate = 1 if shape.has_gate else 0
    of_members = list(zip(*groups, strict=True))
    num_q = [sum(share.num_heads for share in shares) for shares in of_members]
    num_kv = [sum(share.num_kv_heads for share in shares) for shares in of_members]
    heads_in = [q * (1 + gate) + 2 * kv for q, kv in zip(num_q, num_kv, strict=True)]
    sent = [
        slice_length * (sum(heads_in) - heads_in[member])
        + (slice_length + shape.num_text_tokens) * (ulysses - 1) * num_q[member]
        for member in range(ulysses)
    ]
    # The largest block is the first; every block is sent by all processes but one, which may hold the smallest.
    block_tokens = [
        max(1, min(shape.num_grid_tokens - block * ulysses * slice_length, ulysses * slice_length))
        for block in range(ring)
    ]
    handed_on = sum(block_tokens) - min(block_tokens)
    out_numbers = shape.batch * slice_length * shape.out_channels
    return CommunicationVolume(
        all_to_all=shape.num_layers * max(sent) * a_token_head,
        ring=shape.num_layers * 2 * handed_on * max(num_kv) * a_token_head,
        gather=(ulysses * ring - 1) * out_numbers * shape.bytes_per_number,
        branches=(branches - 1) * shape.batch * shape.num_grid_tokens * shape.out_channels * shape.out_bytes_per_number,
    )
