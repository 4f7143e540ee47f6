"""Blocks of 64 x 64 on one GPU: ours, FlashInfer's Hopper kernel alone and with its planning, and dense attention.

    python -m benchmarks.block_sparse_flashinfer_gpu --output block_sparse_flashinfer_gpu.json

Random plans at 32768 tokens, heads of 128, bfloat16; correctness against float64 on a small plan first. `kernel` is the
kernel alone on tokens in order; `whole` brings tokens into the plan's order and back, with a plan that is there (ours:
and lists the blocks); `planned` makes the plan too, as a planner that selects anew at each call needs it. The rate
counts the work of the pairs that are kept. Where FlashInfer refuses a plan, its reason is in the row.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.block_sparse_gpu import HEAD_DIM, inputs, milliseconds, random_plan, uniform
from benchmarks.machine import describe_machine
from diffusion_runtime.kernels.block_sparse import flash4, flashinfer, gluon, triton
from diffusion_runtime.kernels.block_sparse.api import block_sparse_attention, refusal
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan
from diffusion_runtime.kernels.block_sparse.reference import block_sparse_reference

TOKENS = 32768
SCALE = HEAD_DIM**-0.5


def errors_of(implementation: str, heads: int) -> dict[str, float]:
    """Relative errors against float64, of an implementation and of the reference on the same inputs."""
    plan = random_plan(uniform(2048, 64), uniform(2048, 64), 0.3, heads)
    q, k, v = inputs(2048, heads)
    exact, _ = block_sparse_reference(q.double(), k.double(), v.double(), plan, scale=SCALE)
    rounded, _ = block_sparse_reference(q, k, v, plan, scale=SCALE)
    found = block_sparse_attention(q, k, v, plan, scale=SCALE, implementation=implementation).out
    errors = {
        name: float((x.double() - exact).norm() / exact.norm())
        for name, x in (("kernel", found), ("reference", rounded))
    }
    # The reference rounds its result alone; a kernel rounds its softmax weights too.
    assert errors["kernel"] < 3 * errors["reference"] + 1e-4, (implementation, errors)
    return errors


def ours(plan: SparsePlan, heads: int) -> dict[str, Any]:
    q, k, v = inputs(TOKENS, heads)
    implementation = "gluon" if gluon.refusal(q, plan) is None else "triton"
    prepare = gluon.prepare if implementation == "gluon" else triton.prepare
    prepared = prepare(q, k, v, plan, scale=SCALE)
    whole = milliseconds(lambda: prepare(q, k, v, plan, scale=SCALE).launch())
    return {
        "implementation": implementation,
        "kernel_ms": milliseconds(prepared.launch),
        "whole_ms": whole,
        "planned_ms": whole,
    }


def theirs(plan: SparsePlan, heads: int) -> dict[str, Any]:
    q, k, v = inputs(TOKENS, heads)
    reason = refusal("flashinfer", q, plan)
    if reason is not None:
        return {"implementation": "flashinfer", "refused": reason}
    began = time.perf_counter()
    wrapper = flashinfer.planned(plan, SCALE)
    torch.cuda.synchronize()
    planning = 1000 * (time.perf_counter() - began)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    wrapper.run(*packed)
    whole = milliseconds(lambda: block_sparse_attention(q, k, v, plan, scale=SCALE, implementation="flashinfer"))
    return {
        "implementation": "flashinfer",
        "kernel_ms": milliseconds(lambda: wrapper.run(*packed)),
        "whole_ms": whole,
        "planning_ms": planning,
        "planned_ms": whole + planning,
    }


def dense(heads: int) -> dict[str, float]:
    q, k, v = inputs(TOKENS, heads)
    q_bhsd, k_bhsd, v_bhsd = (x.transpose(1, 2) for x in (q, k, v))
    times = {"torch_sdpa": milliseconds(lambda: F.scaled_dot_product_attention(q_bhsd, k_bhsd, v_bhsd))}
    if flash4.package_refusal() is None:
        from flash_attn.cute import flash_attn_func

        times["fa4"] = milliseconds(lambda: flash_attn_func(q, k, v))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--heads", default="12,24")
    # 0.125 lists 64 of 512 key blocks, the most that FlashInfer takes.
    parser.add_argument("--density", default="0.1,0.125,0.2")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    package = flashinfer.package_refusal()
    began = time.perf_counter()
    errors = {name: errors_of(name, 2) for name in ("auto", *(() if package else ("flashinfer",)))}
    started = time.perf_counter() - began
    rows, dense_ms = [], {}
    for heads in map(int, arguments.heads.split(",")):
        dense_ms[heads] = dense(heads)
        for density in map(float, arguments.density.split(",")):
            plan = random_plan(uniform(TOKENS, 64), uniform(TOKENS, 64), density, heads)
            work = 4.0 * TOKENS * TOKENS * heads * HEAD_DIM * plan.density
            for row in (ours(plan, heads), theirs(plan, heads)):
                row |= {"heads": heads, "density": plan.density}
                if "kernel_ms" in row:
                    row["tflops"] = work / row["kernel_ms"] / 1e9
                rows.append(row)
                print(json.dumps(row))
    document = {
        "schema": "diffusion_runtime.block_sparse_flashinfer_gpu/1",
        "machine": describe_machine("cuda"),
        "shape": {"tokens": TOKENS, "head_dim": HEAD_DIM, "blocks": [64, 64], "dtype": "bfloat16"},
        "flashinfer": package or "installed",
        "first_calls_s": started,
        "errors": errors,
        "dense_ms": dense_ms,
        "rows": rows,
    }
    print(json.dumps(dense_ms))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
