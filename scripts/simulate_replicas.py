"""A simulation of one queue in front of many replicas: arrivals, cold starts from a shared cache of models, failures.

python -m scripts.simulate_replicas    # prints the figures of docs/cluster.md

It is checked where there is a formula (tests/test_simulate_replicas.py): the waiting time of M/M/c is Erlang C's, the
share of time that replicas run is mtbf / (mtbf + repair), and loading is bytes over bandwidth.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections import deque
from dataclasses import dataclass, field

GB = 1e9
HOUR = 3600.0
# 419 interruptions that were not planned in 54 days on 16,384 GPUs: the report on the training of Llama 3 (2024).
GPU_MTBF = 16384 * 54 * 24 * HOUR / 419


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Replicas and their requests; times in seconds. rate: requests a second. service: of one request; is_fixed: it is
    always so, else exponential. mtbf: of one replica between failures; repair: until its node is back. start: of a
    process without its model. model_bytes: read by a replica; cache_bandwidth: of the storage, in bytes a second, which
    all that load share; node_bandwidth: of one replica. is_warm: all run already when the first request comes."""

    replicas: int
    rate: float
    service: float
    is_fixed: bool = False
    mtbf: float = math.inf
    repair: float = 0.0
    start: float = 0.0
    model_bytes: float = 0.0
    cache_bandwidth: float = math.inf
    node_bandwidth: float = math.inf
    is_warm: bool = True


@dataclass
class Result:
    """waits: seconds from a request's arrival to its last start. lost: requests whose replica failed twice; again:
    those made again. up_share: of the replicas' time. all_up: when every replica ran first. lost_seconds: of work."""

    waits: list[float] = field(default_factory=list)
    lost: int = 0
    again: int = 0
    up_share: float = 0.0
    all_up: float = 0.0
    lost_seconds: float = 0.0

    @property
    def mean_wait(self) -> float:
        return statistics.fmean(self.waits)

    def wait(self, share: float) -> float:
        """Return the waiting time that a share of the requests does not exceed."""
        return sorted(self.waits)[min(len(self.waits) - 1, int(share * len(self.waits)))]


def erlang_c_wait(servers: int, rate: float, service: float) -> float:
    """Return the mean waiting time of M/M/c: C(c, a) / (c / service - rate), a = rate * service (Erlang, 1917)."""
    load = rate * service
    blocked = 1.0
    for number in range(1, servers + 1):
        # Erlang B by its recursion, which does not overflow.
        blocked = load * blocked / (number + load * blocked)
    waits = blocked / (1 - load / servers * (1 - blocked))
    return waits / (servers / service - rate)


class _Simulation:
    """Events in order of time: (time, number, kind, replica, generation of the replica)."""

    def __init__(self, fleet: Fleet, num_requests: int, seed: int) -> None:
        self.fleet, self.random, self.result = fleet, random.Random(seed), Result()
        self.now, self.left = 0.0, num_requests
        self.events: list[tuple[float, int, str, int, int]] = []
        self.numbers = itertools.count()
        # Requests that wait: their arrival, and how often their replica failed.
        self.queue: deque[tuple[float, int]] = deque()
        self.idle: list[int] = []
        self.running: dict[int, tuple[float, int, float]] = {}
        # A replica that failed is another generation; events of an earlier one are void.
        self.generation = [0] * fleet.replicas
        self.up_since: dict[int, float] = {}
        self.up_seconds, self.num_ever_up = 0.0, 0
        self.loading: dict[int, float] = {}
        self.loaded_at = 0.0

    def run(self) -> Result:
        fleet = self.fleet
        for replica in range(fleet.replicas):
            if fleet.is_warm:
                self.up(replica)
            else:
                self.at(self.now + fleet.start, "load", replica)
        self.at(self.random.expovariate(fleet.rate), "arrive", -1)
        while self.left or self.queue or self.running:
            time, _, kind, replica, generation = heapq.heappop(self.events)
            if replica >= 0 and generation != self.generation[replica]:
                continue
            self.now = time
            getattr(self, kind)(replica)
        up = self.up_seconds + sum(self.now - since for since in self.up_since.values())
        self.result.up_share = up / (fleet.replicas * self.now)
        return self.result

    def at(self, time: float, kind: str, replica: int) -> None:
        generation = self.generation[replica] if replica >= 0 else 0
        heapq.heappush(self.events, (time, next(self.numbers), kind, replica, generation))

    def arrive(self, _: int) -> None:
        self.queue.append((self.now, 0))
        self.left -= 1
        if self.left:
            self.at(self.now + self.random.expovariate(self.fleet.rate), "arrive", -1)
        self.begin()

    def begin(self) -> None:
        """Hand out what waits, first in, first out."""
        while self.queue and self.idle:
            replica, (arrived, losses) = self.idle.pop(), self.queue.popleft()
            seconds = self.fleet.service
            seconds = seconds if self.fleet.is_fixed else self.random.expovariate(1 / seconds)
            self.running[replica] = (arrived, losses, self.now)
            self.at(self.now + seconds, "finish", replica)

    def finish(self, replica: int) -> None:
        arrived, _, began = self.running.pop(replica)
        self.result.waits.append(began - arrived)
        self.idle.append(replica)
        self.begin()

    def up(self, replica: int) -> None:
        self.up_since[replica] = self.now
        self.num_ever_up += 1
        if self.num_ever_up == self.fleet.replicas:
            self.result.all_up = self.now
        if math.isfinite(self.fleet.mtbf):
            self.at(self.now + self.random.expovariate(1 / self.fleet.mtbf), "fail", replica)
        self.idle.append(replica)
        self.begin()

    def fail(self, replica: int) -> None:
        """A request of a replica that fails is made once more, before those that wait."""
        self.generation[replica] += 1
        self.up_seconds += self.now - self.up_since.pop(replica)
        if replica in self.running:
            arrived, losses, began = self.running.pop(replica)
            self.result.lost_seconds += self.now - began
            if losses:
                self.result.lost += 1
            else:
                self.result.again += 1
                self.queue.appendleft((arrived, 1))
        else:
            self.idle.remove(replica)
        self.at(self.now + self.fleet.repair + self.fleet.start, "load", replica)
        self.begin()

    def load(self, replica: int) -> None:
        self.advance_loading()
        self.loading[replica] = self.fleet.model_bytes
        self.at(self.now + self.shortest_load(), "loaded", -1)

    def loaded(self, _: int) -> None:
        """Take up those whose model is there; any change of their number changes the bandwidth of each."""
        self.advance_loading()
        for replica in [each for each, left in self.loading.items() if left <= 1e-9 * self.fleet.model_bytes]:
            del self.loading[replica]
            self.up(replica)
        if self.loading:
            self.at(self.now + self.shortest_load(), "loaded", -1)

    def bandwidth(self) -> float:
        return min(self.fleet.node_bandwidth, self.fleet.cache_bandwidth / max(1, len(self.loading)))

    def shortest_load(self) -> float:
        return min(self.loading.values()) / self.bandwidth()

    def advance_loading(self) -> None:
        seconds, self.loaded_at = self.now - self.loaded_at, self.now
        if seconds > 0 and self.loading:
            done = seconds * self.bandwidth()
            self.loading = {replica: left - done for replica, left in self.loading.items()}


