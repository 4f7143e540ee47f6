"""Clips of four times the trained length by the embedded model, judged by its checker: at once, with RIFLEx, in context
windows of two overlaps, and in windows with another prompt from the middle on; beside clips of the trained length.

    nice -n 19 python -m benchmarks.longer_clips_cpu --output benchmarks/results/longer_clips_cpu.json

Correctness first: windows as long as the clip, and RIFLEx for a clip within the period, give the plain model's latents.

A clip is judged in pieces of the trained length, one behind the other. *object*: as many objects as asked for, of their
colour and shape, before the background asked for. The motion of one that moves is no part of it: in 29 frames it
crosses the picture, so that no clip of 113 can go on with it. *largest difference*: of neighbouring frames, the mean in
levels of 255, which a clip that jumps has more of than one of the trained length. Another prompt from the middle on is
judged in the first piece and in the last.

Frames that were looked at are written with --frames FOLDER, a row for each variant. One thread for each of --processes;
about 60 s of a core for each prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image

from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.quality.shapes.checker import check_clip
from diffusion_runtime.quality.shapes.prompts import EvaluationPrompt, evaluation_prompts

TRAINED, LONG = 29, 113
WINDOWS = {"num_frames": LONG, "context_frames": TRAINED}
# Prompts of objects that stand still and that move, by turns, are taken from so many.
_CANDIDATES = 64
PLAIN = "trained length"
# Of still objects alone: the next prompt, from the middle on.
SWITCHED = "windows, another prompt"
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {"num_frames": TRAINED},
    "at once": {"num_frames": LONG},
    "riflex": {"num_frames": LONG, "riflex": "on"},
    "windows": WINDOWS,
    "windows, overlap 8": {**WINDOWS, "context_overlap": 8},
    SWITCHED: WINDOWS,
}


@dataclass(frozen=True)
class Job:
    """Clips of one prompt. following: the prompt from the middle on, of SWITCHED; None for none."""

    prompt: EvaluationPrompt
    following: EvaluationPrompt | None
    sizes: dict[str, int]
    frames: Path | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--frames", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"height": arguments.size, "width": arguments.size, "num_inference_steps": arguments.steps}
    check_nothing_changes(load_pipeline("shapes", device="cpu"), sizes)
    prompts = prompts_by_motion(arguments.prompts)
    still = [prompt for prompt in prompts if is_still(prompt)]
    after = dict(zip(still, [*still[1:], still[0]], strict=True))
    jobs = [Job(prompt, after.get(prompt), sizes, arguments.frames) for prompt in prompts]
    with ProcessPoolExecutor(arguments.processes) as pool:
        made = []
        for clips in pool.map(make, jobs):
            made.append(clips)
            write(arguments.output, sizes, prompts, made)
    for name in VARIANTS:
        print(name, json.dumps(summary(name, made)))
    return 0


def make(job: Job) -> dict[str, dict[str, Any]]:
    """Return what is seen in the clips of a prompt, by variant."""
    torch.set_num_threads(1)
    pipeline = load_pipeline("shapes", device="cpu")
    seen: dict[str, dict[str, Any]] = {}
    rows = []
    for name, values in VARIANTS.items():
        switch: dict[str, Any] = {}
        if name == SWITCHED:
            if job.following is None:
                continue
            switch = {"prompt_switches": ((LONG // 2, job.following.text),)}
        started = time.process_time()
        request = GenerationRequest(job.prompt.text, seed=job.prompt.seed, **job.sizes, **values, **switch)
        frames = pipeline(pipeline.resolve(request)).frames
        seen[name] = judge(job, frames, is_switched=bool(switch)) | {"cpu_seconds": time.process_time() - started}
        rows.append(numpy.concatenate(list(frames[:: max(1, len(frames) // 14)][:14]), axis=1))
    if job.frames is not None:
        job.frames.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numpy.concatenate(rows)).save(job.frames / f"{job.prompt.seed}.png")
    return seen


def prompts_by_motion(count: int) -> list[EvaluationPrompt]:
    """Return prompts of one object each, that stands still and that moves by turns."""
    every = evaluation_prompts("one_object", _CANDIDATES)
    still, moving = ([each for each in every if is_still(each) == wanted] for wanted in (True, False))
    return [each for pair in zip(still, moving, strict=False) for each in pair][:count]


def is_still(prompt: EvaluationPrompt) -> bool:
    return prompt.attributes.objects[0].motion == "still"


def check_nothing_changes(pipeline: Pipeline, sizes: dict[str, int]) -> None:
    """Raises SystemExit where an option that has nothing to do changes a bit."""
    values = {**sizes, "num_inference_steps": 2, "num_frames": TRAINED, "seed": 1}
    plain = pipeline.latents(GenerationRequest("a red circle", **values))
    for other in ({"context_frames": TRAINED}, {"riflex": "on"}):
        if not torch.equal(plain, pipeline.latents(GenerationRequest("a red circle", **values, **other))):
            raise SystemExit(f"{other} changes a clip of the trained length")


def judge(job: Job, frames: numpy.ndarray, *, is_switched: bool) -> dict[str, Any]:
    """Return what is seen in a clip, uint8 [frames, height, width, 3]: how many pieces have the object, and how many
    are right in all, motion included; the largest mean difference of neighbouring frames."""
    starts = list(range(0, len(frames) - TRAINED + 1, TRAINED - 1))
    asked = [job.prompt] * len(starts)
    if is_switched:
        assert job.following is not None, "of a switched clip"
        starts, asked = [starts[0], starts[-1]], [job.prompt, job.following]
    verdicts = [
        check_clip(prompt.attributes, torch.from_numpy(frames[start : start + TRAINED]))
        for prompt, start in zip(asked, starts, strict=True)
    ]
    differences = numpy.abs(numpy.diff(frames.astype(numpy.int16), axis=0)).mean(axis=(1, 2, 3))
    return {
        "is_still": is_still(job.prompt),
        "pieces": len(verdicts),
        "object": sum(each.count and each.colour and each.shape and each.background for each in verdicts),
        "joint": sum(each.joint for each in verdicts),
        "largest_difference": float(differences.max()),
        "largest_difference_at": int(differences.argmax()) + 1,
    }


def summary(name: str, made: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the counts of a variant over all prompts, and apart for objects that stand still and that move."""
    clips = [clips[name] for clips in made if name in clips]
    found: dict[str, Any] = {}
    for kind, wanted in (("still", True), ("moving", False)):
        of_kind = [clip for clip in clips if clip["is_still"] is wanted]
        if of_kind:
            found[kind] = {
                "clips": len(of_kind),
                "clips_with_object": sum(clip["object"] == clip["pieces"] for clip in of_kind),
                "pieces": sum(clip["pieces"] for clip in of_kind),
                "pieces_with_object": sum(clip["object"] for clip in of_kind),
                "pieces_right": sum(clip["joint"] for clip in of_kind),
                "largest_difference": statistics.median(clip["largest_difference"] for clip in of_kind),
            }
    return {**found, "cpu_seconds_per_clip": statistics.mean(clip["cpu_seconds"] for clip in clips)}


def write(
    path: Path, sizes: dict[str, int], prompts: list[EvaluationPrompt], made: list[dict[str, dict[str, Any]]]
) -> None:
    document = {
        "schema": "diffusion_runtime.longer_clips_cpu/2",
        "machine": describe_machine(torch.device("cpu")),
        **sizes,
        "prompts": [prompt.text for prompt in prompts[: len(made)]],
        "trained_frames": TRAINED,
        "frames": LONG,
        "variants": [
            {"name": name, **VARIANTS[name], **summary(name, made), "each": [clips.get(name) for clips in made]}
            for name in VARIANTS
            if any(name in clips for clips in made)
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
