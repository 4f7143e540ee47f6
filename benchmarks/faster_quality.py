"""Every way to make a clip faster beside fewer plain steps: quality and time on the embedded model.

    python -m benchmarks.faster_quality --device cuda --output benchmarks/results/faster_quality.json
    python -m benchmarks.faster_quality --merge a.json b.json --times alone.json --output FILE
    python -m benchmarks.faster_quality --show benchmarks/results/faster_quality.json     # as a Markdown table

The full run is 24 UniPC steps with guidance. TeaCache and MagCache run with what `calibrate` measures first, in this
run, on CALIBRATION_PROMPTS prompts of combinations never trained on, which no row makes. Each row makes the same seeded
prompts; recorded are prompt accuracy with its 95 % interval, the relative L2 distance of the latents from the full
run's, the PSNR of the frames, and the time of denoising one clip by itself (median of several, warm) over the full
run's. What a way has to beat is the row of plain steps that takes as long.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.clip_quality import Clips, generate_clips, quality_prompts, write_rows
from benchmarks.sparse_quality import SVG2
from diffusion_runtime import AttentionConfig, AttentionSpec, GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.core.hardware import resolve_device
from diffusion_runtime.profiling import calibration
from diffusion_runtime.quality.shapes.prompts import evaluation_prompts

FULL_STEPS = 24
TIMED_CLIPS = 5
CALIBRATION_PROMPTS = 16
# In a step cache's text: the file of that calibration.
CALIBRATION = "CALIBRATION"

DENSE = AttentionSpec("torch_sdpa")


@dataclass(frozen=True)
class Way:
    """One setting. request: values beside the prompt, with CALIBRATION for the file of one; attention: of
    self-attention. quantization: of linear layers; in 8-bit products with --dtype bfloat16 on a GPU."""

    name: str
    request: Mapping[str, Any] = field(default_factory=dict)
    attention: AttentionSpec = DENSE
    quantization: str = "none"


def _steps(count: int, **more: Any) -> dict[str, Any]:
    return {"num_inference_steps": count, **more}


VSA = AttentionSpec("video_sparse_attn", {"sparsity": 0.6})
SVG2_HALF = AttentionSpec("sparse_video_gen_2_attn", {**SVG2, "svg2_top_p_kmeans": 0.95})
FULL = Way("24 steps", _steps(FULL_STEPS))
WAYS = (
    *(Way(f"{count} steps", _steps(count)) for count in (16, 12, 10, 8, 6, 5, 4)),
    Way("4 steps without guidance", _steps(4, guidance_scale=1.0)),
    *(
        Way(f"EasyCache {threshold}", _steps(FULL_STEPS, step_cache=f"easycache:threshold={threshold}"))
        for threshold in (0.05, 0.1, 0.2)
    ),
    *(Way(f"DBCache {r}", _steps(FULL_STEPS, step_cache=f"dbcache:F=1,R={r}")) for r in (0.08, 0.24)),
    *(
        Way(
            f"TeaCache {threshold}", _steps(FULL_STEPS, step_cache=f"teacache:file={CALIBRATION},threshold={threshold}")
        )
        for threshold in (0.1, 0.2, 0.4)
    ),
    *(
        Way(
            f"MagCache {threshold}", _steps(FULL_STEPS, step_cache=f"magcache:file={CALIBRATION},threshold={threshold}")
        )
        for threshold in (0.06, 0.12, 0.24)
    ),
    *(
        Way(f"half size first, delta {delta}", _steps(FULL_STEPS, progressive_resolution=f"dct:delta={delta}"))
        for delta in (0.01, 0.05, 0.1)
    ),
    Way("gate 0.5", _steps(FULL_STEPS, cfg_gate=0.5)),
    Way("EasyCache 0.1, gate 0.5", _steps(FULL_STEPS, step_cache="easycache:threshold=0.1", cfg_gate=0.5)),
    Way("VSA 0.6", _steps(FULL_STEPS), VSA),
    Way("SVG2 0.95", _steps(FULL_STEPS), SVG2_HALF),
    Way("SVG2 0.95, EasyCache 0.1", _steps(FULL_STEPS, step_cache="easycache:threshold=0.1"), SVG2_HALF),
    Way("fp8", _steps(FULL_STEPS), quantization="fp8"),
    Way("fp8-all", _steps(FULL_STEPS), quantization="fp8-all"),
)


def computed_share(clips: Clips) -> float:
    """Of the branch forwards; 1 where nothing is left out."""
    shares = []
    for report in (report for reports in clips.reports for report in reports):
        counts = [(row.num_computed, row.num_reused) for row in report.steps]
        total = sum(map(sum, counts))
        shares.append(sum(count for count, _ in counts) / total if total else 1.0)
    return statistics.fmean(shares)


def calibrate(arguments: argparse.Namespace, path: Path) -> None:
    """Write what MagCache and TeaCache need to know of the model at FULL_STEPS steps, as `calibrate` does."""
    pipeline = load_pipeline(
        "shapes", device=arguments.device, dtype=arguments.dtype, attention=AttentionConfig(per_role={"self": DENSE})
    )
    assert isinstance(pipeline, Pipeline)
    prompts = evaluation_prompts("held_out", min(CALIBRATION_PROMPTS, arguments.num_prompts))
    requests = [GenerationRequest(each.text, seed=each.seed, **FULL.request) for each in prompts]
    path.write_text(json.dumps(calibration.calibrate(pipeline, requests).to_dict()))


def with_calibration(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Request values with the file's name in their step cache."""
    text = values.get("step_cache")
    # Quoted, as a folder's name may hold commas.
    return {**values, "step_cache": text.replace(CALIBRATION, json.dumps(str(path)))} if text else dict(values)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per way, the full run first."""
    prompts = quality_prompts(arguments.num_prompts)
    workers = max(1, (os.cpu_count() or 1) // arguments.shared_by)
    full: Clips | None = None
    full_seconds = 0.0
    chosen = [way for way in WAYS if arguments.only is None or way.name in arguments.only]
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        calibration = Path(folder) / "calibration.json"
        if any(CALIBRATION in way.request.get("step_cache", "") for way in chosen):
            calibrate(arguments, calibration)
        for way in (FULL, *chosen):
            start = time.perf_counter()
            request = with_calibration(way.request, calibration)
            pipeline = load_pipeline(
                "shapes",
                device=arguments.device,
                dtype=arguments.dtype,
                attention=AttentionConfig(per_role={"self": way.attention}),
                quantization=way.quantization,
            )
            # Each clip by itself, the first one warms up.
            singles = generate_clips(pipeline, prompts[: TIMED_CLIPS + 1], request)
            seconds = statistics.median(singles.denoise_seconds[1:])
            made = generate_clips(pipeline, prompts, request, batch_size=arguments.batch, checkers=pool)
            if full is None:
                full, full_seconds = made, seconds
            row = {
                "name": way.name,
                "request": dict(way.request),
                "attention": {"self": way.attention.name, "options": dict(way.attention.options)},
                "computed_share": computed_share(made),
                "denoise_seconds": seconds,
                "time_ratio": seconds / full_seconds,
                **made.beside(full),
                "wall_seconds": round(time.perf_counter() - start, 1),
            }
            print(line(row), flush=True)
            yield row


def line(row: Mapping[str, Any]) -> str:
    """A row of the Markdown table."""
    joint = [row["accuracy"][kind]["joint"]["rate"] for kind in ("one_object", "two_objects")]
    return (
        f"| {row['name']} | {row['computed_share']:.2f} | {row['time_ratio']:.2f} | {joint[0]:.3f} | {joint[1]:.3f} | "
        f"{row['latent_relative_l2']:.3f} | {row['psnr_db']:.1f} |"
    )


def show(document: Mapping[str, Any]) -> None:
    print(
        "| | computed | time | one object | two objects | latent distance | PSNR, dB |\n|---|---|---|---|---|---|---|"
    )
    for row in document["rows"]:
        print(line(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-prompts", type=int, default=256, help="of each kind")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--shared-by", type=int, default=1, help="processes that share the machine's CPU cores")
    parser.add_argument("--only", nargs="+", choices=[way.name for way in WAYS], help="these ways, beside the full run")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--merge", nargs="+", type=Path, help="join these files into --output instead of measuring")
    parser.add_argument("--times", type=Path, help="with --merge: take the times from this file, of a run by itself")
    parser.add_argument("--show", type=Path, help="print this file as a Markdown table")
    arguments = parser.parse_args()
    if arguments.show:
        show(json.loads(arguments.show.read_text()))
        return
    if arguments.output is None:
        parser.error("--output FILE is missing")
    if arguments.merge:
        parts = [json.loads(path.read_text()) for path in arguments.merge]
        rows = {row["name"]: row for part in parts for row in part["rows"]}
        if arguments.times:
            for row in json.loads(arguments.times.read_text())["rows"]:
                if row["name"] in rows:
                    rows[row["name"]] |= {key: row[key] for key in ("denoise_seconds", "time_ratio")}
        order = [FULL.name, *(way.name for way in WAYS)]
        document = {**parts[0], "rows": [rows[name] for name in order if name in rows]}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    on_cuda = resolve_device(arguments.device).type == "cuda"
    write_rows(
        arguments,
        "diffusion_runtime.faster_quality/1",
        measure(arguments),
        dtype=f"{arguments.dtype}, TF32 matrix products" if on_cuda else arguments.dtype,
        num_prompts=arguments.num_prompts,
    )


if __name__ == "__main__":
    main()
