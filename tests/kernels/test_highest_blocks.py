"""The highest scores of a row: reference against sorting, the Triton kernel under the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from triton_interpreter import interpret, needs_triton

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.highest_blocks import highest, highest_reference


def rows() -> torch.Tensor:
    """float32 [6, 37]: random, ties, all equal, zeros of both signs, infinities, NaN."""
    scores = torch.randn(6, 37, generator=torch.Generator().manual_seed(0))
    scores[1] = scores[1].round()
    scores[2] = 1.5
    scores[3] = torch.where(torch.arange(37) % 2 == 0, 0.0, -0.0)
    scores[4, ::5], scores[4, 1::5] = float("inf"), float("-inf")
    scores[5, ::3] = float("nan")
    return scores


def expected(scores: torch.Tensor, num_kept: int) -> torch.Tensor:
    """By a stable sort, as the definition has it."""
    lowest = torch.where(scores.isnan(), float("-inf"), scores)
    return lowest.sort(dim=-1, descending=True, stable=True).indices[..., :num_kept].sort(dim=-1).values.to(torch.int32)


@pytest.mark.parametrize("num_kept", [1, 2, 18, 36, 37])
def test_reference_is_a_stable_sort(num_kept: int) -> None:
    assert torch.equal(highest_reference(rows(), num_kept), expected(rows(), num_kept))
    assert torch.equal(highest(rows().view(2, 3, 37), num_kept), expected(rows(), num_kept).view(2, 3, -1))


@pytest.mark.parametrize("num_kept", [0, 38])
def test_counts_out_of_range_are_refused(num_kept: int) -> None:
    with pytest.raises(ConfigError, match=f"expected 1 to 37 scores to keep, got {num_kept}"):
        highest(rows(), num_kept)


@needs_triton
def test_kernel_under_the_interpreter() -> None:
    script = (
        "from kernels.test_highest_blocks import expected, rows\n"
        "from diffusion_runtime.kernels.highest_blocks import highest_triton\n"
        "for kept in (1, 2, 18, 36, 37):\n"
        "    assert highest_triton(rows(), kept).tolist() == expected(rows(), kept).tolist(), kept\n"
    )
    interpret(script)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_scores", "num_kept"), [(624, 63), (1440, 144), (8192, 900)])
def test_kernel_on_a_gpu(num_scores: int, num_kept: int) -> None:
    scores = torch.randn(64, num_scores, device="cuda")
    scores[::2] = scores[::2].round(decimals=1)
    assert torch.equal(highest(scores, num_kept).cpu(), expected(scores.cpu(), num_kept))
    assert torch.equal(highest(rows().cuda(), 18).cpu(), expected(rows(), 18))
