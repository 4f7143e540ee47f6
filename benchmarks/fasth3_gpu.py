"""A whole clip of FastH3 with random weights on one GPU: seconds of each stage, and where the first step's go.

    python -m benchmarks.fasth3_gpu --output $OUT/fasth3_clip.json [--quantization fp8] [--vae-decode fp8]
    python -m benchmarks.fasth3_gpu --output $OUT/first_step.json --first-step    # 90 s: what the first step does more

4 steps with Video Sparse Attention at 0.9, 124 frames of 1344 x 768, text encoded; everything in one process. One
generation compiles, one is timed. A third stops after its first step, under torch.profiler: its kernels by class, the
times in which the device is idle, and what the host does meanwhile. Then the clip's frames alone are decoded to pixels
on the CPU as before and after: each chunk copied before the next is decoded, copied beside it, and that with products
in 8-bit floats, whose relative L2 from bfloat16 is given (not with `--vae-decode fp8`). `--small` runs every path at
sizes that a CPU computes.

`--first-step`: one generation of one step compiles, and decodes. Two steps are then denoised three times without a
decoding: behind the decoding and behind each other, each step with what the allocator asked of the device and the host
functions that took longest, then under torch.profiler. A first step that is short when no decoding came before it waits
for memory; one that is long both times waits for what its request computes.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from benchmarks.minimax_h3_gpu import TINY
from diffusion_runtime.benchmark.random_pipeline import random_pipeline
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.progress import Progress
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.generation import frame_decoding
from diffusion_runtime.memory.transfers import CopyToHost, begin_copy_to_host
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.request.generation_request import GenerationRequest

MODEL = "fasth3-4-step"
PROMPT = "rain on a tin roof, thunder far away"
# Idle times of the device that are listed, in seconds; and the calls beside each.
LEAST_GAP, NUM_CALLS = 0.005, 4
# Of torch.cuda.memory_stats, as differences over a step: an expandable segment that grows shows in the bytes alone.
MEMORY = (
    "reserved_bytes.all.current",
    "num_device_alloc",
    "num_device_free",
    "num_alloc_retries",
    "num_sync_all_streams",
)
CLASSES = {
    "linear": ("nvjet", "gemm", "cutlass_kernel_", "scaled_mm", "cublas"),
    "attention": ("attend", "flash", "keep_highest", "norm_rope", "block_means"),
    "norm, activation": ("modulated_norm", "activate", "quantize", "rms"),
    "copy": ("memcpy", "memset"),
}
SMALL_VAE = {
    "latent_channels": 24,
    "block_out_channels": [4, 4, 8, 8, 8, 8],
    "layers_per_block": 1,
    "norm_num_groups": 2,
    "decoder_num_layers": 2,
    "decoder_num_attention_heads": 2,
    "decoder_attention_head_dim": 32,
}
SMALL_SOUND = {"encoder_dim": 4, "latent_dim": 64, "num_attention_heads": 2, "decoder_dim": 128}


def opened(arguments: argparse.Namespace, device: torch.device) -> Pipeline:
    changes = {
        "transformer/config.json": TINY,
        "vae/config.json": SMALL_VAE,
        "audio_vae/config.json": SMALL_SOUND,
    }
    config = RuntimeConfig(
        model_path=MODEL,
        device=str(device),
        quantization="none" if arguments.small else arguments.quantization,
        attention_override={"default": {"backend": "video_sparse_attn", "extra": {"sparsity": 0.9}}},
        vae_decode=arguments.vae_decode,
    )
    return random_pipeline(MODEL, config, lambda text: print(text, flush=True), changes if arguments.small else None)


def generated(pipeline: Pipeline, request: GenerationRequest) -> dict[str, Any]:
    """Return the seconds of a generation by stage, and of each step."""
    ends: list[float] = []

    def on_progress(progress: Progress) -> None:
        if progress.stage == "denoise":
            ends.append(progress.seconds)

    media = pipeline(request, on_progress=on_progress)
    steps = [after - before for before, after in itertools.pairwise(ends)]
    return {**media.timings, "steps_s": steps}


def stepped(pipeline: Pipeline, request: GenerationRequest) -> list[dict[str, Any]]:
    """Return the seconds of each step of a request that is not decoded, what the allocator asked of the device in it,
    and the host functions with the most time of their own."""
    is_cuda = pipeline.device.type == "cuda"
    steps: list[dict[str, Any]] = []
    profile, began = cProfile.Profile(), 0.0
    before: dict[str, int] = {}

    def on_progress(progress: Progress) -> None:
        nonlocal profile, before, began
        if progress.stage != "denoise":
            return
        profile.disable()
        now = time.perf_counter()
        memory = {key: torch.cuda.memory_stats(pipeline.device).get(key, 0) for key in MEMORY} if is_cuda else {}
        if progress.step:
            steps.append(
                {
                    "s": now - began,
                    "memory": {key: value - before[key] for key, value in memory.items()},
                    "reserved_gb": memory.get("reserved_bytes.all.current", 0) / 1e9,
                    "host": longest_calls(profile),
                }
            )
        profile, before, began = cProfile.Profile(), memory, time.perf_counter()
        if progress.step < progress.num_steps:
            profile.enable()

    pipeline.latents(request, on_progress=on_progress)
    return steps


def longest_calls(profile: cProfile.Profile) -> list[str]:
    """Return the functions with the most time of their own: a call that waits for the device or the driver is one."""
    found: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    rows = sorted(found.items(), key=lambda row: -row[1][2])[:12]
    return [
        f"{own:.3f} s, {calls} calls, {Path(file).name}:{line} {name}"
        for (file, line, name), (_, calls, own, *_) in rows
    ]


def profiled(device: torch.device, run: Callable[[], object]) -> dict[str, Any]:
    """Return what a run does on the device and on the host."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        run()
    events = profile.events() or []
    kernels = sorted(
        (event.time_range.start / 1e6, event.time_range.end / 1e6, event.name)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    calls = [
        (event.time_range.start / 1e6, event.time_range.end / 1e6, event.name)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CPU
    ]
    by_class: defaultdict[str, float] = defaultdict(float)
    by_kernel: defaultdict[str, list[float]] = defaultdict(list)
    for start, end, name in kernels:
        by_class[class_of(name)] += end - start
        by_kernel[name[:90]].append(end - start)
    longest = sorted(by_kernel.items(), key=lambda item: -sum(item[1]))[:14]
    origin = min((start for start, *_ in calls), default=0.0)
    gaps = []
    for (_, before, _), (after, _, name) in itertools.pairwise(kernels):
        if after - before >= LEAST_GAP:
            inside = sorted(
                ((min(end, after) - max(start, before), call) for start, end, call in calls), key=lambda item: -item[0]
            )
            gaps.append(
                {
                    "at_s": before - origin,
                    "idle_s": after - before,
                    "before_kernel": name[:60],
                    "host": [f"{call} {share:.3f} s" for share, call in inside[:NUM_CALLS] if share > 0],
                }
            )
    first = kernels[0][0] - origin if kernels else None
    return {
        "until_first_kernel_s": first,
        "by_class_s": dict(by_class),
        "kernels": [{"kernel": name, "s": sum(each), "calls": len(each)} for name, each in longest],
        "idle": sorted(gaps, key=lambda gap: -gap["idle_s"])[:20],
        "idle_in_all_s": sum(gap["idle_s"] for gap in gaps),
        "host": [
            {"call": row.key, "self_s": row.self_cpu_time_total / 1e6, "count": row.count}
            for row in sorted(profile.key_averages(), key=lambda row: -row.self_cpu_time_total)[:16]
        ],
    }


def class_of(kernel: str) -> str:
    name = kernel.lower()
    return next((found for found, parts in CLASSES.items() if any(part in name for part in parts)), "other")


def decodings(pipeline: Pipeline, request: GenerationRequest, repeats: int) -> list[dict[str, Any]]:
    """Return the seconds of a clip's frames to pixels on the CPU, as before and after."""
    geometry, size = pipeline.rules.sampling.geometry, pipeline.rules.settings(request).size
    noise = torch.randn(1, *geometry.sample_shape(size), generator=torch.Generator().manual_seed(0))
    latents = geometry.parts(noise.to(pipeline.device), size).video
    decoder = pipeline.parts.decoder

    def in_turn(*tensors: torch.Tensor) -> CopyToHost:
        return CopyToHost(tuple(tensor.cpu() for tensor in tensors))

    def quick() -> LatentDecoder:
        return decoder.in_mode("fp8") if pipeline.device.type == "cuda" else decoder

    ways: dict[str, tuple[Callable[..., CopyToHost], Callable[[], LatentDecoder]]] = {
        "copied in turn": (in_turn, lambda: decoder),
        "copied beside kernels": (begin_copy_to_host, lambda: decoder),
        "and with fp8 products": (begin_copy_to_host, quick),
    }
    rows, exact = [], None
    for name, (copy, decoder_of) in ways.items():
        frame_decoding.begin_copy_to_host = copy
        used, times, frames = decoder_of(), [], torch.empty(0)
        for _ in range(1 + repeats):
            begin = time.perf_counter()
            frames = frame_decoding.decode_frames(used.stream(latents), 24.0, {}, lambda _: lambda _: None)
            times.append(time.perf_counter() - begin)
        exact = frames if exact is None else exact
        difference, scale = frames.float() - exact.float(), exact.float()
        rows.append(
            {
                "way": name,
                "s": statistics.median(times[1:]),
                "first_s": times[0],
                "decoder": used.implementation,
                "is_identical": torch.equal(frames, exact),
                "relative_l2": float(difference.norm() / (scale - scale.mean()).norm()),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    frame_decoding.begin_copy_to_host = begin_copy_to_host
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quantization", default="fp8", help="of the transformer: none, fp8, fp8-all")
    parser.add_argument("--vae-decode", default="exact", help="of the clip that is timed whole: exact, fp8")
    parser.add_argument("--repeats", type=int, default=1, help="timed generations, and decodings of each way")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--first-step", action="store_true", help="the first two steps alone, and what they wait for")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU computes")
    arguments = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {
        "machine": describe_machine(device.type),
        "quantization": arguments.quantization,
        "vae_decode": arguments.vae_decode,
    }

    def keep(name: str, value: Any) -> None:
        result[name] = value
        arguments.output.write_text(json.dumps(result, indent=2, default=str) + "\n")
        print(f"{time.strftime('%H:%M:%S')} {name}: {json.dumps(value, default=str)[:3000]}", flush=True)

    begin = time.perf_counter()
    pipeline = opened(arguments, device)
    keep("load_s", time.perf_counter() - begin)
    sizes: dict[str, Any] = {"height": 64, "width": 96} if arguments.small else {}
    if arguments.first_step:
        keep("cold", generated(pipeline, pipeline.resolve(GenerationRequest(PROMPT, stop_after_step=1, **sizes))))
        two = pipeline.resolve(GenerationRequest(PROMPT, stop_after_step=2, **sizes))
        keep("behind a decoding", stepped(pipeline, two))
        keep("behind each other", stepped(pipeline, two))
        keep("profile", profiled(device, lambda: pipeline.latents(two)))
        return
    request = pipeline.resolve(GenerationRequest(PROMPT, **sizes))
    keep("cold", generated(pipeline, request))
    keep("warm", [generated(pipeline, request) for _ in range(arguments.repeats)])
    if arguments.vae_decode == "exact":
        keep("decode", decodings(pipeline, request, arguments.repeats))
    if not arguments.no_profile:
        # Last: reading its events takes the host seconds.
        stopped = pipeline.resolve(GenerationRequest(PROMPT, stop_after_step=1, **sizes))
        keep("first_step", profiled(device, lambda: pipeline(stopped)))


if __name__ == "__main__":
    main()
