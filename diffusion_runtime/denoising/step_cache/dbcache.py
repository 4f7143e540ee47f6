"""DBCache (Cache-DiT, github.com/vipshop/cache-dit), with F=1 the first-block cache of ParaAttention.

The first F blocks always run. Where their residual is like that of the last computed step, the blocks behind them are
likely to do what they did, and their residual is reused, or a forecast of it:

    h = blocks[:F](x);  d = h - x;  rel = mean|d - d_c| / mean|d_c|, with d_c of the last computed step
    reused:    y = h + r                            r: residual of the middle blocks, or its Taylor forecast
    computed:  y = blocks[F:N-B](h);  r = y - h;  d_c = d
    y = blocks[N-B:](y)

The Taylor forecast of order n is the sum of d_i * D^i / i! over divided differences d_i of r at computed steps, D steps
later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.core.block_stack import MakeModulatedInput, RunBlock, Streams
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.step_cache.counted_runner import CountedRunner, entered, minus, plus
from diffusion_runtime.parallel.collectives import RankGroup, all_gather
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.step_cache_options import DBCacheOptions


@dataclass
class _Branch:
    """State kept of a guidance branch. first_residual: d_c above. differences: of the residual of the middle blocks, by
    order. num_reused: steps in a row."""

    step: int
    first_residual: torch.Tensor
    differences: list[Streams]
    num_reused: int = 0


class DBCache(CountedRunner):
    """The cache of one request, for forward passes of one guidance branch and one sample.

    sequence: processes that run a forward pass together: each sees its own tokens, and two sums are added up over
    them, so that all decide alike.
    """

    def __init__(self, options: DBCacheOptions, sequence: RankGroup, recorder: AttentionRecorder) -> None:
        super().__init__("dbcache", recorder)
        self._options = options
        self._sequence = sequence
        self._branches: dict[str, _Branch] = {}
        self._expert: int | None = None

    def run(
        self,
        blocks: Sequence[RunBlock],
        streams: Streams,
        step: StepInfo,
        num_grid_tokens: int,
        modulated_input: MakeModulatedInput | None = None,  # noqa: ARG002 - of TeaCache
    ) -> Streams:
        """Run the blocks, or reuse the middle ones. Raises RequestError where F and B leave no block to reuse."""
        self._options.check_blocks(len(blocks))
        first, last = self._options.F, len(blocks) - self._options.B
        if step.expert != self._expert:
            self._expert = step.expert
            self._branches.clear()
        before = streams[0][:, :num_grid_tokens].clone()
        for block in blocks[:first]:
            streams = block(streams)
        first_residual = streams[0][:, :num_grid_tokens] - before
        kept = self._branches.get(step.branch)
        difference = self._reusable(kept, first_residual, step)
        if kept is not None and difference is not None:
            kept.num_reused += 1
            self.record(step, difference)
            streams = plus(streams, _forecast(kept.differences, step.index - kept.step))
        else:
            entering = entered(streams)
            for block in blocks[first:last]:
                streams = block(streams)
            differences = [minus(streams, entering)]
            if kept is not None:
                for order, older in enumerate(kept.differences[: self._options.taylor]):
                    change = minus(differences[order], older)
                    differences.append(tuple(stream / (step.index - kept.step) for stream in change))
            self._branches[step.branch] = _Branch(step.index, first_residual, differences)
            self.record(step, None)
        for block in blocks[last:]:
            streams = block(streams)
        return streams

    def _reusable(self, kept: _Branch | None, first_residual: torch.Tensor, step: StepInfo) -> float | None:
        """Return the relative change of the first blocks' residual for a step that is reused, or None for a computed
        one."""
        options = self._options
        if kept is None or step.index < options.W or 0 <= options.MC <= kept.num_reused:
            return None
        if not options.may_reuse(step.num_steps)[step.index]:
            return None
        sums = torch.stack([(first_residual - kept.first_residual).abs().sum(), kept.first_residual.abs().sum()])
        change, size = torch.stack(all_gather(self._sequence, sums.float())).sum(dim=0).tolist()
        difference: float = change / size if size else math.inf
        return difference if options.policy == "static" or difference < options.R else None


def _forecast(differences: Sequence[Streams], num_steps: int) -> Streams:
    """Forecast the residual `num_steps` after the last computed step."""
    forecast = differences[0]
    for order, difference in enumerate(differences[1:], start=1):
        factor = num_steps**order / math.factorial(order)
        forecast = tuple(a + factor * b for a, b in zip(forecast, difference, strict=True))
    return forecast
