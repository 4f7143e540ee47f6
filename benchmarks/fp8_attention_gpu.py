"""Attention in 8-bit floats on one GPU: correctness against float64 first, then times beside the dense backends.

    python -m benchmarks.fp8_attention_gpu --output benchmarks/results/fp8_attention_gpu.json

Needs nvidia-cudnn-frontend (pip install nvidia-cudnn-frontend) and FlashAttention-4; FlashInfer's kernel is a row where
flashinfer and nvcc are installed. Wan 2.1 1.3B at 480p (32760 tokens, 12 heads of 128), 14B at 720p (75600, 40), FLUX.1
at 1024 x 1024 (4608, 24), bfloat16. Rates count the work of dense attention. A row that fails prints its traceback.

--small: on a CPU in Triton's interpreter (TRITON_INTERPRET=1), with the eager reference in the kernel's place, to try
every line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.machine import describe_machine
from diffusion_runtime.attention import attention
from diffusion_runtime.kernels.fp8_attention import reference
from diffusion_runtime.kernels.fp8_attention.cudnn_graph import _handle, built_graph, form_of, run_graph
from diffusion_runtime.kernels.fp8_attention.reference import E4M3, HIGHEST, QuantizedInputs, rotation
from diffusion_runtime.kernels.fp8_attention.triton import LaunchShape, Prepared, prepare, restore_output

SHAPES = {"32760 x 12": (32760, 12), "75600 x 40": (75600, 40), "4608 x 24": (4608, 24)}
SMALL_SHAPES = {"70 x 2": (70, 2)}
HEAD_DIM = 128
DENSE = ("fa4", "cudnn_attn", "int8_attn")
SAMPLED_ROWS = 64
# batch, queries, keys, heads, kv heads, head_dim.
FORMS = (
    (1, 1000, 777, 4, 4, 128),
    (2, 300, 300, 4, 4, 128),
    (2, 512, 77, 6, 2, 128),
    (1, 1024, 1024, 4, 4, 64),
    (1, 64, 1, 2, 2, 128),
    (1, 1, 500, 2, 2, 128),
    (3, 33, 65, 2, 1, 64),
)
KINDS = ("normal", "offset", "outliers", "both", "sharp")
# What makes the tensors even: keys' mean, values' mean, queries and keys per channel instead of per head, rotation.
EVENED = {
    "nothing": (False, False, False, False),
    "k mean": (True, False, False, False),
    "v mean": (False, True, False, False),
    "means": (True, True, False, False),
    "means, channels": (True, True, True, False),
    "means, rotation": (True, True, False, True),
    "channels": (False, False, True, False),
    "rotation": (False, False, False, True),
}
# What gathers, and what rounds and restores.
LAUNCHES = (
    *(LaunchShape(n, rows, warps) for n in (32, 64, 128, 256) for rows, warps in ((16, 4), (32, 4), (32, 8), (64, 8))),
    *(
        LaunchShape(rows=rows, warps=warps)
        for rows, warps in ((16, 1), (16, 2), (32, 2), (32, 4), (64, 2), (64, 8), (128, 4), (128, 8))
    ),
)

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def draw(form: tuple[int, ...], device: str, kind: str = "normal") -> Tensors:
    """q, k, v of a kind: normal; keys and values with an offset per channel; one channel in 16 of q and k four times as
    large; both; scores four times as large."""
    batch, num_q, num_k, heads, kv_heads, head_dim = form
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((num_q, heads), (num_k, kv_heads), (num_k, kv_heads))
    q, k, v = (torch.randn(batch, *shape, head_dim, generator=generator, device=device) for shape in shapes)
    if kind in ("outliers", "both"):
        q[..., ::16] *= 4
        k[..., ::16] *= 4
    if kind in ("offset", "both"):
        k += 4 * torch.randn(kv_heads, head_dim, generator=generator, device=device)
        v += 2 * torch.randn(kv_heads, head_dim, generator=generator, device=device)
    if kind == "sharp":
        q *= 4
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def exact_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, out [batch, rows, heads, head_dim], lse [batch, heads, rows]) in float64 of some queries."""
    rows = torch.linspace(0, q.shape[1] - 1, min(SAMPLED_ROWS, q.shape[1])).long().to(q.device)
    out = torch.empty(q.shape[0], len(rows), *q.shape[2:], dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], len(rows), dtype=torch.float64, device=q.device)
    repeats = q.shape[2] // k.shape[2]
    for head in range(q.shape[2]):
        of_q, keys, values = (x[:, :, h].double() for x, h in ((q, head), (k, head // repeats), (v, head // repeats)))
        scores = of_q[:, rows] @ keys.transpose(1, 2) * q.shape[3] ** -0.5
        lse[:, head] = scores.logsumexp(-1)
        out[:, :, head] = scores.softmax(-1) @ values
    return rows, out, lse


def relative(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def attend(inputs: QuantizedInputs, out8: torch.Tensor, lse: torch.Tensor | None, **options: bool) -> None:
    """The kernel alone: cuDNN's, the reference's on a CPU."""
    scale = inputs.q.shape[3] ** -0.5
    if inputs.q.is_cuda:
        run_graph(*inputs[:4], out8, lse, scale, **options)
        return
    made, made_lse = reference.attend(inputs, scale)
    out8.copy_(made)
    if lse is not None:
        lse.copy_(made_lse)


def prepared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: bool) -> Prepared:
    options = {"rotate": False, "return_lse": False} | options
    made = prepare(q, k, v, scale=q.shape[3] ** -0.5, **options)
    return replace(made, attend=lambda: attend(made.inputs, made.out8, made.lse))


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: bool) -> Prepared:
    made = prepared(q, k, v, **options)
    made.quantize()
    made.attend()
    made.restore()
    return made


def milliseconds(call: Callable[[], object], device: str) -> float:
    if device != "cuda":
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)
    return float(triton.testing.do_bench(call, warmup=30, rep=200, return_mode="median"))


def tried(name: str, call: Callable[[], Any]) -> Any:
    """What `call` returns, or {"failed": its last line}, with the traceback printed."""
    try:
        found = call()
    except Exception as error:  # one row must not end the run
        print(f"--- {name} failed", flush=True)
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:400]}
    print(f"{name}: {json.dumps(found)}", flush=True)
    return found


