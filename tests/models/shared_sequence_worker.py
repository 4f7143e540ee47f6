"""Two processes that share the sequence of whole transformers; test_shared_sequence.py runs it with a file for results.

Each process compares with what one computes alone and writes the largest difference, as a part of the largest value.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import fork_ranks

from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy
from diffusion_runtime.attention.normalized_guidance import NormalizedGuidance
from diffusion_runtime.attention.roles import register_role
from diffusion_runtime.core.latent_geometry import ClipSize, ImageGeometry, LatentGeometry
from diffusion_runtime.models.anima import conditioner as anima_roles
from diffusion_runtime.models.anima.conditioner import ConditionerConfig
from diffusion_runtime.models.anima.config import AnimaTransformerConfig
from diffusion_runtime.models.anima.transformer import AnimaTransformer
from diffusion_runtime.models.flux1.config import Flux1TransformerConfig
from diffusion_runtime.models.flux1.transformer import Flux1Transformer
from diffusion_runtime.models.flux2.config import Flux2TransformerConfig
from diffusion_runtime.models.flux2.transformer import Flux2Transformer
from diffusion_runtime.models.flux3.config import Flux3TransformerConfig
from diffusion_runtime.models.flux3.transformer import REFERENCE_ROLE, Flux3Transformer
from diffusion_runtime.models.flux3.transformer import TEXT_ROLE as FLUX3_TEXT_ROLE
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer, GivenMedia, ImageCondition
from diffusion_runtime.models.krea2.config import Krea2TransformerConfig
from diffusion_runtime.models.krea2.transformer import LAYERS_ROLE, REFINER_ROLE, Krea2Transformer
from diffusion_runtime.models.minimax_h3.config import MiniMaxH3Config
from diffusion_runtime.models.minimax_h3.geometry import MiniMaxH3Geometry
from diffusion_runtime.models.minimax_h3.transformer import TEXT_ROLE as H3_TEXT_ROLE
from diffusion_runtime.models.minimax_h3.transformer import MiniMaxH3Transformer
from diffusion_runtime.models.moss_image.config import MossImageConfig
from diffusion_runtime.models.moss_image.transformer import TEXT_ROLE as MOSS_TEXT_ROLE
from diffusion_runtime.models.moss_image.transformer import MossImageTransformer
from diffusion_runtime.models.qwen_image.config import QwenImageTransformerConfig
from diffusion_runtime.models.qwen_image.transformer import QwenImageTransformer
from diffusion_runtime.models.qwen_image_21.config import QwenImage21TransformerConfig
from diffusion_runtime.models.qwen_image_21.transformer import QwenImage21Transformer
from diffusion_runtime.models.scail_2.config import Scail2Config
from diffusion_runtime.models.scail_2.transformer import Scail2Transformer
from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.cross_attention import IMAGE_ROLE
from diffusion_runtime.models.wan.vace import CONTROL_SELF_ROLE, CONTROL_TEXT_ROLE, WanVaceTransformer
from diffusion_runtime.models.wan_animate_2.config import WanAnimate2Config
from diffusion_runtime.models.wan_animate_2.transformer import REFERENCE_ROLE as DRIVING_ROLE
from diffusion_runtime.models.wan_animate_2.transformer import WanAnimate2Transformer
from diffusion_runtime.models.z_image.config import ZImageTransformerConfig
from diffusion_runtime.models.z_image.transformer import TEXT_ROLE, ZImageTransformer
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.text_encoders.interface import Conditions, TextStream

WORLD = 2
CHANNELS, TEXT_DIM, POOLED_DIM = 4, 12, 6
# 3 x 5 tokens, which two processes do not divide, and text of which one prompt has less.
LATENTS = (2, CHANNELS, 1, 6, 10)
LENGTHS = (3, 7)
GEOMETRY = ImageGeometry(CHANNELS, 8, 1, (1, 2, 2))
SIZE = ClipSize(48, 80, 1, 1)


def flux1(policy: AttentionPolicy) -> DiffusionTransformer:
    config = Flux1TransformerConfig(2, 2, 4, 12, CHANNELS, TEXT_DIM, POOLED_DIM, True, (4, 4, 4))
    return Flux1Transformer(config, GEOMETRY, policy)


def qwen_image(policy: AttentionPolicy) -> DiffusionTransformer:
    config = QwenImageTransformerConfig(3, 4, 12, CHANNELS, TEXT_DIM, (4, 4, 4), references_at_zero=False)
    return QwenImageTransformer(config, GEOMETRY, policy)


def qwen_image_21(policy: AttentionPolicy) -> DiffusionTransformer:
    config = QwenImage21TransformerConfig(3, 4, 12, CHANNELS, TEXT_DIM, 3, (4, 4, 4), eps=1e-6)
    return QwenImage21Transformer(config, ImageGeometry(CHANNELS, 16, 1, (1, 1, 1)), policy)


def flux2(policy: AttentionPolicy) -> DiffusionTransformer:
    config = Flux2TransformerConfig(2, 2, 4, 12, CHANNELS, TEXT_DIM, 96, True, (2, 4, 4, 2), 2000.0, 256, 1e-6)
    return Flux2Transformer(config, ImageGeometry(CHANNELS, 16, 1, (1, 1, 1)), policy)


def flux2_cached(policy: AttentionPolicy) -> DiffusionTransformer:
    sizes = (2, 2, 4, 12, CHANNELS, TEXT_DIM, 96, False, (2, 4, 4, 2), 2000.0, 256, 1e-6)
    config = Flux2TransformerConfig(*sizes, caches_references=True)
    return Flux2Transformer(config, ImageGeometry(CHANNELS, 16, 1, (1, 1, 1)), policy)


def flux3(policy: AttentionPolicy) -> DiffusionTransformer:
    for role in (FLUX3_TEXT_ROLE, REFERENCE_ROLE):
        register_role(role, "cross")
    sizes = (2, 2, 4, 12, CHANNELS, TEXT_DIM, 96, False, (2, 4, 4, 2), 10000.0, 256, 1e-6)
    config = Flux3TransformerConfig(*sizes, caches_references=False, is_flow_map=False)
    return Flux3Transformer(config, ImageGeometry(CHANNELS, 16, 1, (1, 1, 1)), policy)


def z_image(policy: AttentionPolicy) -> DiffusionTransformer:
    register_role(TEXT_ROLE, "cross")
    config = ZImageTransformerConfig(2, 1, 4, 48, CHANNELS, TEXT_DIM, (4, 4, 4), theta=256.0, eps=1e-5)
    return ZImageTransformer(config, GEOMETRY, policy)


def krea2(policy: AttentionPolicy) -> DiffusionTransformer:
    """Four heads of queries and two of keys; as many of the language model's layers are six numbers wide."""
    for role in (LAYERS_ROLE, REFINER_ROLE):
        register_role(role, "cross")
    widths = (4, 2, 12, 96, 2, 1, 6, 8)
    sizes = {"num_layers": 2, "num_text_layers": TEXT_DIM // 6, "num_layer_blocks": 1, "num_refiner_blocks": 1}
    config = Krea2TransformerConfig(
        *widths, **sizes, patch_channels=4 * CHANNELS, axes=(4, 4, 4), theta=1000.0, num_waves=8, eps=1e-5
    )
    return Krea2Transformer(config, GEOMETRY, policy)


def anima(policy: AttentionPolicy) -> DiffusionTransformer:
    for role in (anima_roles.SELF_ROLE, anima_roles.STATES_ROLE):
        register_role(role, "cross")
    conditioner = ConditionerConfig(TEXT_DIM, 8, 12, 2, 1, 16, 300, min_tokens=9)
    config = AnimaTransformerConfig(2, 4, 12, 96, CHANNELS, True, 12, 8, (1e4, 4e4, 3e4), conditioner)
    return AnimaTransformer(config, GEOMETRY, policy)


def moss_image(policy: AttentionPolicy) -> DiffusionTransformer:
    """Four heads, with a multiple of 8 channels each."""
    register_role(MOSS_TEXT_ROLE, "cross")
    config = MossImageConfig(2, 4, 64, 96, TEXT_DIM, CHANNELS, 8, 10000.0)
    return MossImageTransformer(config, ImageGeometry(CHANNELS, 16, 1, (1, 1, 1)), policy)


def wan_vace(policy: AttentionPolicy) -> DiffusionTransformer:
    register_role(CONTROL_SELF_ROLE, "self")
    register_role(CONTROL_TEXT_ROLE, "cross")
    config = WanTransformerConfig(2, 4, 12, 48, CHANNELS, TEXT_DIM, 16, (1, 2, 2), True, 1e-6)
    config = dataclasses.replace(config, control_layers=(0,), control_channels=CHANNELS)
    return WanVaceTransformer(config, LatentGeometry(CHANNELS, 8, 4, (1, 2, 2)), policy)


def flux1_fill(policy: AttentionPolicy) -> DiffusionTransformer:
    sizes = (2, 2, 4, 12, CHANNELS, TEXT_DIM, POOLED_DIM, True, (4, 4, 4))
    return Flux1Transformer(Flux1TransformerConfig(*sizes, condition_channels=CHANNELS), GEOMETRY, policy)


def qwen_image_at_zero(policy: AttentionPolicy) -> DiffusionTransformer:
    config = QwenImageTransformerConfig(3, 4, 12, CHANNELS, TEXT_DIM, (4, 4, 4), references_at_zero=True)
    return QwenImageTransformer(config, GEOMETRY, policy)


def animate(mesh: ProcessMesh) -> torch.Tensor:
    """A step of an animation: 3 frames, of which two attend to a driving video's, and the pass of that before."""
    register_role(DRIVING_ROLE, "cross")
    config = WanAnimate2Config(
        num_layers=2,
        num_heads=2,
        head_dim=12,
        ffn_dim=24,
        num_channels=CHANNELS,
        text_dim=TEXT_DIM,
        num_waves=12,
        patch=(1, 2, 2),
        norm_cross=True,
        eps=1e-6,
        condition_channels=CHANNELS + 4,
        max_tokens=8,
        reference_start=(1, 0, None),
        reference_stride=1,
    )
    torch.manual_seed(0)
    policy, geometry = AttentionPolicy(environment=None, mesh=mesh), LatentGeometry(CHANNELS, 8, 4, (1, 2, 2))
    model = WanAnimate2Transformer(config, geometry, policy).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, CHANNELS, 3, 6, 10, generator=generator)
    image = ImageCondition(torch.randn(1, 2 * CHANNELS + 4, 3, 6, 10, generator=generator)).repeat(2)
    texts, driving = (torch.randn(2, 8, TEXT_DIM, generator=generator) for _ in range(2))
    text = Conditions.of(texts, LENGTHS, further=[TextStream(driving, LENGTHS)])
    context = AttentionContext()
    if mesh.sequence.size > 1:
        context = dataclasses.replace(context, sharding=mesh.sharding)
    out: torch.Tensor = model(latents, torch.tensor([900.0, 40.0]), DenoiserInputs(text, SIZE, image=image), context)
    return out


