"""Tokens of reference images: of models for editing, between the grid that is denoised and the text.

They are of other sizes than the grid, so that they count as text in a token layout: every backend attends to all of
them, and every process that shares a sequence holds all of them. Their order in the blocks is that of training: behind
the grid, with its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.core.token_layout import Extent, TokenLayout
from diffusion_runtime.layers.prompt_cache import cached_for_prompt


def with_references(
    x: torch.Tensor,
    latents: Sequence[torch.Tensor],
    embed: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    context: AttentionContext,
) -> torch.Tensor:
    """This process's slice of the grid [batch, seq, dim], then all tokens of the references, embedded once per request.

    latents: of each reference, [batch, channels, 1, height, width]. dtype: of the model.
    """
    if not latents:
        return x
    tokens = cached_for_prompt(
        "reference_tokens", latents[0], context, lambda: torch.cat([embed(each.to(dtype)) for each in latents], dim=1)
    )
    return torch.cat([x, tokens], dim=1)


def layout_with_references(
    grid: Extent, num_references: int, num_text_tokens: int, lengths: tuple[int, ...], *, tile: Extent
) -> TokenLayout:
    """num_references: tokens of them all. lengths: of each sample's text. tile: of the grid's order."""
    return TokenLayout(
        grid,
        num_suffix_tokens=num_references + num_text_tokens,
        valid_lengths=tuple(num_references + length for length in lengths),
        tile=tile,
        num_given_tokens=num_references,
    )
