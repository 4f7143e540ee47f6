"""A memory plan is made at every start on a GPU: it imports no library whose part a module of ours takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch
from cli_support import process_environment

from diffusion_runtime.memory.meta_operators import MetaOperators

CHILD = """
import sys
from diffusion_runtime import RuntimeConfig
from diffusion_runtime.loading import prepare
# As on a GPU, where a feed-forward layer in 16 bits is an operator of its own.
config = RuntimeConfig(device="cpu", memory_limit="64GB", dtype="bfloat16")
plan = prepare(config).planned_for(()).description.memory
assert plan is not None and plan.demand.decode_activations > 0
print([name for name in ("diffusers", "transformers", "peft", "torch._dynamo", "sympy") if name in sys.modules])
"""
EXPLAIN = """
import sys
from diffusion_runtime.cli.app import run
assert run(["explain", "a", "--model-path", "wan2.1-14b", "--json"]) == 0
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules], file=sys.stderr)
"""


def test_the_plan_of_the_embedded_model_imports_neither_diffusers_nor_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=process_environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_explain_imports_no_compiler() -> None:
    """Which operators on the meta device need it, the releases of torch differ in; 1.4 of 5.3 s for 14 B parameters."""
    environment = process_environment(HF_HUB_OFFLINE="1")
    done = subprocess.run([sys.executable, "-c", EXPLAIN], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "[]"), done.stderr


def test_shapes_on_the_meta_device_are_those_of_torch() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    x, half = meta(2, 3, 4, 5, 6), meta(2, 1, 4, 1, 6, dtype=torch.bfloat16)
    cases: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: torch.cat([x, x[:, :2]], dim=1),
        lambda: torch.cat([x, half.expand(2, 3, 4, 5, 6)], dim=-1),
        lambda: torch.conv3d(x, meta(7, 3, 3, 3, 3), meta(7), stride=(1, 2, 1), padding=(2, 1, 0), dilation=(2, 1, 1)),
        lambda: torch.conv2d(x[0], meta(6, 2, 3, 2), groups=2),
        lambda: torch.nn.functional.conv_transpose2d(x[0], meta(4, 3, 2, 2), stride=2),
        lambda: torch.nn.functional.normalize(x, dim=1),
        lambda: torch.linalg.vector_norm(x, dim=(0, 2)),
        lambda: torch.nn.functional.pad(x, (1, 2, 0, 3, 2, 0)),
        lambda: torch.addmm(meta(9), meta(4, 5), meta(5, 9)),
        lambda: torch.ops.aten._addmm_activation(meta(9), meta(4, 5), meta(5, 9), use_gelu=True),
        lambda: meta(4, 5) @ meta(5, 9),
        lambda: torch.bmm(meta(2, 4, 5), meta(2, 5, 9)),
        lambda: torch.nn.functional.scaled_dot_product_attention(meta(2, 3, 8, 4), meta(2, 3, 5, 4), meta(2, 3, 5, 4)),
        lambda: x * half + 2 * x[:1] - x / 3,
        lambda: half.mul_(2.0).add_(half),
        lambda: torch.arange(2, 9, 3, device="meta") * 2,
        lambda: torch.arange(4, device="meta", dtype=torch.float64) / 2,
        lambda: torch.nn.functional.gelu(half).clamp(-1, 1).sin().neg().exp(),
        lambda: torch.arange(5, device="meta") / 2,
        lambda: x * 2j,
    )
    for number, case in enumerate(cases):
        expected = case()
        with MetaOperators():
            found = case()
        assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device), number
