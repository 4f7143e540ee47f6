"""Prompt accuracy of an embedded model, through the product's own pipeline.

    python -m benchmarks.prompt_accuracy --device cuda --output benchmarks/results/prompt_accuracy.json
    python -m benchmarks.prompt_accuracy --model FOLDER --world emoji --num-prompts 16 --only default

Correctness first: the checker must score 1.00 on clips drawn by the data generator itself. Then 512 seeded prompts of
each kind at the model's default size and steps, and fewer at the presets' sizes and for single images.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.attention import AttentionReport
from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator
from diffusion_runtime.quality.shapes.prompts import PROMPT_KINDS
from diffusion_runtime.quality.worlds import WORLDS, EvaluationPrompt, Verdict, World, proportions


def main() -> None:
    arguments = parse_arguments()
    if not arguments.device.startswith("cuda"):
        tune_cpu_allocator()
    pipeline = load_pipeline(
        arguments.model, device=arguments.device, dtype=arguments.dtype, attention=arguments.attention_backend
    )
    world = WORLDS[arguments.world]
    if (lacks := world.lacks()) is not None:
        raise SystemExit(f"--world {world.name}: {lacks}")
    results: dict[str, Any] = {}
    for name, preset, image, count in settings(arguments.num_prompts):
        if preset not in pipeline.rules.presets:
            continue
        for kind in arguments.kinds:
            if preset == "default" or kind != "held_out":
                prompts = world.evaluation_prompts(kind, count, image=image)
                results[f"{name}/{kind}"] = score(pipeline, world, prompts, preset, image, arguments.batch_size)
        if name == arguments.only:
            break
    document = {
        "schema": "diffusion_runtime.prompt_accuracy/1",
        "machine": describe_machine(pipeline.device),
        "model": arguments.model,
        "dtype": arguments.dtype,
        "results": results,
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print_table(results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shapes")
    parser.add_argument("--world", choices=tuple(WORLDS), default="shapes", help="what the model was trained on")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention-backend", default=None)
    parser.add_argument("--num-prompts", type=int, default=512)
    parser.add_argument("--kinds", nargs="+", choices=PROMPT_KINDS, default=list(PROMPT_KINDS))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--only", default=None, help="stop after this setting, such as `default`")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def settings(num_prompts: int) -> list[tuple[str, str, bool, int]]:
    """(name, preset, single images, prompts of each kind)."""
    fewer = max(1, num_prompts // 4)
    return [
        ("default", "default", False, num_prompts),
        ("image", "default", True, fewer),
        ("draft", "draft", False, fewer),
        ("large", "large", False, fewer),
    ]


def score(
    pipeline: Pipeline, world: World, prompts: Sequence[EvaluationPrompt], preset: str, image: bool, batch_size: int
) -> dict[str, Any]:
    """Generate and check; the attention report of the last batch says what computed it."""
    verdicts: list[Verdict] = []
    report: object = None
    start = time.perf_counter()
    requests: list[GenerationRequest] = []
    starts = range(0, len(prompts), batch_size)
    for first in track(starts, f"{preset} x {len(prompts)}", console=Console(stderr=True)):
        batch = prompts[first : first + batch_size]
        requests = [
            pipeline.resolve(
                GenerationRequest(prompt.text, seed=prompt.seed, num_frames=1 if image else None), preset=preset
            )
            for prompt in batch
        ]
        for prompt, media in zip(batch, pipeline.generate(requests), strict=True):
            verdicts.append(world.judge(prompt.attributes, torch.from_numpy(media.frames)))
            report = media.attention_report
    assert isinstance(report, AttentionReport)
    accuracy = {part: asdict(each) for part, each in proportions(verdicts).items()}
    failed = [
        {"prompt": prompt.text, "seed": prompt.seed}
        for prompt, verdict in zip(prompts, verdicts, strict=True)
        if not verdict.joint
    ]
    shared = {name: value for name, value in requests[-1].to_dict().items() if name not in ("prompt", "seed")}
    return {
        "accuracy": accuracy,
        "request": shared,
        "seconds": round(time.perf_counter() - start, 1),
        "attention": [f"{row.role}: {row.backend} ({row.implementation})" for row in report.rows],
        "failed": failed[:20],
    }


def print_table(results: dict[str, Any]) -> None:
    width = max(len(name) for name in results)
    parts = tuple(next(iter(results.values()))["accuracy"])
    print(f"{'':{width}}  n    " + "  ".join(f"{name:>10}" for name in parts) + "   95 % of joint")
    for name, result in results.items():
        accuracy = result["accuracy"]
        rates = "  ".join(f"{accuracy[attribute]['rate']:10.3f}" for attribute in parts)
        joint = accuracy["joint"]
        print(f"{name:{width}}  {joint['total']:<4} {rates}   {joint['low']:.3f} to {joint['high']:.3f}")


if __name__ == "__main__":
    sys.exit(main())