def simulate(fleet: Fleet, num_requests: int, seed: int = 0) -> Result:
    """Return what became of `num_requests` requests that arrive as a Poisson process."""
    return _Simulation(fleet, num_requests, seed).run()


def main() -> None:
    # One H200 each (docs/benchmarks.md): FLUX.1 [dev], 28 steps of 119 ms; Wan 2.1 1.3B at 480p, 50 steps of two passes
    # of 433 ms. Bytes of transformer and text encoder in bfloat16. Assumed: a node is back after 10 minutes, a process
    # starts in 15 s and reads 2 GB/s, and nodes that are lent for a while go after 6 hours.
    kinds = {"FLUX.1, 1024 x 1024": (28 * 0.119, 34 * GB), "Wan 2.1 1.3B, 81 frames": (100 * 0.433, 14 * GB)}
    print("| requests | replicas | load | nodes go after | requests/s | wait, mean | 99 % | made again, per 1e6 |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (service, model_bytes) in kinds.items():
        for replicas, load, mtbf in (
            (8, 0.9, GPU_MTBF),
            (64, 0.9, GPU_MTBF),
            (64, 0.9, 6 * HOUR),
            (1024, 0.95, 6 * HOUR),
            (4096, 0.95, 6 * HOUR),
        ):
            failing = Fleet(
                replicas=replicas,
                rate=load * replicas / service,
                service=service,
                is_fixed=True,
                mtbf=mtbf,
                repair=600.0,
                start=15.0,
                model_bytes=model_bytes,
                node_bandwidth=2 * GB,
                cache_bandwidth=100 * GB,
            )
            # Long enough for a tenth of the nodes to go.
            num_requests = max(100_000, int(failing.rate * 0.1 * 6 * HOUR))
            result = simulate(failing, num_requests)
            print(
                f"| {name} | {replicas} | {load:.2f} | {mtbf / HOUR:.0f} h | {failing.rate:.1f} | "
                f"{result.mean_wait:.2f} s | {result.wait(0.99):.2f} s | {1e6 * result.again / num_requests:.0f} |"
            )
    print("\n| from nothing to 4096 replicas of FLUX.1 | storage | all run after |\n|---|---|---|")
    for bandwidth, sharing in ((10, 1), (100, 1), (100, 8), (1000, 8)):
        cold = Fleet(
            replicas=4096 // sharing,
            rate=1.0,
            service=1.0,
            start=15.0,
            model_bytes=34 * GB,
            node_bandwidth=2 * GB * sharing,
            cache_bandwidth=bandwidth * GB,
            is_warm=False,
        )
        what = "each reads" if sharing == 1 else "each node of 8 reads once"
        print(f"| {what} | {bandwidth} GB/s | {simulate(cold, 5000).all_up:.0f} s |")


if __name__ == "__main__":
    main()
