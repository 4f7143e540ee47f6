"""A process that a launcher started ends when the launcher is gone, however early that is."""

from __future__ import annotations

import os
import signal
import threading
import time

from diffusion_runtime.parallel.process_info import LAUNCHED_VARIABLE, ProcessInfo

# What the main thread gets to end by itself, temporary files included, once the run is over.
GRACE_SECONDS = 3.0
_LOOK_SECONDS = 0.5
_is_watching = threading.Lock()


def end_with_launcher(place: ProcessInfo) -> None:
    """From now on this process ends soon after its launcher. Needs nothing but the standard library, so that it holds
    while libraries are still imported; a second call changes nothing."""
    if not place.has_agent or not _is_watching.acquire(blocking=False):
        return
    # A launcher of ours says its number, so that one which is gone already is missed as well.
    launcher = int(os.environ[LAUNCHED_VARIABLE]) if place.is_launched else os.getppid()
    threading.Thread(target=_end_with, args=(launcher,), name="launcher watch", daemon=True).start()


def end_this_process(exit_code: int) -> None:
    """First as SIGTERM does, so that temporary files go; if the main thread is stuck, at once."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(exit_code or 1)


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(_LOOK_SECONDS)
    end_this_process(1)