def check(form: tuple[int, ...], device: str, kind: str, **options: bool) -> dict[str, Any]:
    """Errors of the Triton and cuDNN path and of the eager reference, from float64."""
    q, k, v = draw(form, device, kind)
    made = prepared(q, k, v, return_lse=True, **options)
    made.out8.view(torch.uint8).fill_(127)
    made.quantize()
    made.attend()
    made.restore()
    rows, exact, exact_lse = exact_rows(q, k, v)
    assert made.lse is not None
    found = {
        "error": relative(made.out[:, rows], exact),
        "lse": float((made.lse[:, :, rows] - exact_lse).abs().max()),
        "finite": bool(made.out.isfinite().all()),
        "highest": float(made.out8.float().abs().max()),
    }
    if form[1] * form[2] * form[3] < 1 << 27:
        expected, expected_lse = reference.fp8_attention_reference(
            q, k, v, scale=q.shape[3] ** -0.5, rotate=options.get("rotate", False)
        )
        found["reference_error"] = relative(expected[:, rows], exact)
        found["reference_lse"] = float((expected_lse[:, :, rows] - exact_lse).abs().max())
        of_reference = reference.quantize(q, k, v, rotate=options.get("rotate", False))
        found["inputs_that_differ"] = [
            float((a.float() != b.float()).float().mean())
            for a, b in zip(made.inputs[:3], of_reference[:3], strict=True)
        ]
    return found


