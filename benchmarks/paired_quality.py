"""Quality of one attention backend on the embedded model, prompt after prompt beside exact attention, resumable.

    python -m benchmarks.paired_quality --backend fp8_attn --pairs pairs.jsonl --output quality.json \\
        [--device cuda] [--preset default] [--kinds one_object] [--num-prompts 512] [--seconds 140] \\
        [--options max_error=0.2]

Both clips of a prompt start from the same noise. Prompts are made a batch at a time: both backends denoise it, all
latents are decoded at once, and all clips are judged at once, on the device. A line per prompt is then appended to
--pairs, where it goes on when it is started again, and --output is written again: what the lines so far say, so that
whatever ends the run leaves what was measured. --seconds: begin no batch that would end later, by the time of the one
before. --kinds: prompts of these kinds by turns; both by default. --output has the prompt accuracy of both backends
with its 95 % interval, how many clips turned right or wrong with McNemar's p, latent distance and PSNR; how many calls
of a first clip were computed by whom, and its measured error: a run in which another backend computed a call of
self-attention ends there. --preset: of the model, `draft` (128 x 128, 8 steps) unless given. --summarise makes no
clips.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.pairs import NumberedPrompt, add_options, grow, lines_of, make_clips, numbered_prompts
from diffusion_runtime import AttentionConfig, AttentionSpec, GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.core.hardware import resolve_device
from diffusion_runtime.core.options import parse_pairs
from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator
from diffusion_runtime.profiling.instruments import attention_choices
from diffusion_runtime.quality.worlds import WORLDS
from diffusion_runtime.report.attention_report import ReportRow

EXACT = "torch_sdpa"
SHAPES = WORLDS["shapes"]


class PairedRun:
    """The embedded model, which makes the same prompts with either backend. options: of the one that is judged;
    preset: of the model, with its size and steps."""

    def __init__(self, backend: str, options: dict[str, Any], device: str, dtype: str, preset: str) -> None:
        # A graph holds the kernels of one choice, and batches of so many clips are not launch-bound.
        pipeline = load_pipeline("shapes", device=device, dtype=dtype, cuda_graphs="off")
        assert isinstance(pipeline, Pipeline)
        self.pipeline = pipeline
        self.preset = preset
        self.choices = {
            name: AttentionConfig(per_role={"self": AttentionSpec(name, given), "cross": AttentionSpec(EXACT, {})})
            for name, given in {EXACT: {}, backend: options}.items()
        }

    def attention(self, prompt: NumberedPrompt) -> dict[str, Any]:
        """Return how many calls of each role were computed by whom, by a clip of each backend that counts for nothing,
        and the measured error.

        Raises SystemExit where another than the backend computed calls of self-attention.
        """
        found = {}
        for name, choice in self.choices.items():
            with attention_choices(self.pipeline, choice):
                report = self.pipeline(self.request(prompt)).attention_report
            errors = [dataclasses.asdict(row) for row in report.errors]
            found[name] = {"calls": calls_of(report.rows, name), "errors": errors}
        return found

    def request(self, prompt: NumberedPrompt) -> GenerationRequest:
        given = GenerationRequest(prompt.prompt.text, seed=prompt.prompt.seed)
        return self.pipeline.resolve(given, preset=self.preset)

    def pairs(self, prompts: Sequence[NumberedPrompt]) -> list[dict[str, Any]]:
        """A line for each prompt of one batch."""
        requests = [self.request(prompt) for prompt in prompts]
        sides = {}
        for name, choice in self.choices.items():
            with attention_choices(self.pipeline, choice):
                sides[name] = make_clips(self.pipeline, SHAPES, prompts, requests)
        return lines_of(prompts, sides)


def calls_of(rows: Sequence[ReportRow], backend: str) -> dict[str, dict[str, int]]:
    """Return the number of calls by role and by who computed them.

    Raises SystemExit where another than `backend` computed calls of self-attention, or there was none.
    """
    of_self = [row for row in rows if row.role == "self"]
    others = [str(row) for row in of_self if row.backend != backend]
    if others or not of_self:
        raise SystemExit(f"expected {backend} in every call of self-attention, got {'; '.join(others) or 'no call'}")
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        of_role, computed_by = counts.setdefault(row.role, {}), f"{row.backend} ({row.implementation})"
        of_role[computed_by] = of_role.get(computed_by, 0) + row.count
    return counts


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--options", type=parse_pairs, default={}, help="of the backend: key=value,...")
    parser.add_argument("--preset", default="draft")
    add_options(parser)
    arguments = parser.parse_args()
    arguments.world = SHAPES.name
    device = resolve_device(arguments.device)
    arguments.device = str(device)
    dtype = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    document: dict[str, Any] = {"schema": "diffusion_runtime.paired_quality/3", "machine": describe_machine(device)}
    document |= {"backend": arguments.backend, "options": arguments.options, "preset": arguments.preset, "dtype": dtype}

    def begin() -> Any:
        tune_cpu_allocator()
        run = PairedRun(arguments.backend, arguments.options, arguments.device, dtype, arguments.preset)
        document["attention"] = run.attention(numbered_prompts(SHAPES, arguments.kinds, 1)[0])
        print(json.dumps(document["attention"], indent=1), flush=True)
        return run.pairs

    grow(arguments, document, begin, started)


if __name__ == "__main__":
    main()
