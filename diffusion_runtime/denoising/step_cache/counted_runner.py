"""A block runner of a step cache that counts the steps of the guidance branches it runs; residuals of a stack
of blocks."""

from __future__ import annotations

import torch

from diffusion_runtime.core.block_stack import BlockRunner, Streams
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.parallel.collectives import RankGroup, all_gather
from diffusion_runtime.report.attention_report import AttentionRecorder

_BRANCHES = ("cond", "uncond")


class CountedRunner(BlockRunner):
    """Block runner of one request that counts computed and reused steps. method: the name in the report."""

    def __init__(self, method: str, recorder: AttentionRecorder) -> None:
        self._method = method
        self._recorder = recorder
        # The steps of this process's branches: (whether computed, expert, error where it was reused).
        self._log: dict[str, dict[int, tuple[bool, int, float]]] = {}

    def record(self, step: StepInfo, error: float | None) -> None:
        """Count a step. error: of one that was reused, None for a computed one."""
        self._log.setdefault(step.branch, {})[step.index] = (error is None, step.expert, error or 0.0)
        if error is None:
            self._recorder.record_computed(step, (step.branch,))
        else:
            self._recorder.record_reused(step, (step.branch,), self._method, error)

    def share_counts(self, branches: RankGroup, device: torch.device) -> None:
        """Count the steps of the branch that the other group of processes ran, once the last step is over. Nothing
        where every process ran both. Every process calls it."""
        if branches.size == 1:
            return
        mine = _BRANCHES[branches.index]
        rows = [(index, *entry) for index, entry in self._log.get(mine, {}).items()]
        counts = [int(count) for count in all_gather(branches, torch.tensor([len(rows)], device=device))]
        padded = torch.zeros(max(1, *counts), 4)
        for place, row in enumerate(rows):
            padded[place] = torch.tensor(row, dtype=torch.float32)
        for branch, count, table in zip(_BRANCHES, counts, all_gather(branches, padded.to(device)), strict=True):
            for index, computed, expert, error in table[:count].tolist() if branch != mine else ():
                self.record(StepInfo(int(index), branch=branch, expert=int(expert)), None if computed else error)


def entered(streams: Streams) -> Streams:
    """Return a copy of the streams, which blocks overwrite."""
    return tuple(stream.clone() for stream in streams)


def minus(streams: Streams, entering: Streams) -> Streams:
    """entering: as many streams, or those that were joined since."""
    if len(entering) > len(streams):
        entering = (torch.cat(entering, dim=1),)
    return tuple(a - b for a, b in zip(streams, entering, strict=True))


def plus(streams: Streams, residual: Streams) -> Streams:
    """Return the streams with a residual of `minus`, joined where its blocks joined them."""
    if len(streams) > len(residual):
        streams = (torch.cat(streams, dim=1),)
    return tuple(a + b for a, b in zip(streams, residual, strict=True))