def replace(mesh: ProcessMesh) -> torch.Tensor:
    """A step of SCAIL-2: 3 frames of 4 x 6 tokens, a driving video of a quarter of them and two images."""
    register_role(IMAGE_ROLE, "cross")
    sizes = {"num_layers": 2, "num_heads": 2, "head_dim": 12, "ffn_dim": 24, "num_channels": CHANNELS}
    config = Scail2Config(
        **sizes,
        text_dim=TEXT_DIM,
        num_waves=12,
        patch=(1, 2, 2),
        norm_cross=True,
        eps=1e-6,
        condition_channels=4,
        image_dim=20,
        max_tokens=8,
        mask_channels=28,
    )
    torch.manual_seed(0)
    policy, geometry = AttentionPolicy(environment=None, mesh=mesh), LatentGeometry(CHANNELS, 8, 4, (1, 2, 2))
    model = Scail2Transformer(config, geometry, policy).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    generator = torch.Generator().manual_seed(1)
    latents, known = (torch.randn(2, channels, 3, 8, 12, generator=generator) for channels in (CHANNELS, CHANNELS + 4))
    known[:, :4] = 0
    further = (
        torch.randn(2, CHANNELS + 28, 3, 4, 6, generator=generator),
        torch.randn(2, CHANNELS + 28, 2, 8, 12, generator=generator),
    )
    image = ImageCondition(known, torch.randn(2, 5, 20, generator=generator), further=further)
    text = Conditions.of(torch.randn(2, 8, TEXT_DIM, generator=generator), LENGTHS)
    context = AttentionContext()
    if mesh.sequence.size > 1:
        context = dataclasses.replace(context, sharding=mesh.sharding)
    request = GenerationRequest("-", character_mode="replace")
    inputs = DenoiserInputs(text, ClipSize(64, 96, 9, 16), image=image, request=request)
    out: torch.Tensor = model(latents, torch.tensor([900.0, 40.0]), inputs, context)
    return out


