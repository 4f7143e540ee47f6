"""The processes of a worker program, forked from it: what a rank raises is printed, and the others are waited for."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def fork_ranks(work: Callable[[int], object], num_ranks: int) -> int:
    """Call `work(rank)` in a process of its own for each rank; the exit code of a program: 1 where one raised or was
    killed, else 0."""
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            try:
                work(rank)
                os._exit(0)
            except BaseException:
                print(f"rank {rank}: {traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(1)
        children.append(child)
    return max(os.waitpid(child, 0)[1] != 0 for child in children)
