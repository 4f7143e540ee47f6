"""SageAttention 1.0.6 itself, on a CPU: its own kernels in Triton's interpreter, against float64.

The stand-in of test_backends_packages.py proves how the package is called; this is what it computes. The package
asserts that tensors are on a GPU, which `python -O` leaves out. The interpreter reads 0 where a masked load reads
nothing, as GPUs do in practice.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from triton_interpreter import interpret

pytest.importorskip("triton")
pytest.importorskip("sageattention", reason="the test extra brings it on Linux on x86-64")

SCRIPT = """
import json, warnings
warnings.simplefilter("ignore")
import torch
from diffusion_runtime.attention import AttentionCall, LayerInfo, StepInfo, TokenLayout
from diffusion_runtime.attention.backends.calling import run_backend
from diffusion_runtime.attention.backends.interface import NoOptions
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.parallel.interface import AttentionInputs
from diffusion_runtime.attention.self_test import attention_by_definition, planned_tests, run_self_test
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.core.hardware import Hardware, installed_packages

backend = find_backend("sage_attn")
said = {"version": installed_packages()["sageattention"], "kernel": {}, "served": {}, "lengths": {}}

def call(num_queries, layout, head_dim=64, kv_heads=2, **fields):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, num_queries, 2, head_dim, generator=generator)
    k, v = torch.randn(2, 1, layout.num_tokens, kv_heads, head_dim, generator=generator)
    inputs = AttentionInputs(q, k, v, layout)
    return AttentionCall(inputs, NoOptions(), LayerInfo(), StepInfo(), RequestCache(), **fields)

def error(made, result, num_keys):
    visible = torch.zeros(1, 1, made.q.shape[1], made.k.shape[1], dtype=torch.bool)
    visible[..., :num_keys] = True
    visible = visible.tril() if made.causal else visible
    expected, _ = attention_by_definition(made.q, made.k, made.v, visible, made.scale)
    return float((result.out.double() - expected).norm() / expected.norm()), result.implementation

for n in (1, 24, 33, 64, 65, 77, 128, 226):
    made = call(64, TokenLayout.text(n))
    said["kernel"][n] = error(made, backend.run(made), n)
    said["served"][n] = error(made, run_backend(backend, made), n)
for n in (12, 77, 100, 128):
    made = call(64, TokenLayout.text(192, (n,)))
    said["lengths"][n] = error(made, run_backend(backend, made), n)
causal = call(128, TokenLayout((1, 8, 16)), causal=True)
said["causal"] = error(causal, run_backend(backend, causal), 128)
# 128 blocks, the last of them short by 8 keys: 1e-3 of all.
long = call(2, TokenLayout.text(8184), kv_heads=1)
said["long"] = error(long, run_backend(backend, long), 8184)
wide = call(64, TokenLayout.text(64), head_dim=96, kv_heads=1, scale=0.2)
said["wide"] = error(wide, run_backend(backend, wide), 64)
hopper = Hardware("cuda", "NVIDIA H200", (9, 0), (9, 15), "2.13.0", installed_packages())
cases = ("cross-attention", "128 keys", "65 keys", "77 keys", "padded cross-attention", "causal")
planned = [test for test in planned_tests("sage_attn", hopper) if test.case.name in cases]
tests = [run_self_test(test, "cpu") for test in planned if (test.dtype, test.head_dim) == ("bfloat16", 64)]
said["self-test"] = [[test.test.title, test.problem, test.error, test.bound, test.implementation] for test in tests]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(interpret(SCRIPT, flags=("-O",)))
    return answer


@pytest.mark.slow
def test_its_kernel_is_right_where_the_capability_says_so_and_wrong_elsewhere(said: dict[str, Any]) -> None:
    """What the capability rests on: where a version is right for every number of keys, it should say so."""
    assert said["version"] == "1.0.6"
    errors = {int(number): error for number, (error, _) in said["kernel"].items()}
    assert all(errors[number] < 0.015 for number in (64, 128)), errors
    assert all(errors[number] > 0.06 for number in (1, 24, 33, 65, 77, 226)), errors


def test_every_number_of_keys_is_served_right(said: dict[str, Any]) -> None:
    served = said["served"] | {f"cut to {number}": result for number, result in said["lengths"].items()}
    wrong = {number: result for number, result in served.items() if not result[0] < 0.015}
    assert wrong == {}
    by_sage = {number for number, (_, implementation) in served.items() if implementation.startswith("sageattention")}
    assert by_sage == {"64", "128", "cut to 128"}


def test_what_it_computes_itself_stays_there(said: dict[str, Any]) -> None:
    for name in ("causal", "long", "wide"):
        error, implementation = said[name]
        assert error < 0.02, name
        assert implementation == "sageattention 1", name


def test_its_self_test_passes_within_the_error_of_int8(said: dict[str, Any]) -> None:
    results = said["self-test"]
    assert {title: problem for title, problem, *_ in results if problem} == {}
    assert {bound for *_, bound, _ in results} == {0.03}
    assert len(results) == 6
    by_sage = {title.partition(",")[0] for title, *_, implementation in results if implementation == "sageattention 1"}
    # The causal case has 288 keys, which are no whole tiles of 128.
    assert by_sage == {"128 keys"}
