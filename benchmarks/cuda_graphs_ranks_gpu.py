"""CUDA graphs on several GPUs: the embedded model's denoising by Ulysses, ring, CFG and tensor parallel,
graphs on and off.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.cuda_graphs_ranks_gpu --output cuda_graphs_ranks_gpu.json

Latents and counts are compared first, to the bit; then both modes are timed by turns, warm. A launch-bound step gains
most where each process has little to compute. Two GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.config import ParallelConfig, RuntimeConfig
from diffusion_runtime.parallel.process_info import read_process_info
from diffusion_runtime.parallel.world import World

KINDS = {
    "ulysses": ParallelConfig(ulysses_degree=2, cfg_parallel=False),
    "ring": ParallelConfig(ring_degree=2, cfg_parallel=False),
    "cfg": ParallelConfig(cfg_parallel=True),
    "tensor": ParallelConfig(tensor_parallel_size=2, cfg_parallel=False),
}
TIMED_STEPS = 12


def load(parallel: ParallelConfig, mode: str, world: World, device: str) -> Pipeline:
    pipeline = load_pipeline(RuntimeConfig("shapes", device=device, parallel=parallel, cuda_graphs=mode), world=world)
    assert isinstance(pipeline, Pipeline)
    return pipeline


def measure(kind: str, world: World, repeats: int, device: str) -> dict[str, Any]:
    """Medians of the denoising's seconds by mode, and what was replayed."""
    modes = {"off": "off", "on": "on" if device == "cuda" else "auto"}
    pipelines = {name: load(KINDS[kind], mode, world, device) for name, mode in modes.items()}
    size = {} if device == "cuda" else {"height": 64, "width": 64, "num_frames": 1}
    request = GenerationRequest("a red circle moving left", num_inference_steps=TIMED_STEPS, **size)
    is_equal, made = True, {}
    for seed, prompt in enumerate(("a red circle moving left", "a blue square moving up", "a green star")):
        each = dataclasses.replace(request, seed=seed, prompt=prompt)
        made = {mode: pipeline(each) for mode, pipeline in pipelines.items()}
        is_equal &= bool((made["on"].frames == made["off"].frames).all())
        is_equal &= made["on"].attention_report.rows == made["off"].attention_report.rows
    seconds: dict[str, list[float]] = {mode: [] for mode in pipelines}
    for repeat in range(repeats):
        for mode, pipeline in pipelines.items():
            media = pipeline(dataclasses.replace(request, seed=10 + repeat))
            seconds[mode].append(media.timings["denoise"])
    graphs = made["on"].attention_report.graphs
    return {
        "kind": kind,
        "correct": is_equal,
        "denoise_s": {mode: statistics.median(several) for mode, several in seconds.items() if several},
        "graphs": None if graphs is None else dataclasses.asdict(graphs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--device", default="cuda", help="cpu runs the paths without graphs")
    arguments = parser.parse_args()
    place = read_process_info()
    if place is None:
        parser.error("start it with torchrun --standalone --nproc-per-node 2 -m benchmarks.cuda_graphs_ranks_gpu")
    world = World.join(place, announce=lambda failure: print(failure.message, flush=True))
    rows = [measure(kind, world, arguments.repeats, arguments.device) for kind in arguments.only.split(",")]
    if world.is_first:
        document = {
            "schema": "diffusion_runtime.cuda_graphs_ranks_gpu/1",
            "machine": describe_machine(arguments.device),
            "processes": world.size,
            "request": {"frames": 29, "height": 256, "width": 256, "steps": TIMED_STEPS},
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if arguments.device == "cuda" else None,
            "rows": rows,
        }
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")
        for row in rows:
            print(row["kind"], "equal" if row["correct"] else "DIFFERENT", row["denoise_s"], row["graphs"])
    world.agree(None)
    world.leave()


if __name__ == "__main__":
    main()
