"""Quality of one attention backend on the embedded model, prompt after prompt beside exact attention, resumable.

    python -m benchmarks.paired_quality --backend fp8_attn --pairs pairs.jsonl --output quality.json [--num-prompts 512]

Where backend_quality.py makes all clips of one backend after the other, this makes both clips of a prompt and appends a
line to --pairs, where it goes on when it is started again; prompts of one and of two objects by turns. --output: what
the lines so far say: prompt accuracy of both with its 95 % interval, how many clips turned right or wrong, latent
distance and PSNR. --summarise makes no clips.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.clip_quality import KINDS, generate_clips, psnr, quality_prompts
from benchmarks.machine import describe_machine
from diffusion_runtime import AttentionConfig, AttentionSpec, load_pipeline
from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator
from diffusion_runtime.quality.shapes.scoring import wilson

EXACT = "torch_sdpa"
PRESET = "draft"


def make_pairs(arguments: argparse.Namespace, done: set[int]) -> None:
    tune_cpu_allocator()
    each = -(-arguments.num_prompts // len(KINDS))
    prompts = quality_prompts(each)
    pipelines = {
        name: load_pipeline(
            "shapes",
            device="cpu",
            dtype="float32",
            attention=AttentionConfig(
                per_role={"self": AttentionSpec(name, {}), "cross": AttentionSpec("torch_sdpa", {})}
            ),
        )
        for name in (EXACT, arguments.backend)
    }
    for index in range(arguments.num_prompts):
        if index in done:
            continue
        prompt = prompts[index % len(KINDS) * each + index // len(KINDS)]
        exact, rounded = (generate_clips(pipeline, [prompt], {}, preset=PRESET) for pipeline in pipelines.values())
        line = {
            "index": index,
            "right": {EXACT: bool(exact.verdicts[0].joint), arguments.backend: bool(rounded.verdicts[0].joint)},
            "latent_relative_l2": float((rounded.latents - exact.latents).norm() / exact.latents.norm()),
            "psnr_db": psnr(rounded.frames, exact.frames),
        }
        with arguments.pairs.open("a") as file:
            file.write(json.dumps(line) + "\n")


def summary(lines: list[dict[str, Any]], backend: str) -> dict[str, Any]:
    """What the lines say of all prompts and of each kind."""

    def part(of_kind: list[dict[str, Any]]) -> dict[str, Any]:
        right = {
            name: dataclasses.asdict(wilson(sum(line["right"][name] for line in of_kind), len(of_kind)))
            for name in (EXACT, backend)
        }
        return {
            "num_prompts": len(of_kind),
            "joint": right,
            "turned_wrong": sum(line["right"][EXACT] and not line["right"][backend] for line in of_kind),
            "turned_right": sum(line["right"][backend] and not line["right"][EXACT] for line in of_kind),
            "latent_relative_l2": statistics.mean(line["latent_relative_l2"] for line in of_kind),
            "psnr_db": statistics.mean(line["psnr_db"] for line in of_kind),
        }

    kinds = {kind: [line for line in lines if KINDS[line["index"] % len(KINDS)] == kind] for kind in KINDS}
    return {"all": part(lines), **{kind: part(of_kind) for kind, of_kind in kinds.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=512)
    parser.add_argument("--summarise", action="store_true")
    arguments = parser.parse_args()
    if not arguments.summarise:
        held = arguments.pairs.read_text().splitlines() if arguments.pairs.exists() else []
        make_pairs(arguments, {json.loads(line)["index"] for line in held})
    lines = [json.loads(line) for line in arguments.pairs.read_text().splitlines()]
    about = {"schema": "diffusion_runtime.paired_quality/1", "machine": describe_machine("cpu")}
    document = {**about, "backend": arguments.backend, "preset": PRESET, **summary(lines, arguments.backend)}
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["all"], indent=1))


if __name__ == "__main__":
    main()
