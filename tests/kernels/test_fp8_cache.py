"""Keys and values in 8 bits read back: Triton against the reference, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernels import fp8_cache_cases
from triton_interpreter import interpret, needs_triton

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.fp8_cache import dequantise

CASES = Path(__file__).with_name("fp8_cache_cases.py")


@needs_triton
def test_triton_under_its_interpreter_equals_the_reference() -> None:
    assert interpret(CASES).strip() == ""


@pytest.mark.gpu
def test_triton_on_a_gpu_is_no_further_from_float64_than_the_reference() -> None:
    for dtype, bound in ((torch.float32, 2.5e-7), (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        assert fp8_cache_cases.failures(dtype, "cuda", bound=bound) == []


def test_codes_that_do_not_lie_in_a_row_are_left_to_the_reference() -> None:
    codes = torch.zeros(1, 4, 2, 8, dtype=torch.uint8)
    scale, mean = torch.ones(2, 1, 1, 2, 1), torch.ones(1, 1, 2, 8)
    apart = torch.zeros(1, 4, 2, 16, dtype=torch.uint8)[..., ::2]
    for keys in (codes, apart):
        k, v = dequantise(keys, codes, scale, mean)
        assert torch.equal(k, torch.ones(1, 4, 2, 8))
        assert torch.equal(v, torch.zeros(1, 4, 2, 8))
    with pytest.raises(ConfigError, match="implementation 'triton' cannot run here: needs a CUDA GPU; use auto"):
        dequantise(codes, codes, scale, mean, implementation="triton")
