"""The error of rounded attention backends on q, k and v of the embedded model, beside exact attention.

    python -m benchmarks.rounded_attention_error --output benchmarks/results/rounded_attention_error.json

Self-attention of one exact clip per prompt is recorded at some of its steps, in every layer, both guidance branches.
Each setting computes every recorded call. Its error is the relative L2 distance from attention in float64; a row has
the mean, the median and the highest over the calls, and the mean for each layer.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.clip_quality import quality_prompts, write_rows
from benchmarks.pooled_tail_error import recorded_calls
from diffusion_runtime import AttentionConfig, AttentionSpec, GenerationRequest, load_pipeline
from diffusion_runtime.attention import attention

SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (("fp8_attn", {}),)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config = AttentionConfig(per_role={"self": AttentionSpec("torch_sdpa")})
    pipeline = load_pipeline("shapes", device=arguments.device, attention=config)
    with recorded_calls(set(arguments.steps)) as calls:
        for prompt in quality_prompts(arguments.num_prompts):
            pipeline(GenerationRequest(prompt.text, seed=prompt.seed))
    exact = [attention(*(x.double() for x in call.inputs[:3]), backend="torch_sdpa") for call in calls]
    for backend, options in SETTINGS:
        of_layers: dict[int, list[float]] = {}
        for call, wanted in zip(calls, exact, strict=True):
            out = attention(call.q, call.k, call.v, backend=backend, options=options).double()
            of_layers.setdefault(call.layer.index, []).append(float((out - wanted).norm() / wanted.norm()))
        errors = [error for several in of_layers.values() for error in several]
        row = {
            "backend": backend,
            "options": options,
            "num_calls": len(errors),
            "tokens": calls[0].q.shape[1],
            "mean": statistics.mean(errors),
            "median": statistics.median(errors),
            "highest": max(errors),
            "of_layers": {str(layer): statistics.mean(several) for layer, several in sorted(of_layers.items())},
        }
        print(f"{backend} {options}: mean {row['mean']:.4f}, highest {row['highest']:.4f}", flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-prompts", type=int, default=1, help="of each kind")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 5, 9], help="of 12, at which calls are recorded")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    about = {"model": "shapes", "dtype": "float32", "num_prompts": arguments.num_prompts, "steps": arguments.steps}
    write_rows(arguments, "diffusion_runtime.rounded_attention_error/1", measure(arguments), **about)


if __name__ == "__main__":
    main()
