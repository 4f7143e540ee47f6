"""Switches LoRA files on processes that run a model together; test_lora.py compares it with one process.

Arguments: the model's folder, a LoRA file, the folder that rank 0 writes its frames to.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy
import torch

from diffusion_runtime import GenerationRequest, follow, join_processes, lead, load_pipeline
from diffusion_runtime.config import ParallelConfig, RuntimeConfig
from diffusion_runtime.errors import ModelLoadError

SHARED = ParallelConfig(cfg_parallel=False)
REQUEST = GenerationRequest(
    "a ring", height=32, width=64, num_frames=5, num_inference_steps=2, guidance_scale=1.0, sampler="dmd", seed=3
)


def main(model: str, lora: str, folder: str) -> None:
    torch.set_num_threads(1)
    with join_processes() as world:
        pipeline = load_pipeline(RuntimeConfig(model, device="cpu", parallel=SHARED), world=world)
        for name, loras in (("with", [(lora, 0.5)]), ("bad", [f"{lora}.missing"])):
            try:
                pipeline.set_loras(loras)
            except ModelLoadError:
                os.write(1, f"rank {world.place.rank}: refused {name}\n".encode())
            frames = pipeline(REQUEST).frames
            if world.is_first:
                numpy.save(Path(folder, f"{name}.npy"), frames)
        if world.is_first:
            with lead(pipeline, world) as leading:
                leading.set_loras([])
                numpy.save(Path(folder, "without.npy"), leading(REQUEST).frames)
        else:
            follow(pipeline, world)
        if "differ" in Path(folder).name:
            pipeline.set_loras([(lora, 0.1 * world.place.rank)])
            os.write(1, b"went on")


if __name__ == "__main__":
    main(*sys.argv[1:4])
