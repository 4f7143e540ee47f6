"""The watchdog's record of why a run ended."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from diffusion_runtime.parallel.failure import RankFailure
from diffusion_runtime.parallel.process_info import ProcessInfo
from diffusion_runtime.parallel.run_store import RunStore
from diffusion_runtime.parallel.watchdog import Watchdog

FAILURE = RankFailure(2, "ProcessLostError", "rank 2 (process 7 on here) is gone")


def test_the_reason_is_known_to_a_process_once_it_has_announced_it() -> None:
    """The main thread ends the process when it learns why: before the watchdog's thread had said it, nobody would."""
    announced: list[RankFailure] = []
    is_recorded = threading.Event()

    def announce(failure: RankFailure) -> None:
        is_recorded.set()
        time.sleep(0.2)
        announced.append(failure)

    place = ProcessInfo(rank=1, world_size=3, local_rank=1, local_world_size=3, address="127.0.0.1", port=0)
    watchdog = Watchdog(RunStore(dist.HashStore(), ""), place, announce)
    assert watchdog.ending() is None
    reporting = threading.Thread(target=watchdog.end, args=(FAILURE,))
    reporting.start()
    assert is_recorded.wait(60)
    assert watchdog.is_reporting
    assert watchdog.ending() == FAILURE
    assert announced == [FAILURE]
    reporting.join()
    assert not watchdog.is_reporting
    assert watchdog.end(RankFailure(0, "RuntimeError", "later")) == FAILURE
    assert announced == [FAILURE]
