"""The Triton kernels of norm and SiLU against their references, under Triton's interpreter or on a GPU.

Prints what went wrong.

TRITON_INTERPRET=1 python tests/kernels/norm_silu_cases.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from diffusion_runtime.kernels.norm_silu import api, triton

# Channels, frames, height, width: fewer pixels than a tile and more, channels that no tile divides, several parts.
SHAPES = ((4, 1, 3, 5), (20, 2, 7, 11), (8, 3, 40, 60))
EXACT = ("rms, exact", "pixel, exact")


def pairs(dtype: torch.dtype, device: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(what, reference in float64, found). A pixel of zeros has a length of 0; values far from zero have a variance
    that a sum of squares would lose."""
    # 1e-8 is 0 in float16: torch's own division of a pixel of zeros would be 0 / 0.
    pixel_eps = 1e-6 if dtype == torch.float16 else 1e-8
    for channels, *size in SHAPES:
        x = torch.randn(1, channels, *size, device=device).to(dtype)
        x[..., 0] = 0.0
        weight, bias = (torch.randn(channels, device=device).to(dtype) for _ in range(2))
        scale = channels**0.5
        for exact in (True, False):
            suffix = "exact" if exact else "fast"
            yield (
                f"rms, {suffix}",
                api.rms_norm_silu_reference(x, weight, scale),
                triton.rms_norm_silu(x, weight, scale, exact),
            )
            yield (
                f"pixel, {suffix}",
                api.pixel_norm_silu_reference(x, pixel_eps),
                triton.pixel_norm_silu(x, pixel_eps, exact),
            )
        for shift in (0.0, 300.0) if dtype == torch.float32 else (0.0,):
            moved = x + shift
            expected = api.group_norm_silu_reference(moved.double(), weight.double(), bias.double(), 4, 1e-6)
            yield "group", expected.to(dtype), triton.group_norm_silu(moved, weight, bias, 4, 1e-6)


def failures(dtype: torch.dtype, device: str, *, bound: float) -> list[str]:
    """Whose error is above bound * (1 + |number|); for a bound of 0, whose bits differ."""
    torch.manual_seed(0)
    found = []
    for what, expected, computed in pairs(dtype, device):
        assert (expected.shape, expected.dtype) == (computed.shape, computed.dtype), what
        error = float(((expected - computed).double().abs() / (1.0 + expected.double().abs())).max())
        if not error <= bound:
            found.append(f"{what} {tuple(expected.shape)}: {error:.1e}")
    return found


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    # Half precision is left to a GPU: the interpreter's bfloat16 is cut, not rounded.
    print("\n".join(failures(torch.float32, "cpu", bound=2e-5)))
