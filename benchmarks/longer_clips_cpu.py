"""Clips of four times the trained length by the embedded model, judged by its checker: at once, with RIFLEx, in context
windows, and in windows with repeated noise; beside clips of the trained length.

    nice -n 19 python -m benchmarks.longer_clips_cpu --output benchmarks/results/longer_clips_cpu.json

Correctness first: windows as long as the clip, and RIFLEx for a clip within the period, give the plain model's latents.
A clip is judged as a whole, and in pieces of the trained length, one behind the other. Frames that were looked at are
written with --frames FOLDER, a row for each variant. One thread; about 90 s of a core for each prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image

from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.quality.shapes.checker import Verdict, check_clip
from diffusion_runtime.quality.shapes.prompts import EvaluationPrompt, evaluation_prompts
from diffusion_runtime.quality.shapes.scoring import summarise

TRAINED, LONG = 29, 113
WINDOWS = {"num_frames": LONG, "context_frames": TRAINED}
# Prompts of objects that stand still and that move, by turns, are taken from so many.
_CANDIDATES = 64
VARIANTS: dict[str, dict[str, Any]] = {
    "trained length": {"num_frames": TRAINED},
    "at once": {"num_frames": LONG},
    "riflex": {"num_frames": LONG, "riflex": "on"},
    "windows, random noise": {**WINDOWS, "context_noise": "random"},
    "windows, repeated noise": {**WINDOWS, "context_noise": "repeated"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--frames", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pipeline = load_pipeline("shapes", device="cpu")
    sizes = {"height": arguments.size, "width": arguments.size, "num_inference_steps": arguments.steps}
    check_nothing_changes(pipeline, sizes)
    prompts = prompts_by_motion(arguments.prompts)
    judged: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    for prompt in prompts:
        rows = []
        for name, values in VARIANTS.items():
            started = time.process_time()
            request = GenerationRequest(prompt.text, seed=prompt.seed, **sizes, **values)
            frames = pipeline(pipeline.resolve(request)).frames
            judged[name].append(judge(prompt, frames) | {"cpu_seconds": time.process_time() - started})
            rows.append(numpy.concatenate(list(frames[:: max(1, len(frames) // 14)][:14]), axis=1))
        if arguments.frames is not None:
            arguments.frames.mkdir(parents=True, exist_ok=True)
            Image.fromarray(numpy.concatenate(rows)).save(arguments.frames / f"{prompt.seed}.png")
        write(arguments, sizes, judged, prompts)
    for name, clips in judged.items():
        row = summary(clips, prompts)
        rates = (f"{part} {row[part]['joint']['rate']:.2f}" for part in ("whole", "pieces", "still", "moving"))
        print(f"{name:24} {', '.join(rates)}")
    return 0


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


def judge(prompt: EvaluationPrompt, frames: numpy.ndarray) -> dict[str, Any]:
    """Return the verdicts on a clip, uint8 [frames, height, width, 3], and on its pieces."""
    clip = torch.from_numpy(frames)
    starts = range(0, len(frames) - TRAINED + 1, TRAINED - 1)
    pieces = [check_clip(prompt.attributes, clip[start : start + TRAINED]) for start in starts]
    return {"whole": check_clip(prompt.attributes, clip), "pieces": pieces}


def summary(clips: list[dict[str, Any]], prompts: list[EvaluationPrompt]) -> dict[str, Any]:
    """Return the rates of whole clips and of pieces, and those of the pieces of still and of moving objects."""
    pieces: dict[str, list[Verdict]] = {"still": [], "moving": []}
    for prompt, clip in zip(prompts, clips, strict=False):
        pieces["still" if is_still(prompt) else "moving"] += clip["pieces"]
    return {
        "whole": summarise([clip["whole"] for clip in clips]).to_dict(),
        "pieces": summarise([*pieces["still"], *pieces["moving"]]).to_dict(),
        **{name: summarise(found).to_dict() for name, found in pieces.items() if found},
        "cpu_seconds_per_clip": sum(clip["cpu_seconds"] for clip in clips) / len(clips),
    }


def write(
    arguments: argparse.Namespace,
    sizes: dict[str, int],
    judged: dict[str, list[dict[str, Any]]],
    prompts: list[EvaluationPrompt],
) -> None:
    done = min(map(len, judged.values()))
    document = {
        "schema": "diffusion_runtime.longer_clips_cpu/1",
        "machine": describe_machine(torch.device("cpu")),
        **sizes,
        "prompts": [prompt.text for prompt in prompts[:done]],
        "trained_frames": TRAINED,
        "frames": LONG,
        "variants": [{"name": name, **VARIANTS[name], **summary(clips, prompts)} for name, clips in judged.items()],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
