"""Tiles of the text around a grid, as VSA-H3 has them (fastvideo 0.2.1, attention/backends/video_sparse_attn_h3.py):
every segment of the text is cut into runs of as many tokens as a tile of the grid has.

Text is dense in both directions, so these tiles select nothing. They are queries, keys and values of the coarse
attention, whose softmax is over the tiles of the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall
from diffusion_runtime.core.token_layout import TokenLayout


@dataclass(frozen=True)
class TextTiles:
    """The tiles of a layout's text. T text tokens, N tiles, B samples.

    tile_of_token: int64 [T]. tokens: int64 [N, tokens of a tile], T where a tile has fewer. counts: float32 [B or 1, N,
    1, 1], valid tokens of each tile. valid: bool [B or 1, T, 1, 1]; None where all tokens are.
    """

    tile_of_token: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    valid: torch.Tensor | None

    @property
    def num_tiles(self) -> int:
        return self.counts.shape[1]

    @property
    def is_empty(self) -> torch.Tensor | None:
        """bool [B, 1, N]: tiles whose tokens are all padding; None where there is no padding."""
        return None if self.valid is None else (self.counts[:, :, :, 0] == 0).transpose(1, 2)

    def means(self, x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """Return the means over valid tokens, float32 [B, heads, N, head_dim]. x: [B, seq, heads, head_dim], of the
        whole sequence."""
        text = text_rows(x, layout).float()
        if self.valid is not None:
            text = text.masked_fill(~self.valid, 0.0)
        # Gathered and summed, which repeats to the bit on a GPU, unlike index_add.
        of_tiles = torch.nn.functional.pad(text, (0, 0, 0, 0, 0, 1))[:, self.tokens]
        return (of_tiles.sum(dim=2) / self.counts.clamp(min=1)).transpose(1, 2)

    def add_(self, out: torch.Tensor, pooled: torch.Tensor, gate: torch.Tensor, layout: TokenLayout) -> None:
        """Add gate * pooled[tile of the token] to the valid text of `out` in place, in float32 at least. out, gate: [B,
        seq, H, head_dim]; pooled: [B, H, N, head_dim]."""
        working = torch.promote_types(out.dtype, torch.float32)
        spread = pooled.transpose(1, 2)[:, self.tile_of_token].to(working)
        added = text_rows(gate, layout).to(working) * spread
        if self.valid is not None:
            added = added.masked_fill(~self.valid, 0.0)
        before, grid = layout.num_prefix_tokens, layout.num_grid_tokens
        for rows, more in ((out[:, :before], added[:, :before]), (out[:, before + grid :], added[:, before:])):
            rows.copy_(rows.to(working) + more)


def text_rows(x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """Return the text's rows of x [B, seq, ...], those before the grid first."""
    before, grid = layout.num_prefix_tokens, layout.num_grid_tokens
    return x[:, grid:] if before == 0 else torch.cat([x[:, :before], x[:, before + grid :]], dim=1)


def text_tiles_of(call: AttentionCall, num_tokens: int) -> TextTiles | None:
    """Return the tiles of a call's text, of num_tokens tokens each, made once per request; None where the layout
    declares no segments."""
    layout = call.grid_layout
    if not any(layout.text_segments or ()):
        return None
    return call.state.request.compute_once(_text_tiles, layout, num_tokens, call.q.device)


def _text_tiles(layout: TokenLayout, num_tokens: int, device: torch.device) -> TextTiles:
    assert layout.text_segments is not None
    runs: list[torch.Tensor] = []
    start = 0
    for length in layout.text_segments:
        runs += torch.split(torch.arange(start, start + length, device="cpu"), num_tokens) if length else ()
        start += length
    sizes = torch.tensor([len(run) for run in runs], device="cpu")
    tokens = torch.nn.utils.rnn.pad_sequence(runs, batch_first=True, padding_value=start)
    valid = torch.ones(1, start, dtype=torch.bool, device="cpu")
    if layout.has_padding:
        assert layout.valid_lengths is not None
        valid = torch.arange(start, device="cpu") < torch.tensor(layout.valid_lengths, device="cpu")[:, None]
    counts = torch.nn.functional.pad(valid.float(), (0, 1))[:, tokens].sum(dim=-1)
    return TextTiles(
        torch.arange(len(runs), device="cpu").repeat_interleave(sizes).to(device),
        tokens.to(device),
        counts[:, :, None, None].to(device),
        valid[:, :, None, None].to(device) if layout.has_padding else None,
    )
