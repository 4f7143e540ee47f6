"""Where a thread is, and since when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from diffusion_runtime.parallel.run_store import RunStore
from diffusion_runtime.parallel.thread_sampler import ThreadSample, ThreadSampler


def observe(thread: threading.Thread, until: Callable[[ThreadSample], bool]) -> ThreadSample:
    """The first look of which `until` holds: a test ends by its time limit when it never does."""
    observer = ThreadSampler(thread.ident or 0)
    while not until(seen := observer.look()):
        time.sleep(0.02)
    return seen


def test_a_thread_that_hangs_is_blamed() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    try:
        seen = observe(thread, lambda seen: min(seen.idle_seconds, seen.process_idle_seconds) > 0.3)
        assert not seen.waits
        assert seen.waiting_seconds == 0
        assert " in wait" in seen.place
    finally:
        go_on.set()
        thread.join()


def test_a_thread_that_computes_is_not_idle() -> None:
    """Not even where it is seen in one place, as in a call into C."""
    stop, num_rounds = threading.Event(), 0

    def work() -> None:
        nonlocal num_rounds
        while not stop.is_set():
            sum(range(100_000))
            num_rounds += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        seen = observe(thread, lambda seen: num_rounds > 100 and seen.idle_seconds == 0.0)
        assert seen.process_idle_seconds == 0.0
    finally:
        stop.set()
        thread.join()


def test_a_process_that_reads_is_not_idle(tmp_path: Path) -> None:
    """As a download is: the main thread waits for others, which take no time of a processor to speak of."""
    go_on, stop = threading.Event(), threading.Event()
    waiting = threading.Thread(target=go_on.wait)
    file = tmp_path / "weights"
    file.write_bytes(bytes(2**20))

    def read() -> None:
        while not stop.wait(0.05):
            file.read_bytes()

    reading = threading.Thread(target=read)
    waiting.start()
    reading.start()
    try:
        seen = observe(waiting, lambda seen: seen.idle_seconds > 1.0)
        assert seen.process_idle_seconds < seen.idle_seconds
    finally:
        go_on.set()
        stop.set()
        waiting.join()
        reading.join()


def test_who_waits_for_others_is_not_to_blame() -> None:
    store = RunStore(dist.HashStore(), "run/")
    thread = threading.Thread(target=lambda: store.wait(["never"], lambda: store.has("over")))
    thread.start()
    try:
        assert observe(thread, lambda seen: seen.waiting_seconds > 0.3).waits
    finally:
        store.set("over", "")
        thread.join()
