"""CUDA graphs on two processes over gloo, where recorded operators stand for a graph; test_graphs_of_ranks.py runs it
with a folder for results. On GPUs: test_graphs_of_ranks_gpu.py."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from denoiser_inputs import text_inputs
from forked_ranks import fork_ranks
from parallel.model_cases import CONFIG
from recorded_capture import RecordedCapture

from diffusion_runtime.attention import AttentionContext, AttentionPolicy, RequestCache, StepInfo
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.denoising.cuda_graphs.captured_forward import ForwardPass
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.denoising.guidance import with_guidance
from diffusion_runtime.loading.cuda_graphs import UNTRIED_EXCHANGES
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.parallel.branches import BranchExchange
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.tensor_parallel import TensorParallel, shared_pieces

WORLD, NUM_STEPS = 2, 6
NCCL = mock.patch.object(RankGroup, "backend", "nccl")


def wan(policy: AttentionPolicy) -> WanTransformer:
    """With this process's part of the weights, where the policy's mesh shares them."""
    torch.manual_seed(0)
    model = WanTransformer(CONFIG, LatentGeometry(4, 8, 4, (1, 2, 2)), policy).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    TensorParallel.of("wan", policy.mesh.tensor).apply(model)
    pieces = shared_pieces(model, {name: (Piece(name, tuple(tensor.shape)),) for name, tensor in whole.items()})
    model.load_state_dict({name: piece.part.of(whole[name]) for name, (piece,) in pieces.items()})
    return model.requires_grad_(False)


class FailingCapture(RecordedCapture):
    """It fails at the end: recording exchanges tokens, which a capture by CUDA does not."""

    def capture(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        super().capture(run)
        raise RuntimeError("no more memory")


class Requests:
    """Requests of one model on a mesh. share: host time over device time on this process."""

    def __init__(self, mesh: ProcessMesh, share: float = 1.0) -> None:
        self.mesh = mesh
        self.model: DiffusionTransformer = wan(AttentionPolicy(environment=None, mesh=mesh))
        self.capture = RecordedCapture(share)
        self.graphs = ForwardGraphs(self.capture)

    @torch.inference_mode()
    def run(self, seed: int, *, with_graphs: bool = True) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The velocities of each step, and what was replayed."""
        generator = torch.Generator().manual_seed(seed)
        inputs = {branch: text_inputs(torch.randn(1, 5, 8, generator=generator)) for branch in ("cond", "uncond")}
        latents = torch.randn(1, 4, 3, 6, 10, generator=generator)
        state, recorder = RequestCache(), AttentionRecorder()
        forward = self.graphs.of_generation(self.model, recorder, read=self.model.read_inputs, group=self.mesh.forward)

        def predict(x: torch.Tensor, step: StepInfo) -> torch.Tensor:
            context = AttentionContext(step=step, state=state, recorder=recorder, sharding=self.mesh.sharding)
            given = ForwardPass(x, torch.tensor([step.timestep]), inputs[step.branch], context)
            return forward(given) if with_graphs else given.run(self.model)

        guided = with_guidance(predict, 3.0, "two_pass", branches=BranchExchange.of(self.mesh))
        made = []
        for index in range(NUM_STEPS):
            made.append(guided(latents, StepInfo(index, NUM_STEPS, timestep=1000.0 - 100 * index)))
            latents = latents - 0.1 * made[-1]
        forward.report()
        graphs = recorder.report().graphs
        return made, {"replayed": graphs.num_replayed, "eager": graphs.eager} if graphs is not None else {}

    def check(self, seed: int) -> dict[str, Any]:
        """What was replayed of a request whose velocities are those of an eager run, to the bit."""
        found, report = self.run(seed)
        expected, _ = self.run(seed, with_graphs=False)
        report["equal"] = all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        return {**report, "calls": list(self.capture.calls)}


def measure(rank: int, meshes: dict[str, ProcessMesh]) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    with NCCL:
        auto = Requests(meshes["tensor"])
        auto.graphs.shared_refusal = UNTRIED_EXCHANGES
        measured["auto"] = auto.check(1)
        for name, mesh in meshes.items():
            requests = Requests(mesh)
            measured[name] = [requests.check(1), requests.check(2)]
        ulysses = meshes["ulysses"]
        # Rank 1 launches in a tenth of the time; and both do.
        measured["one launch-bound"] = Requests(ulysses, 0.1 if rank else 1.0).check(1)
        measured["none launch-bound"] = Requests(ulysses, 0.1 * (rank + 1)).check(1)
        failing = Requests(ulysses)
        if rank:
            failing.capture = failing.graphs.capture = FailingCapture()
        measured["one fails"] = failing.check(1)
        moving = Requests(ulysses)
        moving.run(1)
        if rank:
            weight = next(moving.model.parameters())
            weight.data = weight.data.clone()
        measured["one moves"] = moving.check(2)
    measured["gloo"] = Requests(ulysses).check(1)
    return measured


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    patience = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=patience)
    meshes = {
        "ulysses": ProcessMesh.create(ulysses_degree=2),
        "ring": ProcessMesh.create(ring_degree=2),
        "branches": ProcessMesh.create(branch_degree=2),
        "tensor": ProcessMesh.create(tensor_degree=2),
    }
    (folder / f"result-{rank}.json").write_text(json.dumps(measure(rank, meshes)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    folder = Path(sys.argv[1])
    return fork_ranks(lambda rank: work(rank, folder), WORLD)


if __name__ == "__main__":
    sys.exit(main())
