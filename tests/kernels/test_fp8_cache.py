"""Keys and values in 8 bits read back: Triton against the reference, and what is refused."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels import fp8_cache_cases

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.fp8_cache.api import dequantise

CASES = Path(__file__).with_name("fp8_cache_cases.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no build for this platform")
def test_triton_under_its_interpreter_equals_the_reference() -> None:
    root = str(CASES.parents[2])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    process = subprocess.run(
        [sys.executable, str(CASES)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == ""


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
