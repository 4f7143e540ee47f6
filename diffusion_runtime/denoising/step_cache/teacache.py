"""TeaCache (Liu et al., arXiv:2411.19108): how much the output changes, estimated from the modulated input.

The input of the first block after its norm, shift and scale, m_t, is cheap; a polynomial measured for the model turns
its change into an estimate of the output's. Per guidance branch:

    E += p(mean|m_t - m_(t-1)| / mean|m_(t-1)|)          t-1: the step before, computed or not
    E < threshold:  the residual of all blocks at the last computed step is reused
    else:           E = 0 and the step is computed

The first step, or the first RET_STEPS, and the last are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.core.block_stack import MakeModulatedInput, ModulatedInput, RunBlock, Streams
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.step_cache.calibration import Calibration
from diffusion_runtime.denoising.step_cache.counted_runner import CountedRunner, entered, minus, plus
from diffusion_runtime.errors import RequestError
from diffusion_runtime.parallel.collectives import RankGroup, all_gather
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.step_cache_options import (
    NUM_COEFFICIENTS,
    RET_STEPS,
    TeaCacheOptions,
    TeaCachePolynomial,
    TeaCachePolynomials,
)


@dataclass
class _Branch:
    """compared: m of the step before. residual: of the last computed step. error: E above."""

    compared: torch.Tensor
    residual: Streams
    error: float = 0.0


class TeaCache(CountedRunner):
    """The cache of one request, for forward passes of one guidance branch and one sample.

    sequence: processes that run a forward pass together: each sees its own tokens, and two sums are added up over
    them, so that all decide alike.
    """

    def __init__(
        self,
        options: TeaCacheOptions,
        polynomial: TeaCachePolynomial,
        sequence: RankGroup,
        recorder: AttentionRecorder,
    ) -> None:
        super().__init__("teacache", recorder)
        threshold = polynomial.threshold if options.threshold is None else options.threshold
        assert threshold is not None, "the request is resolved"
        self._threshold = threshold
        self._use_ret_steps = options.use_ret_steps
        self._polynomial = polynomial
        self._sequence = sequence
        self._branches: dict[str, _Branch] = {}
        self._expert: int | None = None

    def run(
        self,
        blocks: Sequence[RunBlock],
        streams: Streams,
        step: StepInfo,
        num_grid_tokens: int,
        modulated_input: MakeModulatedInput | None = None,
    ) -> Streams:
        assert modulated_input is not None, "every family says what its first block's modulated input is"
        if step.expert != self._expert:
            self._expert = step.expert
            self._branches.clear()
        compared = compared_tensor(modulated_input(), num_grid_tokens, use_ret_steps=self._use_ret_steps)
        kept = self._branches.get(step.branch)
        if kept is not None and self._is_reused(kept, compared, step):
            kept.compared = compared
            self.record(step, kept.error)
            return plus(streams, kept.residual)
        entering = entered(streams)
        streams = super().run(blocks, streams, step, num_grid_tokens, modulated_input)
        self._branches[step.branch] = _Branch(compared, minus(streams, entering))
        self.record(step, None)
        return streams

    def _is_reused(self, kept: _Branch, compared: torch.Tensor, step: StepInfo) -> bool:
        """Adds to the accumulated error of a step that may be reused."""
        if step.index < (RET_STEPS if self._use_ret_steps else 1) or step.index == step.num_steps - 1:
            return False
        kept.error += self._polynomial(relative_change(compared, kept.compared, self._sequence))
        # NaN is not below any threshold.
        return kept.error < self._threshold


def compared_tensor(modulated: ModulatedInput, num_grid_tokens: int, *, use_ret_steps: bool) -> torch.Tensor:
    """Return the tensor that is compared, [batch, rows, dim]: this process's tokens of the grid, without padding."""
    if not use_ret_steps:
        return modulated.values[:, :num_grid_tokens]
    assert modulated.projection is not None, "a model without one has no coefficients for use_ret_steps"
    return modulated.projection


def relative_change(now: torch.Tensor, before: torch.Tensor, sequence: RankGroup) -> float:
    """mean|now - before| / mean|before| over the tokens of all processes, infinite where `before` is zero. One number
    is read from the device."""
    sums = torch.stack([(now - before).abs().sum(dtype=torch.float32), before.abs().sum(dtype=torch.float32)])
    change, size = torch.stack(all_gather(sequence, sums)).sum(dim=0).tolist()
    return float(change / size) if size else math.inf


def polynomial_of(
    options: TeaCacheOptions, calibration: Calibration | None, published: TeaCachePolynomials | None
) -> TeaCachePolynomial:
    """Return the polynomial that a request asks for: of its calibration file, or published for the model.

    calibration: of options.file, None where that is empty. published: None for a model without published coefficients.
    Raises RequestError where there is none.
    """
    known = published if calibration is None else calibration.polynomials
    if known is None and calibration is not None:
        raise RequestError(
            f"step_cache: teacache: this calibration has no coefficients: its {calibration.num_steps} steps were too "
            f"few to fit {NUM_COEFFICIENTS}, or an earlier version measured it; calibrate with more steps"
        )
    if known is None:
        raise RequestError(
            "step_cache: teacache: expected coefficients of this very model, and none were published for it; measure "
            "them, diffusion-runtime calibrate PROMPT ... --model-path MODEL -o FILE, and say teacache:file=FILE; or "
            "use easycache"
        )
    found = known.of_ret_steps if options.use_ret_steps else known.plain
    if found is None:
        raise RequestError(
            "step_cache: teacache: use_ret_steps is a variant for Wan, which compares its projected time embedding; "
            f"the coefficients of {known.models} have none; leave it out"
        )
    return found
