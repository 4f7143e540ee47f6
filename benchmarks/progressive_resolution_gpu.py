"""Progressive resolution at a real size: seconds of a denoising loop beside the sum of its forward passes.

    python -m benchmarks.progressive_resolution_gpu --output benchmarks/results/progressive_resolution_gpu.json
    python -m benchmarks.progressive_resolution_gpu --device cpu --output /tmp/progressive.json   # a tiny transformer

Wan 2.1 1.3B with random weights, 81 frames of 480 x 832, one branch, Euler at shift 5, the spectrum of Wan 2.1's
autoencoder. First the plain loop at full size; then, for each delta, the steps by size, the seconds, and their
prediction: the number of steps at each size times the seconds of one forward pass of that size.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.families import wan
from benchmarks.families.step import FamilyStep
from benchmarks.families_gpu import DTYPE, build_ours, build_theirs
from benchmarks.machine import describe_machine
from diffusion_runtime.attention import AttentionContext, RequestCache, StepInfo
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.flow_match_euler import FlowMatchEulerSampler
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.denoising.progressive_resolution import growth_level, plan_stages, stage_samplers
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.request.progressive_options import LatentSpectrum

# Published for Wan 2.1's autoencoder (arXiv:2605.18736).
SPECTRUM = LatentSpectrum(219.484718, 2.422687)
DELTAS = (0.01, 0.05, 0.1)
SHIFT = 5.0
FULL = (16, 21, 60, 104)
TINY_STEP = dataclasses.replace(
    wan.STEPS[0],
    name="Wan, tiny",
    config={**wan.STEPS[0].config, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64},
)


class Loop:
    """The denoising of one step's inputs at several sizes. shape: of the latents, [channels, frames, height, width]."""

    def __init__(
        self, model: DiffusionTransformer, step: FamilyStep, device: torch.device, shape: tuple[int, ...]
    ) -> None:
        self.model, self.device, self.shape = model, device, shape
        self.inputs = step.make_inputs(device, DTYPE).ours[2]
        # What a loop computes once per request is not part of its forward passes.
        self.states: dict[int, RequestCache] = {}

    def predict(self, state: RequestCache) -> Callable[[torch.Tensor, StepInfo], torch.Tensor]:
        def predict(x: torch.Tensor, info: StepInfo) -> torch.Tensor:
            *_, frames, height, width = x.shape
            size = ClipSize(8 * height, 8 * width, 4 * (frames - 1) + 1, 16)
            timestep = torch.full(x.shape[:1], info.timestep or 0.0, device=self.device)
            context = AttentionContext(step=info, state=state)
            velocity: torch.Tensor = self.model(
                x.to(DTYPE), timestep, dataclasses.replace(self.inputs, size=size), context
            )
            return velocity

        return predict

    def seconds(self, run: Callable[[], torch.Tensor]) -> float:
        run()
        times = []
        for _ in range(3):
            self.synchronize()
            start = time.perf_counter()
            run()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return sorted(times)[1]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def plain(self, num_steps: int) -> torch.Tensor:
        noise = SampleNoise(self.shape, [0]).draw().to(self.device)
        return FlowMatchEulerSampler(num_steps, SHIFT).sample(noise, self.predict(RequestCache()))

    def staged(self, stages: Any, num_steps: int) -> torch.Tensor:
        channels, frames, height, width = self.shape
        first = stages[0].level
        draws = SampleNoise((channels, frames, height >> first, width >> first), [0])
        state = RequestCache()
        predicts = [self.predict(state) for _ in stages]
        sampler = FlowMatchEulerSampler(num_steps, SHIFT)
        latents = draws.draw().to(self.device)
        for stage, predict in zip(stage_samplers(sampler, stages), predicts, strict=True):
            latents = stage.run(stage.start(stage.grown(latents, draws.draw_of)), predict).latents
        return latents

    def forward(self, level: int) -> torch.Tensor:
        channels, frames, height, width = self.shape
        x = torch.randn(1, channels, frames, height >> level, width >> level, device=self.device)
        return self.predict(self.states.setdefault(level, RequestCache()))(x, StepInfo(0, 1, timestep=700.0))


@torch.inference_mode()
def measure(loop: Loop, num_steps: int) -> list[dict[str, Any]]:
    height, width = loop.shape[-2:]
    one = {level: loop.seconds(lambda level=level: loop.forward(level)) for level in (0, 1)}
    plain = loop.seconds(lambda: loop.plain(num_steps))
    rows: list[dict[str, Any]] = [
        {"delta": None, "steps_by_level": {0: num_steps}, "seconds": plain, "predicted_seconds": num_steps * one[0]}
    ]
    sigmas = [float(sigma) for sigma in FlowMatchEulerSampler(num_steps, SHIFT).scheduler(loop.device).sigmas[:-1]]
    for delta in DELTAS:
        stages = plan_stages(sigmas, [growth_level(SPECTRUM, delta, height // 2, width // 2)])
        made = loop.staged(stages, num_steps)
        if tuple(made.shape[1:]) != loop.shape or not made.isfinite().all():
            raise ValueError(f"delta {delta}: latents of {tuple(made.shape)}, or not finite")
        counts = {stage.level: stage.end - stage.first for stage in stages}
        rows.append(
            {
                "delta": delta,
                "steps_by_level": counts,
                "seconds": loop.seconds(lambda stages=stages: loop.staged(stages, num_steps)),
                "predicted_seconds": sum(count * one[level] for level, count in counts.items()),
            }
        )
    for row in rows:
        row |= {"speedup": plain / row["seconds"], "over_predicted": row["seconds"] / row["predicted_seconds"]}
        row["forward_seconds"] = one
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    is_cpu = device.type == "cpu"
    step, shape = (TINY_STEP, (16, 2, 16, 16)) if is_cpu else (wan.STEPS[0], FULL)
    state = dict(build_theirs(step, device).state_dict())
    model = build_ours(step, None, state, device, takes=True)
    rows = measure(Loop(model, step, device, shape), arguments.steps)
    document = {
        "schema": "diffusion_runtime.progressive_resolution_gpu/1",
        "machine": describe_machine(device),
        "step": step.name,
        "num_steps": arguments.steps,
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
