"""Timing in turns: as many samples as rounds, every round in another order, cut short by a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from diffusion_runtime.attention.stopwatch import milliseconds, time_alternately

CPU = torch.device("cpu")


def sleeper(log: list[str], name: str, seconds: float) -> Callable[[], None]:
    def sleep() -> None:
        log.append(name)
        time.sleep(seconds)

    return sleep


def test_a_time_is_of_one_call() -> None:
    log: list[str] = []
    assert 10 <= milliseconds(sleeper(log, "a", 0.01), 5, CPU) < 50
    assert len(log) == 5


def test_rounds_begin_with_another_function_each_time() -> None:
    log: list[str] = []
    functions = {name: sleeper(log, name, 0.006) for name in "abc"}
    samples = time_alternately(functions, CPU, num_rounds=4)
    assert {name: len(times) for name, times in samples.items()} == {"a": 4, "b": 4, "c": 4}
    assert min(min(times) for times in samples.values()) >= 6
    # A call as long as a sample is not repeated within it.
    assert "".join(log) == "abc" + "bca" + "cab" + "abc"


def test_short_calls_are_timed_many_at_once() -> None:
    log: list[str] = []
    samples = time_alternately({"a": sleeper(log, "a", 0.0005)}, CPU, num_rounds=2)
    # One to see how long a call takes, then about five milliseconds of them a sample.
    assert len(samples["a"]) == 2
    assert len(log) > 5
    assert samples["a"][0] == pytest.approx(samples["a"][1], rel=3)


def test_past_the_deadline_there_is_one_sample_of_each() -> None:
    log: list[str] = []
    functions = {name: sleeper(log, name, 0.006) for name in "ab"}
    samples = time_alternately(functions, CPU, num_rounds=50, deadline=time.monotonic())
    assert {name: len(times) for name, times in samples.items()} == {"a": 1, "b": 1}
