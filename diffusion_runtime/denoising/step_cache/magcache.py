"""MagCache (Ma et al., github.com/Zehong-Ma/MagCache): steps left out by how residuals were measured to change.

The size of the residual of all blocks changes from step to step by a ratio that depends on the model and hardly on the
prompt (calibration.py). After the first steps, per guidance branch:

    g *= ratio_t;  e += |1 - g|;  n += 1;   e < threshold and n <= K: the last residual is reused
    else e, n, g = 0, 0, 1 and the step is computed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diffusion_runtime.core.block_stack import MakeModulatedInput, RunBlock, Streams
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.step_cache.calibration import Calibration
from diffusion_runtime.denoising.step_cache.counted_runner import CountedRunner, entered, minus, plus
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.step_cache_options import MagCacheOptions


@dataclass
class _Branch:
    """residual: of the last computed step; the others are g, e and n above."""

    residual: Streams
    scale: float = 1.0
    error: float = 0.0
    num_reused: int = 0


class MagCache(CountedRunner):
    """The cache of one request. Decisions come from the calibration alone, so that every process makes the same."""

    def __init__(
        self, options: MagCacheOptions, calibration: Calibration, num_steps: int, recorder: AttentionRecorder
    ) -> None:
        super().__init__("magcache", recorder)
        self._options = options
        self._ratios = calibration.ratios_for(num_steps)
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
        if step.expert != self._expert:
            self._expert = step.expert
            self._branches.clear()
        kept = self._branches.get(step.branch)
        if kept is not None and self._is_reused(kept, step):
            self.record(step, kept.error)
            return plus(streams, kept.residual)
        entering = entered(streams)
        streams = super().run(blocks, streams, step, num_grid_tokens, modulated_input)
        self._branches[step.branch] = _Branch(minus(streams, entering))
        self.record(step, None)
        return streams

    def _is_reused(self, kept: _Branch, step: StepInfo) -> bool:
        """Counts the step as reused when it is."""
        options = self._options
        # A branch that the calibration has not seen is computed.
        ratios = self._ratios.get(step.branch)
        if ratios is None or step.index < math.ceil(options.retention * step.num_steps):
            return False
        kept.scale *= ratios[step.index]
        kept.error += abs(1 - kept.scale)
        kept.num_reused += 1
        return kept.error < options.threshold and kept.num_reused <= options.K
