"""Starts worlds of real processes; test_exchanges.py runs it with a folder for results and a number of GPUs.

With 0 GPUs processes exchange over gloo on the CPU, else over NCCL, in worlds of as many as there are.

One import serves all processes: each is a fork of this one, which on the CPU has computed what one process does alone.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel.exchange_cases import WORLDS, measure, write_strategy
from parallel.model_cases import compute_alone, measure_models

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.groups import ProcessMesh

# A process that waits longer than this for another one fails, and names what it waited for.
PATIENCE = datetime.timedelta(seconds=600)


def work(world: int, rank: int, folder: Path, is_cuda: bool) -> None:
    """Everything one process does; it writes what it measured."""
    device = f"cuda:{rank}" if is_cuda else "cpu"
    if is_cuda:
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    backend = "nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
    meshes: dict[tuple[int, int, bool], ProcessMesh] = {}
    measured: dict[str, Any] = {}
    for name, case in WORLDS[world].items():
        degrees = (case.ulysses, case.ring, case.ring_inside)
        if is_cuda and case.backend != "torch_sdpa":
            # Heads of 8 are for quick tests on a CPU, and smaller than what sparse kernels take.
            continue
        if degrees not in meshes:
            meshes[degrees] = ProcessMesh.create(
                ulysses_degree=case.ulysses,
                ring_degree=case.ring,
                branch_degree=world // (case.ulysses * case.ring),
                ring_inside=case.ring_inside,
            )
        measured[name] = measure(case, meshes[degrees], folder, device)
    result = {"measured": measured}
    if not is_cuda:
        # Two branches of two processes each share as a world of two does.
        whole = {degrees: mesh for degrees, mesh in meshes.items() if degrees[0] * degrees[1] == world}
        measured |= measure_models(whole)
        result["meshes"] = describe_meshes(world)
    (folder / f"result-{world}-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def describe_meshes(world: int) -> dict[str, object]:
    """Where this process is in meshes of several kinds, and what is said of degrees that do not fit."""
    found: dict[str, object] = {}
    if world == 4:
        for name, arguments in {
            "ulysses inside": {"ulysses_degree": 2, "ring_degree": 2},
            "ring inside": {"ulysses_degree": 2, "ring_degree": 2, "ring_inside": True},
            "branches": {"ulysses_degree": 2, "branch_degree": 2},
        }.items():
            found[name] = members(ProcessMesh.create(**arguments))
        for name, axes in {
            "device ulysses inside": ("ring", "ulysses"),
            "device ring inside": ("ulysses", "ring"),
        }.items():
            found[name] = members(
                ProcessMesh.from_device_mesh(dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=axes))
            )
    try:
        ProcessMesh.create(ulysses_degree=world + 1)
    except ConfigError as error:
        found["error"] = str(error)
    return found


def members(mesh: ProcessMesh) -> dict[str, object]:
    groups = {"ulysses": mesh.ulysses, "ring": mesh.ring, "sequence": mesh.sequence, "branch": mesh.branch}
    return {name: [list(group.members), group.index] for name, group in groups.items()}


def main() -> int:
    folder, num_gpus = Path(sys.argv[1]), int(sys.argv[2])
    write_strategy(folder)
    torch.set_num_threads(1)
    if not num_gpus:
        compute_alone()
    for world in WORLDS:
        if 0 < num_gpus < world:
            continue
        running = {}
        for rank in range(world):
            process = os.fork()
            if process == 0:
                try:
                    work(world, rank, folder, num_gpus > 0)
                    os._exit(0)
                except BaseException:
                    print(f"rank {rank} of {world}: {traceback.format_exc()}", file=sys.stderr, flush=True)
                    os._exit(1)
            running[process] = rank
        failed = False
        while running:
            process, status = os.wait()
            failed |= status != 0
            del running[process]
        if failed:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
