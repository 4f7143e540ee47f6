"""What a training step minimises: the flow-matching error, and for a while two auxiliary losses beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from transformers import UMT5EncoderModel

from scripts.train_embedded.architecture import embed_prompts
from scripts.train_embedded.auxiliary import AUX_WEIGHT, AttributeScore, AuxiliaryHeads, predict_with_hidden
from scripts.train_embedded.latent_pool import TrainingBatch
from scripts.train_embedded.object_labels import IGNORED, cell_labels

TIMESTEP_SPREAD = 1.4
"""Standard deviation of the normal whose sigmoid, shifted, is the share of noise."""
FOREGROUND_WEIGHT = 3.0
FOREGROUND_BELOW = 0.5
"""Share of noise below which objects weigh more. Above it, where an object stands is still open, and a weight that
knows the answer would teach the model an average with more objects in it than there are: it then draws copies."""
CAPTION_DROPOUT = 0.1


@dataclass(frozen=True)
class StepLoss:
    """The losses of one batch."""

    total: Tensor
    """What is minimised."""
    error: Tensor
    """[B], the plain squared error per sample, for the log."""
    scores: dict[str, AttributeScore]
    """The auxiliary losses by name, without their weight; empty once they have faded."""


def training_loss(
    transformer: WanTransformer3DModel,
    text_encoder: UMT5EncoderModel,
    heads: AuxiliaryHeads,
    batch: TrainingBatch,
    empty_ids: Tensor,
    generator: torch.Generator,
    *,
    shift: float,
    prompt_tokens: int,
    auxiliary: float,
) -> StepLoss:
    """The weighted loss of a model that predicts noise minus data; `auxiliary` 0 to 1 fades the auxiliary losses."""
    data = batch.latents.float()
    device, count = generator.device, data.shape[0]
    noise = torch.randn(data.shape, generator=generator, device=device)
    time_share = torch.sigmoid(TIMESTEP_SPREAD * torch.randn(count, generator=generator, device=device))
    time_share = shift * time_share / (1 + (shift - 1) * time_share)
    mixed = torch.lerp(data, noise, time_share[:, None, None, None, None])
    dropped = torch.rand(count, generator=generator, device=device) < CAPTION_DROPOUT
    token_ids = torch.where(dropped[:, None], empty_ids, batch.token_ids)
    text = embed_prompts(text_encoder, token_ids, prompt_tokens)
    predicted, hidden = predict_with_hidden(transformer, mixed, time_share * 1000, text, heads.block_index)
    error = (predicted.float() - (noise - data)) ** 2
    settled = (time_share < FOREGROUND_BELOW).float()[:, None, None, None, None]
    weights = 1 + FOREGROUND_WEIGHT * settled * batch.foreground
    loss = (error * weights).mean() / weights.float().mean()
    scores: dict[str, AttributeScore] = {}
    if auxiliary > 0:
        token_labels = batch.token_labels.long().masked_fill(dropped[:, None, None], IGNORED)
        cells = cell_labels(batch.cells, batch.slots, heads.cells.nothing)
        scores = heads(text[:, : token_ids.shape[1]], token_labels, hidden, cells)
        for score in scores.values():
            loss = loss + AUX_WEIGHT * auxiliary * score.loss
    return StepLoss(loss, error.detach().mean(dim=(1, 2, 3, 4)), scores)
