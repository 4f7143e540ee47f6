"""Where a thread is, and since when."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from diffusion_runtime.parallel.board import Board
from diffusion_runtime.parallel.whereabouts import ThreadObserver, Whereabouts


def observe(thread: threading.Thread, seconds: float) -> Whereabouts:
    observer = ThreadObserver(thread.ident or 0)
    observer.look()
    deadline = time.monotonic() + seconds
    seen = observer.look()
    while time.monotonic() < deadline:
        time.sleep(0.02)
        seen = observer.look()
    return seen


def test_a_thread_that_hangs_is_still_and_blamed() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=lambda: go_on.wait(10))
    thread.start()
    try:
        seen = observe(thread, 0.5)
        assert seen.still_seconds > 0.3
        assert seen.idle_seconds > 0.3
        assert not seen.waits
        assert " in wait" in seen.place
    finally:
        go_on.set()
        thread.join()


def test_a_thread_that_computes_is_not_idle() -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            sum(range(100_000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert observe(thread, 0.5).idle_seconds < 0.3
    finally:
        stop.set()
        thread.join()


def test_who_waits_for_others_is_not_to_blame() -> None:
    board = Board(dist.HashStore(), "run/")
    thread = threading.Thread(target=lambda: board.wait(["never"], lambda: board.has("over")))
    thread.start()
    try:
        assert observe(thread, 0.3).waits
    finally:
        board.set("over", "")
        thread.join()
