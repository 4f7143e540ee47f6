"""What each sparse method costs in quality at each density, on the embedded model, against the dense run.

    python -m benchmarks.sparse_quality --device cuda --output benchmarks/results/sparse_quality.json

Every setting generates the same seeded prompts as the dense run. Recorded: the share of (query, key) pairs that
self-attention kept over all steps and layers, prompt accuracy with its 95 % interval, the relative L2 distance of the
final latents and the PSNR of the frames from the dense run's. Several files made by `--methods` merge with `--merge`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.clip_quality import Clips, generate_clips, joint_rates, quality_prompts, write_rows
from diffusion_runtime import AttentionConfig, AttentionSpec, Pipeline, load_pipeline
from diffusion_runtime.attention import SparsePlan
from diffusion_runtime.attention.sparse import interface

SVG2 = {"svg2_num_q_centroids": 32, "svg2_num_k_centroids": 64, "svg2_min_kc_ratio": 0.0, "svg2_first_times_fp": 0.0}
VMOBA = {
    "moba_select_mode": "topk",
    "first_full_step": 0,
    "temporal_chunk_size": 1,
    "spatial_chunk_size": [4, 4],
    "st_chunk_size": [4, 4, 4],
}
# Each method from dense to sparse. The grid of the default size is 8 x 16 x 16 tokens.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "sliding_tile_attn": [
        {"tile_size": [2, 4, 4], "window": window}
        for window in ([4, 4, 3], [4, 3, 3], [3, 3, 3], [1, 4, 4], [3, 1, 3], [1, 3, 3], [1, 1, 3], [1, 1, 1])
    ],
    "video_sparse_attn": [{"sparsity": value} for value in (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95)],
    "vmoba_attn": [
        {**VMOBA, "temporal_topk": t, "spatial_topk": s, "st_topk": st}
        for t, s, st in ((6, 12, 24), (4, 8, 16), (3, 5, 10), (2, 3, 6), (1, 2, 3), (1, 1, 1))
    ],
    "sparse_video_gen_2_attn": [
        {**SVG2, "svg2_top_p_kmeans": value} for value in (0.98, 0.95, 0.9, 0.8, 0.6, 0.4, 0.2)
    ],
}


# The same with the first 3 of 12 steps dense, where the picture is laid out: what the methods' own defaults do.
WARM_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "sliding_tile_attn": [
        {"tile_size": [2, 4, 4], "window": window, "skip_time_steps": 3} for window in ([4, 4, 3], [3, 3, 3])
    ],
    "video_sparse_attn": [{"sparsity": value, "dense_first_steps": 3} for value in (0.6, 0.8)],
    "vmoba_attn": [
        {**VMOBA, "temporal_topk": t, "spatial_topk": s, "st_topk": st, "first_full_step": 3}
        for t, s, st in ((3, 5, 10), (2, 3, 6))
    ],
    "sparse_video_gen_2_attn": [
        {**SVG2, "svg2_top_p_kmeans": value, "svg2_first_times_fp": 0.25} for value in (0.95, 0.8)
    ],
}


@contextmanager
def recorded_densities() -> Iterator[list[float]]:
    """The density of every plan that the kernel is given."""
    densities: list[float] = []
    original = interface.block_sparse_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: SparsePlan, **rest: Any) -> Any:
        densities.append(plan.density)
        return original(q, k, v, plan, **rest)

    interface.block_sparse_attention = attend  # type: ignore[assignment]
    try:
        yield densities
    finally:
        interface.block_sparse_attention = original


def num_dense_calls(clips: Clips) -> int:
    """Self-attention calls that ran dense; the clips of a batch share their calls."""
    rows = [row for reports in clips.reports for row in reports[-1].rows if row.role == "self"]
    return sum(row.count for row in rows if "block-sparse" not in row.implementation)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per setting, the dense run first."""
    prompts = quality_prompts(arguments.num_prompts)

    def load(spec: AttentionSpec) -> Pipeline:
        config = AttentionConfig(per_role={"self": spec})
        return load_pipeline(arguments.model, device=arguments.device, dtype=arguments.dtype, attention=config)

    dense = generate_clips(load(AttentionSpec("torch_sdpa")), prompts, {}, batch_size=arguments.batch)
    yield {
        "backend": "torch_sdpa",
        "options": {},
        "num_prompts": arguments.num_prompts,
        "device": arguments.device,
        "density": 1.0,
        "accuracy": dense.accuracy(),
    }
    settings = WARM_SETTINGS if arguments.warm else SETTINGS
    todo = [(name, options) for name in arguments.methods for options in settings[name][arguments.skip :]]
    for name, options in track(todo, "settings", console=Console(stderr=True)):
        start = time.perf_counter()
        with recorded_densities() as densities:
            clips = generate_clips(load(AttentionSpec(name, options)), prompts, {}, batch_size=arguments.batch)
        dense_calls = num_dense_calls(clips)
        row = {
            "backend": name,
            "options": options,
            "num_prompts": arguments.num_prompts,
            "device": arguments.device,
            "density": (sum(densities) + dense_calls) / max(1, len(densities) + dense_calls),
            "dense_calls": dense_calls,
            "sparse_calls": len(densities),
            **clips.beside(dense),
            "seconds": round(time.perf_counter() - start, 1),
        }
        print_row(row)
        yield row


def print_row(row: dict[str, Any]) -> None:
    options = ", ".join(f"{key}={value}" for key, value in row["options"].items())
    print(
        f"{row['backend']:24} density {row['density']:.3f}  latents {row.get('latent_relative_l2', math.nan):.4f}  "
        f"PSNR {row.get('psnr_db', math.nan):5.1f} dB  joint {joint_rates(row)}  {options}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shapes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-prompts", type=int, default=64, help="of each kind")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--methods", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--warm", action="store_true", help="the settings whose first steps are dense")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first settings of each method")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--merge", nargs="+", type=Path, help="join these files into --output instead of measuring")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    if arguments.merge:
        parts = [json.loads(path.read_text()) for path in arguments.merge]
        rows = parts[0]["rows"] + [row for part in parts[1:] for row in part["rows"] if row["options"]]
        arguments.output.write_text(json.dumps({**parts[0], "rows": rows}, indent=1) + "\n")
        return
    write_rows(
        arguments,
        "diffusion_runtime.sparse_quality/1",
        measure(arguments),
        model=arguments.model,
        dtype=arguments.dtype,
        num_prompts=arguments.num_prompts,
    )


if __name__ == "__main__":
    main()
