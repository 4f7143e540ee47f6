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
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import diffusion_runtime
from diffusion_runtime import AttentionConfig, AttentionSpec, GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.attention import SparsePlan
from diffusion_runtime.attention.sparse import interface
from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator
from scripts.shapes.checker import Verdict, check_clip
from scripts.shapes.prompts import EvaluationPrompt, PromptKind, evaluation_prompts
from scripts.shapes.scoring import summarise

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


class Recorder:
    """The pipeline's decoder, keeping the latents that it is given."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.latents: list[torch.Tensor] = []

    def stream(self, latents: torch.Tensor) -> Any:
        self.latents.append(latents.detach().float().cpu())
        return self._decoder.stream(latents)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


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


def generate(
    pipeline: Pipeline, prompts: list[EvaluationPrompt], batch_size: int
) -> tuple[torch.Tensor, torch.Tensor, list[Verdict], int]:
    """Latents [n, ...], frames uint8 [n, T, H, W, 3], verdicts, and how many self-attention calls ran dense."""
    recorder = pipeline.decoder = Recorder(pipeline.decoder)  # type: ignore[assignment]
    frames, verdicts, dense_calls = [], [], 0
    try:
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            requests = [pipeline.resolve(GenerationRequest(prompt.text, seed=prompt.seed)) for prompt in batch]
            media = pipeline.generate(requests)
            for prompt, one in zip(batch, media, strict=True):
                frames.append(torch.from_numpy(one.frames))
                verdicts.append(check_clip(prompt.attributes, frames[-1]))
            report = media[-1].attention_report
            dense_calls += sum(
                row.count for row in report.rows if row.role == "self" and "block-sparse" not in row.implementation
            )
    finally:
        pipeline.decoder = recorder._decoder
    return torch.cat(recorder.latents), torch.stack(frames), verdicts, dense_calls


def psnr(frames: torch.Tensor, dense: torch.Tensor) -> float:
    """Mean over clips, in dB; equal clips count as 100."""
    error = (frames.float() - dense.float()).square().flatten(1).mean(dim=1)
    return float(torch.where(error > 0, 10 * torch.log10(255.0**2 / error.clamp(min=1e-9)), 100.0).mean())


def accuracy(verdicts: list[Verdict], kinds: list[str]) -> dict[str, Any]:
    return {
        kind: summarise([v for v, k in zip(verdicts, kinds, strict=True) if k == kind]).to_dict()
        for kind in dict.fromkeys(kinds)
    }


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row a setting, the dense run first."""
    names: tuple[PromptKind, ...] = ("one_object", "two_objects")
    prompts = [prompt for kind in names for prompt in evaluation_prompts(kind, arguments.num_prompts)]
    kinds = [kind for kind in names for _ in range(arguments.num_prompts)]

    def load(spec: AttentionSpec) -> Pipeline:
        config = AttentionConfig(per_role={"self": spec})
        return load_pipeline(arguments.model, device=arguments.device, dtype=arguments.dtype, attention=config)

    dense_latents, dense_frames, verdicts, _ = generate(load(AttentionSpec("torch_sdpa")), prompts, arguments.batch)
    yield {
        "backend": "torch_sdpa",
        "options": {},
        "num_prompts": arguments.num_prompts,
        "device": arguments.device,
        "density": 1.0,
        "accuracy": accuracy(verdicts, kinds),
    }
    settings = WARM_SETTINGS if arguments.warm else SETTINGS
    todo = [(name, options) for name in arguments.methods for options in settings[name][arguments.skip :]]
    for name, options in track(todo, "settings", console=Console(stderr=True)):
        start = time.perf_counter()
        with recorded_densities() as densities:
            latents, frames, verdicts, dense_calls = generate(
                load(AttentionSpec(name, options)), prompts, arguments.batch
            )
        difference = (latents - dense_latents).flatten(1).norm(dim=1) / dense_latents.flatten(1).norm(dim=1)
        row = {
            "backend": name,
            "options": options,
            "num_prompts": arguments.num_prompts,
            "device": arguments.device,
            "density": (sum(densities) + dense_calls) / max(1, len(densities) + dense_calls),
            "dense_calls": dense_calls,
            "sparse_calls": len(densities),
            "latent_relative_l2": float(difference.mean()),
            "psnr_db": psnr(frames, dense_frames),
            "accuracy": accuracy(verdicts, kinds),
            "seconds": round(time.perf_counter() - start, 1),
        }
        print_row(row)
        yield row


def print_row(row: dict[str, Any]) -> None:
    joint = {kind: f"{rates['joint']['rate']:.3f}" for kind, rates in row["accuracy"].items()}
    options = ", ".join(f"{key}={value}" for key, value in row["options"].items())
    print(
        f"{row['backend']:24} density {row['density']:.3f}  latents {row.get('latent_relative_l2', math.nan):.4f}  "
        f"PSNR {row.get('psnr_db', math.nan):5.1f} dB  joint {joint}  {options}",
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
    cuda = arguments.device.startswith("cuda")
    if not cuda:
        tune_cpu_allocator()
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.sparse_quality/1",
        "machine": {
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusion_runtime": diffusion_runtime.__version__,
        },
        "model": arguments.model,
        "dtype": arguments.dtype,
        "num_prompts": arguments.num_prompts,
        "rows": [],
    }
    for row in measure(arguments):
        document["rows"].append(row)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
