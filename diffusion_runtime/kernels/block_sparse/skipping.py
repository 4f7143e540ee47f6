"""Skip-softmax: pieces of keys whose weights are too small to count are left out (BLASST, arXiv:2512.12087).

A tile of queries visits the keys piece after piece and keeps the highest score that each of its queries has seen. A
piece in which the highest score of every query lies below that query's running maximum by more than ln(1 / threshold)
is skipped: its exponentials and its product with v are not computed, and the log-sum-exp does not count it either.

What is skipped depends on the order of the visits, so the order is part of the definition. Tiles are `rows` consecutive
queries of a block, the last one shorter. Pieces are `piece` consecutive positions of the key blocks that the block
lists, ascending; blocks that lie side by side are cut as one run where blocks may be longer than a piece. What is left
of a run, and all text, is always computed, after the pieces; queries of text skip nothing. A query's maximum over the
first keys that are visited is never skipped, so no query that sees a key is left without one.

A weight that is skipped is below `threshold` times the largest weight of its query. With n keys in skipped pieces, at
most n threshold / (1 + n threshold) of the mass is left out, so the result is off by at most twice that times the
largest |v|, and the log-sum-exp by ln(1 + n threshold).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SkipRule:
    """threshold: in (0, 1); rows: queries per tile; piece: keys per piece."""

    threshold: float
    rows: int
    piece: int

    def tiles(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the tiles of the queries from start to stop - 1."""
        return [(first, min(first + self.rows, stop)) for first in range(start, stop, self.rows)]

    def split(self, positions: torch.Tensor, blocks: torch.Tensor, merges: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(positions in whole pieces, the others), each ascending.

        positions: int64 [n], of the listed keys, ascending; blocks: int64 [n], the block of each. merges: blocks that
        lie side by side make one run; without it every block is a run of its own.
        """
        runs = blocks
        if merges:
            runs = torch.nn.functional.pad(positions.diff() != 1, (1, 0)).cumsum(0)[: len(positions)]
        _, run, lengths = torch.unique_consecutive(runs, return_inverse=True, return_counts=True)
        place = torch.arange(len(positions), device=positions.device) - (lengths.cumsum(0) - lengths)[run]
        whole = place < lengths[run] // self.piece * self.piece
        return positions[whole], positions[~whole]

    def skipped(self, scores: torch.Tensor) -> torch.Tensor:
        """bool [heads, pieces]: what a tile skips. scores: [heads, rows, pieces * piece], scaled, in visiting order."""
        tops = scores.reshape(*scores.shape[:-1], -1, self.piece).amax(dim=-1)
        before = torch.nn.functional.pad(tops, (1, 0), value=float("-inf"))[..., :-1].cummax(dim=-1).values
        below: torch.Tensor = tops < before + math.log(self.threshold)
        return below.all(dim=1)
