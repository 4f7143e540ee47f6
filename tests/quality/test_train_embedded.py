"""What training rests on: the whole-clip VAE and the training attention equal diffusers' own; tokens and masks."""

from __future__ import annotations

from random import Random

import pytest
import torch

from scripts.shapes import SceneSettings, render, sample_scenes, write_caption
from scripts.shapes.render import render_float
from scripts.train_embedded.architecture import (
    MAX_PROMPT_TOKENS,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    build_vae,
    embed_prompts,
)
from scripts.train_embedded.attention import TrainingAttention
from scripts.train_embedded.clip_vae import WholeClipVae
from scripts.train_embedded.latent_pool import latent_foreground
from scripts.train_embedded.muon import Muon, orthogonalise
from scripts.train_embedded.world import CAPTION_TOKENS


@pytest.mark.parametrize("num_frames", [1, 5, 9, 17])
def test_whole_clip_vae_equals_the_chunked_one(num_frames: int) -> None:
    torch.manual_seed(0)
    vae = build_vae().eval()
    for name, parameter in vae.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    clip = torch.rand(2, 3, num_frames, 32, 48) * 2 - 1
    whole = WholeClipVae(vae)
    with torch.no_grad():
        expected = vae.encode(clip).latent_dist
        mean, log_variance = whole.encode(clip)
        torch.testing.assert_close(mean, expected.mean, atol=1e-4, rtol=0)
        torch.testing.assert_close(log_variance.clamp(-30, 20), expected.logvar, atol=1e-4, rtol=0)
        decoded = whole.decode(expected.mean).clamp(-1, 1)
        torch.testing.assert_close(decoded, vae.decode(expected.mean).sample, atol=1e-4, rtol=0)
    assert float(decoded.std()) > 0.1


def test_training_attention_equals_the_models_own() -> None:
    torch.manual_seed(0)
    transformer = build_transformer().eval()
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.05)
    arguments = (torch.randn(2, 16, 3, 8, 8), torch.tensor([100.0, 900.0]), torch.randn(2, 20, 128))
    with torch.no_grad():
        expected = transformer(*arguments, return_dict=False)[0]
        transformer.set_attn_processor(TrainingAttention())
        assert all(type(processor) is TrainingAttention for processor in transformer.attn_processors.values())
        torch.testing.assert_close(transformer(*arguments, return_dict=False)[0], expected, atol=1e-5, rtol=1e-5)
    assert float(expected.std()) > 0.1


def test_the_tokenizer_knows_the_captions_and_marks_strangers() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.model_max_length == MAX_PROMPT_TOKENS
    ids = tokenizer("A RED circle, moving left!").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "red", "circle", ",", "moving", "left", "<unk>", "</s>"]
    assert tokenizer("").input_ids == [tokenizer.eos_token_id]
    random = Random(0)
    for scene in sample_scenes(2000, torch.Generator().manual_seed(0)).attributes():
        assert len(tokenizer(write_caption(scene, random).text).input_ids) <= CAPTION_TOKENS


def test_prompt_embeddings_are_zero_past_the_prompt_and_do_not_depend_on_the_padding() -> None:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    text_encoder = build_text_encoder(len(tokenizer)).eval()
    ids = [
        tokenizer(["a red circle"], padding="max_length", max_length=length, return_tensors="pt").input_ids
        for length in (8, 40)
    ]
    with torch.no_grad():
        short, long = (embed_prompts(text_encoder, one, 64) for one in ids)
    torch.testing.assert_close(short, long, atol=1e-5, rtol=1e-5)
    assert float(short[:, :4].abs().min(dim=-1).values.max()) > 0
    assert float(short[:, 4:].abs().max()) == 0.0


def test_latent_foreground_covers_every_object_pixel_of_its_four_frames() -> None:
    scenes = sample_scenes(3, torch.Generator().manual_seed(4), SceneSettings(two_object_fraction=1.0))
    _, covered = render_float(scenes, 9, 64)
    mask = latent_foreground(covered)
    assert mask.shape == (3, 1, 3, 8, 8)
    assert 0 < float(mask.float().mean()) < 0.9
    wide = mask[:, 0].repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
    for frame in range(9):
        group = 0 if frame == 0 else 1 + (frame - 1) // 4
        assert not bool(((covered[:, frame] > 0.05) & (wide[:, group] == 0)).any())


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 24), (2, 24, 8)])
def test_orthogonalise_brings_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 5
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.35


def test_muon_lowers_a_quadratic_loss_and_refuses_vectors() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 8))
    optimizer = Muon([weight])
    before = float(weight.detach().square().sum())
    for _ in range(10):
        weight.grad = None
        (weight**2).sum().backward()
        optimizer.step(0.2)
    assert float(weight.detach().square().sum()) < 0.6 * before
    with pytest.raises(ValueError, match="matrices"):
        Muon([torch.zeros(4)])


def test_rendering_is_the_same_one_by_one_and_in_a_batch() -> None:
    scenes = sample_scenes(4, torch.Generator().manual_seed(9))
    together = render(scenes, 5, 64)
    for row in range(4):
        assert torch.equal(together[row], render(scenes.select(slice(row, row + 1)), 5, 64)[0])
