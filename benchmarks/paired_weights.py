"""Quality of other weights of an embedded model, prompt after prompt beside the shipped ones, resumable.

    python -m benchmarks.paired_weights --model shapes-causal --other '{"model": "FOLDER"}' \\
        --values '{"num_frames": 29}' --pairs pairs.jsonl --output quality.json
    python -m benchmarks.paired_weights --loads '{"lora": ["shapes-fast"]}' --other '{"lora": ["FILE"]}' \\
        --values '{"sampler": "flow_match_euler", "sigmas": [1.0, 0.984, 0.952, 0.87], "guidance_scale": 1.0}' ...

This makes both clips of a prompt and appends a line to --pairs, where it goes on when it is started again; prompts of
one and of two objects by turns. --output: what the lines so far say: prompt accuracy of both with its 95 % interval,
how many clips turned right or wrong, latent distance and PSNR. --summarise makes no clips. paired_quality.py is for
backends.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.clip_quality import KINDS, generate_clips, psnr
from benchmarks.machine import describe_machine
from benchmarks.pairs import add_lines, read_lines, summary, write_whole
from diffusion_runtime import AttentionConfig, AttentionSpec, load_pipeline
from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator
from diffusion_runtime.quality.worlds import WORLDS

EXACT = "torch_sdpa"
# Sides of --other.
SHIPPED, OTHER = "shipped", "other"


def sides(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return arguments of load_pipeline by name: what is compared with, then what is compared."""
    exact = AttentionConfig(per_role={role: AttentionSpec(EXACT, {}) for role in ("self", "cross")})
    loads = {"model": arguments.model, "attention": exact, **arguments.loads}
    return {SHIPPED: loads, OTHER: {**loads, **arguments.other}}


def make_pairs(arguments: argparse.Namespace, done: set[int]) -> None:
    tune_cpu_allocator()
    each = -(-arguments.num_prompts // len(KINDS))
    world = WORLDS[arguments.world]
    if (lacks := world.lacks()) is not None:
        raise SystemExit(f"--world {world.name}: {lacks}")
    prompts = [prompt for kind in KINDS for prompt in world.evaluation_prompts(kind, each)]
    pipelines = {
        name: load_pipeline(device="cpu", dtype="float32", **loads) for name, loads in sides(arguments).items()
    }
    first, second = pipelines
    for index in range(arguments.num_prompts):
        if index in done:
            continue
        prompt = prompts[index % len(KINDS) * each + index // len(KINDS)]
        exact, rounded = (
            generate_clips(pipeline, [prompt], arguments.values, preset=arguments.preset, judge=world.judge)
            for pipeline in pipelines.values()
        )
        line = {
            "index": index,
            "kind": KINDS[index % len(KINDS)],
            "right": {first: bool(exact.verdicts[0].joint), second: bool(rounded.verdicts[0].joint)},
            "latent_relative_l2": float((rounded.latents - exact.latents).norm() / exact.latents.norm()),
            "psnr_db": psnr(rounded.frames, exact.frames),
        }
        add_lines(arguments.pairs, [line])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=json.loads, required=True, help="arguments of load_pipeline, JSON")
    parser.add_argument("--model", default="shapes")
    parser.add_argument("--world", choices=tuple(WORLDS), default="shapes", help="what the model was trained on")
    parser.add_argument("--loads", type=json.loads, default={}, help="arguments of load_pipeline for both, JSON")
    parser.add_argument("--preset", default="draft")
    parser.add_argument("--values", type=json.loads, default={}, help="request fields, JSON")
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=512)
    parser.add_argument("--summarise", action="store_true")
    arguments = parser.parse_args()
    if not arguments.summarise:
        make_pairs(arguments, {line["index"] for line in read_lines(arguments.pairs)})
    lines = read_lines(arguments.pairs)
    about = {
        "schema": "diffusion_runtime.paired_weights/1",
        "machine": describe_machine("cpu"),
        "model": arguments.model,
        "other": arguments.other,
        "preset": arguments.preset,
        "values": arguments.values,
    }
    document = {**about, **summary(lines, KINDS)}
    write_whole(arguments.output, document)
    print(json.dumps(document["all"], indent=1))


if __name__ == "__main__":
    main()