def minimax_h3(policy: AttentionPolicy) -> DiffusionTransformer:
    register_role(H3_TEXT_ROLE, "cross")
    sizes = {"num_waves": 8, "time_hidden_dim": 16, "time_dim": 12, "num_paces": 2, "theta": 1e4}
    config = MiniMaxH3Config(2, 1, 4, 12, 24, 40, CHANNELS, 3, TEXT_DIM, **sizes, eps=1e-5, qk_eps=1e-5, out_eps=1e-5)
    geometry = MiniMaxH3Geometry(CHANNELS, 16, 4, (1, 2, 2), 3, 2, 40.0, frame_limits=(22, 345))
    return MiniMaxH3Transformer(config, geometry, policy)


# A clip of 7 x 1 x 3 tokens with its sound.
CLIP = ClipSize(32, 96, 22, 24)


def forward_with_references(mesh: ProcessMesh) -> torch.Tensor:
    """A video with its sound, an image and a sound, in this order, and texts of unequal lengths."""
    torch.manual_seed(0)
    model = minimax_h3(AttentionPolicy(environment=None, mesh=mesh)).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, generator=generator)

    media = (
        GivenMedia(drawn(CHANNELS, 7, 4, 2), drawn(3, 20, 2)),
        GivenMedia(drawn(CHANNELS, 1, 6, 4)),
        GivenMedia(None, drawn(3, 9, 2)),
    )
    image = ImageCondition(torch.empty(2, CHANNELS, 0, 2, 6), media=media)
    conditions = Conditions.of(drawn(8, TEXT_DIM), LENGTHS)
    context = AttentionContext()
    if mesh.sequence.size > 1:
        context = dataclasses.replace(context, sharding=mesh.sharding)
    latents = drawn(*model.geometry.sample_shape(CLIP))
    inputs = DenoiserInputs(conditions, CLIP, image=image)
    out: torch.Tensor = model(latents, torch.tensor([900.0, 40.0]), inputs, context)
    return out


