"""The allocator's settings, judged by the page faults of real processes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator

IS_GLIBC = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"

# Twenty tensors of 64 MiB, one after the other: 327,680 pages of 4 KiB when none of them is reused.
CHILD = """
import sys
from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator
told = tune_cpu_allocator() if sys.argv[1] == "tuned" else None
import resource, torch
torch.zeros(2**24).fill_(1.0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.empty(2**24).fill_(1.0)
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run_child(mode: str, **environment: str) -> tuple[str, int]:
    """(what tune_cpu_allocator said, page faults) of a process of its own."""
    # A command that ran in this process may have set it.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    result = subprocess.run(
        [sys.executable, "-c", CHILD, mode], capture_output=True, text=True, check=True, env=inherited | environment
    )
    assert result.stderr == ""
    told, faults = result.stdout.split()
    return told, int(faults)


@pytest.mark.skipif(not IS_GLIBC, reason="only glibc has mallopt")
def test_freed_tensors_are_reused_without_new_page_faults() -> None:
    _, default_faults = run_child("default")
    told, tuned_faults = run_child("tuned")
    assert told == "True"
    assert tuned_faults * 20 < default_faults


@pytest.mark.skipif(not IS_GLIBC, reason="only glibc has mallopt")
def test_settings_of_the_environment_are_left_alone() -> None:
    told, _ = run_child("tuned", MALLOC_TRIM_THRESHOLD_="131072")
    assert told == "False"


@pytest.mark.skipif(IS_GLIBC, reason="glibc understands")
def test_another_libc_is_left_alone() -> None:
    assert tune_cpu_allocator() is False
