"""Quality of other weights of an embedded model, prompt after prompt beside the shipped ones, resumable.

    python -m benchmarks.paired_weights --model shapes-causal --other '{"model": "FOLDER"}' \\
        --values '{"num_frames": 29}' --pairs pairs.jsonl --output quality.json
    python -m benchmarks.paired_weights --model emoji --world emoji --loads '{"lora": ["emoji-fast"]}' \\
        --other '{"lora": ["FILE"]}' \\
        --values '{"sampler": "flow_match_euler", "sigmas": [1.0, 0.977, 0.933, 0.824], "guidance_scale": 1.0}' ...

This makes both clips of a prompt from the same noise, a batch at a time, and appends a line for each prompt to --pairs,
where it goes on when it is started again; prompts of one and of two objects by turns. --output: what the lines so far
say: prompt accuracy of both with its 95 % interval, how many clips turned right or wrong with McNemar's exact p, latent
distance and PSNR. --seconds: begin no batch that would end later. --summarise makes no clips. paired_quality.py is for
backends.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.pairs import NumberedPrompt, add_options, grow, lines_of, make_clips
from diffusion_runtime import AttentionConfig, AttentionSpec, GenerationRequest, load_pipeline
from diffusion_runtime.core.hardware import resolve_device
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


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=json.loads, required=True, help="arguments of load_pipeline, JSON")
    parser.add_argument("--model", default="shapes")
    parser.add_argument("--world", choices=tuple(WORLDS), default="shapes", help="what the model was trained on")
    parser.add_argument("--loads", type=json.loads, default={}, help="arguments of load_pipeline for both, JSON")
    parser.add_argument("--preset", default="draft")
    parser.add_argument("--values", type=json.loads, default={}, help="request fields, JSON")
    add_options(parser)
    arguments = parser.parse_args()
    world = WORLDS[arguments.world]
    if (lacks := world.lacks()) is not None:
        parser.error(f"--world {world.name}: {lacks}")
    device = resolve_device(arguments.device)
    arguments.device = str(device)
    dtype = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    document = {
        "schema": "diffusion_runtime.paired_weights/2",
        "machine": describe_machine(device),
        "model": arguments.model,
        "other": arguments.other,
        "preset": arguments.preset,
        "values": arguments.values,
        "dtype": dtype,
    }

    def begin() -> Any:
        tune_cpu_allocator()
        # Batches of so many clips are not launch-bound.
        pipelines = {
            name: load_pipeline(**{"device": arguments.device, "dtype": dtype, "cuda_graphs": "off", **loads})
            for name, loads in sides(arguments).items()
        }

        def pairs(prompts: Sequence[NumberedPrompt]) -> list[dict[str, Any]]:
            made = {}
            for name, pipeline in pipelines.items():
                requests = [
                    pipeline.resolve(
                        GenerationRequest(each.prompt.text, seed=each.prompt.seed, **arguments.values),
                        preset=arguments.preset,
                    )
                    for each in prompts
                ]
                made[name] = make_clips(pipeline, world, prompts, requests)
            return lines_of(prompts, made)

        return pairs

    grow(arguments, document, begin, started)


if __name__ == "__main__":
    main()
