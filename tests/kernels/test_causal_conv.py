"""The kernels of a causal video decoder: their references against the definition, and Triton against the references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernels import causal_conv_cases
from triton_interpreter import interpret, needs_triton

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.causal_conv.api import NormSilu, channels_first_input, channels_last_input

CASES = Path(__file__).with_name("causal_conv_cases.py")


@needs_triton
def test_triton_under_its_interpreter_equals_the_references() -> None:
    assert interpret(CASES).strip() == ""


@pytest.mark.gpu
def test_triton_on_a_gpu_gives_torchs_bits_with_channels_first() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wrong = causal_conv_cases.failures(dtype, "cuda", bound=0.0)
        assert [line for line in wrong if not line.startswith("channels_last")] == []
        assert causal_conv_cases.failures(dtype, "cuda", bound=2e-2) == []


def test_a_window_holds_the_frames_before_and_keeps_the_last_two() -> None:
    frames = torch.arange(1.0, 6.0)
    history = torch.zeros(1, 1, 2, 1, 1)
    for new, expected in ((frames[:1], [0, 0, 1]), (frames[1:2], [0, 1, 2]), (frames[2:], [1, 2, 3, 4, 5])):
        window = channels_first_input(new.view(1, 1, -1, 1, 1), history, None, padding=1)
        assert window[0, 0, :, 1, 1].tolist() == expected
        assert window.sum() == sum(expected), "the padding is zero"
        assert history.flatten().tolist() == expected[-2:]


def test_channels_last_computes_what_channels_first_does() -> None:
    torch.manual_seed(0)
    x, history = torch.randn(1, 6, 3, 4, 5), torch.randn(1, 6, 2, 4, 5)
    norm = NormSilu(torch.randn(6), 6**0.5)
    last = [value[0].permute(1, 2, 3, 0).contiguous() for value in (x, history)]
    expected = channels_first_input(x, history, norm, padding=0)[0].permute(1, 2, 3, 0)
    torch.testing.assert_close(channels_last_input(*last, norm), expected)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(1, 6, 3, 4, 5)
    with pytest.raises(ConfigError, match=r"history of 2 frames of \(channels, height, width\) \(6, 4, 5\), got 1 of"):
        channels_first_input(x, torch.zeros(1, 6, 1, 4, 5), None, padding=1)
    with pytest.raises(ConfigError, match="expected 6 norm weights, got 5"):
        channels_first_input(x, torch.zeros(1, 6, 2, 4, 5), NormSilu(torch.zeros(5), 1.0), padding=1)
    with pytest.raises(ConfigError, match=r"\(6, 4, 5\), got 2 of \(6, 4, 4\)"):
        channels_last_input(x[0].permute(1, 2, 3, 0), torch.zeros(2, 4, 4, 6), None)
