"""DBCache against its formula in float64, on blocks with one stream, with two, and with two that are joined."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tables import table

from diffusion_runtime.core.block_stack import BlockRunner, RunBlock, Streams, overwriting, then_joined
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.step_cache.dbcache import DBCache
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.step_cache_options import DBCacheOptions

NUM_STEPS, NUM_TOKENS, DIM = 14, 6, 8


def block(index: int) -> RunBlock:
    def overwrite(*streams: torch.Tensor) -> None:
        for stream in streams:
            stream += 0.2 * torch.sin(stream * (1 + 0.3 * index) + index)

    return overwriting(overwrite)


def stack(kind: str) -> list[RunBlock]:
    blocks = [block(index) for index in range(5)]
    return [*then_joined(blocks[:3]), *blocks[3:]] if kind == "joined" else blocks


def entering(kind: str, index: int, dtype: torch.dtype) -> Streams:
    """Streams of a step, which change more and more slowly."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, NUM_TOKENS, DIM, generator=generator, dtype=torch.float64)
    text = torch.randn(1, 4, DIM, generator=generator, dtype=torch.float64)
    time = math.exp(-0.4 * index)
    streams = ((x * (1 + time)).to(dtype), (text + time).to(dtype))
    return streams[:1] if kind == "one" else streams


def formula(kind: str, options: DBCacheOptions) -> tuple[list[torch.Tensor], list[int]]:
    """The whole output, streams behind one another, of every step; and the computed steps."""
    blocks = stack(kind)
    outputs, computed, history = [], [], []
    kept_d: torch.Tensor | None = None
    in_a_row = 0
    for index in range(NUM_STEPS):
        x = entering(kind, index, torch.float64)
        h = run(blocks[: options.F], tuple(stream.clone() for stream in x))
        d = h[0][:, :NUM_TOKENS] - x[0]
        whole = torch.cat(h, dim=1)
        relative = math.inf if kept_d is None else float((d - kept_d).abs().mean() / kept_d.abs().mean())
        allowed = options.MC < 0 or in_a_row < options.MC
        last = len(blocks) - options.B
        if index >= options.W and relative < options.R and allowed:
            in_a_row += 1
            y = whole + taylor(history, index, options.taylor)
        else:
            in_a_row, kept_d = 0, d
            y = torch.cat(run(blocks[options.F : last], tuple(stream.clone() for stream in h)), dim=1)
            history.append((index, y - whole))
            computed.append(index)
        ended = (y,) if len(x) == 1 or kind == "joined" else tuple(y.split([NUM_TOKENS, 4], dim=1))
        outputs.append(torch.cat(run(blocks[last:], ended), dim=1))
    return outputs, computed


def taylor(history: list[tuple[int, torch.Tensor]], index: int, order: int) -> torch.Tensor:
    """The forecast from the definition of divided differences, all of them computed anew."""

    def difference(place: int, of_order: int) -> torch.Tensor | None:
        if of_order == 0:
            return history[place][1]
        if place < 1:
            return None
        now, before = difference(place, of_order - 1), difference(place - 1, of_order - 1)
        if now is None or before is None:
            return None
        return (now - before) / (history[place][0] - history[place - 1][0])

    since = index - history[-1][0]
    terms = [difference(len(history) - 1, i) for i in range(order + 1)]
    parts = [term * since**i / math.factorial(i) for i, term in enumerate(terms) if term is not None]
    return torch.stack(parts).sum(dim=0)


def run(blocks: Sequence[RunBlock], streams: Streams) -> Streams:
    return BlockRunner().run(blocks, streams, StepInfo(), NUM_TOKENS)


@table("kind", ["one", "two", "joined"])
@table(
    "options",
    [
        DBCacheOptions(F=1, W=2, R=0.1),
        DBCacheOptions(F=1, B=1, W=2, R=0.1, MC=1),
        DBCacheOptions(F=2, W=3, R=0.1, MC=2, taylor=1),
        DBCacheOptions(F=1, B=2, W=4, R=0.1, MC=2, taylor=2),
    ],
)
def test_dbcache_is_its_formula(kind: str, options: DBCacheOptions) -> None:
    expected, computed = formula(kind, options)
    assert 2 < len(computed) < NUM_STEPS, "the case decides nothing"
    recorder = AttentionRecorder()
    cache = DBCache(options, RankGroup(), recorder)
    for index in range(NUM_STEPS):
        step = StepInfo(index, NUM_STEPS, branch="cond")
        streams = cache.run(stack(kind), entering(kind, index, torch.float32), step, NUM_TOKENS)
        torch.testing.assert_close(torch.cat(streams, dim=1).double(), expected[index], atol=1e-5, rtol=1e-5)
    [row] = recorder.report().steps
    assert row.num_computed == len(computed)


def test_branches_and_experts_share_nothing() -> None:
    recorder = AttentionRecorder()
    cache = DBCache(DBCacheOptions(F=1, W=0, R=10), RankGroup(), recorder)
    for index in range(8):
        for branch in ("cond", "uncond"):
            streams = entering("one", index if branch == "cond" else 7 - index, torch.float32)
            step = StepInfo(index, 8, branch=branch, expert=int(index > 4))
            cache.run(stack("one"), streams, step, NUM_TOKENS)
    rows = {(row.branch, row.expert): row.computed for row in recorder.report().steps}
    assert rows == {("cond", 0): "0", ("uncond", 0): "0", ("cond", 1): "5", ("uncond", 1): "5"}
