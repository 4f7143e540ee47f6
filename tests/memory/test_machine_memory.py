"""What is free in the machine, and in a container whose limit is below it; the peak of this process alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_support import process_environment

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.loading.memory_planning import is_planned
from diffusion_runtime.memory import machine_memory

GB = 10**9


@pytest.mark.parametrize("version", [2, 1])
def test_the_limit_of_a_container_counts_where_it_leaves_less_than_the_machine(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99000000 kB\nMemAvailable: 60000000 kB\n")
    monkeypatch.setattr(machine_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine_memory, "_CONTROL_GROUP", tmp_path)
    assert machine_memory.free_in_machine() == 60_000_000 * 1024
    folder, names, prefix = tmp_path, ("memory.max", "memory.current"), ""
    if version == 1:
        folder, names, prefix = tmp_path / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        folder.mkdir()
    (folder / names[1]).write_text(f"{6 * GB}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{prefix}inactive_file {GB}\n{prefix}active_file {2 * GB}\n")
    for most, expected in (("max", 60_000_000 * 1024), (str(2**63 - 4096), 60_000_000 * 1024), (str(16 * GB), 13 * GB)):
        (folder / names[0]).write_text(f"{most}\n")
        assert machine_memory.free_in_machine() == expected, most
    (folder / names[0]).write_text(f"{2 * GB}\n")
    assert machine_memory.free_in_machine() == 0


def test_the_peak_is_not_that_of_the_program_that_started_this_one() -> None:
    code = "from diffusion_runtime.memory.machine_memory import peak_in_machine as peak; print(peak())"
    script = f"import os, sys; x = b'1' * 600_000_000; os.execv(sys.executable, [sys.executable, '-c', {code!r}])"
    done = subprocess.run(
        [sys.executable, "-c", script], env=process_environment(), capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 550_000_000


class Xpu:
    """torch.xpu as far as memory goes. free: None for a driver that does not say."""

    def __init__(self, free: int | None) -> None:
        self._free = free

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        if self._free is None:
            raise RuntimeError("The device doesn't support querying the available free memory")
        return self._free, 16 * GB

    memory_reserved = staticmethod(lambda _: 3 * GB)
    memory_allocated = staticmethod(lambda _: GB)
    max_memory_allocated = staticmethod(lambda _: 5 * GB)
    reset_peak_memory_stats = staticmethod(lambda _: None)


def test_memory_of_devices_other_than_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    xpu, mps = torch.device("xpu"), torch.device("mps")
    monkeypatch.setattr(torch, "xpu", Xpu(free=8 * GB))
    assert machine_memory.share_of_device(xpu) == 11 * GB
    assert machine_memory.free_on_device(xpu) == 10 * GB
    assert machine_memory.peaks(xpu)["device"] == 5 * GB
    assert is_planned(RuntimeConfig(), xpu)
    machine_memory.forget_device_peak(xpu)
    monkeypatch.setattr(torch, "xpu", Xpu(free=None))
    assert (machine_memory.share_of_device(xpu), machine_memory.free_on_device(xpu)) == (None, None)
    assert not is_planned(RuntimeConfig(), xpu)
    assert (machine_memory.share_of_device(mps), machine_memory.free_on_device(mps)) == (None, None)
    assert set(machine_memory.peaks(mps)) == {"machine"}
    machine_memory.forget_device_peak(mps)
    assert not is_planned(RuntimeConfig(), mps)
