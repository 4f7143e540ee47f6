"""The decoder's training for the PSNR of clips: what is pooled, what the loss is, and what changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diffusion_runtime.models.model_sources import EMBEDDED_FOLDERS
from scripts.train_embedded.clip_vae import WholeClipVae
from scripts.train_embedded.decoder_graphs import DecoderGradients, decibels
from scripts.train_embedded.decoder_pool import POOL_BATCHES, REFRESH_EVERY, DecoderPool, empty_batch
from scripts.train_embedded.export import load_vae
from scripts.train_embedded.train_decoder import DecoderTraining
from scripts.train_embedded.train_vae import clip_to_frames, measure_sharpness, training_clips
from scripts.train_embedded.vae_buckets import Bucket
from scripts.train_embedded.world import EMOJI

VAE = EMBEDDED_FOLDERS["emoji"]
BUCKET = Bucket(5, 32, 1, 1.0)


@pytest.fixture(scope="module")
def training() -> DecoderTraining:
    return DecoderTraining(VAE, "cpu", 0, world=EMOJI)


@torch.no_grad()
def test_the_loss_counts_the_decibels_that_are_reported(training: DecoderTraining) -> None:
    bucket = Bucket(5, 32, 64, 1.0)
    clip, covered = training_clips(bucket, torch.Generator().manual_seed(99), world=EMOJI)
    vae = WholeClipVae(training.module)
    decoded = vae.decode(vae.encode(clip)[0]).clamp(-1, 1)
    whole, things = decibels(decoded, clip_to_frames(clip), covered > 0.5)
    reported = measure_sharpness(vae, "cpu", EMOJI, bucket)
    # The loss compares with 8 bits per colour.
    assert abs(float(whole.mean()) - reported["psnr"]) < 0.05
    assert abs(float(things.mean()) - reported["objects"]) < 0.3


def test_a_step_changes_the_decoder_alone(training: DecoderTraining, tmp_path: Path) -> None:
    pool = DecoderPool(BUCKET, training.vae, EMOJI, "cpu", 0)
    pool.refresh()
    gradients = DecoderGradients(training.vae, training.parameters, [BUCKET], "cpu", captured=False)
    batch = gradients.batches[BUCKET]
    # Of a pool that was refreshed once, the first rows are clips.
    for place, value in vars(pool.held).items():
        getattr(batch, place).copy_(value[:1])
    gradients.capture(BUCKET)
    before = {name: value.clone() for name, value in training.module.state_dict().items()}
    figures = []
    for _ in range(6):
        figures.append(float(gradients.compute(BUCKET)[0]))
        training.apply(1e-3)
    assert figures[-1] > figures[0] + 0.1
    changed = {
        name.split(".")[0]
        for name, value in training.module.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed == {"decoder", "post_quant_conv"}
    training.save(tmp_path / "vae.pt")
    kept = load_vae(tmp_path / "vae.pt", EMOJI)
    assert kept.config.latents_mean == load_vae(VAE).config.latents_mean
    average = dict(zip(map(id, training.parameters), training.average.values, strict=True))
    for (name, value), parameter in zip(kept.named_parameters(), training.module.parameters(), strict=True):
        assert torch.equal(value, average.get(id(parameter), parameter)), name


@torch.no_grad()
def test_clips_and_latents_of_a_pool_belong_together(training: DecoderTraining) -> None:
    pool = DecoderPool(BUCKET, training.vae, EMOJI, "cpu", 3)
    pool.fill()
    assert pool.held.frames.flatten(1).amax(dim=1).min() > 0
    first = pool.held.frames.clone()
    batch = empty_batch(1, BUCKET, "cpu")
    for _ in range(REFRESH_EVERY + 1):
        pool.draw(batch)
    replaced = (pool.held.frames != first).flatten(1).any(dim=1)
    assert replaced.tolist() == [True] * 2 + [False] * (POOL_BATCHES - 2)
    clip = batch.frames.permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    # 8 bits per colour against none.
    assert (training.vae.encode(clip)[0] - batch.latents).abs().max() < 0.05 * batch.latents.abs().max()
