"""Compiled blocks on two processes; test_compiled_ranks.py runs it with a folder for results."""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from denoiser_inputs import text_inputs
from forked_ranks import fork_ranks
from parallel.model_cases import CONFIG
from sound_denoiser import sound_denoiser, sound_inputs

from diffusion_runtime.attention import AttentionContext, AttentionPolicy, RequestCache, StepInfo
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.denoising.guidance import with_guidance
from diffusion_runtime.layers.compiled_blocks import CompiledBlocks
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.parallel.branches import BranchExchange
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.tensor_parallel import TensorParallel, shared_pieces

WORLD = 2
# (ulysses, ring, branches, tensor). USP, of four processes, is the first two one inside the other, within the same
# operator.
MESHES = ((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2))
# Frames, height and width of the latents; text tokens; seed. The first two are a request, the others one each.
REQUESTS = ((3, 6, 10, 5, 1), (3, 6, 10, 5, 2), (3, 6, 10, 7, 3), (2, 4, 14, 5, 4))

Given = tuple[torch.Tensor, torch.Tensor, DenoiserInputs]


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


def video_inputs() -> list[Given]:
    made = []
    for frames, height, width, num_text, seed in REQUESTS:
        generator = torch.Generator().manual_seed(seed)
        latents = torch.randn(2, 4, frames, height, width, generator=generator)
        text = torch.randn(2, num_text, 8, generator=generator)
        made.append((latents, torch.tensor([900.0 - seed, 40.0]), text_inputs(text)))
    return made


def with_sound() -> list[Given]:
    latents, timestep, inputs = sound_inputs()
    return [(latents, timestep, inputs), (latents / 2, timestep / 2, inputs)]


BUILDERS: dict[str, tuple[Callable[[AttentionPolicy], Any], Callable[[], list[Given]]]] = {
    "wan": (wan, video_inputs),
    "sound": (sound_denoiser, with_sound),
}


def run_all(model: Any, mesh: ProcessMesh, given: list[Given], *, is_compiled: bool) -> list[torch.Tensor]:
    """One step of each request, with guidance."""
    results = []
    for index, (latents, timestep, inputs) in enumerate(given):
        context = AttentionContext(state=RequestCache(), sharding=mesh.sharding, is_compiled=is_compiled)

        def predict(x: torch.Tensor, step: StepInfo) -> torch.Tensor:
            shift = 0.0 if step.branch == "cond" else 30.0
            out: torch.Tensor = model(x, timestep + shift, inputs, dataclasses.replace(context, step=step))  # noqa: B023
            return out

        guided = with_guidance(predict, 4.0, "two_pass", branches=BranchExchange.of(mesh))
        results.append(guided(latents, StepInfo(index, len(given))))
    return results


def measure(meshes: dict[str, ProcessMesh], name: str) -> dict[str, Any]:
    """The largest difference to eager blocks on the same processes, and the graphs that were there after each run."""
    build, make = BUILDERS[name]
    blocks, errors, num_graphs = CompiledBlocks("eager"), {}, []
    for degrees, mesh in meshes.items():
        policy, given = AttentionPolicy(environment=None, mesh=mesh), make()
        with torch.inference_mode():
            expected = run_all(build(policy), mesh, given, is_compiled=False)
            model = build(policy)
            # The same compiled functions: a graph holds nothing of the processes.
            blocks.compile(model)
            found = run_all(model, mesh, given[:1], is_compiled=True)
            num_graphs.append(blocks.num_graphs)
            found += run_all(model, mesh, given[1:], is_compiled=True)
        num_graphs.append(blocks.num_graphs)
        differences = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]
        errors[degrees] = float(max(differences))
    return {"errors": errors, "graphs": num_graphs}


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    patience = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=patience)
    meshes = {
        str(degrees): ProcessMesh.create(
            ulysses_degree=degrees[0], ring_degree=degrees[1], branch_degree=degrees[2], tensor_degree=degrees[3]
        )
        for degrees in MESHES
    }
    of_sound = dict(list(meshes.items())[:1])
    measured = {"wan": measure(meshes, "wan"), "sound": measure(of_sound, "sound")}
    (folder / f"result-{rank}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    folder = Path(sys.argv[1])
    return fork_ranks(lambda rank: work(rank, folder), WORLD)


if __name__ == "__main__":
    sys.exit(main())