def check_replay(device: str) -> dict[str, Any]:
    """A CUDA graph of a whole call gives the eager call's bits on other inputs."""
    if device != "cuda":
        return {}
    form = (1, 1000, 777, 4, 4, 128)
    q, k, v = draw(form, device)
    first = [x.clone() for x in (q, k, v)]
    whole(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = whole(q, k, v).out
    for x in (q, k, v):
        x.copy_(torch.randn_like(x) * 2)
    graph.replay()
    torch.cuda.synchronize()
    same = torch.equal(out, whole(q, k, v).out)
    for x, y in zip((q, k, v), first, strict=True):
        x.copy_(y)
    again = torch.equal(whole(q, k, v).out, whole(q, k, v).out)
    return {"replay_is_equal": same, "calls_are_equal": again}


def evened(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flags: tuple[bool, ...]) -> QuantizedInputs:
    """Eager: the inputs of the kernel with a choice of what makes them even; scales per tensor, v's per channel."""
    with_k_mean, with_v_mean, channels, rotate = flags
    queries, keys, values = q.float(), k.float(), v.float()
    k_mean, v_mean = (keys.mean(1) * with_k_mean, values.mean(1) * with_v_mean)
    keys, values = keys - k_mean[:, None], values - v_mean[:, None]
    if rotate:
        turn = rotation(q.shape[3]).to(q.device)
        queries, keys = (x @ turn * q.shape[3] ** -0.5 for x in (queries, keys))
    dims = 1 if channels else (1, 3)
    of_q, of_k = (x.abs().amax(dims, keepdim=True).clamp(min=1e-10) for x in (queries, keys))
    balance = (of_k / of_q).sqrt()
    queries, keys = queries * balance, keys / balance
    q_scale, k_scale = HIGHEST / queries.abs().max(), HIGHEST / keys.abs().max()
    v_scales = values.abs().amax(1) / HIGHEST
    q8, k8, v8 = (reference.rounded(x) for x in (queries * q_scale, keys * k_scale, values / v_scales[:, None]))
    return QuantizedInputs(q8, k8, v8, (1 / (q_scale * k_scale)).reshape(1), k_mean, v_mean, v_scales)


def error_of_evened(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flags: tuple[bool, ...]) -> float:
    inputs = evened(q, k, v, flags)
    out8 = torch.empty(q.shape, dtype=E4M3, device=q.device)
    attend(inputs, out8, None)
    rows, exact, _ = exact_rows(q, k, v)
    return relative(reference.restore(out8, inputs, torch.float32)[:, rows], exact)


def plans_of(made: Prepared, work: float) -> dict[str, Any]:
    """Every plan that cuDNN proposes, with its time."""
    inputs = made.inputs
    form = form_of(inputs.q, inputs.k, made.out8, HEAD_DIM**-0.5, False)
    graph, _, constants = built_graph(form)
    found: dict[str, Any] = {}
    tensors = {**constants, 1: inputs.q, 2: inputs.k, 3: inputs.v, 4: inputs.descale, 10: made.out8}
    for index in range(graph.get_execution_plan_count()):
        name = f"{index} {graph.get_plan_name_at_index(index)}"
        try:
            graph.build_plan_at_index(index)
            size = graph.get_workspace_size_plan_at_index(index)
            workspace = torch.empty(max(1, size), dtype=torch.uint8, device="cuda")

            def run(index: int = index, workspace: torch.Tensor = workspace) -> None:
                graph.execute_plan_at_index(tensors, workspace, index, handle=_handle(inputs.q.device.index))

            ms = milliseconds(run, "cuda")
            found[name] = [ms, work / ms / 1e9, size]
        except Exception as error:  # a plan that cannot run is one line
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def launches_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    """Milliseconds of what surrounds the kernel, by the shape of its launches."""
    found: dict[str, Any] = {}
    for shape in LAUNCHES:
        gathers = (shape.rows, shape.warps) == (64, 4)
        for rotate in (False,) if gathers else (False, True):
            first = f"{shape.programs} programs of {shape.gather_rows} rows, {shape.gather_warps} warps"
            name = first if gathers else f"{shape.rows} rows, {shape.warps} warps{', rotated' if rotate else ''}"
            try:
                made = prepare(q, k, v, scale=HEAD_DIM**-0.5, rotate=rotate, return_lse=False, shape=shape)
                made.out8.zero_()
                made.gather()
                parts = (made.gather,) if gathers else (made.round_inputs, made.restore)
                found[name] = [round(milliseconds(part, q.device.type), 4) for part in parts]
            except Exception as error:  # one shape must not end the run
                found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def flash_infer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, device: str) -> dict[str, Any]:
    """FlashInfer's kernel on the same 8-bit inputs, with an output in bfloat16."""
    import flashinfer

    heads = q.shape[2]

    def kernel(made: Prepared) -> torch.Tensor:
        ones = torch.ones(heads, device=q.device)
        return flashinfer.single_prefill_with_kv_cache(
            *(x[0] for x in made.inputs[:3]),
            scale_q=made.inputs.descale.expand(heads).contiguous(),
            scale_k=ones,
            scale_v=ones,
            o_dtype=torch.bfloat16,
            sm_scale=HEAD_DIM**-0.5,
            backend="fa3",
        )

    def run() -> None:
        made = prepare(q, k, v, scale=HEAD_DIM**-0.5, rotate=False, return_lse=False)
        made.quantize()
        restore_output(kernel(made)[None], made.inputs.v_scales, made.inputs.v_mean, made.out, LaunchShape())

    made = whole(q, k, v)
    rows, exact, _ = exact_rows(q, k, v)
    started = time.perf_counter()
    raw = kernel(made)[None]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    error = relative(reference.restore(raw[:, rows], made.inputs, torch.float32), exact)
    return {
        "first_call_s": seconds,
        "error": error,
        "kernel_ms": milliseconds(lambda: kernel(made), device),
        "with_quantising_ms": milliseconds(run, device),
    }


