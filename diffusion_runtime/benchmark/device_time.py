"""Division of a call's time, by torch.profiler: attention, linear products and the rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ATTENTION, LINEAR, REST = "attention", "linear", "rest"
_NUM_LONGEST = 8
# Parts of the names of kernels and operators, lower case. Attention comes first: FlashAttention is built of CUTLASS.
_ATTENTION_NAMES = ("flash", "fmha", "sdpa", "scaled_dot_product", "attention", "attend", "_fwd_sm90", "forward_sm90")
_LINEAR_NAMES = ("gemm", "cutlass", "nvjet", "cublas", "sm90_xmma", "splitkreduce", "scaled_mm", "mkldnn::_linear")
_LINEAR_OPERATORS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation")


@dataclass(frozen=True)
class TimeShares:
    """Milliseconds of one profiled call, by kind. longest: (name, ms, calls) of what took longest in the rest."""

    attention: float
    linear: float
    rest: float
    longest: tuple[tuple[str, float, int], ...]

    @property
    def total(self) -> float:
        return self.attention + self.linear + self.rest

    def scaled_to(self, milliseconds: float) -> TimeShares:
        """Return the same shares of another total."""
        scale = milliseconds / max(self.total, 1e-9)
        longest = tuple((name, ms * scale, calls) for name, ms, calls in self.longest)
        return TimeShares(self.attention * scale, self.linear * scale, self.rest * scale, longest)

    def to_dict(self) -> dict[str, Any]:
        return {
            "attention_ms": self.attention,
            "linear_ms": self.linear,
            "rest_ms": self.rest,
            "longest_of_rest": [{"name": name, "ms": ms, "calls": calls} for name, ms, calls in self.longest],
        }


def time_shares(run: Callable[[], object], device: torch.device) -> TimeShares:
    """Return the shares of kernels on a GPU; of operators on a CPU, without the time between them, such as Python's."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    # Below it, the library reports each start and stop on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    totals = dict.fromkeys((ATTENTION, LINEAR, REST), 0.0)
    others = []
    for event in profiled.key_averages():
        spent = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000
        kind = kind_of(event.key)
        totals[kind] += spent
        if kind == REST:
            others.append((event.key[:80], spent, event.count))
    longest = sorted(others, key=lambda other: -other[1])[:_NUM_LONGEST]
    return TimeShares(totals[ATTENTION], totals[LINEAR], totals[REST], tuple(longest))


def kind_of(name: str) -> str:
    """Attention, linear or rest: of a kernel or an operator."""
    lower = name.lower()
    if any(part in lower for part in _ATTENTION_NAMES):
        return ATTENTION
    if lower in _LINEAR_OPERATORS or any(part in lower for part in _LINEAR_NAMES):
        return LINEAR
    return REST
