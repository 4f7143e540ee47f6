"""Split-KV: when keys are cut, and that what is merged is attention to all of them."""

from __future__ import annotations

import torch

from diffusion_runtime.attention.backends.reference import reference_attention
from diffusion_runtime.attention.backends.split_kv import KeySplit, attend_split, can_split, plan_split


def test_keys_are_cut_where_the_last_wave_would_leave_a_gpu_idle() -> None:
    # (queries, keys, heads of all samples) on 132 multiprocessors, tiles of 128.
    for what, shape, expected in (
        ("444 tiles: three waves and 48 tiles", (4680, 32760, 12), KeySplit(4224, 5)),
        ("the same with a shorter window", (4680, 18720, 12), KeySplit(4224, 5)),
        ("few tiles: every query's keys are cut", (100, 32760, 12), KeySplit(0, 9)),
        ("too few keys to pay for a second call", (4680, 4680, 12), None),
        ("many waves: less than a twentieth is idle", (32760, 32760, 12), None),
        ("full waves", (33 * 128, 32760, 12), None),
        ("a prime number of keys has no equal parts", (4680, 32749, 12), None),
        ("a wave less as one call, and more tiles in parts", (7800, 15600, 5), KeySplit(3328, 3)),
        ("no heads", (4680, 32760, 0), None),
    ):
        assert plan_split(*shape, 128, 132) == expected, what


def test_what_is_merged_is_attention_to_all_keys() -> None:
    torch.manual_seed(0)
    # Cut out of a fused tensor, as a projection leaves them; two query heads per key head.
    q = torch.randn(2, 10, 3, 4, 8, dtype=torch.float64).unbind(2)[0]
    k, v = torch.randn(2, 24, 2, 2, 8, dtype=torch.float64).unbind(2)
    seen: list[tuple[int, ...]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((*q.shape[:2], *k.shape[:2]))
        return reference_attention(q, k, v)

    expected, expected_lse = reference_attention(q, k, v)
    for split, calls in ((KeySplit(6, 3), [(6, 4, 6, 8), (2, 6, 2, 24)]), (KeySplit(0, 4), [(8, 10, 8, 6)])):
        seen.clear()
        out, lse = attend_split(split, q, k, v, attend)
        assert seen == calls
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, expected_lse.to(lse.dtype), rtol=0, atol=1e-6)


def test_samples_that_lie_apart_are_not_cut() -> None:
    k = torch.zeros(2, 12, 2, 8)
    assert can_split(k, k)
    assert can_split(k[:1, :8], k[:1, :8])
    assert not can_split(k[:, :8], k)
    assert not can_split(k, k[:, :8])
