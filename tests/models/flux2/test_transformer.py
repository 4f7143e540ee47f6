"""The FLUX.2 transformer against diffusers' own on tiny weights, float32: within 1e-5 of the largest value."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2Transformer2DModel
from family_parity import load_transformer, relative
from tables import table
from tiny_flux2 import CHANNELS, TEXT_DIM

from diffusion_runtime.attention import AttentionContext, TokenLayout
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.flux2.family import FAMILY
from diffusion_runtime.models.flux2.transformer import Flux2Transformer
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.text_encoders.interface import Conditions

NUM_TEXT_TOKENS = 9


@pytest.fixture(scope="module", params=["dev", "klein"])
def models(
    request: pytest.FixtureRequest, tiny_flux2_folder: Path, tiny_klein_folder: Path
) -> tuple[Flux2Transformer, Flux2Transformer2DModel]:
    """Ours and theirs: [dev] with an embedded guidance scale, [klein] without."""
    folder = tiny_flux2_folder if request.param == "dev" else tiny_klein_folder
    return load_transformer(FAMILY, folder), load_theirs(folder, torch.float32)


@pytest.fixture(scope="module")
def ours(tiny_flux2_folder: Path) -> Flux2Transformer:
    return load_transformer(FAMILY, tiny_flux2_folder)


def load_theirs(folder: Path, dtype: torch.dtype) -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel.from_pretrained(folder / "transformer", dtype=dtype).eval()


def arguments(
    batch: int = 1, rows: int = 4, columns: int = 6, guidance: float = 3.7
) -> tuple[torch.Tensor, torch.Tensor, DenoiserInputs]:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(batch, CHANNELS, 1, rows, columns, generator=generator)
    text = torch.randn(batch, NUM_TEXT_TOKENS, TEXT_DIM, generator=generator)
    inputs = DenoiserInputs(Conditions.of(text), ClipSize(4 * rows, 4 * columns, 1, 1), guidance=guidance)
    return latents, torch.linspace(937.3, 12.0, batch + 1)[:batch], inputs


@torch.no_grad()
def run_theirs(
    model: Flux2Transformer2DModel, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs
) -> torch.Tensor:
    rows, columns = latents.shape[-2:]
    one = torch.arange(1)
    out = model(
        hidden_states=latents.flatten(2).transpose(1, 2),
        encoder_hidden_states=inputs.text.embeddings,
        timestep=timestep / 1000,
        img_ids=torch.cartesian_prod(one, torch.arange(rows), torch.arange(columns), one),
        txt_ids=torch.cartesian_prod(one, one, one, torch.arange(inputs.text.embeddings.shape[1])),
        guidance=torch.full_like(timestep, inputs.guidance),
        return_dict=False,
    )[0]
    return out.transpose(1, 2).unflatten(2, (1, rows, columns))


@table("batch", [1, 2])
@table("size", [(4, 6), (5, 3), (1, 1)])
def test_velocities_equal_those_of_diffusers(models: Any, batch: int, size: tuple[int, int]) -> None:
    given = arguments(batch, *size)
    before = given[0].clone(), given[2].text.embeddings.clone()
    assert relative(models[0](*given, AttentionContext()), run_theirs(models[1], *given)) < 1e-5
    assert torch.equal(given[0], before[0])
    assert torch.equal(given[2].text.embeddings, before[1])


def test_every_input_matters(ours: Flux2Transformer) -> None:
    """Otherwise the comparisons could not tell whether one went astray on both sides."""
    latents, timestep, inputs = arguments()
    out = ours(latents, timestep, inputs, AttentionContext())
    text = inputs.text
    others = [
        (timestep / 2, inputs),
        (timestep, dataclasses.replace(inputs, guidance=1.0)),
        (timestep, dataclasses.replace(inputs, text=dataclasses.replace(text, embeddings=-text.embeddings))),
        (timestep, dataclasses.replace(inputs, text=dataclasses.replace(text, embeddings=text.embeddings.flip(1)))),
    ]
    for other in others:
        assert relative(ours(latents, *other, AttentionContext()), out) > 1e-3


def test_a_batch_equals_its_samples_and_padding_is_left_out(ours: Flux2Transformer) -> None:
    latents, timestep, inputs = arguments(batch=2)
    padded = Conditions.of(inputs.text.embeddings, (4, 7))
    together = ours(latents, timestep, dataclasses.replace(inputs, text=padded), AttentionContext())
    for index, length in enumerate(padded.lengths):
        part = slice(index, index + 1)
        alone = dataclasses.replace(inputs, text=Conditions.of(padded.embeddings[part, :length]))
        assert relative(together[part], ours(latents[part], timestep[part], alone, AttentionContext())) < 1e-5


def test_bfloat16_is_as_exact_as_diffusers(tiny_flux2_folder: Path, ours: Flux2Transformer) -> None:
    rounded, theirs = (
        load_transformer(FAMILY, tiny_flux2_folder, torch.bfloat16),
        load_theirs(tiny_flux2_folder, torch.bfloat16),
    )
    assert {parameter.dtype for parameter in rounded.parameters()} == {torch.bfloat16}
    # A timestep and a scale that bfloat16 holds exactly: diffusers rounds both.
    latents, _, inputs = arguments(batch=2, guidance=4.0)
    timestep = torch.full((2,), 500.0)
    reference = ours(latents, timestep, inputs, AttentionContext())
    out = rounded(latents, timestep, inputs, AttentionContext())
    assert out.dtype == torch.float32
    text = dataclasses.replace(inputs, text=inputs.text.to(latents.device, torch.bfloat16))
    their_error = relative(run_theirs(theirs, latents.bfloat16(), timestep, text), reference)
    assert relative(out, reference) < 1.5 * their_error < 0.2


def test_layers_see_the_grid_with_the_text_behind_it(ours: Flux2Transformer) -> None:
    layers = list(ours.attention_layers())
    seen: list[TokenLayout] = []

    def keep(module: AttentionLayer, given: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        assert keywords.get("mask") is None
        seen.append(given[3].layout)

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    latents, timestep, inputs = arguments(batch=2)
    padded = dataclasses.replace(inputs, text=Conditions.of(inputs.text.embeddings, (4, 7)))
    ours(latents, timestep, padded, AttentionContext())
    for hook in hooks:
        hook.remove()
    assert len(seen) == 4
    # Trimmed to the longest prompt.
    assert set(seen) == {TokenLayout((1, 4, 6), num_suffix_tokens=7, valid_lengths=(4, 7))}
