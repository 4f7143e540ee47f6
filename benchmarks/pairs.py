"""Pairs of clips of the same prompts, made, decoded and judged a batch at a time: a line of JSON for each prompt, a
file of them that grows, and a summary of what they say."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.clip_quality import KINDS
from diffusion_runtime import GenerationRequest, Pipeline
from diffusion_runtime.quality.paired_test import mcnemar
from diffusion_runtime.quality.shapes import checker
from diffusion_runtime.quality.shapes.scoring import wilson
from diffusion_runtime.quality.shapes.segmentation import segment_frames
from diffusion_runtime.quality.worlds import WORLDS, EvaluationPrompt, Verdict, World

# A clip's latents are 128 kB and its frames 6 MB of float32; on a CPU a batch saves nothing.
BATCH_SIZES = {"cuda": 64, "cpu": 2}
# Frames whose regions are found together: until the slowest of them is done, which a CPU waits for.
FRAMES_AT_ONCE = {"cuda": 1024, "cpu": 29}


@dataclass(frozen=True)
class NumberedPrompt:
    """A prompt, its kind and its place among all."""

    index: int
    kind: str
    prompt: EvaluationPrompt


@dataclass(frozen=True)
class Clips:
    """latents: float32 [n, ...]; frames: uint8 [n, frames, height, width, 3]; verdicts: one per clip."""

    latents: torch.Tensor
    frames: torch.Tensor
    verdicts: list[Verdict]


def numbered_prompts(world: World, kinds: Sequence[str], num_prompts: int) -> list[NumberedPrompt]:
    """Return the prompts of a run, of the kinds by turns."""
    each = -(-num_prompts // len(kinds))
    of_kind = {kind: world.evaluation_prompts(kind, each) for kind in kinds}  # type: ignore[arg-type]
    turns = ((index, kinds[index % len(kinds)]) for index in range(num_prompts))
    return [NumberedPrompt(index, kind, of_kind[kind][index // len(kinds)]) for index, kind in turns]


@torch.inference_mode()
def make_clips(
    pipeline: Pipeline, world: World, prompts: Sequence[NumberedPrompt], requests: Sequence[GenerationRequest]
) -> Clips:
    """Denoise, decode and judge a batch together, on the pipeline's device."""
    latents = pipeline.latents(requests)
    frames = (pipeline.decoder.decode(latents) * 255.0).round_().to(torch.uint8)
    return Clips(latents, frames, _verdicts(world, prompts, frames))


def _verdicts(world: World, prompts: Sequence[NumberedPrompt], frames: torch.Tensor) -> list[Verdict]:
    if world is not WORLDS["shapes"]:
        return [world.judge(prompt.prompt.attributes, clip) for prompt, clip in zip(prompts, frames, strict=True)]
    num_frames = frames.shape[1]
    segmented = segment_frames(frames.flatten(0, 1), FRAMES_AT_ONCE.get(frames.device.type, num_frames))
    own = (segmented.clip(slice(start, start + num_frames)) for start in range(0, len(segmented.areas), num_frames))
    return [
        checker.judge(prompt.prompt.attributes, checker.read_segmentation(clip))
        for prompt, clip in zip(prompts, own, strict=True)
    ]