# Beside the latents, of their size; to edit, of others.
BESIDE, TO_EDIT = (LATENTS[3:],), ((4, 6), (8, 2))
# With the sizes of images.
IMAGES: dict[str, tuple[Callable[[AttentionPolicy], DiffusionTransformer], Sequence[tuple[int, ...]]]] = {
    "flux1 to edit": (flux1, TO_EDIT),
    "flux1 fill": (flux1_fill, BESIDE),
    "flux2 to edit": (flux2, TO_EDIT),
    "flux2 cached": (flux2_cached, TO_EDIT),
    "flux3 to edit": (flux3, TO_EDIT),
    "qwen_image to edit": (qwen_image, TO_EDIT),
    "qwen_image at zero": (qwen_image_at_zero, TO_EDIT),
    # A control video, whose tokens are cut like the grid's.
    "wan_vace": (wan_vace, BESIDE),
}
BUILDERS: dict[str, Callable[[AttentionPolicy], DiffusionTransformer]] = {
    "flux1": flux1,
    "flux2": flux2,
    "qwen_image": qwen_image,
    "qwen_image_21": qwen_image_21,
    "z_image": z_image,
    "krea2": krea2,
    "anima": anima,
    "moss_image": moss_image,
}
# What a transformer does with its tokens is the same in a ring: text beside the grid, images to edit, a control.
IN_A_RING = (
    "flux1",
    "z_image",
    "flux3 to edit",
    "qwen_image to edit",
    "wan_vace",
    "wan_animate_2",
    "scail_2",
    "minimax_h3",
)
CASES = {**{name: (build, ()) for name, build in BUILDERS.items()}, **IMAGES}
# Away from the second text within attention, whose tokens are as long as tau allows on some and not on others.
GUIDANCE = NormalizedGuidance(scale=4.0, tau=1.5, alpha=0.5, num_samples=1)
GUIDED = ("flux1 to edit", "z_image", "qwen_image_21", "wan_vace")


def forward(
    build: Callable[[AttentionPolicy], DiffusionTransformer],
    mesh: ProcessMesh,
    images: Sequence[tuple[int, ...]] = (),
    guidance: NormalizedGuidance | None = None,
) -> torch.Tensor:
    torch.manual_seed(0)
    model = build(AttentionPolicy(environment=None, mesh=mesh)).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(LATENTS, generator=generator)
    text = torch.randn(2, 8, TEXT_DIM, generator=generator)
    pooled = torch.randn(2, POOLED_DIM, generator=generator)
    # Of families that read a second tokenizer's ids.
    further = [TextStream(torch.tensor([[[0, 7], [1, 3], [0, 9]]] * 2).float(), (3, 1))] if build is anima else []
    conditions = Conditions.of(text, LENGTHS, pooled=pooled, further=further)
    parts = [torch.randn(*LATENTS[:3], *size, generator=generator) for size in images]
    image = ImageCondition(parts[0], further=tuple(parts[1:])) if parts else None
    if guidance is not None and model.text_is_keys:
        latents, image = latents[:1], None if image is None else ImageCondition(image.latents[:1])
    inputs = DenoiserInputs(conditions, SIZE, guidance=3.5, image=image)
    context = AttentionContext(guidance=guidance)
    if mesh.sequence.size > 1:
        context = dataclasses.replace(context, sharding=mesh.sharding)
    out: torch.Tensor = model(latents, torch.tensor([900.0, 40.0])[: len(latents)], inputs, context)
    return out


