"""What a computed step share costs in time: denoising a real size with random weights and forced step caches.

    python -m benchmarks.step_cache_gpu --family wan --output benchmarks/results/step_cache_gpu.json

Which steps are computed is forced, since random weights say nothing about decisions: EasyCache with a threshold that
reuses all steps after the warm-up but the last, DBCache with a static mask, the gate. Correctness first: a threshold of
0 must change no bit of the latents. Recorded: the share of computed branch forwards, and seconds over those of the full
run, whose difference is what the caches themselves cost. DBCache runs its first blocks at reused steps as well.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.families.step import FamilyStep
from benchmarks.families_gpu import DTYPE, build_ours, build_theirs, free, steps_of
from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest
from diffusion_runtime.attention import AttentionContext, AttentionRecorder, RequestCache, StepInfo
from diffusion_runtime.denoising.flow_match_euler import FlowMatchEulerSampler
from diffusion_runtime.denoising.guidance import with_guidance
from diffusion_runtime.denoising.step_cache.requested import StepCache
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.parallel.groups import ProcessMesh

EXACT = "easycache:threshold=0,warmup=0"


def forced_caches(num_steps: int) -> list[dict[str, Any]]:
    """Request values; every second step of the last four fifths for the mask."""
    mask = [1 if index < num_steps // 5 or index % 2 else 0 for index in range(num_steps)]
    text = json.dumps(mask).replace(" ", "")
    return [
        {"step_cache": "easycache:threshold=10,warmup=0.5"},
        {"step_cache": "easycache:threshold=10,warmup=0.25"},
        {"step_cache": f"dbcache:F=1,W=0,mask={text},policy=static"},
        {"cfg_gate": 0.5},
    ]


@torch.inference_mode()
def denoise(
    model: DiffusionTransformer, step: FamilyStep, device: torch.device, num_steps: int, values: dict[str, Any]
) -> tuple[torch.Tensor, float, int, int]:
    """Latents, seconds, computed and all branch forwards."""
    latents, _, inputs = step.make_inputs(device, DTYPE).ours
    cache_of_request, recorder = RequestCache(), AttentionRecorder()
    cache = StepCache.of(GenerationRequest("-", **values), ProcessMesh(), recorder)
    num_forwards = 0

    def predict(x: torch.Tensor, info: StepInfo) -> torch.Tensor:
        nonlocal num_forwards
        num_forwards += 1
        timestep = torch.full(x.shape[:1], info.timestep or 0.0, device=device)
        context = AttentionContext(
            step=info, state=cache_of_request, recorder=recorder, block_runner=cache.block_runner
        )
        velocity: torch.Tensor = model(x.to(DTYPE), timestep, inputs, context)
        return velocity

    guided = with_guidance(predict, 5.0, "two_pass", wrappers=cache.wrappers)
    synchronize(device)
    started = time.perf_counter()
    made = FlowMatchEulerSampler(num_steps, 5.0).sample(latents, guided)
    synchronize(device)
    seconds = time.perf_counter() - started
    rows = recorder.report().steps
    return made, seconds, sum(row.num_computed for row in rows) or num_forwards, 2 * num_steps


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(step: FamilyStep, device: torch.device, num_steps: int) -> list[dict[str, Any]]:
    theirs = build_theirs(step, device)
    state = dict(theirs.state_dict())
    del theirs
    model = build_ours(step, None, state, device, takes=True)
    denoise(model, step, device, 2, {})
    full, full_seconds, _, _ = denoise(model, step, device, num_steps, {})
    exact, seconds, _, _ = denoise(model, step, device, num_steps, {"step_cache": EXACT})
    if not torch.equal(full, exact):
        raise ValueError(f"{step.name}: a threshold of 0 changes the latents")
    rows = [
        {"request": {}, "computed_share": 1.0, "time_ratio": 1.0, "seconds": full_seconds},
        {"request": {"step_cache": EXACT}, "computed_share": 1.0, "time_ratio": seconds / full_seconds},
    ]
    for values in forced_caches(num_steps):
        _, seconds, computed, total = denoise(model, step, device, num_steps, values)
        rows.append({"request": values, "computed_share": computed / total, "time_ratio": seconds / full_seconds})
        print(f"computed {computed / total:.3f}  time {seconds / full_seconds:.3f}  {values}", flush=True)
    return [{"step": step.name, **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="wan", help="a module of benchmarks/families")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sizes", type=int, default=1, help="how many of the family's sizes")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = []
    for step in steps_of(arguments.family)[: arguments.sizes]:
        rows += measure(step, device, arguments.steps)
        free()
    document = {
        "schema": "diffusion_runtime.step_cache_gpu/1",
        "machine": describe_machine(device),
        "num_steps": arguments.steps,
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
