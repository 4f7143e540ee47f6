"""VSA-H3 by its published formula, in float64, one sample and one head after the other."""

from __future__ import annotations

import math

import torch

from diffusion_runtime.attention import TokenLayout


def tiles_of_sequence(
    layout: TokenLayout, tile: tuple[int, int, int], length: int | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of every tile, by their places in the sequence: of the text, then of the grid. length: of valid text."""
    size, before = math.prod(tile), layout.num_prefix_tokens
    text = [*range(before), *range(before + math.prod(layout.grid), layout.num_tokens)]
    valid = len(text) if length is None else length
    of_text, start = [], 0
    for segment in layout.text_segments or ():
        for first in range(start, start + segment, size):
            tokens = [token for token in range(first, min(first + size, start + segment)) if token < valid]
            if tokens:
                of_text.append([text[token] for token in tokens])
        start += segment
    of_grid: dict[tuple[int, int, int], list[int]] = {}
    for token in range(math.prod(layout.grid)):
        place = (token // (layout.grid[1] * layout.grid[2]), token // layout.grid[2] % layout.grid[1])
        t, y, x = *place, token % layout.grid[2]
        of_grid.setdefault((t // tile[0], y // tile[1], x // tile[2]), []).append(before + token)
    return of_text, [of_grid[key] for key in sorted(of_grid)]


def vsa_h3_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    layout: TokenLayout,
    tile: tuple[int, int, int],
    num_kept: int,
) -> torch.Tensor:
    """The published formula, one sample and one head after the other; 0 for padding."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    repeats = q.shape[2] // k.shape[2]
    for sample in range(q.shape[0]):
        length = None if layout.valid_lengths is None else layout.valid_lengths[sample]
        of_text, of_grid = tiles_of_sequence(layout, tile, length)
        tiles = [*of_text, *of_grid]
        for head in range(q.shape[2]):
            queries, keys, values = (
                x[sample, :, number].double() for x, number in ((q, head), (k, head // repeats), (v, head // repeats))
            )
            means = [torch.stack([x[tokens].mean(0) for tokens in tiles]) for x in (queries, keys, values)]
            scores = means[0] @ means[1].T / q.shape[3] ** 0.5
            pooled = scores.softmax(-1) @ means[2]
            every = [token for tokens in tiles for token in tokens]
            for number, tokens in enumerate(tiles):
                seen = every
                if number >= len(of_text):
                    best = scores[number, len(of_text) :].topk(num_kept).indices.tolist()
                    seen = [each for kept in (*of_text, *(of_grid[one] for one in best)) for each in kept]
                attended = (queries[tokens] @ keys[seen].T / q.shape[3] ** 0.5).softmax(-1) @ values[seen]
                out[sample, tokens, head] = attended + gate[sample, tokens, head].double() * pooled[number]
    return out
