"""One generation with a memory limit, or none; the peaks of the process before it loads and at its end, in bytes, and
which offloading the plan chose."""

from __future__ import annotations

import json
import sys

import torch

from diffusion_runtime import GenerationRequest, RuntimeConfig
from diffusion_runtime.loading import prepare
from diffusion_runtime.memory.machine_memory import peak_in_machine


def main(folder: str, limit: str) -> None:
    torch.set_num_threads(1)
    size = {"height": 32, "width": 32, "num_frames": 5}
    request = GenerationRequest("a star", num_inference_steps=2, seed=1, **size)
    config = RuntimeConfig(model_path=folder, device="cpu", dtype="float32", memory_limit=limit or None)
    prepared = prepare(config)
    resolved = prepared.rules.resolve(request)
    # Planned in both, as the plan imports more than a load without one.
    plan = prepared.planned_for([resolved]).description.memory
    assert plan is not None
    before = peak_in_machine()
    pipeline = prepared.load(None, [resolved])
    frames = pipeline(request).frames
    print(json.dumps([before, peak_in_machine(), plan.offload, int(frames.sum())]))


if __name__ == "__main__":
    main(*sys.argv[1:])
