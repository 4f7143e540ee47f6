"""A Ray cluster of nodes on this machine, in a process of its own: `python ray_cluster.py NODES`.

It prints the address, then obeys lines of standard input: `kill N` ends node N as a power cut would, `add` adds one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cli_support import process_environment

# Explicitly: what the cluster and whoever speaks to it agree on.
ENVIRONMENT = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 32, "RAY_USAGE_STATS_ENABLED": "0"}
# A dead node refuses the connection, and is noticed after 3 s rather than 15. A node that lives may take 10 s to
# answer: with 1 s, a busy machine of two cores lost a living node.
_QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10000,
    "health_check_failure_threshold": 3,
}


class RayCluster:
    """The cluster's process."""

    def __init__(self, num_nodes: int) -> None:
        words = [sys.executable, str(Path(__file__)), str(num_nodes)]
        pipe = subprocess.PIPE
        environment = process_environment(**ENVIRONMENT)
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.address = self._answer()

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return next(line.split()[1] for line in self._process.stdout if line.startswith("cluster: "))

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0


@contextlib.contextmanager
def ray_cluster(num_nodes: int) -> Iterator[RayCluster]:
    """Context manager: a cluster of nodes of one CPU each; the first one is the head, and cannot be killed."""
    cluster = RayCluster(num_nodes)
    try:
        yield cluster
    finally:
        cluster.stop()


def main(num_nodes: int) -> None:
    from ray.cluster_utils import Cluster

    sizes = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    head = {**sizes, "include_dashboard": False, "_system_config": _QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(**sizes) for _ in range(num_nodes - 1)]
    print(f"cluster: {cluster.address}", flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "kill":
            cluster.remove_node(nodes[int(words[1])], allow_graceful=False)
        else:
            nodes.append(cluster.add_node(**sizes))
        print("cluster: done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(int(sys.argv[1]))
