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

EXACT = "torch_sdpa"
PRESET = "draft"
SHAPES = WORLDS["shapes"]


class PairedRun:
    """The embedded model, which makes the same prompts with either backend. options: of the one that is judged."""

    def __init__(self, backend: str, options: dict[str, Any], device: str, dtype: str) -> None:
        # A graph holds the kernels of one choice, and batches of so many clips are not launch-bound.
        pipeline = load_pipeline("shapes", device=device, dtype=dtype, cuda_graphs="off")
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
        sides = {}
        for name, choice in self.choices.items():
            with attention_choices(self.pipeline, choice):
                sides[name] = make_clips(self.pipeline, SHAPES, prompts, requests)
        return lines_of(prompts, sides)


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--options", type=parse_pairs, default={}, help="of the backend: key=value,...")
    add_options(parser)
    arguments = parser.parse_args()
    arguments.world = SHAPES.name
    device = resolve_device(arguments.device)
    arguments.device = str(device)
    dtype = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    document: dict[str, Any] = {"schema": "diffusion_runtime.paired_quality/2", "machine": describe_machine(device)}
    document |= {"backend": arguments.backend, "options": arguments.options, "preset": PRESET, "dtype": dtype}

    def begin() -> Any:
        tune_cpu_allocator()
        run = PairedRun(arguments.backend, arguments.options, arguments.device, dtype)
        document["attention"] = run.attention(numbered_prompts(SHAPES, arguments.kinds, 1)[0])
        print(json.dumps(document["attention"], indent=1), flush=True)
        return run.pairs

    grow(arguments, document, begin, started)


if __name__ == "__main__":
    main()
