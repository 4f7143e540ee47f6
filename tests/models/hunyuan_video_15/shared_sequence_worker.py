"""Two real processes share the sequence of both HunyuanVideo transformers; test_shared_sequence.py runs it with a file
for what the first one measured.

45 grid tokens, which two processes do not divide, beside text of unequal lengths, which both hold.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from diffusion_runtime.attention import AttentionContext, AttentionPolicy
from diffusion_runtime.attention.roles import register_role
from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry
from diffusion_runtime.models.hunyuan_video.config import HunyuanVideoConfig
from diffusion_runtime.models.hunyuan_video.transformer import REFINER_ROLE, HunyuanVideoTransformer
from diffusion_runtime.models.hunyuan_video_15 import text_stream
from diffusion_runtime.models.hunyuan_video_15.config import HunyuanVideo15Config
from diffusion_runtime.models.hunyuan_video_15.transformer import HunyuanVideo15Transformer
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer, ImageCondition
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.text_encoders.interface import Conditions, TextStream

SIZE = ClipSize(24, 40, 9, 24)
WORLD = 2
PATIENCE = datetime.timedelta(seconds=600)


def first_version(policy: AttentionPolicy) -> tuple[DiffusionTransformer, torch.Tensor, DenoiserInputs]:
    config = HunyuanVideoConfig(
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        num_heads=2,
        head_dim=12,
        ffn_dim=32,
        num_channels=4,
        text_dim=8,
        pooled_dim=6,
        patch=(1, 2, 2),
        axis_channels=(4, 4, 4),
        theta=256.0,
        has_guidance=True,
    )
    model = HunyuanVideoTransformer(config, LatentGeometry(4, 4, 4, config.patch), policy)
    text = Conditions.of(torch.randn(2, 7, 8), (4, 7), pooled=torch.randn(2, 6))
    return model, torch.randn(2, 4, 3, 6, 10), DenoiserInputs(text, SIZE, guidance=6.0)


def version_15(policy: AttentionPolicy) -> tuple[DiffusionTransformer, torch.Tensor, DenoiserInputs]:
    config = HunyuanVideo15Config(
        num_layers=2,
        num_refiner_layers=1,
        num_heads=2,
        head_dim=12,
        ffn_dim=32,
        num_channels=4,
        text_dim=8,
        glyph_dim=6,
        image_dim=10,
        patch=(1, 1, 1),
        axis_channels=(4, 4, 4),
        theta=256.0,
        target_size=32,
        starts_from_image=True,
        takes_next_timestep=False,
    )
    model = HunyuanVideo15Transformer(config, LatentGeometry(4, 8, 4, config.patch), policy)
    text = Conditions.of(torch.randn(2, 7, 8), (4, 7), further=[TextStream(torch.randn(2, 5, 6), (5, 0))])
    image = ImageCondition(torch.randn(2, 4, 1, 3, 5), torch.randn(2, 3, 10))
    return model, torch.randn(2, 4, 3, 3, 5), DenoiserInputs(text, SIZE, image=image)


MODELS = {"hunyuan_video": first_version, "hunyuan_video_15": version_15}


@torch.no_grad()
def forward(name: str, mesh: ProcessMesh) -> torch.Tensor:
    torch.manual_seed(0)
    model, latents, inputs = MODELS[name](AttentionPolicy(environment=None, mesh=mesh))
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    velocity: torch.Tensor = model(
        latents, torch.tensor([900.0, 40.0]), inputs, AttentionContext(sharding=mesh.sharding)
    )
    return velocity


def work(rank: int, result: Path) -> None:
    """Everything one process does; the first one writes the largest differences, over the largest value."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{result}-store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=PATIENCE)
    measured = {}
    for way, (ulysses, ring) in {"ulysses": (WORLD, 1), "ring": (1, WORLD)}.items():
        mesh = ProcessMesh.create(ulysses_degree=ulysses, ring_degree=ring)
        for name in MODELS:
            together, alone = forward(name, mesh), forward(name, ProcessMesh())
            measured[f"{name}, {way}"] = float((together - alone).abs().max() / alone.abs().max())
    if rank == 0:
        result.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def main(result: Path) -> int:
    for role in (REFINER_ROLE, text_stream.REFINER_ROLE):
        register_role(role, "cross")
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(rank, result)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
