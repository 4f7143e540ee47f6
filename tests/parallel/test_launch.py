"""Processes of one run, started by torch's launcher from the process that a user is in."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from diffusion_runtime.parallel.launch import launch, shutdown_limit


def test_a_check_that_fails_ends_the_ranks_and_no_other_child() -> None:
    """A notebook or a server may have child processes of its own."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:

        def check() -> None:
            raise ValueError("not to be had")

        with pytest.raises(ValueError, match="not to be had"):
            launch(
                ("-c", "import time; time.sleep(1000)"),
                2,
                on_cpu=True,
                verbose=False,
                end_at_once=lambda _: None,
                check=check,
            )
        assert other.poll() is None
        other.kill()


def test_the_time_to_end_is_given_to_a_torch_that_takes_one() -> None:
    """torch 2.11 has no such argument, and LaunchConfig of 2.12 has."""
    without = dataclasses.make_dataclass("LaunchConfig", [("run_id", str)])
    limited = dataclasses.make_dataclass("LaunchConfig", [("run_id", str), ("shutdown_timeout", float)])
    assert shutdown_limit(without) == {}
    assert limited("run", **shutdown_limit(limited)).shutdown_timeout < 3
