"""Denoising with step caches on 4 real processes; test_step_cache_ranks.py runs it with a folder for results.

Each process compares with what one computes alone: the latents after the last step, and which steps were computed.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from denoiser_inputs import text_inputs
from forked_ranks import fork_ranks

from diffusion_runtime import GenerationRequest
from diffusion_runtime.attention import AttentionContext, AttentionPolicy, AttentionRecorder, RequestCache, StepInfo
from diffusion_runtime.core.block_stack import BlockRunner, MakeModulatedInput, ModulatedInput, RunBlock, Streams
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.denoising.flow_match_euler import FlowMatchEulerSampler
from diffusion_runtime.denoising.guidance import with_guidance
from diffusion_runtime.denoising.step_cache.requested import StepCache
from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.parallel.branches import BranchExchange
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.request.step_cache_options import TeaCachePolynomial, TeaCachePolynomials

# (ulysses, ring, branch): both ways to share tokens, and tokens shared beside guidance branches.
WORLD = 4
MESHES = ((2, 2, 1), (2, 1, 2))
REQUESTS = {
    "easycache": GenerationRequest("-", step_cache="easycache:threshold=1.2,warmup=0.2"),
    "both": GenerationRequest("-", step_cache="easycache:threshold=1.2,warmup=0.2", cfg_gate=0.5),
    "dbcache": GenerationRequest("-", step_cache="dbcache:F=1,W=2,R=1,MC=2"),
    "teacache": GenerationRequest("-", step_cache="teacache:threshold=1.2"),
    "teacache of tokens": GenerationRequest("-", step_cache="teacache:threshold=0.2"),
}
POLYNOMIALS = TeaCachePolynomials("a model", "a source", TeaCachePolynomial((0.0, 0.0, 0.0, 1.0, 0.0), None))
NUM_STEPS = 8
PATCH = (1, 2, 2)
CONFIG = WanTransformerConfig(2, 4, 12, 64, 4, 8, 16, PATCH, norm_cross=True, eps=1e-6, has_gate=False)


class OfTokens(BlockRunner):
    """Compares this process's tokens instead of Wan's timestep, as other families do; padding is not zero."""

    def __init__(self, inner: BlockRunner) -> None:
        self._inner = inner

    def run(
        self,
        blocks: Sequence[RunBlock],
        streams: Streams,
        step: StepInfo,
        num_grid_tokens: int,
        _modulated_input: MakeModulatedInput | None = None,
    ) -> Streams:
        return self._inner.run(blocks, streams, step, num_grid_tokens, lambda: ModulatedInput(streams[0] + 1))


def denoise(request: GenerationRequest, mesh: ProcessMesh, name: str) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Latents after the last step, and the report's rows of steps."""
    torch.manual_seed(0)
    policy = AttentionPolicy(environment=None, mesh=mesh)
    model = WanTransformer(CONFIG, LatentGeometry(4, 8, 4, PATCH), policy).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, 4, 3, 6, 6, generator=generator)
    inputs = {branch: text_inputs(torch.randn(1, 5, 8, generator=generator)) for branch in ("cond", "uncond")}
    state, recorder = RequestCache(), AttentionRecorder()

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        assert step.timestep is not None
        timestep = torch.full((1,), step.timestep)
        context = AttentionContext(
            step=step, state=state, recorder=recorder, sharding=mesh.sharding, block_runner=runner
        )
        velocity: torch.Tensor = model(latents, timestep, inputs[step.branch], context)
        return velocity

    cache = StepCache.of(request, mesh, recorder, published=POLYNOMIALS)
    runner = OfTokens(cache.block_runner) if name == "teacache of tokens" else cache.block_runner
    guided = with_guidance(predict, 3.0, "two_pass", branches=BranchExchange.of(mesh), wrappers=cache.wrappers)
    latents = FlowMatchEulerSampler(NUM_STEPS, 3.0).sample(noise, guided)
    cache.finish(latents.device)
    return latents, recorder.report().to_dict()["steps"]


def work(rank: int, folder: Path, singles: dict[str, tuple[torch.Tensor, list[dict[str, Any]]]]) -> None:
    store = dist.FileStore(str(folder / "store"), WORLD)
    patience = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=patience)
    measured = []
    for degrees in MESHES:
        mesh = ProcessMesh.create(ulysses_degree=degrees[0], ring_degree=degrees[1], branch_degree=degrees[2])
        for name, request in REQUESTS.items():
            (together, steps), (alone, steps_alone) = denoise(request, mesh, name), singles[name]
            error = float((together - alone).abs().max() / alone.abs().max())
            row = {"mesh": degrees, "cache": name, "error": error, "steps": steps, "steps_alone": steps_alone}
            measured.append(row)
    (folder / f"result-{rank}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    singles = {name: denoise(request, ProcessMesh(), name) for name, request in REQUESTS.items()}
    return fork_ranks(lambda rank: work(rank, folder, singles), WORLD)


if __name__ == "__main__":
    sys.exit(main())
