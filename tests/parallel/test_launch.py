"""Processes of one run, started by torch's launcher from the process that a user is in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from diffusion_runtime.parallel.launch import launch


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
