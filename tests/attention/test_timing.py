"""Timing in turns: as many samples as rounds, every round in another order, cut short by a deadline."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from diffusion_runtime.attention import autotune as timing
from diffusion_runtime.attention.autotune import milliseconds, time_alternately

CPU = torch.device("cpu")


class Clock:
    """Time that passes in the functions of the tests alone, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def sleeper(clock: Clock, log: list[str], name: str, seconds: float) -> Callable[[], None]:
    def sleep() -> None:
        log.append(name)
        clock.now += seconds

    return sleep


def test_a_time_is_of_one_call(clock: Clock) -> None:
    log: list[str] = []
    assert milliseconds(sleeper(clock, log, "a", 0.01), 5, CPU) == pytest.approx(10)
    assert len(log) == 5


def test_rounds_begin_with_another_function_each_time(clock: Clock) -> None:
    log: list[str] = []
    functions = {name: sleeper(clock, log, name, 0.006) for name in "abc"}
    samples = time_alternately(functions, CPU, num_rounds=4)
    assert {name: len(times) for name, times in samples.items()} == {"a": 4, "b": 4, "c": 4}
    assert all(time == pytest.approx(6) for times in samples.values() for time in times)
    # A call as long as a sample is not repeated within it.
    assert "".join(log) == "abc" + "bca" + "cab" + "abc"


def test_short_calls_are_timed_many_at_once(clock: Clock) -> None:
    log: list[str] = []
    samples = time_alternately({"a": sleeper(clock, log, "a", 0.0005)}, CPU, num_rounds=2)
    # One to see how long a call takes, then about five milliseconds of them a sample.
    assert len(samples["a"]) == 2
    assert len(log) == 1 + 2 * 10
    assert samples["a"] == pytest.approx([0.5, 0.5])


def test_past_the_deadline_there_is_one_sample_of_each(clock: Clock) -> None:
    log: list[str] = []
    functions = {name: sleeper(clock, log, name, 0.006) for name in "ab"}
    samples = time_alternately(functions, CPU, num_rounds=50, deadline=clock.monotonic())
    assert {name: len(times) for name, times in samples.items()} == {"a": 1, "b": 1}
