"""Queue rules as pure functions: who is admitted, and which waiting jobs run together next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diffusion_runtime.serving.settings import Limits


@dataclass(frozen=True)
class WaitingJob:
    """A job that waits. key: jobs of one key may run as one batch. size: its number of requests. overtaken: how often
    later jobs ran before it."""

    id: str
    key: str
    owner: str = ""
    size: int = 1
    overtaken: int = 0


@dataclass(frozen=True)
class NextBatch:
    """Jobs that run together, in their order; overtaken: those that they ran before."""

    ids: tuple[str, ...] = ()
    overtaken: tuple[str, ...] = ()


def refuse(waiting: Sequence[WaitingJob], owner: str, limits: Limits) -> str | None:
    """Return why one more job of `owner` is not admitted, None where it is."""
    if len(waiting) >= limits.max_queue:
        return f"{len(waiting)} jobs wait already, at most {limits.max_queue} may; try again later"
    own = sum(job.owner == owner for job in waiting)
    if own >= limits.max_queue_per_key:
        return f"{own} jobs of this key wait already, at most {limits.max_queue_per_key} may; try again later"
    return None


def next_batch(waiting: Sequence[WaitingJob], max_size: int, max_overtakes: int, num_free: int = 1) -> NextBatch:
    """Return the first waiting job with later ones of its key. First in, first out: a job that joins runs before those
    between, each of which may be overtaken `max_overtakes` times. max_size: requests that run together.
    num_free: replicas that can begin a batch; each of the others is left a job, which is done sooner there than in this
    batch."""
    if not waiting:
        return NextBatch()
    head = waiting[0]
    chosen, size = [head.id], head.size
    between: list[WaitingJob] = []
    overtaken: tuple[str, ...] = ()
    for job in waiting[1:]:
        if size >= max_size or len(chosen) > len(waiting) - num_free:
            break
        if job.key != head.key or size + job.size > max_size:
            between.append(job)
        elif all(each.overtaken < max_overtakes for each in between):
            chosen.append(job.id)
            size += job.size
            overtaken = tuple(each.id for each in between)
        else:
            break
    return NextBatch(tuple(chosen), overtaken)


def seconds_until_place(num_waiting: int, mean_seconds: float, max_queue: int) -> int:
    """Return whole seconds until a place in the queue is likely to be free: those of the jobs that must begin first."""
    return max(1, math.ceil((num_waiting - max_queue + 1) * mean_seconds))
