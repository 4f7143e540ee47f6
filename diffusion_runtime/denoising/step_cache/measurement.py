"""Measurements of `calibrate` on a model's blocks: residuals for MagCache, changes of input and output for TeaCache."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import numpy
import torch

from diffusion_runtime.core.block_stack import BlockRunner, MakeModulatedInput, RunBlock, Streams
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.step_cache.counted_runner import entered, minus
from diffusion_runtime.denoising.step_cache.teacache import compared_tensor, relative_change
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.request.step_cache_options import NUM_COEFFICIENTS

# (relative change of what TeaCache compares, relative change of the output of all blocks).
Change = tuple[float, float]


class StackMeasurement(BlockRunner):
    """Runs every block, and measures, for one request of one process.

    ratios: by branch and step, of the sizes of the residuals of this step and the one before (MagCache). changes: by
    what is compared, `plain` or `of_ret_steps`, from each step to the next within a branch (TeaCache).
    """

    def __init__(self) -> None:
        self.ratios: dict[str, dict[int, float]] = {}
        self.changes: dict[str, list[Change]] = {}
        self._sizes: dict[str, torch.Tensor] = {}
        self._compared: dict[str, dict[str, torch.Tensor]] = {}
        self._expert: int | None = None

    def run(
        self,
        blocks: Sequence[RunBlock],
        streams: Streams,
        step: StepInfo,
        num_grid_tokens: int,
        modulated_input: MakeModulatedInput | None = None,
    ) -> Streams:
        if step.expert != self._expert:
            self._expert = step.expert
            self._sizes.clear()
            self._compared.clear()
        modulated = None if modulated_input is None else modulated_input()
        compared = {}
        if modulated is not None:
            compared["plain"] = compared_tensor(modulated, num_grid_tokens, use_ret_steps=False)
            if modulated.projection is not None:
                compared["of_ret_steps"] = compared_tensor(modulated, num_grid_tokens, use_ret_steps=True)
        entering = entered(streams)
        streams = super().run(blocks, streams, step, num_grid_tokens, modulated_input)
        self._add_ratio(minus(streams, entering)[0][:, :num_grid_tokens], step)
        # A copy: what follows the blocks may write into their output.
        self._add_changes({**compared, "output": streams[0][:, :num_grid_tokens].clone()}, step)
        return streams

    def _add_ratio(self, residual: torch.Tensor, step: StepInfo) -> None:
        sizes = residual.float().norm(dim=-1)
        before = self._sizes.get(step.branch)
        ratio = 1.0 if before is None else float((sizes / before.clamp(min=1e-12)).mean())
        self.ratios.setdefault(step.branch, {})[step.index] = ratio
        self._sizes[step.branch] = sizes

    def _add_changes(self, now: dict[str, torch.Tensor], step: StepInfo) -> None:
        before = self._compared.get(step.branch)
        self._compared[step.branch] = now
        if before is None:
            return
        change = {name: relative_change(now[name], before[name], RankGroup()) for name in now}
        for name in now.keys() - {"output"}:
            self.changes.setdefault(name, []).append((change[name], change["output"]))


def mean_ratios(measured: Sequence[StackMeasurement], num_steps: int) -> dict[str, tuple[float, ...]]:
    """Return the mean ratios by branch, over several requests; 1 for a step that a branch did not run."""
    branches = dict.fromkeys(branch for each in measured for branch in each.ratios)
    return {
        branch: tuple(
            sum(each.ratios.get(branch, {}).get(index, 1.0) for each in measured) / len(measured)
            for index in range(num_steps)
        )
        for branch in branches
    }


def fit_polynomials(measured: Sequence[StackMeasurement]) -> Mapping[str, tuple[float, ...]]:
    """TeaCache's coefficients, the highest power first, by what is compared; empty for too few steps to fit any."""
    names = dict.fromkeys(name for each in measured for name in each.changes)
    fits = {name: _fit(change for each in measured for change in each.changes.get(name, ())) for name in names}
    return {name: fit for name, fit in fits.items() if fit is not None}


def _fit(changes: Iterable[Change]) -> tuple[float, ...] | None:
    """Least squares. One point more than coefficients is needed for a fit that is not an interpolation."""
    finite = numpy.array([change for change in changes if numpy.isfinite(change).all()], dtype=numpy.float64)
    if len(finite) == 0 or len(numpy.unique(finite[:, 0])) <= NUM_COEFFICIENTS:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", numpy.exceptions.RankWarning)
        fit, _, rank, *_ = numpy.polyfit(finite[:, 0], finite[:, 1], NUM_COEFFICIENTS - 1, full=True)
    return tuple(float(coefficient) for coefficient in fit) if rank == NUM_COEFFICIENTS else None
