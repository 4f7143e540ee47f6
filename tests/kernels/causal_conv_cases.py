"""The Triton kernels of a causal decoder against their references, under Triton's interpreter or on a GPU. Prints what
went wrong.

TRITON_INTERPRET=1 python tests/kernels/causal_conv_cases.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from diffusion_runtime.kernels.causal_conv import reference, triton
from diffusion_runtime.kernels.causal_conv.api import NormSilu
from diffusion_runtime.kernels.frame_upsampling import reference as upsampling_reference
from diffusion_runtime.kernels.frame_upsampling import triton as upsampling_triton
from diffusion_runtime.kernels.frame_upsampling.api import Duplication

Pairs = Iterator[tuple[str, torch.Tensor, torch.Tensor]]
# Channels, frames, height, width, padding: more than one tile across, odd sizes, one frame, no padding.
SHAPES = ((3, 1, 3, 5, 1), (6, 3, 3, 9, 1), (18, 1, 2, 130, 0))


def random_norm(channels: int, dtype: torch.dtype, device: str) -> NormSilu:
    return NormSilu(torch.randn(channels, device=device, dtype=dtype), channels**0.5)


def channels_first(dtype: torch.dtype, device: str) -> Pairs:
    """As the video's frames lie channel by channel, and frame by frame."""
    for channels, frames, height, width, padding in SHAPES:
        rows = torch.randn(1, channels, frames, height, width, device=device).to(dtype)
        for x in (rows, rows.transpose(1, 2).contiguous().transpose(1, 2)):
            for norm in (None, random_norm(channels, dtype, device)):
                history = torch.randn(1, channels, 2, height, width, device=device).to(dtype)
                copy = history.clone()
                expected = reference.channels_first_input(x, history, norm, padding)
                found = triton.channels_first_input(x, copy, norm, padding)
                yield "input", expected, found
                yield "history", history, copy
            bias, sums = torch.randn(channels, device=device).to(dtype), [rows.clone() for _ in range(2)]
            yield (
                "sum",
                reference.add_bias_residual(sums[0], bias, x),
                triton.add_bias_residual(sums[1], bias, x),
            )
            for is_interleaved in (False, True) if channels % 2 == 0 else (False,):
                yield (
                    "upsampled",
                    upsampling_reference.upsample_channels_first(x, is_interleaved),
                    upsampling_triton.upsample_channels_first(x, is_interleaved),
                )


def channels_last(dtype: torch.dtype, device: str) -> Pairs:
    for channels, frames, height, width, _ in SHAPES:
        x, residual = (torch.randn(frames, height, width, channels, device=device).to(dtype) for _ in range(2))
        bias, norm = torch.randn(channels, device=device).to(dtype), random_norm(channels, dtype, device)
        cases = [(norm, None, None, False), (None, bias, None, False), (norm, bias, residual, False)]
        for norm_or_none, bias_or_none, residual_or_none, is_first in [*cases, (norm, bias, residual, True)]:
            history = torch.randn(2, height, width, channels, device=device).to(dtype)
            histories, sums = (history, history.clone()), (x.clone(), x.clone())
            expected, found = (
                implementation.channels_last_input(total, kept, norm_or_none, bias_or_none, residual_or_none, is_first)
                for implementation, total, kept in zip((reference, triton), sums, histories, strict=True)
            )
            yield "input", expected, found
            yield "history", *histories
            yield "sum", *sums
    # Torch's order of summation is known from 64 channels on; a row of pixels that no tile divides, some apart.
    apart = torch.randn(2, 3, 7, 128, device=device).to(dtype)[..., :96]
    norm, bias = random_norm(96, dtype, device), torch.randn(96, device=device).to(dtype)
    for x in (apart, apart.contiguous()):
        kept = (
            torch.zeros(2, 3, 7, 96, device=device, dtype=dtype),
            torch.zeros(2, 3, 7, 96, device=device, dtype=dtype),
        )
        sums, residual = (x.clone(), x.clone()), apart.flip(1)
        expected = reference.channels_last_input(sums[0], kept[0], norm, bias, residual, False)
        yield "torch's order", expected, triton.channels_last_input(sums[1], kept[1], norm, bias, residual, False, True)
        yield "torch's order, sum", *sums
        for is_interleaved in (False, True) if channels % 2 == 0 else (False,):
            yield (
                "upsampled",
                upsampling_reference.upsample_channels_last(x, is_interleaved, bias, residual),
                upsampling_triton.upsample_channels_last(x, is_interleaved, bias, residual),
            )


def duplicated(dtype: torch.dtype, device: str) -> Pairs:
    """Shortcuts that double the frames, that drop the first, and that keep their number."""
    _, frames, height, width, _ = SHAPES[1]
    channels = 6
    for duplication, num_sources in ((Duplication(2, 4), 12), (Duplication(2, 8, 1), 6), (Duplication(1, 2), 12)):
        source = torch.randn(1, num_sources, frames, height, width, device=device).to(dtype)
        num_frames = frames * duplication.frames_factor - duplication.num_dropped
        x = torch.randn(num_frames, channels, 2 * height, 2 * width, device=device).to(dtype)
        yield (
            "first",
            upsampling_reference.add_duplicated_channels_first(x.clone(), source, duplication),
            upsampling_triton.add_duplicated_channels_first(x.clone(), source, duplication),
        )
        last, source = x.permute(0, 2, 3, 1).contiguous(), source[0].permute(1, 2, 3, 0).contiguous()
        bias = torch.randn(channels, device=device).to(dtype)
        yield (
            "last",
            upsampling_reference.add_duplicated_channels_last(last.clone(), source, duplication, bias),
            upsampling_triton.add_duplicated_channels_last(last.clone(), source, duplication, bias),
        )


CASES = {case.__name__: case for case in (channels_first, channels_last, duplicated)}


def failures(dtype: torch.dtype, device: str, *, bound: float) -> list[str]:
    """Whose error is above bound * (1 + |number|); for a bound of 0, whose bits differ."""
    torch.manual_seed(0)
    found = []
    for name, case in CASES.items():
        for what, expected, computed in case(dtype, device):
            assert (expected.shape, expected.dtype) == (computed.shape, computed.dtype), (name, what)
            error = float(((expected - computed).double().abs() / (1.0 + expected.double().abs())).max())
            if not error <= bound:
                found.append(f"{name}, {what} {tuple(expected.shape)}: {error:.1e}")
    return found


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    # Half precision is left to a GPU: the interpreter's bfloat16 is cut, not rounded.
    print("\n".join(failures(torch.float32, "cpu", bound=2e-6)))