def lines_of(prompts: Sequence[NumberedPrompt], sides: Mapping[str, Clips]) -> list[dict[str, Any]]:
    """Return a line for each prompt of one batch. sides: the clips of the reference, then the others."""
    (first, exact), (second, other) = sides.items()
    distance = (other.latents - exact.latents).flatten(1).norm(dim=1) / exact.latents.flatten(1).norm(dim=1)
    error = (other.frames.float() - exact.frames.float()).square().flatten(1).mean(dim=1)
    # Equal clips count as 100 dB.
    decibels = torch.where(error > 0, 10 * torch.log10(255.0**2 / error.clamp(min=1e-9)), 100.0)
    columns = zip(prompts, exact.verdicts, other.verdicts, distance.tolist(), decibels.tolist(), strict=True)
    return [
        {
            "index": prompt.index,
            "kind": prompt.kind,
            "right": {first: bool(one.joint), second: bool(two.joint)},
            "latent_relative_l2": apart,
            "psnr_db": psnr,
        }
        for prompt, one, two, apart, psnr in columns
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every run of pairs has."""
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", help="bfloat16 on a GPU, float32 on a CPU unless given")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--num-prompts", type=int, default=512)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--summarise", action="store_true")


def grow(
    arguments: argparse.Namespace,
    document: dict[str, Any],
    begin: Callable[[], Callable[[Sequence[NumberedPrompt]], list[dict[str, Any]]]],
    started: float,
) -> None:
    """Make the pairs that are missing in `arguments.pairs`, and write both files after every batch.

    begin: loads the models, may add to the document, and returns what makes the lines of one batch. started: when the
    program began, by time.perf_counter.
    """
    lines = read_lines(arguments.pairs)

    def write() -> None:
        document["seconds"] = round(time.perf_counter() - started, 1)
        write_whole(arguments.output, {**document, **summary(lines, arguments.kinds)})

    if not arguments.summarise:
        done = {line["index"] for line in lines}
        make = begin()
        document["seconds_before"] = round(time.perf_counter() - started, 1)
        prompts = numbered_prompts(WORLDS[arguments.world], arguments.kinds, arguments.num_prompts)
        left = [prompt for prompt in prompts if prompt.index not in done]
        size = arguments.batch_size or BATCH_SIZES.get(torch.device(arguments.device).type, 1)
        for batch in _batches(left, size, started + arguments.seconds):
            found = make(batch)
            add_lines(arguments.pairs, found)
            lines += found
            write()
            print(f"{len(lines)} prompts ({document['seconds']} s)", flush=True)
    write()
    if not lines:
        how = "run it without --summarise" if arguments.summarise else "give it more --seconds"
        raise SystemExit(f"no pair in {arguments.pairs}: {how}")
    print(json.dumps(summary(lines, arguments.kinds)["all"], indent=1))


def _batches(prompts: Sequence[NumberedPrompt], size: int, deadline: float) -> Iterator[Sequence[NumberedPrompt]]:
    """Yield batches until the next one would end after `deadline`, by the time that the one before took."""
    took = 0.0
    for first in range(0, len(prompts), size):
        started = time.perf_counter()
        if started + took > deadline:
            print(f"the time is over: {len(prompts) - first} prompts are left", flush=True)
            return
        yield prompts[first : first + size]
        took = time.perf_counter() - started


def summary(lines: Sequence[dict[str, Any]], kinds: Iterable[str]) -> dict[str, Any]:
    """Return the prompt accuracy of both sides with its 95 % interval, how many clips turned right or wrong with
    McNemar's p, latent distance and PSNR: of all lines and of those of each kind. Without a line there is their
    number alone, 0.

    lines: {"kind", "right": {reference: bool, other: bool}, "latent_relative_l2", "psnr_db"}.
    """

    def part(of_kind: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if not of_kind:
            return {"num_prompts": 0}
        sides = {name: [bool(line["right"][name]) for line in of_kind] for name in of_kind[0]["right"]}
        test = mcnemar(*sides.values())
        return {
            "num_prompts": len(of_kind),
            "joint": {name: dataclasses.asdict(wilson(sum(right), len(right))) for name, right in sides.items()},
            "turned_wrong": test.only_first,
            "turned_right": test.only_second,
            "p": test.p,
            "latent_relative_l2": statistics.mean(line["latent_relative_l2"] for line in of_kind),
            "psnr_db": statistics.mean(line["psnr_db"] for line in of_kind),
        }

    of_kinds = {kind: [line for line in lines if line["kind"] == kind] for kind in kinds}
    return {"all": part(lines), **{kind: part(of_kind) for kind, of_kind in of_kinds.items() if of_kind}}


def read_lines(pairs: Path) -> list[dict[str, Any]]:
    """Return the lines so far, and take a last one out of the file that was cut off."""
    if not pairs.exists():
        return []
    *whole, rest = pairs.read_text().split("\n")
    if rest:
        pairs.write_text("".join(f"{line}\n" for line in whole))
    return [json.loads(line) for line in whole]


def add_lines(pairs: Path, lines: Iterable[dict[str, Any]]) -> None:
    with pairs.open("a") as file:
        file.write("".join(f"{json.dumps(line)}\n" for line in lines))


def write_whole(path: Path, document: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)
