"""Stored keys: keys and values where a store holds them, for backends that read them there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class PageFormat(NamedTuple):
    """The format of stored keys: tokens of a page, and the dtype of the numbers, float8_e4m3fn for codes."""

    page_size: int
    dtype: torch.dtype


class StoredForm(NamedTuple):
    """The facts about stored keys that the host knows. pages: those in sight of each sample, in order."""

    format: PageFormat
    pages: tuple[tuple[int, ...], ...]

    @property
    def num_keys(self) -> int:
        """Return the number of keys of a sample."""
        return self.format.page_size * len(self.pages[0])


@dataclass(frozen=True, eq=False)
class CodeScales:
    """The values of codes: x = code * scale + mean. scale: [2 (keys, values), batch, 1, kv_heads, 1]; mean: of the
    keys, [batch, 1, kv_heads, head_dim]."""

    scale: torch.Tensor
    mean: torch.Tensor


@dataclass(frozen=True, eq=False)
class StoredKeys:
    """Keys and values in sight as pages, each [num_pages, page_size, kv_heads, head_dim].

    page_table: int32 [batch, pages in sight], contiguous in its last dimension. form: the same on the host. codes: of
    numbers in float8_e4m3fn; None for those in the dtype of the model.
    """

    keys: torch.Tensor
    values: torch.Tensor
    page_table: torch.Tensor
    form: StoredForm
    codes: CodeScales | None = None


@dataclass(frozen=True, eq=False)
class KeyParts:
    """Keys and values in sight in two parts. stored: where the store holds them, None for none; own: those of the pass
    itself, [batch, tokens, kv_heads, head_dim] each, where they are not among the stored ones."""

    stored: StoredKeys | None
    own: tuple[torch.Tensor, torch.Tensor] | None = None
