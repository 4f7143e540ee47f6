"""GPU kernels load 16 bytes at once: what they are handed begins there."""

from __future__ import annotations

import torch

from diffusion_runtime.attention.backends.calling import aligned_tokens

WHOLE = torch.randn(2, 9, 4, 67, dtype=torch.bfloat16)
FUSED = torch.randn(2, 9, 3, 4, 64, dtype=torch.bfloat16)


def test_rows_that_begin_in_between_are_copied() -> None:
    views = {
        "a part of wider heads": WHOLE[..., :64],
        "a part that begins in between": WHOLE[..., 3:],
        "contiguous, from the fourth number on": torch.randn(2 * 9 * 4 * 64 + 3, dtype=torch.bfloat16)[3:].view(
            2, 9, 4, 64
        ),
        "numbers of a head apart": torch.randn(2, 9, 64, 4, dtype=torch.bfloat16).transpose(2, 3),
        "float32, from the second number on": torch.randn(2 * 9 * 4 * 64 + 1)[1:].view(2, 9, 4, 64),
    }
    for name, x in views.items():
        aligned = aligned_tokens(x)
        assert torch.equal(aligned, x), name
        assert aligned.data_ptr() % 16 == 0, name
        assert aligned.stride(-1) == 1, name
        assert all(stride * x.element_size() % 16 == 0 for stride in aligned.stride()[:-1]), name


def test_what_is_aligned_is_not_copied() -> None:
    keys = torch.randn(2, 20, 4, 64)
    views = {
        "fused": FUSED[:, :, 1],
        "cut keys": keys[:, 5:],
        "heads first": keys.transpose(1, 2),
        "repeated heads": keys[:, :, :1].expand(-1, -1, 4, -1),
        # No copy would align these.
        "heads of 20 numbers": torch.randn(2, 9, 4, 20, dtype=torch.bfloat16),
    }
    assert [name for name, x in views.items() if aligned_tokens(x) is not x] == []
