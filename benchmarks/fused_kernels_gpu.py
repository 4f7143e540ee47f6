"""The fused kernels of transformer layers on one GPU: each beside its eager form, then whole forwards with and without.

    python -m benchmarks.fused_kernels_gpu --output fused_kernels_gpu.json [--only wan,flux1] [--sweep] [--device cpu]

Correctness comes first: at every size a kernel's error against float32 is bounded by the eager form's own in bfloat16.
Then times: milliseconds of both, effective GB/s (what must be read and written once), microseconds of the host per
call; with --sweep other numbers of warps and rows per program too. Then forwards of the families at real size with
random weights (no download), the kernels on and off by turns, with the relative difference of their velocities, and
where the device's time goes. `--device cpu` runs every path at tiny sizes, the eager form alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.families import flux1, flux2, qwen_image, wan, z_image
from benchmarks.families.step import FamilyStep, StepInputs
from benchmarks.families_gpu import write_folder
from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy, RequestCache, attention
from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.kernels.activations import triton as activations_triton
from diffusion_runtime.kernels.activations.api import gelu_, silu_mul
from diffusion_runtime.kernels.block_packing import TokenBlocks
from diffusion_runtime.kernels.fp8_rows import reference as fp8_reference
from diffusion_runtime.kernels.fp8_rows.api import quantize_gated_rows
from diffusion_runtime.kernels.implementation import VARIABLE
from diffusion_runtime.kernels.launches import LaunchCache
from diffusion_runtime.kernels.modulated_norm import triton as norm_triton
from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm, add_branch_, modulated_norm, modulated_norm_fp8
from diffusion_runtime.kernels.qk_norm_rope import triton as rope_triton
from diffusion_runtime.kernels.qk_norm_rope.api import norm_rope
from diffusion_runtime.kernels.qk_norm_rope.block_order import norm_rope_into_blocks
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.models.random_weights import fill_randomly
from diffusion_runtime.models.registry import family_for_folder

LAYER, EPS = Norm("layer", 1e-6), 1e-6
# Of a block of Video Sparse Attention, 4 x 4 x 8.
BLOCK_TOKENS = 128
# Relative L2 of two bfloat16 forwards of random weights that round at other places.
MAX_DIFFERENCE = 0.05


@dataclass(frozen=True)
class Size:
    """Tokens and heads of one block's attention. over_heads: one norm for all heads, as in Wan."""

    name: str
    num_tokens: int
    num_heads: int
    head_dim: int
    ffn_dim: int
    over_heads: bool = False

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim


SIZES = (
    Size("Wan 2.1 1.3B 480p", 32760, 12, 128, 8960, over_heads=True),
    Size("FLUX.1 1024", 4608, 24, 128, 12288),
    Size("Qwen-Image 1024", 4096, 24, 128, 12288),
    Size("Z-Image 1024", 4224, 30, 128, 10240),
    Size("FLUX.2 1024", 4608, 48, 128, 18432),
)
# What --sweep times with other launches, at the first two sizes: each takes half a second to compile.
SWEPT = (
    "norm, modulated",
    "gated sum, norm, modulated",
    "norm, modulated, to fp8",
    "norm and rope in place",
    "silu times features",
)
TINY_SIZES = (Size("tiny", 24, 2, 16, 64), Size("tiny, over heads", 7, 3, 8, 40, over_heads=True))


@dataclass(frozen=True)
class Operation:
    """run: of (inputs, implementation), what it computed. make: inputs from a seed. passes: numbers read and written,
    of the tokens' dtype."""

    name: str
    make: Callable[[int], Any]
    run: Callable[[Any, str], tuple[torch.Tensor, ...]]
    passes: int


