"""Long work says how much it is, and ends on a signal although one call computes."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from cli_support import Command

from diffusion_runtime.cli.interruptible import has_abandoned_work, run_interruptibly
from diffusion_runtime.explanation.estimate import duration_text, estimate_text


def test_a_signal_ends_the_wait_for_a_call_that_computes() -> None:
    is_computing, may_end = threading.Event(), threading.Event()

    def compute() -> None:
        is_computing.set()
        # No signal reaches this thread, as none reaches a kernel.
        may_end.wait()

    def interrupt() -> None:
        is_computing.wait()
        signal.raise_signal(signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(compute)
    assert has_abandoned_work()
    may_end.set()
    sender.join()


def test_results_and_errors_are_those_of_the_work() -> None:
    assert run_interruptibly(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_interruptibly(lambda: 1 / 0)


def test_an_estimate_names_operations_and_time() -> None:
    assert "1.0e+09 floating-point operations, 1 s or more on this CPU" in estimate_text(1e9, torch.float32)
    assert [duration_text(seconds) for seconds in (0.1, 80, 600, 9000)] == ["1 s", "80 s", "10 min", "2.5 h"]


def test_bench_says_how_much_it_will_compute(command: Command) -> None:
    flags = ("--shapes", "shapes-draft", "--backends", "torch_sdpa", "--repeats", "1", "--device", "cpu")
    made = command("bench", "attention", *flags)
    assert made.code == 0, made.err
    assert "shapes: 1, backends: 1, calls of each shape: 3; " in made.said
    assert "floating-point operations" in made.said.partition("timing")[0]
