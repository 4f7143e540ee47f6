"""The error of sparse methods with and without a pooled tail, on q, k and v of the embedded model, beside dense.

    python -m benchmarks.pooled_tail_error --output benchmarks/results/pooled_tail_error.json

Self-attention of one dense clip per prompt is recorded at some of its steps, in every layer, both guidance branches.
Each setting then computes every recorded call with `tail` none and pooled, from the same plan. The error of a call is
the relative L2 distance of its result from dense attention, in float32; a row has the mean over calls, and the ratio of
the two means with the 95 % interval of resampled calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.clip_quality import quality_prompts, write_rows
from benchmarks.sparse_quality import SVG2, VMOBA
from diffusion_runtime import AttentionConfig, AttentionSpec, GenerationRequest, load_pipeline
from diffusion_runtime.attention import LayerInfo, StepInfo, TokenLayout, attention, plan_attention
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult
from diffusion_runtime.attention.backends.torch_sdpa import TorchSdpaBackend

# The grid of the default size has 32 tiles of 4 x 4 x 4 tokens.
NUM_TILES = 32
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *(("sol_attn", {"top_k": count / NUM_TILES}) for count in (4, 6, 11, 16)),
    *(("video_sparse_attn", {"sparsity": 1 - count / NUM_TILES}) for count in (4, 6, 11, 16)),
    *(("sol_attn", {"tau": tau}) for tau in (1.0, 1.5)),
    ("sliding_tile_attn", {"tile_size": [2, 4, 4], "window": [1, 3, 3]}),
    ("sparse_video_gen_2_attn", {**SVG2, "svg2_top_p_kmeans": 0.6}),
    ("vmoba_attn", {**VMOBA, "temporal_topk": 2, "spatial_topk": 3, "st_topk": 6}),
]


@contextmanager
def recorded_calls(steps: set[int]) -> Iterator[list[AttentionCall]]:
    """Self-attention calls of these steps, while they are dense."""
    calls: list[AttentionCall] = []
    run = TorchSdpaBackend.run

    def keep(backend: TorchSdpaBackend, call: AttentionCall) -> AttentionResult:
        if call.layer.role == "self" and call.step.index in steps:
            q, k, v = (x.detach().float().cpu().clone() for x in (call.q, call.k, call.v))
            calls.append(call._replace(inputs=call.inputs._replace(q=q, k=k, v=v)))
        return run(backend, call)

    TorchSdpaBackend.run = keep  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        TorchSdpaBackend.run = run  # type: ignore[method-assign]


def errors_of(
    calls: list[AttentionCall], whole: list[torch.Tensor], backend: str, options: dict[str, Any]
) -> dict[str, Any]:
    """A row: of each tail the error of every call."""
    found: dict[str, list[float]] = {"none": [], "pooled": []}
    densities: list[float] = []
    for call, dense in zip(calls, whole, strict=True):
        layout = call.layout
        assert isinstance(layout, TokenLayout)
        place: dict[str, Any] = {
            "backend": backend,
            "layout": layout,
            "layer": LayerInfo(call.layer.index, call.layer.num_layers),
            "step": StepInfo(call.step.index, call.step.num_steps),
        }
        densities.append(plan_attention(call.q, call.k, options=options, **place).density)
        for tail, errors in found.items():
            out = attention(call.q, call.k, call.v, options={**options, "tail": tail}, **place)
            errors.append(float((out - dense).norm() / dense.norm()))
    without, pooled = (torch.tensor(found[tail], dtype=torch.float64) for tail in ("none", "pooled"))
    drawn = torch.randint(len(calls), (2000, len(calls)), generator=torch.Generator().manual_seed(0))
    ratios = pooled[drawn].mean(dim=1) / without[drawn].mean(dim=1)
    low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {
        "backend": backend,
        "options": options,
        "num_calls": len(calls),
        "density": sum(densities) / len(densities),
        "error_without": float(without.mean()),
        "error_pooled": float(pooled.mean()),
        "ratio": {"value": float(pooled.mean() / without.mean()), "low": low, "high": high},
        "calls_that_gain": int((pooled < without).sum()),
    }


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config = AttentionConfig(per_role={"self": AttentionSpec("torch_sdpa")})
    pipeline = load_pipeline("shapes", device=arguments.device, attention=config)
    with recorded_calls(set(arguments.steps)) as calls:
        for prompt in quality_prompts(arguments.num_prompts):
            pipeline(GenerationRequest(prompt.text, seed=prompt.seed))
    whole = [attention(call.q, call.k, call.v, backend="torch_sdpa") for call in calls]
    for backend, options in SETTINGS:
        row = errors_of(calls, whole, backend, options)
        print(
            f"{backend:24} density {row['density']:.3f}  without {row['error_without']:.4f}  "
            f"pooled {row['error_pooled']:.4f}  ratio {row['ratio']['value']:.3f} "
            f"({row['ratio']['low']:.3f}-{row['ratio']['high']:.3f})  {options}",
            flush=True,
        )
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-prompts", type=int, default=1, help="of each kind")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 5, 9], help="of 12, at which calls are recorded")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    about = {"model": "shapes", "dtype": "float32", "num_prompts": arguments.num_prompts, "steps": arguments.steps}
    write_rows(arguments, "diffusion_runtime.pooled_tail_error/1", measure(arguments), **about)


if __name__ == "__main__":
    main()