def operations(size: Size, device: torch.device, dtype: torch.dtype) -> Iterator[Operation]:
    dim, whole = size.dim, size.num_tokens * size.dim
    cos_sin = torch.randn(size.num_tokens, size.head_dim // 2, device=device)
    turns = torch.polar(torch.ones_like(cos_sin), cos_sin)
    generator = torch.Generator(device)

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    def inputs(seed: int) -> dict[str, torch.Tensor]:
        generator.manual_seed(seed)
        names = ("shift", "scale", "gate")
        rows = dict(zip(names, random(1, 3 * dim, dtype=torch.float32).chunk(3, dim=-1), strict=True))
        return {"x": random(1, size.num_tokens, dim), "branch": random(1, size.num_tokens, dim), **rows}

    weight, bias = 1 + 0.1 * random(dim, dtype=torch.float32), random(dim, dtype=torch.float32)
    weighted, rms = Norm("layer", EPS, weight, bias), Norm("rms", EPS, weight.to(dtype))

    def norm(each: Norm, *, branch: bool, rows: bool, rms_branch: bool = False) -> Callable[..., Any]:
        def run(i: dict[str, torch.Tensor], implementation: str) -> tuple[torch.Tensor, ...]:
            # torch's RMSNorm wants weights of x's dtype, and x is float32 where it is exact.
            own = each if each.kind == "layer" or each.weight is None else _like(each, i["x"])
            added = Branch(i["branch"], i["gate"], own if rms_branch else None) if branch else None
            modulation = {"shift": i["shift"], "scale": i["scale"]} if rows else {}
            out = modulated_norm(i["x"], own, branch=added, **modulation, implementation=implementation)
            return out, i["x"]

        return run

    def fp8(i: dict[str, torch.Tensor], implementation: str) -> tuple[torch.Tensor, ...]:
        if i["x"].dtype != dtype:
            return (modulated_norm(i["x"], LAYER, shift=i["shift"], scale=i["scale"]).flatten(0, 1),)
        rows = {"shift": i["shift"], "scale": i["scale"]}
        found = modulated_norm_fp8(i["x"], LAYER, **rows, implementation=implementation)
        return (found.values.float() * found.scales,) if "checked" in i else tuple(found)

    yield Operation("norm, modulated", inputs, norm(LAYER, branch=False, rows=True), 2 * whole)
    yield Operation("gated sum, norm, modulated", inputs, norm(LAYER, branch=True, rows=True), 4 * whole)
    yield Operation("gated sum, norm with weights", inputs, norm(weighted, branch=True, rows=False), 4 * whole)
    both = norm(rms, branch=True, rows=False, rms_branch=True)
    yield Operation("gated sum of a normalised branch, rms norm", inputs, both, 4 * whole)
    yield Operation("norm, modulated, to fp8", inputs, fp8, 2 * whole * 3 // 4)
    yield Operation(
        "gated sum",
        inputs,
        lambda i, each: (add_branch_(i["x"], Branch(i["branch"], i["gate"]), implementation=each),),
        3 * whole,
    )
    weights = [1 + 0.1 * random(dim if size.over_heads else size.head_dim) for _ in range(2)]

    def packed(seed: int) -> dict[str, torch.Tensor]:
        generator.manual_seed(seed)
        shape = (1, size.num_tokens, 3, size.num_heads, size.head_dim)
        return {"packed": random(*shape), "out": torch.empty(3, *shape[:2], *shape[3:], device=device, dtype=dtype)}

    def rope(i: dict[str, torch.Tensor], implementation: str) -> tuple[torch.Tensor, ...]:
        return norm_rope(i["packed"], weights, EPS, turns, implementation=implementation)[:2]

    def rope_out(i: dict[str, torch.Tensor], implementation: str) -> tuple[torch.Tensor, ...]:
        out = i["out"].movedim(0, 2)
        return norm_rope(i["packed"], weights, EPS, turns, out=out, implementation=implementation)

    yield Operation("norm and rope in place", packed, rope, 4 * whole)
    yield Operation("norm and rope to another place", packed, rope_out, 6 * whole)
    bounds = torch.arange(0, size.num_tokens + BLOCK_TOKENS, BLOCK_TOKENS, device=device).clamp(max=size.num_tokens)
    order = torch.arange(size.num_tokens, dtype=torch.int32, device=device)
    geometry = BlockGeometry(order[None], bounds[None].to(torch.int32), BLOCK_TOKENS, is_identity=True)
    blocks = TokenBlocks(geometry, size.num_tokens, None, "qk")

    def rope_blocks(i: dict[str, torch.Tensor], implementation: str) -> tuple[torch.Tensor, ...]:
        found = norm_rope_into_blocks(i["packed"], weights, EPS, turns, blocks, implementation=implementation)
        assert found.q_means is not None
        assert found.k_means is not None
        return found.q, found.k, found.q_means, found.k_means

    yield Operation("norm and rope into blocks, with their means", packed, rope_blocks, 6 * whole)
    ffn = size.num_tokens * size.ffn_dim

    def product(seed: int) -> torch.Tensor:
        generator.manual_seed(seed)
        return random(1, size.num_tokens, 2 * size.ffn_dim)

    yield Operation(
        "silu times features", product, lambda i, each: (silu_mul(*i.chunk(2, -1), implementation=each),), 3 * ffn
    )

    def silu_fp8(i: dict[str, torch.Tensor], implementation: str) -> tuple[torch.Tensor, ...]:
        halves = i["product"].chunk(2, -1)
        if i["product"].dtype != dtype:
            return (silu_mul(*halves, implementation="reference").flatten(0, 1),)
        if implementation == "triton":
            found = quantize_gated_rows(*halves)
        else:
            found = fp8_reference.quantize_rows(silu_mul(*halves, implementation="reference").flatten(0, 1))
        return (found.values.float() * found.scales,) if "checked" in i else tuple(found)

    yield Operation("silu times features, to fp8", lambda seed: {"product": product(seed)}, silu_fp8, ffn * 5 // 2)
    yield Operation(
        "gelu of a part", product, lambda i, each: (gelu_(i[..., size.ffn_dim :], implementation=each),), 2 * ffn
    )


def _like(norm: Norm, x: torch.Tensor) -> Norm:
    assert norm.weight is not None
    return norm._replace(weight=norm.weight.to(x.dtype))


def converted(inputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return {k: change(v) for k, v in inputs.items()} if isinstance(inputs, dict) else change(inputs)


def errors(operation: Operation, implementations: tuple[str, ...]) -> dict[str, float]:
    """Relative L2 of each against the eager form on the same numbers in float32, which is exact to 1e-6."""
    inputs = operation.make(1)
    if isinstance(inputs, dict):
        inputs["checked"] = torch.ones(())
    exact = [part.double() for part in operation.run(converted(inputs, lambda x: x.float().clone()), "reference")]
    found = {}
    for each in implementations:
        parts = [part.double() for part in operation.run(converted(inputs, torch.clone), each)]
        distance = sum(float((a - b).square().sum()) for a, b in zip(parts, exact, strict=True))
        found[each] = (distance / sum(float(b.square().sum()) for b in exact)) ** 0.5
    return found


class Clock:
    """Times of calls by the device's clock, of a CPU by its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def median_ms(self, run: Callable[[int], object], repeats: int, num_warm: int = 2) -> float:
        """run: takes the number of the repeat."""
        times = []
        for repeat in range(repeats + num_warm):
            self.synchronize()
            if self.device.type == "cuda":
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # So that the host is ahead when the first event is reached.
                torch.cuda._sleep(200_000)
                start.record()
                run(repeat)
                stop.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(stop))
            else:
                begin = time.perf_counter()
                run(repeat)
                times.append((time.perf_counter() - begin) * 1000)
        return statistics.median(times[num_warm:])

    def host_ms(self, run: Callable[[], object]) -> float:
        """Until one call returns, on an idle device."""
        self.synchronize()
        begin = time.perf_counter()
        run()
        spent = time.perf_counter() - begin
        self.synchronize()
        return spent * 1000

    def host_us(self, run: Callable[[int], object]) -> float:
        """Microseconds until a call returns, the device's work apart."""
        self.synchronize()
        begin = time.perf_counter()
        for repeat in range(50):
            run(repeat)
        spent = time.perf_counter() - begin
        self.synchronize()
        return spent / 50 * 1e6


def caller(operation: Operation, inputs: list[Any], implementation: str) -> Callable[[int], object]:
    """Takes the number of the repeat."""
    return lambda repeat: operation.run(inputs[repeat % len(inputs)], implementation)


def kernel_rows(
    size: Size, device: torch.device, dtype: torch.dtype, *, sweep: bool, repeats: int
) -> Iterator[dict[str, Any]]:
    implementations = ("reference", "triton") if device.type == "cuda" else ("reference",)
    clock = Clock(device)
    for operation in operations(size, device, dtype):
        row: dict[str, Any] = {"size": size.name, "operation": operation.name, "errors": {}}
        row["errors"] = errors(operation, implementations)
        if device.type == "cuda":
            bound = 1.05 * row["errors"]["reference"] + 1e-6
            row["correct"] = row["errors"]["triton"] <= bound
        # Several, so that none is still in the cache from the call before.
        inputs = [operation.make(seed) for seed in range(4)]
        for each in implementations:
            call = caller(operation, inputs, each)
            milliseconds = clock.median_ms(call, repeats)
            row[f"{each}_ms"] = milliseconds
            row[f"{each}_gb_per_s"] = operation.passes * dtype.itemsize / milliseconds / 1e6
            row[f"{each}_host_us"] = clock.host_us(call)
        if sweep and device.type == "cuda" and operation.name in SWEPT and size in SIZES[:2]:
            row["sweep_ms"] = dict(swept(operation, inputs, clock, repeats))
        yield row


def swept(operation: Operation, inputs: list[Any], clock: Clock, repeats: int) -> Iterator[tuple[str, float]]:
    """Times with other launches."""
    norm_shape, rope_warps = norm_triton.launch_shape, rope_triton.num_warps_for
    activation = activations_triton.BLOCK, activations_triton.NUM_WARPS

    def measure() -> float:
        for module in caches:
            module._launches = LaunchCache()
        return clock.median_ms(caller(operation, inputs, "triton"), repeats)

    caches = {module: module._launches for module in (norm_triton, rope_triton, activations_triton)}
    try:
        if "rope" in operation.name:
            for warps in (1, 2, 4, 8, 16):
                rope_triton.num_warps_for = lambda *_, warps=warps: warps
                yield f"{warps} warps", measure()
        elif "norm" in operation.name or "sum" in operation.name:
            for rows in (1, 2, 4):
                for warps in (2, 4, 8, 16):
                    norm_triton.launch_shape = lambda dim, rows=rows, warps=warps: (
                        1 << (dim - 1).bit_length(),
                        rows,
                        warps,
                    )
                    yield f"{rows} rows, {warps} warps", measure()
        else:
            for block in (1024, 2048, 4096):
                for warps in (2, 4, 8):
                    activations_triton.BLOCK, activations_triton.NUM_WARPS = block, warps
                    yield f"{block} columns, {warps} warps", measure()
    finally:
        norm_triton.launch_shape, rope_triton.num_warps_for = norm_shape, rope_warps
        activations_triton.BLOCK, activations_triton.NUM_WARPS = activation
        for module, cache in caches.items():
            module._launches = cache


@torch.inference_mode()
def product_rows(size: Size, device: torch.device, dtype: torch.dtype, repeats: int) -> Iterator[dict[str, Any]]:
    """A linear layer and its GELU apart and in the epilogue; a single-stream block's product in one and in two."""
    clock = Clock(device)
    torch.manual_seed(0)
    with torch.device(device):
        layer = Linear(size.dim, size.ffn_dim).to(dtype)
        x = torch.randn(1, size.num_tokens, size.dim, dtype=dtype)
        one = Linear(size.dim, 3 * size.dim + size.ffn_dim).to(dtype)
        qkv, up = Linear(size.dim, 3 * size.dim).to(dtype), layer
        wide = torch.randn(1, size.num_tokens, 3 * size.dim + size.ffn_dim, dtype=dtype)
        out = Linear(size.dim + size.ffn_dim, size.dim).to(dtype)
        hidden = torch.randn(1, size.num_tokens, size.ffn_dim, dtype=dtype)
    wide_double = torch.nn.functional.linear(x[:, :512].double(), layer.weight.double(), layer.bias.double())
    exact = torch.nn.functional.gelu(wide_double, approximate="tanh")
    found = {}
    for setting in ("reference", "auto"):
        with kernels(setting):
            found[setting] = (layer.forward_gelu(x)[:, :512].double() - exact).norm() / exact.norm()

    def set_to(setting: str, run: Callable[[], object]) -> Callable[[int], object]:
        def call(_: int) -> object:
            with kernels(setting):
                return run()

        return call

    def split() -> object:
        first, second = out.weight[:, : size.dim], out.weight[:, size.dim :]
        return torch.addmm(out.bias, x[0], first.t()).addmm_(hidden[0], second.t())

    yield {
        "size": size.name,
        "operation": "linear and gelu",
        "errors": {key: float(value) for key, value in found.items()},
        "apart_ms": clock.median_ms(set_to("reference", lambda: layer.forward_gelu(x)), repeats),
        "epilogue_ms": clock.median_ms(set_to("auto", lambda: layer.forward_gelu(x)), repeats),
        "linear_ms": clock.median_ms(lambda _: layer(x), repeats),
        "single stream: product in one": clock.median_ms(lambda _: one(x), repeats),
        "single stream: gelu of its part": clock.median_ms(lambda _: gelu_(wide[..., 3 * size.dim :]), repeats),
        "single stream: copy of attention": clock.median_ms(
            lambda _: wide[..., 2 * size.dim : 3 * size.dim].copy_(x), repeats
        ),
        "single stream: product in two, gelu in the epilogue": clock.median_ms(
            set_to("auto", lambda: (qkv(x), up.forward_gelu(x))), repeats
        ),
        "single stream: out in one": clock.median_ms(lambda _: out(wide[..., 2 * size.dim :]), repeats),
        "single stream: out in two": clock.median_ms(lambda _: split(), repeats),
    }


@torch.inference_mode()
def attention_row(size: Size, device: torch.device, dtype: torch.dtype, backend: str, repeats: int) -> dict[str, Any]:
    """Attention of q, k and v as they lie in one product, and of tensors of their own, by turns."""
    clock = Clock(device)
    packed = torch.randn(1, size.num_tokens, 3, size.num_heads, size.head_dim, device=device, dtype=dtype)
    apart = [part.contiguous() for part in packed.unbind(2)]
    times: dict[str, list[float]] = {"packed_ms": [], "apart_ms": []}
    for _ in range(repeats):
        for name, parts in (("packed_ms", packed.unbind(2)), ("apart_ms", apart)):
            q, k, v = parts
            times[name].append(clock.median_ms(lambda _, q=q, k=k, v=v: attention(q, k, v, backend=backend), 1, 1))
    medians = {name: statistics.median(several) for name, several in times.items()}
    return {"size": size.name, "operation": f"attention, {backend}", **medians}


@contextlib.contextmanager
def kernels(setting: str) -> Iterator[None]:
    """setting: auto or reference."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = setting
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def build(step: FamilyStep, device: torch.device, dtype: torch.dtype, backend: str | None) -> DiffusionTransformer:
    """A family's transformer with random weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, step)
        model = family_for_folder(folder).describe(folder)
        policy = AttentionPolicy(cli=AttentionConfig.parse(backend), device=str(device), dtype=dtype)
        empty = model.build_transformer(policy)
        return fill_randomly(model, empty, device, dtype)


def velocity(model: DiffusionTransformer, inputs: StepInputs, state: RequestCache) -> torch.Tensor:
    """state: of the request that the step belongs to. What depends on sizes and prompt alone, such as rotary positions,
    is computed at its first step and not part of the others."""
    out: torch.Tensor = model(*inputs.ours, AttentionContext(state=state))
    return out


@torch.inference_mode()
def forward_difference(step: FamilyStep, device: torch.device, dtype: torch.dtype) -> float:
    """Relative L2 between forwards with the fused kernels and without."""
    model, inputs = build(step, device, dtype, None), step.make_inputs(device, dtype)
    found = {}
    for setting in ("reference", "auto"):
        with kernels(setting):
            found[setting] = velocity(model, inputs, RequestCache()).float()
    return float((found["auto"] - found["reference"]).norm() / found["reference"].norm())


@torch.inference_mode()
def forward_row(
    step: FamilyStep, device: torch.device, dtype: torch.dtype, backend: str | None, repeats: int
) -> dict[str, Any]:
    clock = Clock(device)
    begin = time.perf_counter()
    model, inputs = build(step, device, dtype, backend), step.make_inputs(device, dtype)
    clock.synchronize()
    row: dict[str, Any] = {"step": step.name, "build_s": time.perf_counter() - begin}
    layer = next(layer for layer in model.attention_layers() if layer.layer.role == "self")
    row["backend"] = layer.decisions.possible[0][1].backend
    found, times, first = {}, {"reference": [], "auto": []}, {}  # type: ignore[var-annotated]
    state = RequestCache()
    for setting in times:
        begin = time.perf_counter()
        with kernels(setting):
            found[setting] = velocity(model, inputs, state).float()
        clock.synchronize()
        first[setting] = time.perf_counter() - begin
    for _ in range(repeats):
        for setting, several in times.items():
            with kernels(setting):
                several.append(clock.median_ms(lambda _: velocity(model, inputs, state), 1, 0))
    row["first_s"] = first
    row["relative_difference"] = float((found["auto"] - found["reference"]).norm() / found["reference"].norm())
    row["correct"] = row["relative_difference"] < MAX_DIFFERENCE
    row["ms"] = {setting: statistics.median(several) for setting, several in times.items()}
    for setting in times:
        with kernels(setting):
            row[f"{setting}_host_ms"] = statistics.median(
                clock.host_ms(lambda: velocity(model, inputs, state)) for _ in range(repeats)
            )
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                velocity(model, inputs, state)
                row[f"{setting}_peak_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
                row[f"{setting}_kernels"] = device_times(lambda: velocity(model, inputs, state))
    return row


def device_times(run: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds of matrix products, attention, the fused kernels and everything else, and its longest parts."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    totals: dict[str, float] = {}
    others: dict[str, list[float]] = {}
    for event in profiled.key_averages():
        spent = event.self_device_time_total / 1000
        name = event.key
        kind = kind_of(name)
        totals[kind] = totals.get(kind, 0.0) + spent
        if kind != "matrix products":
            others.setdefault(f"{kind}: {name[:60]}", []).extend([spent, event.count])
    longest = sorted(others.items(), key=lambda item: -item[1][0])[:6]
    return {"ms": totals, "longest": [{"name": n, "ms": v[0], "count": v[1]} for n, v in longest]}


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    if name in ("modulated_norm", "norm_rope", "activate"):
        return "fused kernels"
    if any(part in name for part in ("flash", "fmha", "sdpa", "attention", "_fwd_sm90", "forward_sm90")):
        return "attention"
    if any(part in name for part in ("gemm", "cutlass", "nvjet", "cublas", "sm90_xmma", "splitkreduce")):
        return "matrix products"
    return "other"


def _qwen_1024() -> FamilyStep:
    """At the size that others publish: 1024 x 1024."""

    def make(device: torch.device, dtype: torch.dtype) -> StepInputs:
        inputs = qwen_image.STEPS[0].make_inputs(device, dtype)
        latents, timestep, ours = inputs.ours
        size = ClipSize(1024, 1024, 1, 1)
        cut = latents[..., :128, :128].contiguous()
        return dataclasses.replace(inputs, ours=(cut, timestep, dataclasses.replace(ours, size=size)))

    return dataclasses.replace(qwen_image.STEPS[0], name="Qwen-Image, 1024 x 1024, both branches", make_inputs=make)


def _tiny(step: FamilyStep, **changes: Any) -> FamilyStep:
    return dataclasses.replace(step, name=f"{step.name}, tiny", config={**step.config, **changes})


STEPS: Mapping[str, FamilyStep] = {
    "flux1": flux1.STEPS[0],
    "wan": wan.STEPS[0],
    "z_image": z_image.STEPS[0],
    "qwen_image": _qwen_1024(),
    "flux2": flux2.STEPS[0],
}
TINY_STEPS = (
    dataclasses.replace(
        _tiny(wan.STEPS[0], num_layers=2, num_attention_heads=2, attention_head_dim=16, ffn_dim=64),
        make_inputs=lambda device, dtype: wan._inputs(ClipSize(64, 64, 5, 16), (16, 2, 8, 8), device, dtype),
    ),
    _tiny(
        flux1.STEPS[0],
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        axes_dims_rope=[4, 6, 6],
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help=f"forwards of these alone: {','.join(STEPS)}; none: no forward")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", help="of the attention; the platform's default where it is left out")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sweep", action="store_true", help="time the kernels with other launches too")
    parser.add_argument("--no-kernels", action="store_true", help="whole forwards alone")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16
    began = time.perf_counter()
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "dtype": str(dtype),
        "kernels": [],
        "products": [],
        "forwards": [],
        "failures": {},
    }
    if on_gpu:
        result["triton"] = importlib.import_module("triton").__version__

    def save() -> None:
        result["seconds"] = time.perf_counter() - began
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")

    def attempt(name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            traceback.print_exc()
            result["failures"][name] = f"{type(error).__name__}: {error}"
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        save()

    def kernels_of(size: Size) -> None:
        with torch.inference_mode():
            for row in kernel_rows(size, device, dtype, sweep=arguments.sweep, repeats=20 if on_gpu else 2):
                result["kernels"].append(row)
                if not row.get("correct", True):
                    result["failures"][f"{row['size']}, {row['operation']}"] = "less exact than the eager form"
                times = " ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float))
                print(f"{row['size']:20} {row['operation']:44} {times} {row['errors']}", flush=True)
                save()

    def products_of(size: Size) -> None:
        for row in product_rows(size, device, dtype, 10 if on_gpu else 2):
            result["products"].append(row)
            print(json.dumps(row), flush=True)
        row = attention_row(size, device, dtype, arguments.backend or "torch_sdpa", 5 if on_gpu else 1)
        result["products"].append(row)
        print(json.dumps(row), flush=True)

    def forward_of(step: FamilyStep) -> None:
        row = forward_row(step, device, dtype, arguments.backend, arguments.repeats if on_gpu else 1)
        result["forwards"].append(row)
        if not row["correct"]:
            result["failures"][step.name] = f"relative difference {row['relative_difference']:.3g}"
        print(json.dumps({k: v for k, v in row.items() if not k.endswith("_kernels")}), flush=True)
        for setting in ("reference", "auto"):
            found = row.get(f"{setting}_kernels")
            if found:
                print(f"  {setting}: " + ", ".join(f"{k} {v:.1f} ms" for k, v in found["ms"].items()))

    wanted = [name for name in arguments.only.split(",") if name] or list(STEPS)
    if not arguments.no_kernels:
        for size in SIZES if on_gpu else TINY_SIZES:
            attempt(size.name, lambda size=size: kernels_of(size))
        for size in (SIZES[0], SIZES[1]) if on_gpu else TINY_SIZES:
            attempt(f"{size.name}, products", lambda size=size: products_of(size))
    steps = [] if wanted == ["none"] else [STEPS[name] for name in wanted] if on_gpu else list(TINY_STEPS)
    for step in steps:
        attempt(step.name, lambda step=step: forward_of(step))
    save()
    print(f"{result['seconds']:.0f} s")
    for name, failure in result["failures"].items():
        print(f"FAILED {name}: {failure}")
    if result["failures"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
