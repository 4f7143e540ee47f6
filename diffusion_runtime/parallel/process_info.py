"""Rank, world size and rendezvous address of this process, read from the environment that launchers set; and the end of
a launched process whose launcher is gone (parent-death detection), however early that is.

The standard library alone, so that both work while other libraries are still being imported.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from diffusion_runtime.errors import ConfigError

# Set by our own launcher for its ranks. The launcher reports their errors, so that each is reported once.
LAUNCHED_VARIABLE = "DIFFUSION_RUNTIME_LAUNCHED"
# Set by torch's elastic launcher, ours and torchrun: its process is our parent.
AGENT_VARIABLE = "TORCHELASTIC_RUN_ID"
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
# Exit code of a rank that SIGTERM has ended in order, as shells have it.
TERMINATED = 128 + signal.SIGTERM
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True)
class ProcessInfo:
    """This process among those of the run.

    rank: from 0 to world_size - 1; local_rank: among the local_world_size of this machine, which is also the number of
    its device. address, port: where the processes meet; port 0 for a process alone. attempt: how
    often the launcher has started them again. is_launched: our own launcher is the parent. has_agent: torch's elastic
    launcher is, in whichever form. error_file: where a launcher reads why this process failed.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    attempt: int = 0
    is_launched: bool = False
    has_agent: bool = False
    error_file: str | None = None

    @property
    def is_first(self) -> bool:
        """True for rank 0, which writes files and the terminal's output."""
        return self.rank == 0


def is_rank(environment: Mapping[str, str]) -> bool:
    """Return True if a launcher has started this process as one of several."""
    return "RANK" in environment and environment.get("WORLD_SIZE", "1") != "1"


def read_process_info(environment: Mapping[str, str] | None = None) -> ProcessInfo | None:
    """Read the rank and rendezvous that a launcher has set; None when this process runs alone.

    Raises ConfigError for an environment that is incomplete or contradicts itself.
    """
    found = os.environ if environment is None else environment
    if "RANK" not in found or "WORLD_SIZE" not in found:
        return None
    numbers = {}
    for name in _NUMBERS:
        text = found.get(name)
        if text is not None:
            if not text.isdecimal():
                raise ConfigError(f"environment {name}: expected a whole number of 0 or more, got {text!r}")
            numbers[name] = int(text)
    if numbers["WORLD_SIZE"] == 1:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK") if not found.get(name)]
    if missing:
        raise ConfigError(
            f"environment: RANK and WORLD_SIZE are set, {' and '.join(missing)} not; start with "
            "`torchrun --nproc-per-node N -m diffusion_runtime ...` or `--num-gpus N`, or unset RANK and WORLD_SIZE"
        )
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise ConfigError(f"environment: RANK {numbers['RANK']} is not below WORLD_SIZE {numbers['WORLD_SIZE']}")
    return ProcessInfo(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_world_size=numbers.get("LOCAL_WORLD_SIZE", numbers["LOCAL_RANK"] + 1),
        address=found["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        attempt=numbers.get("TORCHELASTIC_RESTART_COUNT", 0),
        is_launched=LAUNCHED_VARIABLE in found,
        has_agent=AGENT_VARIABLE in found,
        error_file=found.get(ERROR_FILE_VARIABLE) or None,
    )


# Grace period in which the main thread may end by itself, and remove temporary files, once the run is over.
GRACE_SECONDS = 3.0
_LOOK_SECONDS = 0.5
_is_watching = threading.Lock()


def end_with_launcher(process: ProcessInfo) -> None:
    """Let this process end soon after its launcher. Uses the standard library alone, so that it works while other
    libraries are still being imported; a second call changes nothing."""
    if not process.has_agent or not _is_watching.acquire(blocking=False):
        return
    # Our own launcher passes its process id on, so that one which is gone already is detected as well.
    launcher = int(os.environ[LAUNCHED_VARIABLE]) if process.is_launched else os.getppid()
    threading.Thread(target=_end_with, args=(launcher,), name="launcher watchdog", daemon=True).start()


def end_this_process(exit_code: int) -> None:
    """End this process by SIGTERM first, so that temporary files are removed; at once if the main thread is stuck."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(exit_code or 1)


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LOOK_SECONDS)
    end_this_process(1)
