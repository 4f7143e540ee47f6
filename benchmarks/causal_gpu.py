"""Streams of causal Wan 2.1 1.3B at 480p on one GPU: seconds per chunk, to the first frames, and what grows with time.

    python -m benchmarks.causal_gpu --output benchmarks/results/causal_gpu.json
    python -m benchmarks.causal_gpu --cases "window 21" --output window_21.json    # those whose names begin so
    python -m benchmarks.causal_gpu --device cpu --output causal_cpu.json          # every path, at tiny sizes

Random weights of the published sizes, full decoder, text encoder left out. Chunks of three latent frames, twelve of
video, in four steps without guidance and a commit, as Self-Forcing and LongLive make them. A short stream first, for
what is compiled at the first use; then one for each window and dtype of the cache. `chunk_s` is the median of the
chunks whose window is full; the rate is that of 10 chunks around a frame; memory is what is allocated between chunks.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig
from diffusion_runtime.benchmark.random_pipeline import random_pipeline
from diffusion_runtime.parallel.world import World

MODEL = "wan2.1-1.3b"
CAUSAL = {
    "_class_name": "CausalWanTransformer3DModel",
    "num_frames_per_block": 3,
    "sliding_window_num_frames": 21,
    "local_attn_size": -1,
    "sink_size": 0,
}
TINY: Mapping[str, Mapping[str, object]] = {
    "transformer/config.json": {
        "num_attention_heads": 12,
        "attention_head_dim": 8,
        "ffn_dim": 64,
        "num_layers": 2,
    },
    "vae/config.json": {"base_dim": 8},
}
PUBLISHED = {"height": 480, "width": 832}
SMALL = {"height": 64, "width": 32}
BAR_CHUNK_S, BAR_FIRST_S = 0.40, 0.60
AROUND = 10


@dataclass(frozen=True)
class Case:
    """values: of the request. chunks: how many are made. runtime: of the pipeline, beside device and dtype."""

    name: str
    values: Mapping[str, Any]
    chunks: int
    runtime: Mapping[str, Any] = field(default_factory=dict)


CASES = (
    Case("window 21 (Self-Forcing)", {"kv_window": 21, "kv_sink": 0}, 40),
    Case("window 12, sink 3 (LongLive)", {"kv_window": 12, "kv_sink": 3}, 200),
    Case("window 21, fp8 cache", {"kv_window": 21, "kv_sink": 0, "kv_cache_dtype": "fp8_e4m3"}, 40),
    Case("window 21, fast decoding", {"kv_window": 21, "kv_sink": 0}, 40, {"vae_decode": "fast"}),
    Case(
        "window 21, fast decoding, linear layers in fp8",
        {"kv_window": 21, "kv_sink": 0},
        40,
        {"vae_decode": "fast", "quantization": "fp8"},
    ),
)
"""Those of one pipeline one after the other."""


def open_pipeline(device: torch.device, runtime: Mapping[str, Any], world: World | None = None) -> Pipeline:
    """Random weights of the published sizes on a GPU, of tiny ones elsewhere."""
    changes = {} if device.type == "cuda" else TINY
    changes = {
        **changes,
        "transformer/config.json": {**changes.get("transformer/config.json", {}), **CAUSAL},
        "model_index.json": {
            "_class_name": "WanCausalDMDPipeline",
            "transformer": ["diffusers", CAUSAL["_class_name"]],
        },
    }
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    config = RuntimeConfig(device=str(device) if world is None else device.type, dtype=dtype, **runtime)
    return random_pipeline(MODEL, config, lambda _: None, changes, world)


def allocated(device: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def measure(pipeline: Pipeline, case: Case, chunks: int) -> dict[str, Any]:
    device = pipeline.device
    size = PUBLISHED if device.type == "cuda" else SMALL
    request = GenerationRequest("a red circle", seed=1, num_frames=12 * chunks - 3, **size, **case.values)
    request = pipeline.resolve(request, "self-forcing-4")
    seconds: list[float] = []
    memory: dict[int, int] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before: Mapping[str, float] = {}
    with pipeline.stream(request) as stream:
        for chunk in stream:
            seconds.append(chunk.seconds)
            if len(seconds) in (20, chunks):
                memory[len(seconds)] = allocated(device)
            if len(seconds) == min(10, chunks - 1):
                before = stream.timings
        timings, first, worst = stream.timings, stream.rate.first_frame_seconds, stream.rate.worst_gap_seconds
        cache_bytes = stream.cache_bytes
        report = stream.attention_report
    settled = seconds[min(10, chunks - 1) :]
    shares = {stage: (timings[stage] - before[stage]) / len(settled) for stage in ("denoise", "decode")}
    early, late = rate_around(seconds, 100), rate_around(seconds, 2000)
    return {
        "case": case.name,
        "chunks": chunks,
        "first_frames_s": first,
        "chunk_s": statistics.median(settled),
        "denoise_s": shares["denoise"],
        "decode_s": shares["decode"],
        "worst_gap_s": worst,
        "frames_per_second_at_100": early,
        "frames_per_second_at_2000": late,
        "late_over_early": None if late is None or early is None else late / early,
        "memory_chunk_20": memory.get(20),
        "memory_last_chunk": memory.get(chunks),
        "cache_gb": cache_bytes / 1e9,
        "peak_gb": torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None,
        "attention": {row.role: f"{row.backend}: {row.implementation}" for row in report.rows},
        "libraries": {row.component: f"{row.library}: {row.implementation}" for row in report.libraries},
        "notes": list(report.notes),
    }


def rate_around(seconds: Sequence[float], frame: int) -> float | None:
    """Frames per second of AROUND chunks about a frame; None where the stream ended before."""
    begin = frame // 12 - AROUND // 2
    part = seconds[begin : begin + AROUND]
    return 12 * AROUND / sum(part) if len(part) == AROUND else None


def rows_of(device: torch.device, chunks: int | None, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    for runtime, of_pipeline in itertools.groupby(cases, lambda case: case.runtime):
        pipeline = open_pipeline(device, runtime)
        for case in of_pipeline:
            # What is compiled, and tuned for the sizes of this cache.
            measure(pipeline, case, 9 if device.type == "cuda" else 3)
            yield measure(pipeline, case, chunks or case.chunks)
        pipeline.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--chunks", type=int, help="of every stream; default: 40, and 200 of one")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--cases", nargs="+", default=[""], metavar="NAME", help=f"beginnings of: {'; '.join(c.name for c in CASES)}"
    )
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.name.startswith(tuple(arguments.cases))]
    if not cases:
        parser.error(f"--cases: none begins with {' or '.join(arguments.cases)}")
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.causal_gpu/1",
        "machine": describe_machine(device),
        "model": MODEL,
        "transformer": CAUSAL,
        "bars_s": {"chunk": BAR_CHUNK_S, "first_frames": BAR_FIRST_S},
        "rows": [],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for row in rows_of(device, arguments.chunks, cases):
        document["rows"].append(row)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
        shown = ", ".join(
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
            if value is not None
        )
        print(shown, flush=True)


if __name__ == "__main__":
    main()
