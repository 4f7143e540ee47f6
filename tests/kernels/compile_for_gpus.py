"""Compile the Triton kernels that a call launches for a GPU that is not there: what compiles may still be wrong, what
does not compile would be found by whoever has that GPU.

    python tests/kernels/compile_for_gpus.py 90

A stand-in driver names the target; launches compile and compute nothing, so what callers make of the results is not
looked at. Prints a JSON object: how many variants of each kernel compiled, what was raised where one did not, and which
kernels of the package no call launched.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import diffusion_runtime.kernels

KERNELS = "diffusion_runtime.kernels"
# Half a second and more each.
MOST_VARIANTS = 3
# Those of transformers, whose calls are of many kinds.
WITH_EVERY_VARIANT = ("modulated_norm.", "qk_norm_rope.", "fp8_rows.", "int8_rows.")
CASES = ("gathered_cases", "chunk_selection_cases")


class NoGpu:
    """What Triton's compiler asks a driver."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


def define_kernels() -> set[str]:
    """The names of all that are launched, which begin with no underscore.

    As kernels that are compiled, while this project takes the interpreter to be on: it hands CPU tensors to Triton
    then alone. Triton looks at the variable where a kernel is defined."""
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("diffusion_runtime.kernels.implementation")
    os.environ["TRITON_INTERPRET"] = "0"
    found = set()
    for module in pkgutil.walk_packages(diffusion_runtime.kernels.__path__, f"{KERNELS}."):
        if "triton" in module.name or module.name.endswith("_kernels"):
            defined = vars(importlib.import_module(module.name)).values()
            found |= {name_of(each) for each in defined if isinstance(each, JITFunction)}
    importlib.import_module("exact_division_cases")
    os.environ["TRITON_INTERPRET"] = "1"
    return {name for name in found if not name.rpartition(".")[2].startswith("_")}


def name_of(kernel: Any) -> str:
    """`block_sparse.attend`: two packages may have a kernel of one name."""
    place = kernel.fn.__module__.removeprefix(f"{KERNELS}.").removesuffix(".triton_kernels")
    return f"{place}.{kernel.fn.__name__}"


