"""The text stream of HunyuanVideo-1.5: tokens of an image, of text to write, and of the prompt, one after the other.

Real tokens come first in every sample, so that the padding of all three is one length. Shapes: B batch, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.layers.embeddings import ImageEmbedding
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.norm import LayerNorm
from diffusion_runtime.layers.token_refiner import TokenRefiner, UnrefinedText
from diffusion_runtime.models.hunyuan_video_15.config import HunyuanVideo15Config
from diffusion_runtime.models.hunyuan_video_15.weights import GLYPH_HIDDEN_DIM, NUM_WAVES
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.text_encoders.interface import TextStream

REFINER_ROLE = "hunyuan_video_15.text_refiner"
_EPS = 1e-5
# Rows of the embedding that tells the three kinds of tokens apart.
_PROMPT, _GLYPHS, _IMAGE = 0, 1, 2


@dataclass(frozen=True)
class Tokens:
    """Tokens [B, num, D], and for each sample how many are real; those come first."""

    values: torch.Tensor
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class PreparedText:
    """Text values that do not change from step to step. ahead: image and glyphs, which precede the prompt; prompt:
    input of the refiner."""

    ahead: tuple[Tokens, ...]
    prompt: UnrefinedText


class GlyphEmbedding(nn.Module):
    """Tokens of text to write, taken to the transformer's width by three layers."""

    def __init__(self, glyph_dim: int, hidden_dim: int, dim: int) -> None:
        super().__init__()
        self.norm = LayerNorm(glyph_dim, _EPS)
        self.up = Linear(glyph_dim, hidden_dim)
        self.middle = Linear(hidden_dim, hidden_dim)
        self.down = Linear(hidden_dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., glyph_dim] to [..., dim]."""
        out: torch.Tensor = self.down(F.gelu(self.middle(F.gelu(self.up(self.norm(x))))))
        return out


class TextStreamEmbedding(nn.Module):
    """Embedding of the text stream. kinds: [3, D], added to the tokens of prompt, glyphs and image."""

    def __init__(self, config: HunyuanVideo15Config, policy: AttentionPolicy) -> None:
        super().__init__()
        self.kinds = nn.Parameter(torch.zeros(3, config.dim))
        self.image = ImageEmbedding(config.image_dim, config.dim)
        self.glyphs = GlyphEmbedding(config.glyph_dim, GLYPH_HIDDEN_DIM, config.dim)
        self.refiner = TokenRefiner(
            config.text_dim,
            config.num_heads,
            config.head_dim,
            config.num_refiner_layers,
            num_waves=NUM_WAVES,
            role=REFINER_ROLE,
            name="text.refiner",
            policy=policy,
        )

    def prepare(self, inputs: DenoiserInputs) -> PreparedText:
        """Return the values that no step changes. inputs.text.further: the text to write, if there is any."""
        dtype, ahead = self.kinds.dtype, []
        if inputs.image is not None and inputs.image.embeddings is not None:
            image = self.image(inputs.image.embeddings.to(dtype)) + self.kinds[_IMAGE]
            ahead.append(Tokens(image, (image.shape[1],) * image.shape[0]))
        for stream in inputs.text.further:
            if any(stream.lengths):
                ahead.append(self._written(stream, dtype))
        prompt = self.refiner.prepare(inputs.text.embeddings, inputs.text.lengths)
        return PreparedText(tuple(ahead), prompt)

    def _written(self, stream: TextStream, dtype: torch.dtype) -> Tokens:
        embeddings = stream.embeddings[:, : max(stream.lengths)].to(dtype)
        return Tokens(self.glyphs(embeddings) + self.kinds[_GLYPHS], stream.lengths)

    def forward(self, text: PreparedText, timestep: torch.Tensor, context: AttentionContext) -> Tokens:
        """Return all tokens of a step, new ones. timestep: [B], in [0, 1000]."""
        prompt = self.refiner(text.prompt, timestep, context).add_(self.kinds[_PROMPT])
        return joined([*text.ahead, Tokens(prompt, text.prompt.lengths)])


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Return the real tokens of every part, one after the other, followed by the padding of all, as zeros."""
    if len(parts) == 1:
        return parts[0]
    lengths = tuple(map(sum, zip(*(part.lengths for part in parts), strict=True)))
    first = parts[0].values
    whole = first.new_zeros(len(lengths), max(lengths), first.shape[2])
    for sample in range(len(lengths)):
        start = 0
        for part in parts:
            stop = start + part.lengths[sample]
            whole[sample, start:stop] = part.values[sample, : part.lengths[sample]]
            start = stop
    return Tokens(whole, lengths)
