"""What step caches cost in quality and save in time on the embedded model, beside fewer plain steps at the same time.

    python -m benchmarks.step_cache_quality --device cpu --output benchmarks/results/step_cache_quality.json

Every setting generates the same seeded prompts as the full run. Recorded: the share of branch forwards that were
computed (the two branches of guidance count one each), seconds of denoising over those of the full run, the relative L2
distance of the final latents from the full run's, the PSNR of the frames, and prompt accuracy with its 95 % interval.
Behind the caches stand runs of the same sampler with so many plain steps as the caches computed: what a cache has to
beat.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import diffusion_runtime
from benchmarks.sparse_quality import Recorder, accuracy, psnr
from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator
from scripts.shapes.checker import Verdict, check_clip
from scripts.shapes.prompts import EvaluationPrompt, PromptKind, evaluation_prompts

# Request values of each cache, from little to much.
CACHES: list[dict[str, Any]] = [
    *({"step_cache": f"easycache:threshold={threshold}"} for threshold in (0.05, 0.1, 0.2, 0.4)),
    *({"cfg_gate": gate} for gate in (0.75, 0.5)),
    {"step_cache": "easycache:threshold=0.1", "cfg_gate": 0.5},
]


def generate(pipeline: Pipeline, prompts: list[EvaluationPrompt], values: dict[str, Any]) -> dict[str, Any]:
    """Latents [n, ...], frames uint8 [n, T, H, W, 3], verdicts, branch forwards, seconds of denoising by the clock, and
    the processor's seconds of everything, text and decoding included (a shared machine makes the clock's unsteady)."""
    recorder = pipeline.decoder = Recorder(pipeline.decoder)  # type: ignore[assignment]
    frames: list[torch.Tensor] = []
    verdicts: list[Verdict] = []
    num_forwards, seconds = 0, 0.0
    started = time.process_time()
    try:
        for prompt in prompts:
            request = pipeline.resolve(GenerationRequest(prompt.text, seed=prompt.seed, **values))
            media = pipeline(request)
            frames.append(torch.from_numpy(media.frames))
            verdicts.append(check_clip(prompt.attributes, frames[-1]))
            seconds += media.timings["denoise"]
            steps = media.attention_report.steps
            num_forwards += sum(row.num_computed for row in steps) or 2 * values["num_inference_steps"]
    finally:
        pipeline.decoder = recorder._decoder
    return {
        "latents": torch.cat(recorder.latents),
        "frames": torch.stack(frames),
        "verdicts": verdicts,
        "num_forwards": num_forwards,
        "seconds": seconds,
        "processor_seconds": time.process_time() - started,
    }


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per setting: the full run, the caches, then plain steps."""
    names: tuple[PromptKind, ...] = ("one_object", "two_objects")
    prompts = [prompt for kind in names for prompt in evaluation_prompts(kind, arguments.num_prompts)]
    kinds = [kind for kind in names for _ in range(arguments.num_prompts)]
    pipeline = load_pipeline(arguments.model, device=arguments.device, dtype=arguments.dtype)
    full_values = {"num_inference_steps": arguments.steps, **arguments.request}
    generate(pipeline, prompts[:1], full_values)
    full = generate(pipeline, prompts, full_values)

    def row(values: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        difference = (made["latents"] - full["latents"]).flatten(1).norm(dim=1) / full["latents"].flatten(1).norm(dim=1)
        return {
            "request": values,
            "computed_share": made["num_forwards"] / full["num_forwards"],
            "time_ratio": made["seconds"] / full["seconds"],
            "processor_time_ratio": made["processor_seconds"] / full["processor_seconds"],
            "seconds_per_clip": made["seconds"] / len(prompts),
            "latent_relative_l2": float(difference.mean()),
            "psnr_db": psnr(made["frames"], full["frames"]),
            "accuracy": accuracy(made["verdicts"], kinds),
        }

    yield row(full_values, full)
    counts = set()
    for values in track(arguments.caches, "caches", console=Console(stderr=True)):
        found = row({**full_values, **values}, generate(pipeline, prompts, {**full_values, **values}))
        counts.add(max(1, round(found["computed_share"] * arguments.steps)))
        yield found
    for count in track(sorted(counts - {arguments.steps}, reverse=True), "plain steps", console=Console(stderr=True)):
        values = {**full_values, "num_inference_steps": count}
        yield row(values, generate(pipeline, prompts, values))


def print_row(row: dict[str, Any]) -> None:
    joint = {kind: f"{rates['joint']['rate']:.3f}" for kind, rates in row["accuracy"].items()}
    print(
        f"computed {row['computed_share']:.3f}  time {row['time_ratio']:.3f} (processor "
        f"{row['processor_time_ratio']:.3f})  latents {row['latent_relative_l2']:.4f}  PSNR {row['psnr_db']:5.1f} dB  "
        f"joint {joint}  {row['request']}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shapes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-prompts", type=int, default=64, help="of each kind")
    parser.add_argument("--steps", type=int, default=24, help="of the full run")
    parser.add_argument("--request", type=json.loads, default={}, help="more request values, as JSON")
    parser.add_argument("--caches", type=json.loads, default=CACHES, help="a JSON list of request values")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    cuda = arguments.device.startswith("cuda")
    if not cuda:
        tune_cpu_allocator()
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.step_cache_quality/1",
        "machine": {
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusion_runtime": diffusion_runtime.__version__,
        },
        "model": arguments.model,
        "dtype": arguments.dtype,
        "num_prompts": arguments.num_prompts,
        "rows": [],
    }
    for row in measure(arguments):
        print_row(row)
        document["rows"].append(row)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
