"""Our FLUX.1 transformer against diffusers' FluxTransformer2DModel on the same random weights: within 1e-5."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from family_parity import load_transformer, relative
from tables import table
from tiny_encoders import HIDDEN
from tiny_flux1 import CHANNELS

from diffusion_runtime.attention import AttentionContext, TokenLayout
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.flux1.family import FAMILY
from diffusion_runtime.models.flux1.transformer import Flux1Transformer
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.text_encoders.interface import Conditions


@pytest.fixture(scope="module")
def models(tiny_flux1_folder: Path) -> tuple[Flux1Transformer, FluxTransformer2DModel]:
    return load_transformer(FAMILY, tiny_flux1_folder), load_theirs(tiny_flux1_folder)


@pytest.fixture(scope="module")
def models_without_guidance(tiny_flux1_schnell_folder: Path) -> tuple[Flux1Transformer, FluxTransformer2DModel]:
    return load_transformer(FAMILY, tiny_flux1_schnell_folder), load_theirs(tiny_flux1_schnell_folder)


def load_theirs(folder: Path, dtype: torch.dtype = torch.float32) -> FluxTransformer2DModel:
    return FluxTransformer2DModel.from_pretrained(folder / "transformer", dtype=dtype).eval()


def arguments(
    height: int = 8, width: int = 12, batch: int = 1, num_text_tokens: int = 9
) -> tuple[torch.Tensor, torch.Tensor, DenoiserInputs]:
    """Latents, unequal timesteps, and text of which every token counts."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(batch, CHANNELS, 1, height, width, generator=generator)
    text = torch.randn(batch, num_text_tokens, HIDDEN, generator=generator)
    pooled = torch.randn(batch, HIDDEN, generator=generator)
    inputs = DenoiserInputs(Conditions.of(text, pooled=pooled), ClipSize(height, width, 1, 1), guidance=3.5)
    return latents, torch.linspace(937.3, 12.0, batch + 1)[:batch], inputs


@torch.no_grad()
def run_theirs(
    model: FluxTransformer2DModel, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs
) -> torch.Tensor:
    """Their transformer between their pipeline's own packing and unpacking."""
    from diffusers import FluxPipeline

    batch, channels, _, height, width = latents.shape
    tokens = FluxPipeline._pack_latents(latents[:, :, 0], batch, channels, height, width)
    ids = FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, latents.device, torch.float32)
    out = model(
        hidden_states=tokens,
        timestep=timestep / 1000,
        guidance=torch.full((batch,), inputs.guidance) if model.config.guidance_embeds else None,
        pooled_projections=inputs.text.pooled,
        encoder_hidden_states=inputs.text.embeddings,
        txt_ids=torch.zeros(inputs.text.embeddings.shape[1], 3),
        img_ids=ids,
        return_dict=False,
    )[0]
    return FluxPipeline._unpack_latents(out, height, width, vae_scale_factor=1)[:, :, None]


def run_ours(
    model: Flux1Transformer, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs
) -> torch.Tensor:
    out: torch.Tensor = model(latents, timestep, inputs, AttentionContext())
    return out


@table("size", [(2, 2), (8, 12), (6, 2)])
@table("batch", [1, 2])
def test_forward_equals_diffusers(models: Any, size: tuple[int, int], batch: int) -> None:
    given = arguments(*size, batch=batch)
    before = given[0].clone(), given[2].text.embeddings.clone()
    out = run_ours(models[0], *given)
    assert out.shape == given[0].shape
    assert relative(out, run_theirs(models[1], *given)) < 1e-5
    assert torch.equal(given[0], before[0])
    assert torch.equal(given[2].text.embeddings, before[1])


def test_forward_without_embedded_guidance(models_without_guidance: Any) -> None:
    given = arguments(batch=2)
    assert relative(run_ours(models_without_guidance[0], *given), run_theirs(models_without_guidance[1], *given)) < 1e-5


def test_every_input_matters(models: Any) -> None:
    """Otherwise the comparisons could not tell whether one went astray on both sides."""
    latents, timestep, inputs = arguments()
    out = run_ours(models[0], latents, timestep, inputs)
    text, pooled = inputs.text, inputs.text.pooled
    assert pooled is not None
    others = [
        (timestep / 2, inputs),
        (timestep, dataclasses.replace(inputs, guidance=1.0)),
        (timestep, dataclasses.replace(inputs, text=dataclasses.replace(text, pooled=-pooled))),
        (timestep, dataclasses.replace(inputs, text=dataclasses.replace(text, embeddings=-text.embeddings))),
    ]
    for other in others:
        assert relative(run_ours(models[0], latents, *other), out) > 1e-3


def test_text_that_is_declared_padding_is_left_out(models: Any) -> None:
    latents, timestep, inputs = arguments(batch=2)
    padded = Conditions.of(inputs.text.embeddings, (4, 7), pooled=inputs.text.pooled)
    together = run_ours(models[0], latents, timestep, dataclasses.replace(inputs, text=padded))
    for index, length in enumerate(padded.lengths):
        part = slice(index, index + 1)
        text = dataclasses.replace(padded.take([index]), embeddings=padded.embeddings[part, :length], lengths=(length,))
        alone = run_ours(models[0], latents[part], timestep[part], dataclasses.replace(inputs, text=text))
        assert relative(together[part], alone) < 1e-5


def test_bfloat16_is_as_exact_as_diffusers(models: Any, tiny_flux1_folder: Path) -> None:
    ours = load_transformer(FAMILY, tiny_flux1_folder, torch.bfloat16)
    theirs = load_theirs(tiny_flux1_folder, torch.bfloat16)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    latents, _, inputs = arguments(batch=2)
    # A timestep and a scale that bfloat16 holds exactly: diffusers rounds both.
    timestep, inputs = torch.full((2,), 500.0), dataclasses.replace(inputs, guidance=4.0)
    reference = run_ours(models[0], latents, timestep, inputs)
    out = run_ours(ours, latents, timestep, inputs)
    assert out.dtype == torch.float32
    rounded = dataclasses.replace(inputs, text=inputs.text.to(latents.device, torch.bfloat16))
    their_error = relative(run_theirs(theirs, latents.bfloat16(), timestep, rounded), reference)
    assert relative(out, reference) < 1.5 * their_error < 0.2


def test_layers_see_the_grid_with_the_text_behind_it(models: Any) -> None:
    ours, _ = models
    layers = list(ours.attention_layers())
    seen: list[TokenLayout] = []

    def keep(module: AttentionLayer, given: tuple[Any, ...]) -> None:
        assert not any(isinstance(value, torch.Tensor) and value.dtype == torch.bool for value in given)
        seen.append(given[3].layout)

    hooks = [layer.register_forward_pre_hook(keep) for layer in layers]
    latents, timestep, inputs = arguments(batch=2)
    padded = dataclasses.replace(inputs, text=Conditions.of(inputs.text.embeddings, (4, 7), pooled=inputs.text.pooled))
    run_ours(ours, latents, timestep, padded)
    for hook in hooks:
        hook.remove()
    # Trimmed to the longest prompt.
    assert set(seen) == {TokenLayout((1, 4, 6), num_suffix_tokens=7, valid_lengths=(4, 7))}
