"""Quality of one attention backend on the embedded model, prompt after prompt beside exact attention, resumable.

    python -m benchmarks.paired_quality --backend fp8_attn --pairs pairs.jsonl --output quality.json \\
        [--device cuda] [--kinds one_object] [--num-prompts 512] [--seconds 140] [--options max_error=0.2]

Both clips of a prompt start from the same noise. Prompts are made a batch at a time: both backends denoise it, all
latents are decoded at once, and all clips are judged at once, on the device. A line per prompt is then appended to
--pairs, where it goes on when it is started again, and --output is written again: what the lines so far say, so that
whatever ends the run leaves what was measured. --seconds: begin no batch that would end later, by the time of the one
before. --kinds: prompts of these kinds by turns; both by default. --output has the prompt accuracy of both backends
with its 95 % interval, how many clips turned right or wrong with McNemar's p, latent distance and PSNR; who computed
the calls of a first clip, and its measured error. --summarise makes no clips.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.clip_quality import KINDS
from benchmarks.machine import describe_machine
from benchmarks.pairs import add_lines, read_lines, summary, write_whole
from diffusion_runtime import AttentionConfig, AttentionSpec, GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.core.hardware import resolve_device
from diffusion_runtime.core.options import parse_pairs
from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator
from diffusion_runtime.profiling.instruments import attention_choices
from diffusion_runtime.quality.shapes.checker import Verdict, judge, read_segmentation
from diffusion_runtime.quality.shapes.prompts import EvaluationPrompt, evaluation_prompts
from diffusion_runtime.quality.shapes.segmentation import segment_frames

EXACT = "torch_sdpa"
PRESET = "draft"
# A clip's latents are 128 kB and its frames 6 MB of float32; on a CPU a batch saves nothing.
BATCH_SIZES = {"cuda": 64, "cpu": 2}
# Frames whose regions are found together: until the slowest of them is done, which a CPU waits for.
FRAMES_AT_ONCE = {"cuda": 1024, "cpu": 29}


@dataclasses.dataclass(frozen=True)
class NumberedPrompt:
    """A prompt, its kind and its place among all."""

    index: int
    kind: str
    prompt: EvaluationPrompt


@dataclasses.dataclass(frozen=True)
class Clips:
    """latents: float32 [n, ...]; frames: uint8 [n, frames, height, width, 3]; verdicts: one per clip."""

    latents: torch.Tensor
    frames: torch.Tensor
    verdicts: list[Verdict]


def numbered_prompts(kinds: Sequence[str], num_prompts: int) -> list[NumberedPrompt]:
    """Return the prompts of a run, of the kinds by turns."""
    each = -(-num_prompts // len(kinds))
    of_kind = {kind: evaluation_prompts(kind, each) for kind in kinds}  # type: ignore[arg-type]
    turns = ((index, kinds[index % len(kinds)]) for index in range(num_prompts))
    return [NumberedPrompt(index, kind, of_kind[kind][index // len(kinds)]) for index, kind in turns]


class PairedRun:
    """The embedded model, which makes the same prompts with either backend. options: of the one that is judged."""

    def __init__(self, backend: str, options: dict[str, Any], device: torch.device, dtype: str) -> None:
        self.device = device
        # A graph holds the kernels of one choice, and batches of so many clips are not launch-bound.
        pipeline = load_pipeline("shapes", device=str(device), dtype=dtype, cuda_graphs="off")
        assert isinstance(pipeline, Pipeline)
        self.pipeline = pipeline
        self.choices = {
            name: AttentionConfig(per_role={"self": AttentionSpec(name, given), "cross": AttentionSpec(EXACT, {})})
            for name, given in {EXACT: {}, backend: options}.items()
        }

    def attention(self, prompt: NumberedPrompt) -> dict[str, Any]:
        """Return who computes the calls of each backend, by a clip that counts for nothing, and the measured error."""
        found = {}
        for name, choice in self.choices.items():
            with attention_choices(self.pipeline, choice):
                report = self.pipeline(self.request(prompt)).attention_report
            rows = {row.role: row.implementation for row in report.rows}
            found[name] = {"computed_by": rows, "errors": [dataclasses.asdict(row) for row in report.errors]}
        return found

    def request(self, prompt: NumberedPrompt) -> GenerationRequest:
        given = GenerationRequest(prompt.prompt.text, seed=prompt.prompt.seed)
        return self.pipeline.resolve(given, preset=PRESET)

    def pairs(self, prompts: Sequence[NumberedPrompt]) -> list[dict[str, Any]]:
        """A line for each prompt of one batch."""
        requests = [self.request(prompt) for prompt in prompts]
        (_, exact), (backend, rounded) = ((name, self.clips(name, prompts, requests)) for name in self.choices)
        distance = (rounded.latents - exact.latents).flatten(1).norm(dim=1) / exact.latents.flatten(1).norm(dim=1)
        error = (rounded.frames.float() - exact.frames.float()).square().flatten(1).mean(dim=1)
        # Equal clips count as 100 dB.
        decibels = torch.where(error > 0, 10 * torch.log10(255.0**2 / error.clamp(min=1e-9)), 100.0)
        columns = zip(prompts, exact.verdicts, rounded.verdicts, distance.tolist(), decibels.tolist(), strict=True)
        return [
            {
                "index": prompt.index,
                "kind": prompt.kind,
                "right": {EXACT: bool(one.joint), backend: bool(other.joint)},
                "latent_relative_l2": apart,
                "psnr_db": psnr,
            }
            for prompt, one, other, apart, psnr in columns
        ]

    @torch.inference_mode()
    def clips(self, name: str, prompts: Sequence[NumberedPrompt], requests: Sequence[GenerationRequest]) -> Clips:
        """Clips of one backend, decoded and judged together."""
        with attention_choices(self.pipeline, self.choices[name]):
            latents = self.pipeline.latents(requests)
        frames = (self.pipeline.decoder.decode(latents) * 255.0).round_().to(torch.uint8)
        num_frames = frames.shape[1]
        segmented = segment_frames(frames.flatten(0, 1), FRAMES_AT_ONCE[self.device.type])
        own = (segmented.clip(slice(start, start + num_frames)) for start in range(0, len(segmented.areas), num_frames))
        verdicts = [
            judge(prompt.prompt.attributes, read_segmentation(clip)) for prompt, clip in zip(prompts, own, strict=True)
        ]
        return Clips(latents, frames, verdicts)


def batches(prompts: Sequence[NumberedPrompt], size: int, deadline: float) -> Iterator[Sequence[NumberedPrompt]]:
    """Yield batches until the next one would end after `deadline`, by the time that the one before took."""
    took = 0.0
    for first in range(0, len(prompts), size):
        started = time.perf_counter()
        if started + took > deadline:
            print(f"the time is over: {len(prompts) - first} prompts are left", flush=True)
            return
        yield prompts[first : first + size]
        took = time.perf_counter() - started


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--options", type=parse_pairs, default={}, help="of the backend: key=value,...")
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", help="bfloat16 on a GPU, float32 on a CPU unless given")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--num-prompts", type=int, default=512)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--summarise", action="store_true")
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    dtype = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    document: dict[str, Any] = {"schema": "diffusion_runtime.paired_quality/2", "machine": describe_machine(device)}
    document |= {"backend": arguments.backend, "options": arguments.options, "preset": PRESET, "dtype": dtype}
    lines = read_lines(arguments.pairs)

    def write() -> None:
        document["seconds"] = round(time.perf_counter() - started, 1)
        write_whole(arguments.output, {**document, **summary(lines, arguments.kinds)})

    if not arguments.summarise:
        tune_cpu_allocator()
        done = {line["index"] for line in lines}
        prompts = numbered_prompts(arguments.kinds, arguments.num_prompts)
        run = PairedRun(arguments.backend, arguments.options, device, dtype)
        document["attention"] = run.attention(prompts[0])
        document["seconds_before"] = round(time.perf_counter() - started, 1)
        print(json.dumps(document["attention"], indent=1), f"({document['seconds_before']} s)", flush=True)
        left = [prompt for prompt in prompts if prompt.index not in done]
        size = arguments.batch_size or BATCH_SIZES.get(device.type, 1)
        for batch in batches(left, size, started + arguments.seconds):
            found = run.pairs(batch)
            add_lines(arguments.pairs, found)
            lines += found
            write()
            print(f"{len(lines)} prompts ({document['seconds']} s)", flush=True)
    if not lines:
        raise SystemExit("no prompt was made: give it more --seconds")
    write()
    print(json.dumps(summary(lines, arguments.kinds)["all"], indent=1))


if __name__ == "__main__":
    main()
