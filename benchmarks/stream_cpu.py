"""Streams of the embedded causal model on a CPU: seconds to the first frames, frames per second, by size.

    python -m benchmarks.stream_cpu --output benchmarks/results/stream_cpu.json [--seconds 8] [--repeats 3]

The model is loaded once; a stream before those that count fills what is made at the first use. Frames are handed over
and dropped, so that writing a file is not in it. The rate is that of the frames behind the first chunk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline

MODEL = "shapes-causal"
SIZES = (128, 256)
# Of two idle cores: frames per second by size, and seconds to the first frames.
BARS: dict[str, Any] = {"frames_per_second": {"128": 40, "256": 12}, "first_frames_s": 2}


def stream(pipeline: Pipeline, size: int, seconds: float, **values: Any) -> dict[str, float]:
    request = GenerationRequest("a red circle moving left", height=size, width=size, seconds=seconds, seed=1, **values)
    with pipeline.stream(request) as frames:
        for _ in frames:
            pass
    rate = frames.rate
    assert rate.frames_per_second is not None
    return {
        "first_frames_s": rate.first_frame_seconds,
        "frames_per_second": rate.frames_per_second,
        "worst_gap_s": rate.worst_gap_seconds,
        "denoise_s": frames.timings["denoise"],
        "decode_s": frames.timings["decode"],
        "num_frames": frames.num_frames,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of every stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    pipeline = load_pipeline(MODEL, device="cpu")
    assert isinstance(pipeline, Pipeline)
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.stream_cpu/1",
        "machine": describe_machine("cpu"),
        "num_threads": torch.get_num_threads(),
        "model": MODEL,
        "load_s": time.perf_counter() - begin,
        "bars": BARS,
        "rows": [],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for size in SIZES:
        for name, values in {"auto": {}, "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"}}.items():
            stream(pipeline, size, 2.0, **values)
            runs = [stream(pipeline, size, arguments.seconds, **values) for _ in range(arguments.repeats)]
            row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            document["rows"].append({"size": size, "kv_cache_dtype": name, **row, "runs": runs})
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")
            print(
                f"{size} x {size}, cache {name}: first frames {row['first_frames_s']:.2f} s, then "
                f"{row['frames_per_second']:.1f} frames per second, slowest chunk {row['worst_gap_s']:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
