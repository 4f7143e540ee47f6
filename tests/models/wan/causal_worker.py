"""Processes that share a causal Wan transformer's sequence and key-value cache; test_causal_processes.py runs it.

Four processes cut the tokens in four, then in two pairs. Each compares with itself alone and writes the largest
difference, as a part of the largest value, and the bytes of its cache.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from denoiser_inputs import text_inputs
from forked_ranks import fork_ranks

from diffusion_runtime.attention import AttentionContext, AttentionPolicy
from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.cache.plan import plan_forward
from diffusion_runtime.attention.cache.quantised import Fp8Store
from diffusion_runtime.attention.cache.slots import FrameSlots
from diffusion_runtime.attention.cache.store import KeyStore, RingStore
from diffusion_runtime.attention.cache.window import FrameWindow
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.attention.layers import CACHED_KEYS
from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.models.geometry import LatentGeometry
from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.step_info import StepInfo

WORLD, CHANNELS, TEXT_DIM = 4, 4, 12
GEOMETRY = LatentGeometry(CHANNELS, 8, 4, (1, 2, 2))
# 2 x 3 tokens per frame, 3 frames per chunk: 18 tokens, which four processes do not divide.
PER_FRAME, CHUNK = 6, 3


def build(mesh: ProcessMesh) -> WanTransformer:
    config = WanTransformerConfig(2, 4, 12, 48, CHANNELS, TEXT_DIM, 16, (1, 2, 2), True, 1e-6, is_causal=True)
    return WanTransformer(config, GEOMETRY, AttentionPolicy(environment=None, mesh=mesh, num_head_groups=2))


def run(mesh: ProcessMesh, positions: str, kind: type[KeyStore] = RingStore) -> tuple[torch.Tensor, int]:
    """The velocities of four chunks, of the last one with two timesteps, and the bytes of the cache."""
    torch.manual_seed(0)
    model = build(mesh).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    latents = torch.randn(1, CHANNELS, 4 * CHUNK, 4, 6)
    inputs = text_inputs(torch.randn(1, 8, TEXT_DIM))
    slots, state, found = FrameSlots.of(FrameWindow(1, 7), None), RequestCache(), []
    for start in range(0, 4 * CHUNK, CHUNK):
        frames = range(start, start + CHUNK)
        for phase, time in (("denoise", 700.0), ("commit", 0.0)):
            step = StepInfo(timestep=time, phase=phase)  # type: ignore[arg-type]
            timestep = torch.tensor([time])
            if start == 3 * CHUNK:
                step = dataclasses.replace(step, frame_timesteps=(0.0, time, time))
                timestep = torch.tensor([step.frame_timesteps])
            cache = FrameCache(plan_forward(slots, frames, PER_FRAME, phase), positions, kind)
            context = AttentionContext(step=step, state=state, cache=cache)
            if mesh.sequence.size > 1:
                context = dataclasses.replace(context, sharding=mesh.sharding)
            found.append(model(latents[:, :, frames.start : frames.stop], timestep, inputs, context))
    stores = [store for store in state.find_all(CACHED_KEYS) if isinstance(store, kind)]
    return torch.cat(found), sum(store.num_bytes for store in stores)


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    patience = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=patience)
    measured = {}
    meshes = {
        degree: ProcessMesh.create(
            ulysses_degree=degree, ring_degree=1, branch_degree=WORLD // degree, ring_inside=False
        )
        for degree in (4, 2)
    }
    for positions, kind in (("absolute", RingStore), ("window", RingStore), ("window", Fp8Store)):
        alone, all_bytes = run(ProcessMesh(), positions, kind)
        for degree, mesh in meshes.items():
            together, own_bytes = run(mesh, positions, kind)
            error = float((together - alone).abs().max() / alone.abs().max())
            measured[f"{degree}, {positions}, {kind.__name__}"] = [error, own_bytes / all_bytes]
    try:
        build(ProcessMesh.create(ulysses_degree=2, ring_degree=2, branch_degree=1, ring_inside=False))
    except BackendUnavailableError as refused:
        measured["ring"] = str(refused)  # type: ignore[assignment]
    (folder / f"result-{rank}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    folder = Path(sys.argv[1])
    return fork_ranks(lambda rank: work(rank, folder), WORLD)


if __name__ == "__main__":
    sys.exit(main())
