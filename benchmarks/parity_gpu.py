"""Numbers of every way to compute the embedded model's generation beside one plain reference, on one GPU.

    python -m benchmarks.parity_gpu --output benchmarks/results/parity_gpu.json [--only bf16,graphs] [--device cpu]

The reference: float32, eager formulas in the place of fused kernels, `torch_sdpa`, neither compiled nor replayed. Of
every row: the relative L2 distance of the latents from the reference's after each step (the largest and the last), and
the PSNR of the frames. Bounds, of which one that is missed makes the exit code 1:

- float32: a distance of at most 1e-5 after every step;
- bfloat16: more than 40 dB, or a last distance of at most 1.25 times that of the eager formulas in bfloat16, which
  themselves must reach what fp8 must;
- fp8: more than 30 dB from the same settings in bfloat16 without 8-bit products, in the mean and in the median of
  NUM_PROMPTS prompts of `faster_quality`, which is the measure of docs/quantization.md (256 of each kind: 39 dB in the
  mean). One clip says little: where differences double with every step it has 20 dB;
- CUDA graphs and offloading: latents and frames to the bit of the same row without, and something replayed or streamed.

A row that needs a GPU is listed as not run with `--device cpu`, which makes a smaller clip.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import statistics
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from benchmarks.clip_quality import KINDS, quality_prompts
from benchmarks.faster_quality import FULL_STEPS
from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.comparison.frame_metrics import psnr_db
from diffusion_runtime.comparison.latent_distance import relative_l2
from diffusion_runtime.core.hardware import detect_hardware
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.kernels.implementation import VARIABLE
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.profiling.instruments import watched_latents
from diffusion_runtime.report.attention_report import AttentionReport

SEED = 1
PROMPT = "a red circle moving left"
SMALL: Mapping[str, Any] = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 6}
# Prompts over which 8-bit products are judged, half of them of one object and half of two, and their requests. Of whole
# clips on a CPU too: 16 prompts are 36.7 dB from bfloat16 in the mean at these sizes, those of 5 frames, for which the
# model is not trained, 31.2 (29.8 in the median, 28.7 of the first 4).
NUM_PROMPTS = {"cuda": 16, "cpu": 4}
PROMPT_REQUEST: Mapping[str, Mapping[str, Any]] = {
    "cuda": {"num_inference_steps": FULL_STEPS},
    "cpu": {"height": 64, "width": 64, "num_inference_steps": 6},
}
MAX_FLOAT32_DISTANCE, MIN_BF16_DB, MIN_FP8_DB = 1e-5, 40.0, 30.0
# Roundings at other places may add up to a little more than those of the eager formulas.
OWN_ERROR_SLACK = 1.25
PLAIN = {"cuda_graphs": "off", "offload": "none"}
NEEDS_CUDA = "needs a CUDA GPU"


@dataclass(frozen=True)
class Row:
    """One way to compute the clip. settings: of RuntimeConfig; is_fused: whether fused kernels compute where they can.
    same_as: the row whose numbers it must have to the bit. beside: the row from which many prompts are judged, in the
    place of the one prompt from the reference. needs_cuda: it is another row on a CPU, or none."""

    name: str
    dtype: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_fused: bool = True
    same_as: str | None = None
    beside: str | None = None
    needs_cuda: bool = False


SDPA: Mapping[str, Any] = {"attention_override": "torch_sdpa"}
REFERENCE = Row("reference", "float32", SDPA, is_fused=False)
OWN_ERROR = "bf16 eager"
ROWS = (
    Row("float32 fused", "float32", SDPA, needs_cuda=True),
    Row("float32 auto", "float32"),
    Row("float32 graphs", "float32", {"cuda_graphs": "on"}, same_as="float32 auto", needs_cuda=True),
    Row("float32 offload", "float32", {"offload": "layers"}, same_as="float32 auto", needs_cuda=True),
    Row(OWN_ERROR, "bfloat16", SDPA, is_fused=False),
    Row("bf16 fused", "bfloat16", SDPA, needs_cuda=True),
    Row("bf16 auto", "bfloat16"),
    Row("bf16 graphs", "bfloat16", {"cuda_graphs": "on"}, same_as="bf16 auto", needs_cuda=True),
    Row("bf16 offload", "bfloat16", {"offload": "layers"}, same_as="bf16 auto", needs_cuda=True),
    Row("fp8", "bfloat16", {"quantization": "fp8"}, beside="bf16 auto"),
    Row(
        "fp8 graphs",
        "bfloat16",
        {"quantization": "fp8", "cuda_graphs": "on"},
        same_as="fp8",
        beside="bf16 auto",
        needs_cuda=True,
    ),
)


@dataclass(frozen=True)
class Made:
    """A clip as it was made. latents: after each step, float32 on the CPU; computed_by: in words. clips: frames of the
    many prompts, of rows that are judged by them."""

    latents: tuple[torch.Tensor, ...]
    frames: numpy.ndarray
    report: AttentionReport
    clips: tuple[numpy.ndarray, ...] = ()

    @property
    def computed_by(self) -> str:
        return ", ".join(dict.fromkeys(row.backend for row in self.report.rows))


@contextmanager
def fused_kernels(is_on: bool) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "triton" if is_on else "reference"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def load(config: RuntimeConfig) -> Pipeline:
    """With `offload: layers` one block stays on the device: a model this small would fit whole."""
    pipeline = prepare_streaming(config).load() if config.offload == "layers" else load_pipeline(config)
    assert isinstance(pipeline, Pipeline)
    return pipeline


def prepare_streaming(config: RuntimeConfig) -> PreparedModel:
    prepared = prepare(config).planned_for(())
    assert isinstance(prepared, PreparedModel)
    plan = prepared.description.memory
    assert plan is not None
    plan = dataclasses.replace(plan, resident=dict.fromkeys(plan.resident, 1), keeps_transformer=False)
    return dataclasses.replace(prepared, description=dataclasses.replace(prepared.description, memory=plan))


def make(row: Row, device: str, requests: Sequence[GenerationRequest] = ()) -> Made:
    """The clip of the row's settings. requests: of further clips by the same pipeline."""
    settings = PLAIN | dict(row.settings) if device == "cuda" else dict(row.settings)
    latents: list[torch.Tensor] = []

    def watch(_: StepInfo, found: torch.Tensor) -> None:
        latents.append(found.detach().to("cpu", torch.float32, copy=True))

    with fused_kernels(row.is_fused):
        pipeline = load(RuntimeConfig("shapes", device=device, dtype=row.dtype, **settings))
        try:
            request = GenerationRequest(PROMPT, seed=SEED, **({} if device == "cuda" else SMALL))
            with watched_latents(pipeline, watch):
                media = pipeline(request)
            clips = tuple(pipeline(request).frames for request in requests)
        finally:
            pipeline.close()
    return Made(tuple(latents), media.frames, media.attention_report, clips)


