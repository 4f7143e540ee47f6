"""Silence of a process, judged by what the system says of it. The clock is the test's own; the processes are real."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from diffusion_runtime.parallel.failure import RankFailure
from diffusion_runtime.parallel.process_info import ProcessInfo
from diffusion_runtime.parallel.run_store import RunStore
from diffusion_runtime.parallel.signs_of_life import (
    MEETING_SECONDS,
    SILENT_SECONDS,
    STOPPED_SECONDS,
    SignsOfLife,
    children_of,
    is_alive,
    read_state,
    variable_of,
)
from diffusion_runtime.parallel.thread_sampler import ThreadSample
from diffusion_runtime.parallel.watchdog import Watchdog

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="looks for processes in /proc")
SLEEP = "import time; time.sleep(1000)"
# As it prints, it has started, and sleeps from then on.
IDLE = f"print(flush=True); {SLEEP}"
BUSY = "print(flush=True)\nwhile True: pass"


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, env={"RANK": "7"})
    try:
        assert running.stdout is not None
        assert running.stdout.readline()
        yield running
    finally:
        running.kill()
        running.communicate()


def settled(number: int) -> None:
    """Until the process has gone to sleep, and what it does is over."""
    while (state := read_state(number)) is None or state.code != "S":
        time.sleep(0.01)


def test_a_process_that_speaks_or_that_nobody_can_see() -> None:
    signs = SignsOfLife()
    assert signs.look(1, None, 0.0) is None
    assert signs.look(2, None, 10 * SILENT_SECONDS) is None
    assert signs.look(2, None, 10 * SILENT_SECONDS + SILENT_SECONDS - 1) is None
    assert signs.look(2, None, 10 * SILENT_SECONDS + SILENT_SECONDS) == "has sent no heartbeat for 45 s"
    signs.forget()
    assert signs.look(2, None, 100 * SILENT_SECONDS) is None
    late = SignsOfLife()
    assert late.look(None, None, 0.0) is None
    assert late.look(None, None, MEETING_SECONDS - 1) is None
    assert late.look(None, None, MEETING_SECONDS) == "has not joined the others for 300 s"


@needs_proc
def test_a_silent_process_lives_as_long_as_it_works() -> None:
    with process(BUSY) as busy, process(IDLE) as idle:
        settled(idle.pid)
        assert idle.pid in children_of(os.getpid())
        assert variable_of(idle.pid, "RANK") == "7"
        working, sleeping = SignsOfLife(), SignsOfLife()
        for number in range(3):
            # So much as the system's clock can tell.
            before = read_state(busy.pid)
            while before == read_state(busy.pid):
                time.sleep(0.01)
            assert working.look(1, busy.pid, number * SILENT_SECONDS) is None
        assert sleeping.look(1, idle.pid, 0.0) is None
        assert sleeping.look(1, idle.pid, SILENT_SECONDS - 1) is None
        silent = f"for {SILENT_SECONDS:.0f} s, and has used no CPU time"
        assert sleeping.look(1, idle.pid, SILENT_SECONDS) == f"has sent no heartbeat {silent}"
        assert SignsOfLife().look(None, idle.pid, 0.0) is None
        busy.send_signal(signal.SIGSTOP)
        while not getattr(read_state(busy.pid), "is_stopped", False):
            time.sleep(0.01)
        stopped = SignsOfLife()
        assert stopped.look(1, busy.pid, 0.0) is None
        assert stopped.look(1, busy.pid, STOPPED_SECONDS) == "has been stopped for 15 s"
        idle.kill()
        while is_alive(idle.pid):
            time.sleep(0.01)
        # It is dead as soon as it has ended, whether or not its parent has asked.
        assert sleeping.look(1, idle.pid, SILENT_SECONDS) == "is gone: it was killed or crashed"


@needs_proc
def test_who_says_that_a_process_died() -> None:
    """Our own launcher, where there is one. Nobody waits for a call that the dead one would have to answer."""
    with process(IDLE) as dead:
        pass
    for is_launched in (True, False):
        store = RunStore(dist.HashStore(), "run/")
        said: list[RankFailure] = []
        place = ProcessInfo(0, 2, 0, 2, "localhost", 1, is_launched=is_launched, has_agent=is_launched)
        watch = Watchdog(store, place, said.append)
        watch._beat(has_left=False)
        beat = json.loads(store.get(["beat/0"])[0])
        store.set("beat/1", json.dumps({**beat, "process": dead.pid}))
        failure = watch._judge()
        assert failure is not None
        assert "is gone: it was killed or crashed" in failure.message
        assert said == ([] if is_launched else [failure])
        assert store.ending() == (None if is_launched else dataclasses.replace(failure))
        # Unless it has left in order meanwhile.
        store.set("beat/1", json.dumps({**beat, "process": dead.pid, "has_left": True}))
        assert Watchdog(store, place, said.append)._judge() is None


@needs_proc
def test_the_watched_thread_may_be_any_and_idle_waits_blame_nobody() -> None:
    store = RunStore(dist.HashStore(), "run/")
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        watch = Watchdog(store, ProcessInfo(0, 2, 0, 2, "localhost", 1), lambda failure: None, thread)
        watch._beat(has_left=False)
        watched = json.loads(store.get(["beat/0"])[0])
        assert watched["place"].startswith("threading.py:")
        assert not watched["waits"]
        with watch.idle():
            watch._beat(has_left=False)
            idle = json.loads(store.get(["beat/0"])[0])
        # Nobody else is at fault for it, and neither is this process.
        assert (idle["waits"], idle["waiting_seconds"]) == (True, 0.0)
    finally:
        ended.set()
        thread.join()


def test_a_process_that_sleeps_while_another_waits_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its main thread sleeps at one place while another rank waits."""
    store = RunStore(dist.HashStore(), "run/")
    watch = Watchdog(store, ProcessInfo(0, 2, 0, 2, "localhost", 1), lambda failure: None)
    watch.enable_hang_detection(40.0)
    asleep = ThreadSample("subprocess.py:1 in wait", 500.0, 500.0, 0.0, False)
    monkeypatch.setattr(watch._observer, "look", lambda: asleep)

    def judged() -> RankFailure | None:
        watch._beat(has_left=False)
        beat = json.loads(store.get(["beat/0"])[0])
        store.set("beat/1", json.dumps({**beat, "waits": True, "idle_seconds": 500.0, "waiting_seconds": 500.0}))
        return watch._find_hanging(watch._read_beats(), 40.0)

    failure = judged()
    assert failure is not None
    assert "rank 0" in failure.message
    assert "hangs: it has been at subprocess.py:1 in wait for 500 s" in failure.message
