"""Neighbourhood attention (Hassani et al., arXiv:2204.07143) on a grid of frames, height and width: each token attends
to a window around it, which is moved inward at the edges so that it always has its whole size.

The grid is cut into boxes of queries. The keys that a box sees lie in a box too, and torch's scaled dot-product
attention takes both with a mask: exact, on every device, without the mask of the whole grid, which at 121 frames of
768 x 512 would have 10^13 entries. Boxes that lie side by side are one call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Queries of a box, in frames, height and width: few enough for the keys around them, enough for a matrix product.
BOX = (4, 8, 8)


@dataclass(frozen=True)
class _Axis:
    """Boxes along one axis. starts: of the queries, `size` each, the last ones of a box that reaches back; keys: first
    key of each box, num_keys each. visible: [boxes, size, num_keys]."""

    size: int
    num_keys: int
    starts: tuple[int, ...]
    keys: tuple[int, ...]
    visible: torch.Tensor

    @classmethod
    def of(cls, num_queries: int, origin: int, length: int, window: int, box: int, device: torch.device) -> _Axis:
        """Return the boxes of queries that are the tokens from `origin` on of an axis of `length` keys."""
        window, size = min(window, length), min(box, num_queries)
        starts = tuple(min(start, num_queries - size) for start in range(0, num_queries, size))
        num_keys = min(size + window - 1, length)
        keys = tuple(min(max(origin + start - window // 2, 0), length - num_keys) for start in starts)
        queries = torch.tensor(starts, device=device)[:, None] + torch.arange(size, device=device) + origin
        first = (queries - window // 2).clamp(0, length - window)[..., None]
        places = (torch.tensor(keys, device=device)[:, None] + torch.arange(num_keys, device=device))[:, None]
        return cls(size, num_keys, starts, keys, (places >= first) & (places < first + window))


def neighborhood_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: tuple[int, int, int],
    *,
    scale: float | None = None,
    origin: tuple[int, int, int] = (0, 0, 0),
    box: tuple[int, int, int] = BOX,
) -> torch.Tensor:
    """Return the attention of each token to its window. q, k, v and the result: [batch, frames, height, width, heads,
    head_dim]. window: in tokens; a longer one than the grid is the grid. scale: of the scores, None for 1 / sqrt(
    head_dim). origin: place of the first query in the grid of the keys, where q is a part of it."""
    out = torch.empty_like(q)
    frames, rows, columns = (
        _Axis.of(q.shape[1 + axis], origin[axis], k.shape[1 + axis], window[axis], box[axis], q.device)
        for axis in range(3)
    )
    side = torch.tensor(columns.keys, device=q.device)[:, None] + torch.arange(columns.num_keys, device=q.device)
    own = torch.tensor(columns.starts, device=q.device)[:, None] + torch.arange(columns.size, device=q.device)
    for frame, first_frame in enumerate(frames.starts):
        for row, first_row in enumerate(rows.starts):
            place = (
                slice(None),
                slice(first_frame, first_frame + frames.size),
                slice(first_row, first_row + rows.size),
            )
            seen = (
                slice(None),
                slice(frames.keys[frame], frames.keys[frame] + frames.num_keys),
                slice(rows.keys[row], rows.keys[row] + rows.num_keys),
            )
            # [boxes, frames, rows, columns] of queries, then of keys.
            mask = (
                (
                    frames.visible[frame][None, :, None, None, :, None, None]
                    & rows.visible[row][None, None, :, None, None, :, None]
                    & columns.visible[:, None, None, :, None, None, :]
                )
                .flatten(4)
                .flatten(1, 3)
            )
            attended = F.scaled_dot_product_attention(
                _side_by_side(q[place], own),
                _side_by_side(k[seen], side),
                _side_by_side(v[seen], side),
                attn_mask=mask[:, None].repeat(q.shape[0], 1, 1, 1),
                scale=scale,
            )
            parts = torch.unflatten(attended.transpose(1, 2), 1, (frames.size, rows.size, columns.size))
            # One after the other: boxes at the end share queries, of which the last one's count.
            for index, part in enumerate(torch.unflatten(parts, 0, (q.shape[0], -1)).unbind(1)):
                start = columns.starts[index]
                out[(*place, slice(start, start + columns.size))] = part
    return out


def _side_by_side(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return [batch * boxes, heads, tokens, head_dim] of x [batch, frames, rows, width, heads, head_dim]. columns:
    [boxes, columns], those of each box."""
    boxes = x[:, :, :, columns].permute(0, 3, 5, 1, 2, 4, 6)
    return boxes.flatten(0, 1).flatten(2, 4)
