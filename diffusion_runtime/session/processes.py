"""Joins the processes of a run (rendezvous) from Python: `with join_processes() as world:`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diffusion_runtime.parallel.failure import RankFailure, RunEnded
from diffusion_runtime.parallel.process_info import ProcessInfo, read_process_info
from diffusion_runtime.parallel.world import World
from diffusion_runtime.untrusted.printable import printable

_ALONE = ProcessInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, address="", port=0)


@contextmanager
def join_processes(
    process_info: ProcessInfo | None = None,
    *,
    announce: Callable[[RankFailure], None] | None = None,
    thread: threading.Thread | None = None,
) -> Iterator[World]:
    """Context manager: join the processes started together, by torchrun or alike; a script alone is one of one.

    At the end of the block all processes wait for each other. What is raised in it ends the run on all of them, and is
    raised on.

    process_info: this process among all; read from the environment by default. announce: called once, on one process,
    with why the run ends before its end; by default it is printed on standard error. thread: the one that will run
    the model; by default this one.

    Raises ConfigError for an environment that contradicts itself or a port that another run uses, DiffusionRuntimeError
    when the other processes do not come.
    """
    found = process_info or read_process_info() or _ALONE
    world = World.join(found, announce=announce or _print_failure, thread=thread)
    try:
        yield world
        world.agree(None)
    except RunEnded:
        raise
    except BaseException as error:
        if world.size == 1:
            # There is no other process to inform.
            world.leave()
        elif isinstance(error, KeyboardInterrupt):
            world.leave_failed(RankFailure.of_interruption(f"rank {found.rank}: interrupted"))
        else:
            world.leave_failed(world.failure_of(error))
        raise
    world.leave()


def _print_failure(failure: RankFailure) -> None:
    print(f"error: {printable(failure.message)}", file=sys.stderr, flush=True)
