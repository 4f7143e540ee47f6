"""A script of a user's own, which torchrun starts: two pipelines in one world, then one on another device; and a tensor
that the first process has in another order in memory."""

from __future__ import annotations

import os

import torch

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.config import ParallelConfig, RuntimeConfig
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.process_info import read_process_info
from diffusion_runtime.parallel.world import World

SIZES = {"height": 64, "width": 64, "num_frames": 1, "num_inference_steps": 2}


def main() -> None:
    torch.set_num_threads(1)
    place = read_process_info()
    assert place is not None
    world = World.join(place, announce=lambda failure: print(failure.message, flush=True))
    frames = []
    for parallel in (ParallelConfig(ulysses_degree=2, cfg_parallel=False), ParallelConfig(cfg_parallel=True)):
        pipeline = load_pipeline(RuntimeConfig("shapes", device="cpu", parallel=parallel), world=world)
        frames.append(pipeline(GenerationRequest(prompt="a red circle", **SIZES)).frames.astype(int))
        notes = pipeline(GenerationRequest(prompt="a star", guidance_scale=1.0, **SIZES)).attention_report.notes
        assert any("leave out --cfg-parallel" in note for note in notes) == (parallel.cfg_parallel is True), notes
    turned = torch.arange(6.0).view(2, 3).t()
    received = world.broadcast(turned if world.is_first else torch.empty(3, 2))
    assert torch.equal(received, turned), received
    try:
        world.open_groups(torch.device("cuda", 0), 40.0)
    except ConfigError as error:
        line = f"rank {world.place.rank}: {abs(frames[0] - frames[1]).max()}; {error}\n"
        # In one piece: `print` without a buffer writes the line's end apart, and the other process's line between.
        os.write(1, line.encode())
    world.agree(None)
    world.leave()


if __name__ == "__main__":
    main()