def time_shape(tokens: int, heads: int, device: str) -> dict[str, Any]:
    """One shape: dense backends before and after, the parts of a call, and what the kernel's variants take."""
    form = (1, tokens, tokens, heads, heads, HEAD_DIM)
    q, k, v = draw(form, device)
    work = 4 * tokens**2 * heads * HEAD_DIM
    found: dict[str, Any] = {}

    def dense(name: str) -> Any:
        rows, exact, _ = exact_rows(q, k, v)
        error = relative(attention(q, k, v, backend=name)[:, rows], exact)
        return {"error": error, "ms": milliseconds(lambda: attention(q, k, v, backend=name), device)}

    def part(call: Callable[[], object], size: float) -> dict[str, float]:
        """size: bytes that a part reads and writes."""
        ms = milliseconds(call, device)
        return {"ms": ms, "TB/s": size / ms / 1e9}

    numbers = q.numel()
    for name in DENSE:
        found[name] = tried(name, lambda name=name: dense(name))
    for name, options in {
        "plain": {},
        "rotate": {"rotate": True},
        "lse": {"return_lse": True},
        "heads first": {"heads_first": True},
    }.items():
        made = tried(f"{name} made", lambda options=options: whole(q, k, v, **options) and {})
        if made:
            found[name] = made
            continue
        made = whole(q, k, v, **options)
        rows, exact, _ = exact_rows(q, k, v)
        found[name] = tried(
            name,
            lambda made=made, options=options, rows=rows, exact=exact: {
                "error": relative(made.out[:, rows], exact),
                "whole": milliseconds(lambda: whole(q, k, v, **options), device),
                "attend": milliseconds(made.attend, device),
                "gather": part(made.gather, 6 * numbers),
                "round": part(made.round_inputs, 9 * numbers),
                "restore": part(made.restore, 3 * numbers),
            },
        )
        del made
    made = whole(q, k, v)
    if device == "cuda":
        found["plans"] = tried("plans: ms, TF/s, workspace", lambda: plans_of(made, work))
        if tokens < 40000:
            found["launches"] = tried("launches: gather; round, restore", lambda: launches_of(q, k, v))
    without = tried(
        "attend without highest",
        lambda: milliseconds(lambda: attend(made.inputs, made.out8, None, highest=False), device),
    )
    found["attend without highest"] = without
    found["fa4 again"] = tried("fa4 again", lambda: dense("fa4"))
    found["whole again"] = tried("whole again", lambda: milliseconds(lambda: whole(q, k, v), device))
    if device == "cuda":
        found["host_us"] = tried("host us per call", lambda: host_microseconds(q[:, :64], k[:, :64], v[:, :64]))
    found["work"] = work
    return found