def compile_what_is_launched(compiled: dict[str, int], failed: dict[str, str]) -> None:
    """From now on a launch compiles, and returns None as under the interpreter."""
    run = JITFunction.run

    def compile_alone(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        del warmup
        name = name_of(kernel)
        if compiled.get(name, 0) >= MOST_VARIANTS and not name.startswith(WITH_EVERY_VARIANT):
            return
        try:
            run(kernel, *arguments, grid=grid, warmup=True, **keywords)
        except Exception as error:  # any exception of a compiler
            failed.setdefault(name, "".join(traceback.format_exception(error))[-2000:])
        else:
            compiled[name] = compiled.get(name, 0) + 1

    JITFunction.run = compile_alone


def call_everything(capability: int) -> None:
    fused = importlib.import_module("fused_layer_cases")
    for cases in (fused.norm_cases, fused.rope_cases, fused.block_cases, fused.activation_cases):
        # Half a second each: some of the many that differ by a flag.
        for _, compute in itertools.islice(cases(torch.bfloat16, "cpu"), 0, None, 5):
            compute("triton")
    rows = importlib.import_module("diffusion_runtime.kernels.fp8_rows.triton")
    integers = importlib.import_module("diffusion_runtime.kernels.int8_rows.triton")
    x, y, z = torch.randn(3, 8, 512, dtype=torch.bfloat16)
    for keywords in (
        {},
        {"gelu_from": 256},
        {"features": y},
        {"first": y, "gelu_from": 512},
        {"first": y, "features": z},
    ):
        rows.quantize_rows(x, **keywords)
        for group_size in (0, 16, 64, 256):
            integers.quantize_rows(x, group_size, **keywords)
    # The tiles of GPUs: CPU tensors take smaller ones.
    integers._tile = lambda _: integers._TILES[capability in (90, 100)]
    of_x, of_weight = (integers.quantize_rows(each, 16) for each in (x, torch.randn(300, 528, dtype=torch.bfloat16)))
    for bias in (None, y[0][:8].contiguous()):
        integers.multiply_rows(of_x, integers.quantize_rows(y, 16), bias, torch.bfloat16)
    integers.multiply_rows(of_weight, of_weight, None, torch.float32)
    for call in (*(importlib.import_module(name).main for name in CASES), *further_calls()):
        # Of numbers that nobody computed.
        with contextlib.suppress(AssertionError, IndexError, RuntimeError, ValueError):
            call()


def further_calls() -> Iterator[Callable[[], object]]:
    """Of kernels that no case above reaches."""
    conv, silu, sparse = map(importlib.import_module, ("causal_conv_cases", "norm_silu_cases", "block_sparse_cases"))
    conv.SHAPES, silu.SHAPES = conv.SHAPES[1:2] * 2, silu.SHAPES[1:2]
    for case in (*conv.CASES.values(), silu.pairs):
        yield partial(collections.deque, case(torch.bfloat16, "cpu"))
    for kind, tail in (("small tiles", True), ("row mask", True), ("small tiles", False)):
        call = partial(sparse.errors, kind, sparse.LAYOUTS["suffix"], 64, torch.bfloat16, None, 0.1, "cpu", False)
        yield partial(call, pooled_tail=tail)
    for head_dim, layout in ((64, "grid"), (128, "suffix")):
        attend = importlib.import_module(f"{KERNELS}.block_sparse.gluon").block_sparse_gluon
        case = ("tiles", sparse.LAYOUTS[layout], head_dim, torch.bfloat16, None, 0.1, "cpu")
        yield partial(sparse.errors, *case, layout == "suffix", layout == "grid", attend=attend)
    gathered = importlib.import_module("gathered_cases")
    pooled = dataclasses.replace(gathered.gathered_plan(gathered.SMALL), pooled_tail=True)
    yield partial(gathered.check, pooled, gathered.SMALL, head_dim=64, dtype=torch.bfloat16)
    names = ("block_means", "block_packing", "highest_blocks", "kmeans.triton")
    cache = importlib.import_module(f"{KERNELS}.fp8_cache")
    codes, scale = torch.zeros(2, 1, 16, 2, 64, dtype=torch.uint8), torch.ones(2, 1, 1, 2, 1, dtype=torch.bfloat16)
    yield partial(cache.dequantise, *codes, scale, torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16))
    # CPU tensors take other branches where these are called.
    division, numbers = importlib.import_module("exact_division_cases"), torch.zeros(64, 64, dtype=torch.bfloat16)
    yield partial(division.silu, numbers)
    yield partial(division.divide, numbers, torch.ones(64))
    split = importlib.import_module(f"{KERNELS}.split_kv")
    parts = torch.zeros(6, 16, 2, 64, dtype=torch.bfloat16)
    yield partial(split.merge_parts, parts, torch.zeros(6, 2, 16), parts[:2])
    means, packing, highest, kmeans = (importlib.import_module(f"{KERNELS}.{name}") for name in names)
    q, k, v = torch.randn(3, 1, 256, 2, 64, dtype=torch.bfloat16)
    prepared = importlib.import_module(f"{KERNELS}.fp8_attention.triton").prepare(q, k, v, scale=0.1, return_lse=True)
    yield from (prepared.gather, prepared.round_inputs, prepared.restore)
    order, centroids, points = torch.arange(256, dtype=torch.int32), torch.randn(2, 8, 64), q.transpose(1, 2)
    yield partial(packing.reorder_tokens, q, order)
    yield partial(highest.highest_triton, torch.randn(4, 100), 10)
    yield partial(kmeans.assign_triton, points, centroids)
    grouping = importlib.import_module(f"{KERNELS}.kmeans.reference").group_by_label(order.repeat(2, 1) % 8, 8)
    yield partial(kmeans.update_triton, points, grouping, centroids)
    geometry = sparse.plan_of("tiles", sparse.LAYOUTS["grid"]).q
    x = torch.randn(1, geometry.num_tokens, 2, 64, dtype=torch.bfloat16)
    yield partial(means.block_means_triton, x, geometry)


def main(capability: int) -> None:
    compiled: dict[str, int] = {}
    failed: dict[str, str] = {}
    every = define_kernels()
    driver.set_active(NoGpu(capability))
    compile_what_is_launched(compiled, failed)
    call_everything(capability)
    missing = sorted(every - compiled.keys() - failed.keys())
    print(json.dumps({"triton": triton.__version__, "compiled": compiled, "failed": failed, "missing": missing}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
