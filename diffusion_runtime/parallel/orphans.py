"""Ends a launched process when its launcher is gone (parent-death detection), however early that is."""

from __future__ import annotations

import os
import signal
import threading
import time

from diffusion_runtime.parallel.process_info import LAUNCHED_VARIABLE, ProcessInfo

# Grace period in which the main thread may end by itself, and remove temporary files, once the run is over.
GRACE_SECONDS = 3.0
_LOOK_SECONDS = 0.5
_is_watching = threading.Lock()


def end_with_launcher(place: ProcessInfo) -> None:
    """From now on this process ends soon after its launcher. Uses the standard library alone, so that it works while
    other libraries are still being imported; a second call changes nothing."""
    if not place.has_agent or not _is_watching.acquire(blocking=False):
        return
    # Our own launcher passes its process id on, so that one which is gone already is detected as well.
    launcher = int(os.environ[LAUNCHED_VARIABLE]) if place.is_launched else os.getppid()
    threading.Thread(target=_end_with, args=(launcher,), name="launcher watchdog", daemon=True).start()


def end_this_process(exit_code: int) -> None:
    """As SIGTERM does first, so that temporary files are removed; at once if the main thread is stuck."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(exit_code or 1)


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LOOK_SECONDS)
    end_this_process(1)
