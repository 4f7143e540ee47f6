"""Divisions without a branch give the bits of torch's on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu


def bits_differ(found: torch.Tensor, expected: torch.Tensor) -> int:
    """How many numbers; what is not a number has many bits."""
    integers = torch.int16 if found.element_size() == 2 else torch.int32
    same = (found.view(integers) == expected.view(integers)) | (found.isnan() & expected.isnan())
    return int((~same).sum())


def test_silu_of_every_number_in_half_precision() -> None:
    from kernels.exact_division_cases import silu

    for dtype in (torch.bfloat16, torch.float16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).cuda()
        assert bits_differ(silu(x), F.silu(x)) == 0


def test_quotients_are_those_of_torch() -> None:
    from kernels.exact_division_cases import divide

    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = (torch.randn(2**16, 64) * torch.exp(4 * torch.randn(2**16, 1))).to(dtype).cuda()
        lengths = torch.linalg.vector_norm(x.float(), dim=1) * (1 + torch.rand(2**16, device="cuda"))
        lengths = lengths.clamp_min(1e-12)
        x[:, :4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")])
        lengths[:3] = torch.tensor([1e-12, float("inf"), float("nan")])
        assert bits_differ(divide(x, lengths), x.float() / lengths[:, None]) == 0
