"""Contact sheets: a few frames of several clips in one PNG, one clip a row, to look at what was made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor


def save_sheet(path: Path, clips: Sequence[Tensor], *, num_columns: int = 6, size: int = 128, fold: int = 2) -> None:
    """Write clips, uint8 [frames, height, width, 3] each, as rows of `num_columns` frames, `fold` rows side by side."""
    rows = []
    for clip in clips:
        count = min(num_columns, clip.shape[0])
        picked = [round(index * (clip.shape[0] - 1) / max(count - 1, 1)) for index in range(count)]
        frames = F.interpolate(clip[picked].permute(0, 3, 1, 2).float(), size=(size, size), mode="area")
        rows.append(F.pad(frames, (1, 1, 1, 1)).permute(1, 2, 0, 3).flatten(2))
    per_fold = -(-len(rows) // fold)
    blank = torch.zeros_like(rows[0])
    rows += [blank] * (per_fold * fold - len(rows))
    columns = [torch.cat(rows[first : first + per_fold], dim=1) for first in range(0, len(rows), per_fold)]
    sheet = torch.cat(columns, dim=2).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    Image.fromarray(sheet).save(path)
