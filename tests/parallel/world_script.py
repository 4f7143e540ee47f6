"""A script of a user's own, which torchrun starts: two pipelines in one world, then one on another device; and a tensor
that the first process has in another order in memory."""

from __future__ import annotations

import dataclasses
import os

import torch

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.config import ParallelConfig, RuntimeConfig
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.process_info import read_process_info
from diffusion_runtime.parallel.world import World

SIZES = {"height": 64, "width": 64, "num_frames": 1, "num_inference_steps": 2}
OF_CHUNKS = GenerationRequest(
    "a red circle", first_chunk_steps=2, prompt_switches=((5, "a blue star"),), **{**SIZES, "num_frames": 21}
)


def main() -> None:
    torch.set_num_threads(1)
    place = read_process_info()
    assert place is not None
    world = World.join(place, announce=lambda failure: print(failure.message, flush=True))
    frames, chunks = [], []
    for parallel in (ParallelConfig(ulysses_degree=2, cfg_parallel=False), ParallelConfig(cfg_parallel=True)):
        pipeline = load_pipeline(RuntimeConfig("shapes", device="cpu", parallel=parallel), world=world)
        frames.append(pipeline(GenerationRequest(prompt="a red circle", **SIZES)).frames.astype(int))
        notes = pipeline(GenerationRequest(prompt="a star", guidance_scale=1.0, **SIZES)).attention_report.notes
        assert any("leave out --cfg-parallel" in note for note in notes) == (parallel.cfg_parallel is True), notes
        # A new prompt is guided from keys that one of the two has.
        causal = load_pipeline(RuntimeConfig("shapes-causal", device="cpu", parallel=parallel), world=world)
        assert causal.resolve(OF_CHUNKS).guided_switch_chunks == 1
        chunks += [
            causal(dataclasses.replace(OF_CHUNKS, guided_switch_chunks=num)).frames.astype(int) for num in (1, 0)
        ]
    assert abs(chunks[0] - chunks[2]).max() <= 1
    assert abs(chunks[1] - chunks[3]).max() <= 1
    assert abs(chunks[0] - chunks[1]).max() > 8
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
