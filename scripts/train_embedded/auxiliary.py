"""Two losses that teach the model which attributes belong to one object; their heads are thrown away.

The flow-matching error says little about binding: a green square where a green circle was asked for is wrong in a few
corner pixels. So the text encoder must tell at every word of an object that object's colour, shape and motion, and the
transformer must tell the same at every token where the object is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from scripts.train_embedded.object_labels import ATTRIBUTES, IGNORED, NUM_CLASSES

AUX_WEIGHT = 0.1
"""Of each of the two losses, while the fade is 1."""
FADE_FROM, FADE_TO = 0.6, 0.85
"""Share of the training at which the weight begins to fall, and at which it is 0: the end is for the error alone."""
HIDDEN_BLOCK = 3
"""Index of the block of `shapes` whose output must tell the objects: it has read the text, and blocks are left to act
on it."""


def fade(progress: float) -> float:
    """1, then linear down to 0."""
    return min(1.0, max(0.0, (FADE_TO - progress) / (FADE_TO - FADE_FROM)))


def predict_with_hidden(
    transformer: WanTransformer3DModel, latents: Tensor, timestep: Tensor, text: Tensor, block_index: int = HIDDEN_BLOCK
) -> tuple[Tensor, Tensor]:
    """The transformer's own forward, and the tokens [B, t * h * w, dim] after one block; timestep is [B]."""
    batch, _, num_frames, height, width = latents.shape
    patch = transformer.config.patch_size
    rotary = transformer.rope(latents)
    tokens = transformer.patch_embedding(latents).flatten(2).transpose(1, 2).contiguous()
    embedded, modulation, text, _ = transformer.condition_embedder(timestep, text, None, timestep_seq_len=None)
    modulation = modulation.unflatten(1, (6, -1))
    hidden = tokens
    for index, block in enumerate(transformer.blocks):
        tokens = block(tokens, text, modulation, rotary)
        if index == block_index:
            hidden = tokens
    shift, scale = (transformer.scale_shift_table + embedded.unsqueeze(1)).chunk(2, dim=1)
    tokens = (transformer.norm_out(tokens.float()) * (1 + scale) + shift).type_as(tokens)
    pixels = transformer.proj_out(tokens).reshape(
        batch, num_frames // patch[0], height // patch[1], width // patch[2], *patch, -1
    )
    return pixels.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3), hidden


@dataclass(frozen=True)
class AttributeScore:
    """One auxiliary loss, and per attribute how many labels were predicted right out of how many, [n] each."""

    loss: Tensor
    right: Tensor
    total: Tensor


class AttributeHead(nn.Module):
    """One linear head an attribute, side by side in one matrix; `nothing` is a further class of the first."""

    def __init__(self, dim: int, *, nothing: bool, num_classes: Sequence[int] = NUM_CLASSES) -> None:
        super().__init__()
        self.nothing = num_classes[0]
        self.sizes = (num_classes[0] + nothing, *num_classes[1:])
        self.linear = nn.Linear(dim, sum(self.sizes))

    def forward(self, hidden: Tensor, labels: Tensor) -> AttributeScore:
        """hidden [B, S, dim] and labels [B, S, n] int64: cross-entropy, averaged over labels, then over attributes."""
        losses, right, total = [], [], []
        logits = self.linear(hidden).float().flatten(0, 1).split(self.sizes, dim=1)
        for attribute, one in enumerate(logits):
            wanted = labels[..., attribute].flatten()
            summed = F.cross_entropy(one, wanted, ignore_index=IGNORED, reduction="sum")
            losses.append(summed / (wanted != IGNORED).sum().clamp(min=1))
            counted = wanted != IGNORED
            if attribute == 0:
                counted = counted & (wanted != self.nothing)
            right.append(((one.detach().argmax(dim=1) == wanted) & counted).sum())
            total.append(counted.sum())
        return AttributeScore(torch.stack(losses).mean(), torch.stack(right), torch.stack(total))


class AuxiliaryHeads(nn.Module):
    """The heads of both losses."""

    def __init__(
        self,
        text_dim: int,
        hidden_dim: int,
        num_classes: Sequence[int] = NUM_CLASSES,
        block_index: int = HIDDEN_BLOCK,
    ) -> None:
        super().__init__()
        self.block_index = block_index
        self.text = AttributeHead(text_dim, nothing=False, num_classes=num_classes)
        self.cells = AttributeHead(hidden_dim, nothing=True, num_classes=num_classes)

    def forward(
        self, text: Tensor, token_labels: Tensor, hidden: Tensor, cell_labels: Tensor
    ) -> dict[str, AttributeScore]:
        """Both scores; hidden states are normed first, since a block's output grows with depth and with training."""
        normed = F.layer_norm(hidden.float(), hidden.shape[-1:])
        return {"text": self.text(text, token_labels), "cell": self.cells(normed, cell_labels)}


class ScoreLog:
    """Sums scores between two lines of the log, on the device."""

    def __init__(self, attributes: Sequence[str] = ATTRIBUTES) -> None:
        self._attributes = attributes
        self._sums: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def add(self, scores: dict[str, AttributeScore]) -> None:
        """Keep the scores of one step."""
        for name, score in scores.items():
            self._sums.setdefault(name, []).append((score.loss.detach(), score.right, score.total))

    def take(self) -> dict[str, float | dict[str, float]]:
        """Loss and accuracy per attribute (where there is an object) since the last call; empty without scores."""
        values: dict[str, float | dict[str, float]] = {}
        for name, scores in self._sums.items():
            loss, right, total = (torch.stack(part) for part in zip(*scores, strict=True))
            shares = (right.sum(dim=0) / total.sum(dim=0).clamp(min=1)).tolist()
            values[f"{name}_loss"] = loss.mean().item()
            values[f"{name}_accuracy"] = {
                attribute: round(share, 4) for attribute, share in zip(self._attributes, shares, strict=True)
            }
        self._sums = {}
        return values