def prompt_requests(row: Row, device: str) -> list[GenerationRequest]:
    """Of the many prompts, each with its seed; none for a row that neither is judged by them nor judges another."""
    if row.beside is None and all(other.beside != row.name for other in ROWS):
        return []
    prompts = quality_prompts(NUM_PROMPTS[device] // len(KINDS))
    return [GenerationRequest(prompt.text, seed=prompt.seed, **PROMPT_REQUEST[device]) for prompt in prompts]


def over_prompts(made: Made, beside: Made) -> dict[str, Any]:
    """PSNR of each prompt's frames from those of the same prompt in another row, in dB, with mean and median."""
    each = [psnr_db(mine, its) for mine, its in zip(made.clips, beside.clips, strict=True)]
    return {"psnr_db": each, "mean_psnr_db": statistics.fmean(each), "median_psnr_db": statistics.median(each)}


def distances(made: Made, reference: Made) -> list[float]:
    """After each step."""
    found = [relative_l2(mine, its) for mine, its in zip(made.latents, reference.latents, strict=True)]
    return [math.nan if distance is None else distance for distance in found]


def missed(row: Row, made: Made, figures: Mapping[str, Any], made_before: Mapping[str, Made]) -> list[str]:
    """The bounds that a row does not meet."""
    reasons = []
    largest, last, decibels = figures["largest_distance"], figures["last_distance"], figures["psnr_db"]
    if row.dtype == "float32":
        if not largest <= MAX_FLOAT32_DISTANCE:
            reasons.append(f"a distance of {largest:.1e} is above {MAX_FLOAT32_DISTANCE:.0e}")
    elif row.beside is not None:
        prompts = figures["prompts"]
        reasons += [
            f"{found:.1f} dB from {row.beside} in the {kind} of {len(prompts['psnr_db'])} prompts are not above "
            f"{MIN_FP8_DB:.0f}"
            for kind in ("mean", "median")
            if not (found := prompts[f"{kind}_psnr_db"]) > MIN_FP8_DB
        ]
    elif row.name == OWN_ERROR:
        if not decibels > MIN_FP8_DB:
            reasons.append(f"{decibels:.1f} dB are no more than 8-bit products must reach, {MIN_FP8_DB:.0f}")
    elif not decibels > MIN_BF16_DB:
        own = distances(made_before[OWN_ERROR], made_before[REFERENCE.name])[-1]
        if not last <= OWN_ERROR_SLACK * own:
            reasons.append(f"{decibels:.1f} dB, and a distance of {last:.2e} where eager formulas have {own:.2e}")
    if row.same_as is not None:
        reasons += differences(made, made_before[row.same_as], row.same_as)
    graphs = made.report.graphs
    if row.settings.get("cuda_graphs") == "on" and (graphs is None or not graphs.num_replayed):
        reasons.append(f"nothing was replayed: {graphs}")
    if row.settings.get("offload") == "layers" and not any("blocks streamed" in note for note in made.report.notes):
        reasons.append("no block was streamed")
    return reasons


def differences(made: Made, other: Made, name: str) -> list[str]:
    """What is not to the bit that of another row."""
    steps = [i for i, (a, b) in enumerate(zip(made.latents, other.latents, strict=True)) if not torch.equal(a, b)]
    reasons = [f"the latents are not those of {name} from step {steps[0] + 1} on"] if steps else []
    if not numpy.array_equal(made.frames, other.frames):
        reasons.append(f"the frames are not those of {name}")
    pairs = zip(made.clips, other.clips, strict=False)
    prompts = [index for index, (a, b) in enumerate(pairs) if not numpy.array_equal(a, b)]
    return [*reasons, f"the frames of prompt {prompts[0] + 1} are not those of {name}"] if prompts else reasons


def measure(row: Row, device: str, made_before: dict[str, Made]) -> dict[str, Any]:
    """The figures of a row, as JSON has them. made_before: the clips of the rows before, which gets this one's."""
    made = make(row, device, prompt_requests(row, device))
    made_before[row.name] = made
    each = distances(made, made_before[REFERENCE.name])
    figures: dict[str, Any] = {
        "name": row.name,
        "state": "ok",
        "dtype": row.dtype,
        "settings": dict(row.settings),
        "fused_kernels": row.is_fused,
        "attention": made.computed_by,
        "num_steps": len(each),
        "distances": each,
        "largest_distance": max(each),
        "last_distance": each[-1],
        "psnr_db": psnr_db(made.frames, made_before[REFERENCE.name].frames),
        "prompts": None
        if row.beside is None
        else {"beside": row.beside, **over_prompts(made, made_before[row.beside])},
        "same_as": row.same_as,
        "graphs": None if made.report.graphs is None else str(made.report.graphs),
    }
    reasons = missed(row, made, figures, made_before)
    return {**figures, "state": "missed" if reasons else "ok", "reason": "; ".join(reasons)}


def chosen_rows(only: str) -> tuple[Row, ...]:
    """The rows whose names have a word of `only` in them, with the rows that they are compared with."""
    words = [word.strip() for word in only.split(",") if word.strip()]
    chosen = {row.name for row in ROWS if not words or any(word in row.name for word in words)}
    needed = {name for row in ROWS if row.name in chosen for name in (row.same_as, row.beside)}
    needed |= {OWN_ERROR} if chosen else set()
    return tuple(row for row in ROWS if row.name in chosen | needed)


def table(rows: list[dict[str, Any]]) -> str:
    """dB: of one prompt from the reference. prompts: mean and median dB of many from bfloat16."""
    lines = [f"{'row':<16} {'largest':>8} {'last':>8} {'dB':>6} {'prompts':>11}  {'attention':<12} state"]
    for row in rows:
        figures = f"{'-':>8} {'-':>8} {'-':>6} {'-':>11}  {'-':<12}"
        if "psnr_db" in row:
            many = row["prompts"]
            prompts = f"{many['mean_psnr_db']:.1f}, {many['median_psnr_db']:.1f}" if many else "-"
            figures = (
                f"{row['largest_distance']:>8.1e} {row['last_distance']:>8.1e} {row['psnr_db']:>6.1f} {prompts:>11}  "
                f"{row['attention']:<12}"
            )
        state = row["state"] + (f", to the bit of {row['same_as']}" if row.get("same_as") and not row["reason"] else "")
        lines.append(f"{row['name']:<16} {figures} {state}" + (f": {row['reason']}" if row["reason"] else ""))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default="", help="words in the names of rows: bf16,graphs; default: all rows")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    # The reference is to round as float32 does.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "machine": {**describe_machine(arguments.device), **detect_hardware(arguments.device).packages},
        "bounds": {"float32": MAX_FLOAT32_DISTANCE, "bf16_db": MIN_BF16_DB, "fp8_db": MIN_FP8_DB},
        "request": {"prompt": PROMPT, "seed": SEED, **({} if arguments.device == "cuda" else SMALL)},
        "prompts": {"num_prompts": NUM_PROMPTS[arguments.device], **PROMPT_REQUEST[arguments.device]},
        "rows": rows,
    }
    made = {REFERENCE.name: make(REFERENCE, arguments.device)}
    for row in chosen_rows(arguments.only):
        if row.needs_cuda and arguments.device != "cuda":
            rows.append({"name": row.name, "state": "not run", "reason": NEEDS_CUDA})
        else:
            try:
                rows.append(measure(row, arguments.device, made))
            except Exception as error:
                traceback.print_exc()
                rows.append({"name": row.name, "state": "failed", "reason": f"{type(error).__name__}: {error}"})
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(table(rows))
    if any(row["state"] in ("missed", "failed") for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
