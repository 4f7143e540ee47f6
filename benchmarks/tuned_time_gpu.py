"""Time of tuned sparse settings at Wan 1.3B, 480 x 832, 81 frames, beside dense attention and fewer dense steps.

    python -m benchmarks.tuned_time_gpu --seconds 400 --output benchmarks/results/tuned_time_gpu.json
    python -m benchmarks.tuned_time_gpu --rules benchmarks/results/tune_quality.json --output FILE

--rules times the settings that tune_quality.py chose on the embedded model instead: each range of layers and steps in
proportion, each choice by the one of this grid's ladder that keeps the nearest share. The number of dense steps that
were as accurate there (`dense_steps_needed`, in proportion) stands beside the time, and `is_faster_than_fewer_steps`
says which takes less. Accuracy at one size says nothing of another: it is the shape of such a setting whose time this
shows.

Time alone: weights are random and the sensitivities are made up (early steps and outer layers matter more), so the
settings say nothing about quality. They are what `tune` makes otherwise: its ladders of densities on this grid of
32 760 tokens, its cells, its knapsack, and the schedule rules that it writes to a YAML. Denoising alone is timed, with
guidance in two passes, after a pass that compiles; each sparse setting is compared with as many dense steps as take no
longer, which are timed too. Every setting must have run the backends of its rules, on finite latents.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.families.step import FamilyStep, StepInputs
from benchmarks.families.wan import STEPS
from benchmarks.families_gpu import DTYPE, free, write_folder
from benchmarks.machine import describe_machine
from diffusion_runtime.attention import (
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    AttentionRecorder,
    LayerInfo,
    RequestCache,
    StepInfo,
    TokenLayout,
)
from diffusion_runtime.attention.config import AttentionSpec
from diffusion_runtime.attention.schedule import IndexRanges
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.token_layout import Extent
from diffusion_runtime.denoising.flow_match_euler import FlowMatchEulerSampler
from diffusion_runtime.denoising.guidance import with_guidance
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.random_weights import fill_randomly
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.text_encoders.interface import Conditions
from diffusion_runtime.tuning.cells import Cell, make_cells, schedule_rules
from diffusion_runtime.tuning.knapsack import Option, pareto_frontier
from diffusion_runtime.tuning.ladders import METHODS, density_of, ladder
from diffusion_runtime.tuning.search import Point

GRID: Extent = (21, 30, 52)
LAYER_RANGES, STEP_RANGES, LEVELS = 3, 4, 4
FLOW_SHIFT = 5.0
# Of a small clip, to run every path on a CPU.
TINY_GRID: Extent = (4, 8, 8)


def made_up_loss(cell: Cell, kept: float, num_steps: int) -> float:
    """Of a cell: the squared share left out, more for early steps and for the first and last layers."""
    early = 2.0 - cell.steps.start / num_steps
    outer = 1.5 if cell.layers.start == 0 else 1.0
    return early * outer * (1 - kept) ** 2 * len(cell.steps) * len(cell.layers)


def tuned_points(method: str, grid: Extent, num_layers: int, num_steps: int) -> list[Point]:
    """The frontier of a method on the made-up losses, from dense to sparse."""
    layout = TokenLayout(grid=grid)
    cells = make_cells({"self": num_layers}, num_steps, LAYER_RANGES, STEP_RANGES)
    choices: list[AttentionSpec | None] = [None, *ladder(method, grid, LEVELS)]
    options = []
    for cell in cells:
        weight = len(cell.layers) * len(cell.steps) / (num_layers * num_steps)
        shares = []
        for spec in choices:
            found = [
                1.0 if spec is None else density_of(spec, layout, LayerInfo(index, num_layers, "self"), num_steps)
                for index in cell.layers
            ]
            shares.append(sum(1.0 if share is None else share for share in found) / len(found))
        options.append([Option(kept * weight, made_up_loss(cell, kept, num_steps)) for kept in shares])
    return [
        Point(
            schedule_rules((cell, choices[pick]) for cell, pick in zip(cells, selection.picks, strict=True)),
            selection.cost,
        )
        for selection in pareto_frontier(options)
    ]


def scaled_settings(document: dict[str, Any], grid: Extent, num_layers: int, num_steps: int) -> list[dict[str, Any]]:
    """The tuned settings of tune_quality.py for another model: method, rules, kept, dense_share (see --rules)."""
    found = []
    for row in document["rows"]:
        if not row["finished"]:
            continue
        cells = row["sensitivity"]
        own = {key: 1 + max(last_index(cell[key]) for cell in cells) for key in ("layers", "steps")}
        kept_of = {json.dumps(cell["extra"], sort_keys=True): cell["kept"] for cell in cells}
        rules, left_out = [], 0.0
        for rule in row["tuned"]["attention"]:
            layers = scaled(rule.get("layers"), own["layers"], num_layers)
            steps = scaled(rule.get("steps"), own["steps"], num_steps)
            aim = kept_of[json.dumps(rule["extra"], sort_keys=True)]
            spec, kept = nearest_choice(row["method"], grid, aim, num_layers, num_steps)
            rules.append({"role": "self", "layers": text_of(layers), "steps": text_of(steps), **spec.to_dict()})
            left_out += (1 - kept) * len(layers) * len(steps) / (num_layers * num_steps)
        test = row.get("test")
        share = None if test is None else test["dense_steps_needed"] / test["num_steps"]
        found.append({"method": row["method"], "rules": rules, "kept": 1 - left_out, "dense_share": share})
    return found


def last_index(ranges: str) -> int:
    return max(last for _, last in IndexRanges.parse(ranges, "ranges").ranges)


def scaled(ranges: str | None, own: int, other: int) -> list[int]:
    """Indices of `other` that stand where those of `ranges` do among `own`; None for all."""
    kept = IndexRanges.parse(ranges, "ranges")
    return [index for index in range(other) if kept.contains(index * own // other, own)]


def text_of(indices: Sequence[int]) -> str:
    return ",".join(map(str, indices))


def nearest_choice(
    method: str, grid: Extent, aim: float, num_layers: int, num_steps: int
) -> tuple[AttentionSpec, float]:
    """Of a fine ladder, the choice whose share of the pairs is nearest to `aim`, and that share."""
    layout = TokenLayout(grid=grid)
    shares = []
    for spec in ladder(method, grid, 16):
        found = [density_of(spec, layout, LayerInfo(index, num_layers, "self"), num_steps) for index in range(3)]
        shares.append((spec, sum(1.0 if share is None else share for share in found) / len(found)))
    return min(shares, key=lambda each: abs(each[1] - aim))


def made_up_setting(method: str, target: float, grid: Extent, num_layers: int, num_steps: int) -> dict[str, Any]:
    points = tuned_points(method, grid, num_layers, num_steps)
    point = min(points, key=lambda each: abs(each.kept - target))
    return {"method": method, "rules": list(point.rules), "kept": point.kept, "dense_share": None}


def build(step: FamilyStep, rules: Sequence[dict[str, Any]], device: torch.device) -> DiffusionTransformer:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, step)
        model = family_for_folder(folder).describe(folder)
        config = AttentionConfig.parse({"schedule": list(rules)} if rules else None)
        policy = AttentionPolicy(cli=config, device=str(device), dtype=DTYPE)
        return fill_randomly(model, model.build_transformer(policy), device, DTYPE)


@torch.inference_mode()
def denoise(
    model: DiffusionTransformer, step: FamilyStep, device: torch.device, num_steps: int, guidance: float
) -> tuple[float, AttentionRecorder]:
    """Seconds of one denoising, and what attention ran."""
    latents, _, inputs = step.make_inputs(device, DTYPE).ours
    cache, recorder = RequestCache(), AttentionRecorder()

    def predict(x: torch.Tensor, info: StepInfo) -> torch.Tensor:
        timestep = torch.full(x.shape[:1], info.timestep or 0.0, device=device)
        velocity: torch.Tensor = model(
            x.to(DTYPE), timestep, inputs, AttentionContext(step=info, state=cache, recorder=recorder)
        )
        return velocity

    guided = with_guidance(predict, guidance, "two_pass")
    synchronize(device)
    started = time.perf_counter()
    made = FlowMatchEulerSampler(num_steps, FLOW_SHIFT).sample(latents, guided)
    synchronize(device)
    seconds = time.perf_counter() - started
    if not bool(made.isfinite().all()):
        raise ValueError(f"{step.name}: the latents are not finite")
    return seconds, recorder


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def tiny_step() -> FamilyStep:
    """The first step's model with three small layers, and a clip of TINY_GRID tokens."""

    def make_inputs(device: torch.device, dtype: torch.dtype) -> StepInputs:
        latents, text = (torch.randn(1, *shape, device=device, dtype=dtype) for shape in ((16, 4, 16, 16), (512, 4096)))
        inputs = DenoiserInputs(Conditions.of(text), ClipSize(128, 128, 13, 16))
        return StepInputs((latents, torch.zeros(1, device=device), inputs), {}, lambda out: out)

    return dataclasses.replace(
        STEPS[0], name="tiny", config={**STEPS[0].config, "num_layers": 3, "ffn_dim": 64}, make_inputs=make_inputs
    )


