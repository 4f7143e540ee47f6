"""Our Qwen-Image transformer against diffusers' QwenImageTransformer2DModel on the same random weights: within 1e-5."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from family_parity import load_transformer, relative
from tables import table
from tiny_encoders import HIDDEN
from tiny_qwen_image import CHANNELS

from diffusion_runtime.attention import AttentionContext, TokenLayout
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.models.qwen_image.family import FAMILY
from diffusion_runtime.models.qwen_image.transformer import QwenImageTransformer
from diffusion_runtime.text_encoders.interface import Conditions


@pytest.fixture(scope="module")
def models(tiny_qwen_image_folder: Path) -> tuple[QwenImageTransformer, QwenImageTransformer2DModel]:
    return load_transformer(FAMILY, tiny_qwen_image_folder), load_theirs(tiny_qwen_image_folder)


def load_theirs(folder: Path, dtype: torch.dtype = torch.float32) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel.from_pretrained(folder / "transformer", dtype=dtype).eval()


def arguments(
    height: int = 8, width: int = 12, lengths: tuple[int, ...] = (9,)
) -> tuple[torch.Tensor, torch.Tensor, DenoiserInputs]:
    """Latents, unequal timesteps, and text with room for 11 tokens whose padding is not zero, so that it would show."""
    generator = torch.Generator().manual_seed(1)
    batch = len(lengths)
    latents = torch.randn(batch, CHANNELS, 1, height, width, generator=generator)
    text = torch.randn(batch, 11, HIDDEN, generator=generator)
    inputs = DenoiserInputs(Conditions.of(text, lengths), ClipSize(height, width, 1, 1))
    return latents, torch.linspace(937.3, 12.0, batch + 1)[:batch], inputs


@torch.no_grad()
def run_theirs(
    model: QwenImageTransformer2DModel, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs
) -> torch.Tensor:
    """Their transformer between their pipeline's own packing and unpacking."""
    from diffusers import QwenImagePipeline

    batch, channels, _, height, width = latents.shape
    embeddings, lengths = inputs.text.embeddings, torch.tensor(inputs.text.lengths)
    out = model(
        hidden_states=QwenImagePipeline._pack_latents(latents[:, :, 0], batch, channels, height, width),
        timestep=timestep / 1000,
        encoder_hidden_states=embeddings,
        encoder_hidden_states_mask=torch.arange(embeddings.shape[1])[None] < lengths[:, None],
        img_shapes=[[(1, height // 2, width // 2)]] * batch,
        return_dict=False,
    )[0]
    return QwenImagePipeline._unpack_latents(out, height, width, vae_scale_factor=1)


def run_ours(
    model: QwenImageTransformer, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs
) -> torch.Tensor:
    out: torch.Tensor = model(latents, timestep, inputs, AttentionContext())
    return out


# Odd numbers of rows and columns have their centre beside the middle.
@table("size", [(2, 2), (8, 12), (10, 6)])
@table("lengths", [(9,), (11,), (4, 9), (7, 1)])
def test_forward_equals_diffusers(models: Any, size: tuple[int, int], lengths: tuple[int, ...]) -> None:
    given = arguments(*size, lengths)
    before = given[0].clone(), given[2].text.embeddings.clone()
    out = run_ours(models[0], *given)
    assert out.shape == given[0].shape
    assert relative(out, run_theirs(models[1], *given)) < 1e-5
    assert torch.equal(given[0], before[0])
    assert torch.equal(given[2].text.embeddings, before[1])


def test_time_and_text_matter(models: Any) -> None:
    """Otherwise the comparisons could not tell whether one went astray on both sides."""
    latents, timestep, inputs = arguments()
    out = run_ours(models[0], latents, timestep, inputs)
    other_text = dataclasses.replace(inputs.text, embeddings=-inputs.text.embeddings)
    for other in ((timestep / 2, inputs), (timestep, dataclasses.replace(inputs, text=other_text))):
        assert relative(run_ours(models[0], latents, *other), out) > 1e-3


def test_bfloat16_is_as_exact_as_diffusers(models: Any, tiny_qwen_image_folder: Path) -> None:
    ours = load_transformer(FAMILY, tiny_qwen_image_folder, torch.bfloat16)
    theirs = load_theirs(tiny_qwen_image_folder, torch.bfloat16)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    latents, _, inputs = arguments(lengths=(4, 9))
    # A timestep that bfloat16 holds exactly: diffusers rounds it.
    timestep = torch.full((2,), 500.0)
    reference = run_ours(models[0], latents, timestep, inputs)
    out = run_ours(ours, latents, timestep, inputs)
    assert out.dtype == torch.float32
    rounded = dataclasses.replace(inputs, text=inputs.text.to(latents.device, torch.bfloat16))
    their_error = relative(run_theirs(theirs, latents.bfloat16(), timestep, rounded), reference)
    assert relative(out, reference) < 1.5 * their_error < 0.2


def test_layers_see_padding_as_lengths_behind_the_grid(models: Any) -> None:
    ours, _ = models
    layers = list(ours.attention_layers())
    seen: list[TokenLayout] = []

    def keep(module: AttentionLayer, given: tuple[Any, ...]) -> None:
        # Queries, keys and values of the trimmed text, and nothing that could be a mask.
        assert [value.shape for value in given[:3]] == [(2, 24 + 9, 2, 16)] * 3
        assert len(given) == 4
        seen.append(given[3].layout)

    hooks = [layer.register_forward_pre_hook(keep) for layer in layers]
    run_ours(ours, *arguments(lengths=(4, 9)))
    for hook in hooks:
        hook.remove()
    assert len(seen) == 3
    assert set(seen) == {TokenLayout((1, 4, 6), num_suffix_tokens=9, valid_lengths=(4, 9))}


def test_no_mask_reaches_torchs_kernel(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the padded batch is cut at its lengths; torch's own function never gets a mask."""
    calls: list[object] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watching(*given: Any, attn_mask: Any = None, **options: Any) -> torch.Tensor:
        calls.append(attn_mask if len(given) < 4 else given[3])
        return original(*given, attn_mask=attn_mask, **options) if len(given) < 4 else original(*given, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watching)
    context = AttentionContext()
    latents, timestep, inputs = arguments(lengths=(4, 9))
    models[0](latents, timestep, inputs, context)
    assert calls
    assert all(mask is None for mask in calls)
    assert {row.count for row in context.recorder.report().rows} == {3}


def test_guidance_keeps_the_length_of_every_token(models: Any) -> None:
    """As in QwenImagePipeline, on tokens as its packing makes them."""
    from diffusers import QwenImagePipeline

    ours, _ = models
    cond, uncond = torch.randn(2, 2, CHANNELS, 1, 6, 8).unbind(0)
    guided = ours.combine_guidance(cond, uncond, 4.0)
    packed = [
        QwenImagePipeline._pack_latents(velocity[:, :, 0], 2, CHANNELS, 6, 8)
        for velocity in (cond, uncond + 4.0 * (cond - uncond), guided)
    ]
    expected = packed[1] * (packed[0].norm(dim=-1, keepdim=True) / packed[1].norm(dim=-1, keepdim=True))
    torch.testing.assert_close(packed[2], expected)
    zero = torch.zeros_like(cond)
    assert torch.equal(ours.combine_guidance(zero, zero, 4.0), zero)