def host_microseconds(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    q, k, v = (x.contiguous() for x in (q, k, v))
    whole(q, k, v)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(100):
        whole(q, k, v)
    seconds = time.perf_counter() - started
    torch.cuda.synchronize()
    return 1e4 * seconds


def print_table(shapes: dict[str, Any]) -> None:
    def rate(of_shape: dict[str, Any], ms: object) -> str:
        return f"{ms:9.3f} ms {of_shape['work'] / ms / 1e9:5.0f} TF/s" if isinstance(ms, float) else f" {ms}"

    for name, of_shape in shapes.items():
        print(f"\n{name} tokens x heads of {HEAD_DIM}")
        for key in (*DENSE, "fa4 again", "plain", "rotate", "lse", "heads first", "flashinfer"):
            row = of_shape.get(key)
            if not isinstance(row, dict) or "failed" in row:
                print(f"{key:14} {row}")
                continue
            shown = {"ms": "", "whole": "whole", "attend": "alone", "kernel_ms": "alone", "with_quantising_ms": "whole"}
            times = "  ".join(f"{label} {rate(of_shape, row[k])}" for k, label in shown.items() if k in row)
            parts = "  ".join(f"{k} {row[k]['ms']:.3f}" for k in ("gather", "round", "restore") if k in row)
            print(f"{key:14} {times}  {parts}  error {row['error']:.4f}")
        times = [of_shape[key].get("ms") for key in ("fa4", "fa4 again")]
        if all(isinstance(ms, float) for ms in times) and "whole" in of_shape["plain"]:
            print(f"whole over fa4: {min(times) / of_shape['plain']['whole']:.3f}x")


def versions() -> dict[str, Any]:
    names = ("nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "nvidia-cutlass-dsl", "flash-attn-4", "flashinfer-python")
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    started = time.perf_counter()
    import cudnn

    found["cudnn_import_s"] = time.perf_counter() - started
    found["cudnn_of_frontend"] = cudnn.backend_version_string()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--no-flashinfer", action="store_true")
    arguments = parser.parse_args()
    started = time.perf_counter()
    device, sizes = ("cpu", SMALL_SHAPES) if arguments.small else ("cuda", SHAPES)
    result: dict[str, Any] = {"machine": describe_machine(device), "versions": tried("versions", versions)}
    forms = FORMS[2:4] if arguments.small else FORMS
    result["forms"] = {str(form): tried(str(form), lambda form=form: check(form, device, "normal")) for form in forms}
    form = (1, 70, 70, 2, 2, 128) if arguments.small else (1, 4096, 4096, 8, 8, 128)
    result["kinds"] = {
        kind: tried(
            kind,
            lambda kind=kind: {str(rotate): check(form, device, kind, rotate=rotate) for rotate in (False, True)},
        )
        for kind in KINDS
    }
    result["replay"] = tried("replay", lambda: check_replay(device))
    result["evened"] = {
        kind: {
            name: tried(
                f"{kind}, {name}", lambda kind=kind, flags=flags: error_of_evened(*draw(form, device, kind), flags)
            )
            for name, flags in EVENED.items()
        }
        for kind in KINDS
    }
    result["shapes"] = {name: time_shape(*size, device) for name, size in sizes.items()}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if not arguments.no_flashinfer and device == "cuda":
        for name, (tokens, heads) in sizes.items():
            of_shape = result["shapes"][name]
            inputs = draw((1, tokens, tokens, heads, heads, HEAD_DIM), device)
            of_shape["flashinfer"] = tried(f"flashinfer {name}", lambda inputs=inputs: flash_infer(*inputs, device))
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print("\nerrors by what is made even")
    for kind, row in result["evened"].items():
        shown = "  ".join(f"{name} {x:.4f}" if isinstance(x, float) else f"{name} failed" for name, x in row.items())
        print(f"{kind:9} {shown}")
    print_table(result["shapes"])
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