def measure(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    device = torch.device(arguments.device)
    started = time.monotonic()
    is_tiny = device.type == "cpu"
    step, grid = (tiny_step(), TINY_GRID) if is_tiny else (STEPS[0], GRID)
    num_layers, num_steps = int(step.config["num_layers"]), int(arguments.steps)
    rows: list[dict[str, Any]] = document["rows"]
    document["model"], document["grid"] = step.name, list(grid)

    def timed(model: DiffusionTransformer, count: int) -> tuple[float, AttentionRecorder]:
        return denoise(model, step, device, count, arguments.guidance)

    def keep() -> None:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")

    dense = build(step, [], device)
    timed(dense, 2)
    full, recorder = timed(dense, num_steps)
    rows.append({"setting": "dense", "kept": 1.0, "steps": num_steps, "seconds": full, "ratio": 1.0})
    rows[-1]["backends"] = sorted({row.backend for row in recorder.report().rows if row.role == "self"})
    keep()
    if arguments.rules is None:
        wanted = [(method, target) for target in arguments.kept for method in arguments.methods]
        settings = [made_up_setting(*each, grid, num_layers, num_steps) for each in wanted]
    else:
        settings = scaled_settings(json.loads(arguments.rules.read_text()), grid, num_layers, num_steps)
        settings = [each for each in settings if each["method"] in arguments.methods]
    counts: set[int] = set()
    for setting in settings:
        method, rules = setting["method"], setting["rules"]
        if arguments.seconds is not None and time.monotonic() - started > arguments.seconds - 2 * full:
            document["not_run"].append(
                f"{method}, {setting['kept']:.3f} kept: --seconds {arguments.seconds:g} were over"
            )
            continue
        model = build(step, rules, device)
        # All steps: kernels are compiled for the densities of each range.
        timed(model, num_steps)
        seconds, recorder = timed(model, num_steps)
        ran = sorted({row.backend for row in recorder.report().rows if row.role == "self"})
        if rules and method not in ran:
            raise ValueError(f"{method} was to run, {', '.join(ran)} did")
        count = min(num_steps, max(1, int(seconds / full * num_steps)))
        counts.add(count)
        rows.append(
            {
                "setting": f"tuned {method}",
                "kept": round(setting["kept"], 4),
                "steps": num_steps,
                "seconds": seconds,
                "ratio": seconds / full,
                "dense_steps_in_its_time": count,
                "backends": ran,
                "attention": list(rules),
            }
        )
        if (share := setting["dense_share"]) is not None:
            needed = math.ceil(share * num_steps - 1e-9)
            counts.add(needed)
            rows[-1] |= {"dense_steps_needed": needed, "is_faster_than_fewer_steps": seconds / full < share}
        keep()
        del model
        if not is_tiny:
            free()
    for count in sorted(counts - {num_steps}, reverse=True):
        if arguments.seconds is not None and time.monotonic() - started > arguments.seconds:
            document["not_run"].append(f"{count} dense steps: --seconds {arguments.seconds:g} were over")
            continue
        seconds, _ = timed(dense, count)
        rows.append(
            {
                "setting": f"dense, {count} steps",
                "kept": 1.0,
                "steps": count,
                "seconds": seconds,
                "ratio": seconds / full,
            }
        )
        keep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu: every path, at one tiny clip")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--guidance", type=float, default=5.0)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--kept", nargs="+", type=float, default=[0.5, 0.25], help="shares of pairs to come nearest to")
    parser.add_argument("--rules", type=Path, help="results of tune_quality.py, whose settings are timed")
    parser.add_argument("--seconds", type=float, default=None, help="wall clock after which no setting is begun")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.tuned_time_gpu/1",
        "machine": describe_machine(arguments.device),
        "dtype": "bfloat16",
        "guidance": arguments.guidance,
        "rows": [],
        "not_run": [],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    measure(arguments, document)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{'setting':26} {'kept':>6} {'steps':>5} {'seconds':>8} {'of dense':>8}  dense steps in its time")
    for row in document["rows"]:
        print(
            f"{row['setting']:26} {row['kept']:6.3f} {row['steps']:5d} {row['seconds']:8.3f} {row['ratio']:8.3f}  "
            f"{row.get('dense_steps_in_its_time', '-')}"
        )
    for each in document["not_run"]:
        print("not run:", each)


if __name__ == "__main__":
    main()
