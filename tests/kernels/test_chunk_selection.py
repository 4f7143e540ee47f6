"""Chunk selection: the Triton kernel, interpreted and on a GPU; test_vmoba_selection.py judges the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernels.chunk_selection_cases import check, inputs
from triton_interpreter import interpret, needs_triton

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.chunk_selection import SelectionRule, chunk_row_mask, refusal


@needs_triton
def test_kernel_under_the_interpreter() -> None:
    assert interpret(Path(__file__).with_name("chunk_selection_cases.py")).endswith("ok\n")


def test_what_does_not_fit_is_refused() -> None:
    q, means, order, chunk_of_row = inputs("random", 7, torch.float32, "cpu")
    rule = SelectionRule("query_head", 2, 0.0)
    with pytest.raises(ConfigError, match=r"expected means \[2, a divisor of 4, chunks, 24\]"):
        chunk_row_mask(q, means[:1], order, chunk_of_row, rule)
    with pytest.raises(ConfigError, match="block with a threshold alone"):
        chunk_row_mask(q, means, order, chunk_of_row, SelectionRule("block", 2, 0.0))
    if not torch.cuda.is_available():
        assert refusal(q, means, "query_head") == "needs a CUDA GPU, the tensors are on cpu"
    assert "compares the chunks of one query" in str(refusal(q, means, "overall"))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["exact", "ties", "equal", "broken"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernel_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    for num_chunks, num_tokens in ((7, 30), (130, 700), (390, 1000), (1000, 2000)):
        if kind != "broken" or num_chunks == 7:
            check(kind, num_chunks, dtype, "cuda", num_tokens)