def fasth3(mesh: ProcessMesh) -> torch.Tensor:
    """MiniMax-H3 with gates by Video Sparse Attention, of a clip with sound and an image to end with."""
    register_role(H3_TEXT_ROLE, "cross")
    choice = {"per_role": {"self": {"backend": "video_sparse_attn", "extra": {"sparsity": 0.5}}}}
    geometry = MiniMaxH3Geometry(CHANNELS, 16, 4, (1, 2, 2), 5, 2, 40.0, (22, 345))
    config = MiniMaxH3Config(2, 1, 3, 16, 24, 40, CHANNELS, 5, TEXT_DIM, 8, 12, 10, 2, 1e4, 1e-5, 1e-5, 1e-5)
    torch.manual_seed(0)
    policy = AttentionPolicy(config=AttentionConfig.parse(choice), environment=None, mesh=mesh)
    model = MiniMaxH3Transformer(dataclasses.replace(config, has_gate=True), geometry, policy)
    model.requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape))
    # 7 x 5 x 3 tokens, which are eight tiles.
    size = ClipSize(160, 96, 22, 24)
    latents, last = torch.randn(2, *geometry.sample_shape(size)), torch.randn(2, CHANNELS, 1, 10, 6)
    conditions = dataclasses.replace(Conditions.of(torch.randn(2, 8, TEXT_DIM), LENGTHS), picture_ranges=((1, 2),))
    image = ImageCondition(last[:, :, :0], further=(last,), places=((6, 1.0),))
    context = AttentionContext()
    if mesh.sequence.size > 1:
        context = dataclasses.replace(context, sharding=mesh.sharding)
    inputs = DenoiserInputs(conditions, size, image=image)
    out: torch.Tensor = model(latents, torch.tensor([900.0, 40.0]), inputs, context)
    rows = [row for row in context.recorder.report().rows if row.role == "self"]
    assert all("block-sparse" in row.implementation for row in rows)
    return out


def work(rank: int, folder: Path, alone: dict[str, torch.Tensor]) -> None:
    store = dist.FileStore(str(folder / "store"), WORLD)
    patience = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=patience)
    measured = {}
    for kind, degrees in {"ulysses": (2, 1), "ring": (1, 2)}.items():
        mesh = ProcessMesh.create(ulysses_degree=degrees[0], ring_degree=degrees[1], branch_degree=1, ring_inside=False)
        for name, (build, images) in CASES.items():
            if kind == "ring" and name not in IN_A_RING:
                continue
            together, expected = forward(build, mesh, images), alone[name]
            measured[f"{name}, {kind}"] = float((together - expected).abs().max() / expected.abs().max())
        for name in GUIDED if kind == "ulysses" else GUIDED[:1]:
            together, expected = forward(CASES[name][0], mesh, CASES[name][1], GUIDANCE), alone[f"{name}, guided"]
            measured[f"{name}, guided, {kind}"] = float((together - expected).abs().max() / expected.abs().max())
            unguided = float((alone[name][: len(expected)] - expected).abs().max() / expected.abs().max())
            measured[f"{name}, guided, of not"] = unguided
        together, expected = animate(mesh), alone["wan_animate_2"]
        measured[f"wan_animate_2, {kind}"] = float((together - expected).abs().max() / expected.abs().max())
        together, expected = replace(mesh), alone["scail_2"]
        measured[f"scail_2, {kind}"] = float((together - expected).abs().max() / expected.abs().max())
        together, expected = forward_with_references(mesh), alone["minimax_h3"]
        measured[f"minimax_h3, {kind}"] = float((together - expected).abs().max() / expected.abs().max())
    mesh = ProcessMesh.create(ulysses_degree=2, ring_degree=1, branch_degree=1, ring_inside=False)
    together, expected = fasth3(mesh), alone["fasth3"]
    measured["fasth3, ulysses"] = float((together - expected).abs().max() / expected.abs().max())
    (folder / f"result-{rank}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    alone = {name: forward(build, ProcessMesh(), images) for name, (build, images) in CASES.items()}
    alone |= {f"{name}, guided": forward(CASES[name][0], ProcessMesh(), CASES[name][1], GUIDANCE) for name in GUIDED}
    alone |= {
        "wan_animate_2": animate(ProcessMesh()),
        "fasth3": fasth3(ProcessMesh()),
        "scail_2": replace(ProcessMesh()),
    }
    alone["minimax_h3"] = forward_with_references(ProcessMesh())
    return fork_ranks(lambda rank: work(rank, folder, alone), WORLD)


if __name__ == "__main__":
    sys.exit(main())
