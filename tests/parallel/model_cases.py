"""Whole transformers over a shared sequence: 45 tokens, or 21 and sound, which 2 and 4 processes do not divide."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from denoiser_inputs import text_inputs
from sound_denoiser import sound_denoiser, sound_inputs
from staged_sampling import sample_in_stages

from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy, RequestCache, token_order
from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.cache.plan import plan_forward
from diffusion_runtime.attention.cache.slots import FrameSlots
from diffusion_runtime.attention.cache.store import RingStore
from diffusion_runtime.attention.cache.window import FrameWindow
from diffusion_runtime.attention.cached_calls import CACHED_KEYS
from diffusion_runtime.attention.roles import register_role
from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.core.token_layout import RASTER
from diffusion_runtime.denoising.flow_match_euler import FlowMatchEulerSampler
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.denoising.progressive_resolution import plan_stages
from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.qwen_image.config import QwenImageTransformerConfig
from diffusion_runtime.models.qwen_image.transformer import QwenImageTransformer
from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.cross_attention import IMAGE_ROLE
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.text_encoders.interface import Conditions

PATCH = (1, 2, 2)
CONFIG = WanTransformerConfig(
    num_layers=2,
    num_heads=4,
    head_dim=12,
    ffn_dim=64,
    num_channels=4,
    text_dim=8,
    num_waves=16,
    patch=PATCH,
    norm_cross=True,
    eps=1e-6,
    has_gate=True,
)
VSA = {"backend": "video_sparse_attn", "extra": {"sparsity": 0.5}}


def measure_models(meshes: dict[tuple[int, int, bool], ProcessMesh]) -> dict[str, dict[str, float]]:
    """By mesh and attention: the largest difference to one process alone, over the largest value."""
    measured = {}
    for degrees, mesh in meshes.items():
        for name in ("dense", "VSA"):
            if name == "VSA" and mesh.ring.size > 1 and mesh.ulysses.size == 1:
                continue
            for start in ("text", "image", "image tokens"):
                together = _forward(name, start, mesh)
                # Together the tokens are cut in the order of VSA's tiles, and alone they are in raster order.
                with mock.patch.object(token_order, "shared_tile", return_value=RASTER):
                    alone = _alone(_forward, name, start)
                error = float((together - alone).abs().max() / alone.abs().max())
                measured[f"model, {degrees}, {name}, from {start}"] = {"error": error, "text_apart": 0.0}
        (together, from_formula), (alone, _) = _few_steps(mesh), _alone(_few_steps)
        error = float((together - alone).abs().max() / alone.abs().max())
        measured[f"model, {degrees}, dmd"] = {"error": error, "text_apart": 0.0, "from_formula": from_formula}
        together, alone = _growing(mesh), _alone(_growing)
        error = float((together - alone).abs().max() / alone.abs().max())
        measured[f"model, {degrees}, progressive resolution"] = {"error": error, "text_apart": 0.0}
        together, alone = _forward_with_sound(mesh), _alone(_forward_with_sound)
        error = float((together - alone).abs().max() / alone.abs().max())
        measured[f"model, {degrees}, with sound"] = {"error": error, "text_apart": 0.0}
        together, alone = _forward_with_references(mesh), _alone(_forward_with_references)
        error = float((together - alone).abs().max() / alone.abs().max())
        measured[f"model, {degrees}, with references"] = {"error": error, "text_apart": 0.0}
        if mesh.ring.size > 1:
            with pytest.raises(BackendUnavailableError, match=r"ring attention moves keys .* share by ulysses_degree"):
                _chunks("absolute", mesh)
            continue
        for positions in ("absolute", "window"):
            (together, own_bytes), (alone, all_bytes) = _chunks(positions, mesh), _alone(_chunks, positions)
            error = float((together - alone).abs().max() / alone.abs().max())
            # Each process keeps the heads that it computes: of 4 on 3 processes, one of them 2.
            num_heads = [len(heads) for heads in numpy.array_split(range(4), mesh.ulysses.size)][mesh.ulysses.index]
            assert own_bytes * 4 == all_bytes * num_heads
            measured[f"model, {degrees}, causal, {positions}"] = {"error": error, "text_apart": 0.0}
    return measured


def compute_alone() -> None:
    """What one process computes, once for all that are forked afterwards."""
    for name in ("dense", "VSA"):
        for start in ("text", "image", "image tokens"):
            with mock.patch.object(token_order, "shared_tile", return_value=RASTER):
                _alone(_forward, name, start)
    for compute in (_few_steps, _growing, _forward_with_sound, _forward_with_references):
        _alone(compute)
    for positions in ("absolute", "window"):
        _alone(_chunks, positions)


@functools.cache
def _alone(compute: Callable[..., Any], *arguments: str) -> Any:
    """What one process computes is the same beside every mesh."""
    return compute(*arguments, ProcessMesh())


def _forward_with_sound(mesh: ProcessMesh) -> torch.Tensor:
    model = sound_denoiser(AttentionPolicy(environment=None, mesh=mesh))
    return model(*sound_inputs(), AttentionContext(sharding=mesh.sharding))


def _forward_with_references(mesh: ProcessMesh) -> torch.Tensor:
    """15 tokens of a grid, those of two images of other sizes, and texts of unequal lengths."""
    torch.manual_seed(0)
    sizes = {"num_channels": 4, "text_dim": 8, "axes": (4, 4, 4), "num_waves": 16}
    config = QwenImageTransformerConfig(2, 4, 12, **sizes, references_at_zero=False)
    policy = AttentionPolicy(environment=None, mesh=mesh)
    model = QwenImageTransformer(config, LatentGeometry(4, 8, 1, PATCH), policy).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    generator = torch.Generator().manual_seed(1)
    latents, one, other = (torch.randn(2, 4, 1, *size, generator=generator) for size in ((6, 10), (4, 4), (8, 6)))
    text = Conditions.of(torch.randn(2, 5, 8, generator=generator), (5, 2))
    inputs = DenoiserInputs(text, ClipSize(48, 80, 1, 1), image=ImageCondition(one, further=(other,)))
    return model(latents, torch.tensor([900.0, 40.0]), inputs, AttentionContext(sharding=mesh.sharding))


def _chunks(positions: str, mesh: ProcessMesh) -> tuple[torch.Tensor, int]:
    """The velocities of three chunks with a key-value cache, of the last one at two timesteps, and its bytes. 45 tokens
    per chunk; heads are exchanged in two groups, and each has keys of its own."""
    policy = AttentionPolicy(environment=None, mesh=mesh, num_head_groups=2)
    model = _model(policy, dataclasses.replace(CONFIG, is_causal=True, has_gate=False))
    generator = torch.Generator().manual_seed(1)
    inputs = text_inputs(torch.randn(1, 5, 8, generator=generator))
    slots, state, found = FrameSlots.of(FrameWindow(1, 7), None), RequestCache(), []
    for start in (0, 3, 6):
        latents = torch.randn(1, 4, 3, 6, 10, generator=generator)
        for time in (700.0, 0.0):
            step, timestep = StepInfo(timestep=time), torch.tensor([time])
            if start == 6:
                step = dataclasses.replace(step, frame_timesteps=(0.0, time, time))
                timestep = torch.tensor([step.frame_timesteps])
            cache = FrameCache(plan_forward(slots, range(start, start + 3), 15), positions)
            context = AttentionContext(step=step, state=state, sharding=mesh.sharding, cache=cache)
            found.append(model(latents, timestep, inputs, context))
    stores = [store for store in state.find_all(CACHED_KEYS) if isinstance(store, RingStore)]
    return torch.cat(found), sum(store.num_bytes for store in stores)


def _few_steps(mesh: ProcessMesh) -> tuple[torch.Tensor, float]:
    """Latents of three steps that add fresh noise, and how far they are from the formula in float64, given the
    velocities."""
    levels, velocities = (1.0, 0.757, 0.522), []
    model = _model(AttentionPolicy(environment=None, mesh=mesh))
    inputs = text_inputs(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)))

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        timestep = torch.full((2,), step.timestep or 0.0)
        context = AttentionContext(step=step, sharding=mesh.sharding)
        velocities.append(model(latents, timestep, inputs, context))
        return velocities[-1]

    noise, again = (SampleNoise((4, 3, 6, 10), (5, 6)) for _ in range(2))
    result = build_sampler("dmd", 3, 1.0, {}, levels).sample(noise.draw(), predict, draw_noise=noise.draw)
    x = again.draw().double()
    for index, sigma in enumerate(levels):
        x = x - sigma * velocities[index].double()
        if index < 2:
            x = (1 - levels[index + 1]) * x + levels[index + 1] * again.draw().double()
    return result, float((result.double() - x).abs().max())


def _growing(mesh: ProcessMesh) -> torch.Tensor:
    """Latents after two steps at half the height and width and two at the whole, with one cache of the request."""
    model, state = _model(AttentionPolicy(environment=None, mesh=mesh)), RequestCache()
    inputs = text_inputs(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)))

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        timestep = torch.full((2,), step.timestep or 0.0)
        context = AttentionContext(step=step, state=state, sharding=mesh.sharding)
        velocity: torch.Tensor = model(latents, timestep, inputs, context)
        return velocity

    sampler, noise = FlowMatchEulerSampler(4, 3.0), SampleNoise((4, 3, 6, 10), (5, 6))
    stages = plan_stages(sampler.scheduler(torch.device("cpu")).sigmas[:4].tolist(), (0.8,))
    assert [stage.end for stage in stages] == [2, 4]
    return sample_in_stages(sampler, stages, noise.draw(), [predict, predict], noise.draw_of)


def _model(policy: AttentionPolicy, config: WanTransformerConfig = CONFIG) -> WanTransformer:
    torch.manual_seed(0)
    model = WanTransformer(config, LatentGeometry(4, 8, 4, PATCH), policy).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def _forward(attention: str, start: str, mesh: ProcessMesh) -> torch.Tensor:
    """attention: dense or VSA. start: text; an image that is the first frame; or one beside the latents, with tokens
    that are whole on every process."""
    config = AttentionConfig.parse({"per_role": {"self": VSA}} if attention == "VSA" else None)
    register_role(IMAGE_ROLE, "cross")
    sizes = dataclasses.replace(CONFIG, condition_channels=6, image_dim=10) if start == "image tokens" else CONFIG
    model = _model(AttentionPolicy(config=config, environment=None, mesh=mesh), sizes)
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 4, 3, 6, 10, generator=generator)
    text = torch.randn(2, 5, 8, generator=generator)
    inputs = text_inputs(text)
    if start == "image":
        image = ImageCondition(torch.randn(2, 4, 1, 6, 10, generator=generator))
        inputs = DenoiserInputs(inputs.text, inputs.size, image=image)
    if start == "image tokens":
        tokens = torch.randn(2, 3, 10, generator=generator)
        image = ImageCondition(torch.randn(2, 6, 3, 6, 10, generator=generator), tokens)
        inputs = DenoiserInputs(inputs.text, inputs.size, image=image)
    timestep = torch.tensor([900.0, 40.0])
    return model(latents, timestep, inputs, AttentionContext(sharding=mesh.sharding))
