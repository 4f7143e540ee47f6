"""The Z-Image transformer against diffusers' own on tiny weights, float32: within 1e-5 of the largest value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImageTransformer2DModel
from family_parity import load_transformer, relative
from tables import table
from tiny_encoders import HIDDEN
from tiny_z_image import CHANNELS

from diffusion_runtime.attention import AttentionContext, TokenLayout
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.models.z_image.transformer import TEXT_ROLE, ZImageTransformer
from diffusion_runtime.text_encoders.interface import Conditions


@pytest.fixture(scope="module")
def ours(tiny_z_image_folder: Path) -> ZImageTransformer:
    return load_transformer(family_for_folder(tiny_z_image_folder), tiny_z_image_folder)


@pytest.fixture(scope="module")
def theirs(tiny_z_image_folder: Path) -> ZImageTransformer2DModel:
    return ZImageTransformer2DModel.from_pretrained(tiny_z_image_folder / "transformer", dtype=torch.float32).eval()


def inputs(lengths: tuple[int, ...], rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, DenoiserInputs]:
    generator = torch.Generator().manual_seed(1)
    batch = len(lengths)
    latents = torch.randn(batch, CHANNELS, 1, rows, columns, generator=generator)
    text = torch.randn(batch, max(lengths), HIDDEN, generator=generator)
    for sample, length in enumerate(lengths):
        text[sample, length:] = 0
    size = ClipSize(2 * rows, 2 * columns, 1, 1)
    return latents, torch.linspace(937.3, 12.0, batch + 1)[:batch], DenoiserInputs(Conditions.of(text, lengths), size)


@torch.no_grad()
def run_theirs(
    model: ZImageTransformer2DModel, latents: torch.Tensor, timestep: torch.Tensor, given: DenoiserInputs
) -> torch.Tensor:
    texts = [row[:length] for row, length in zip(given.text.embeddings, given.text.lengths, strict=True)]
    velocity = model(list(latents), (1000 - timestep) / 1000, texts, return_dict=False)[0]
    return -torch.stack(velocity)


@table("lengths", [(5,), (32,), (7, 7), (3, 40), (33, 64, 1)])
@table("size", [(8, 12), (8, 16), (2, 2)])
def test_velocities_equal_those_of_diffusers(
    ours: ZImageTransformer, theirs: ZImageTransformer2DModel, lengths: tuple[int, ...], size: tuple[int, int]
) -> None:
    arguments = inputs(lengths, *size)
    before = arguments[2].text.embeddings.clone()
    assert relative(ours(*arguments, AttentionContext()), run_theirs(theirs, *arguments)) < 1e-5
    assert torch.equal(arguments[2].text.embeddings, before)


def test_steps_share_the_refined_text(ours: ZImageTransformer, theirs: ZImageTransformer2DModel) -> None:
    latents, timestep, given = inputs((9, 35), 8, 12)
    context = AttentionContext()
    for factor in (1.0, 0.6, 0.3):
        arguments = latents, factor * timestep, given
        assert relative(ours(*arguments, context), run_theirs(theirs, *arguments)) < 1e-5
    rows = context.recorder.report().rows
    counts = {role: sum(row.count for row in rows if row.role == role) for role in ("self", TEXT_ROLE)}
    assert counts == {"self": 3 * 4, TEXT_ROLE: 2}


def test_padding_is_lengths_and_the_grid_is_said(ours: ZImageTransformer) -> None:
    seen: dict[str, set[TokenLayout]] = {}

    def keep(module: AttentionLayer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        assert keywords.get("mask") is None
        seen.setdefault(module.layer.name, set()).add(arguments[3].layout)

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in ours.attention_layers()]
    ours(*inputs((5, 40), 8, 12), AttentionContext())
    for handle in handles:
        handle.remove()
    assert seen["text_refiner.0.self_attention.attention"] == {TokenLayout.text(64, (32, 64))}
    filled = TokenLayout((1, 4, 6), num_suffix_tokens=8, num_given_tokens=8)
    assert seen["grid_refiner.0.self_attention.attention"] == {filled}
    lengths = (8 + 32, 8 + 64)
    joint = TokenLayout((1, 4, 6), num_suffix_tokens=8 + 64, valid_lengths=lengths, num_given_tokens=8)
    assert seen["blocks.1.self_attention.attention"] == {joint}
    names = {name for name, _ in ours.named_modules()}
    assert set(seen) <= names
