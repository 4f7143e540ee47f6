"""Padding as lengths, for kernels that know neither masks nor lengths and for those with a varlen form.

The kernels here are ours and strict: dense tensors alone, at least one key, garbage for samples without keys.
"""

from __future__ import annotations

import torch
from attention_calls import attention_call
from exact_attention import LAYOUTS, assert_is_exact, exact, visible_by
from tables import table

from diffusion_runtime.attention import AttentionCall, AttentionResult
from diffusion_runtime.attention.backends.key_ranges import PackedCall, attend_by_lengths, attend_by_ranges
from diffusion_runtime.attention.backends.reference import reference_attention
from diffusion_runtime.core.token_layout import TokenLayout


class Kernels:
    """A dense and a varlen kernel that count their calls."""

    def __init__(self) -> None:
        self.dense: list[tuple[int, int]] = []
        self.packed: list[tuple[int, ...]] = []

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> AttentionResult:
        assert k.shape[1] > 0
        assert not causal or q.shape[1] == k.shape[1]
        self.dense.append((q.shape[0], k.shape[1]))
        out, lse = reference_attention(q, k, v, scale=call.scale, causal=causal)
        return AttentionResult(out, lse if call.return_lse else None, "dense")

    def attend_packed(self, call: AttentionCall, packed: PackedCall) -> AttentionResult:
        assert packed.q_offsets.dtype == packed.k_offsets.dtype == torch.int32
        assert packed.k_offsets[-1] == len(packed.k) == len(packed.v)
        assert packed.q_offsets[-1] == len(packed.q)
        self.packed.append(packed.lengths)
        out = torch.full_like(packed.q, float("nan"))
        lse = torch.full((packed.q.shape[1], len(packed.q)), float("inf"))
        for sample, length in enumerate(packed.lengths):
            rows = slice(int(packed.q_offsets[sample]), int(packed.q_offsets[sample + 1]))
            keys = slice(int(packed.k_offsets[sample]), int(packed.k_offsets[sample + 1]))
            assert keys.stop - keys.start == length <= packed.max_length
            if length:
                one, row_lse = reference_attention(
                    packed.q[None, rows], packed.k[None, keys], packed.v[None, keys], scale=call.scale
                )
                out[rows], lse[:, rows] = one[0], row_lse[0]
        return AttentionResult(out, lse if call.return_lse else None, "packed")


def padded_call(layout: TokenLayout | None, causal: bool, return_lse: bool) -> AttentionCall:
    torch.manual_seed(0)
    q = torch.randn(3, 17, 4, 16)
    k, v = torch.randn(2, 3, 17, 2, 16)
    unseen = ~visible_by(layout, 3, 17, causal=False).any(dim=1)
    k[unseen], v[unseen] = 1e4, float("nan")
    return attention_call(q, k, v, layout=layout, scale=0.3, causal=causal, return_lse=return_lse)


def result_expected(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    return exact(call.q, call.k, call.v, visible_by(call.layout, 3, 17, call.causal), 0.3)


@table("layout_name", LAYOUTS)
@table("causal", [False, True])
@table("return_lse", [False, True])
@table("packing", [False, True])
def test_against_float64(layout_name: str, causal: bool, return_lse: bool, packing: bool) -> None:
    call, kernels = padded_call(LAYOUTS[layout_name], causal, return_lse), Kernels()
    if packing:
        result = attend_by_lengths(call, kernels.attend, kernels.attend_packed)
    else:
        result = attend_by_ranges(call, kernels.attend)
    assert (result.lse is not None) == return_lse
    assert_is_exact(result.out, result.lse, result_expected(call))


@table(
    ("layout_name", "dense", "packed"),
    [
        ("none", [(3, 17)], []),
        ("equal", [(3, 14)], []),
        ("one word", [(3, 1)], []),
        ("suffix", [], [(17, 14, 12)]),
        ("prefix", [], [(17, 14, 12)]),
        ("text", [], [(17, 3, 0)]),
    ],
)
def test_keys_are_cut_where_samples_are_equal_and_packed_where_they_are_not(
    layout_name: str, dense: list[tuple[int, int]], packed: list[tuple[int, ...]]
) -> None:
    kernels = Kernels()
    attend_by_lengths(padded_call(LAYOUTS[layout_name], False, False), kernels.attend, kernels.attend_packed)
    assert (kernels.dense, kernels.packed) == (dense, packed)


def test_samples_of_equal_ranges_share_a_call() -> None:
    kernels = Kernels()
    result = attend_by_ranges(padded_call(LAYOUTS["alternating"], False, False), kernels.attend)
    assert kernels.dense == [(2, 15), (1, 12)]
    assert result.implementation == "dense by length"


def test_equal_lengths_after_the_grid_are_a_view_not_a_copy() -> None:
    call = padded_call(TokenLayout((1, 3, 4), num_suffix_tokens=5, valid_lengths=(2, 2, 2)), False, False)

    def attend(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> AttentionResult:
        assert q.data_ptr() == call.q.data_ptr()
        assert k.data_ptr() == call.k.data_ptr()
        assert v.data_ptr() == call.v.data_ptr()
        return AttentionResult(q, None, "looked")

    assert attend_by_ranges(call, attend).implementation == "looked"
