"""Metrics of a server in Prometheus' text format. No prompt, key, identifier or name of a file is a label."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_PREFIX = "diffusion_runtime"


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"{_PREFIX}_{name}", text, labels, buckets=_BUCKETS, registry=registry)

        self.requests = counter("requests", "HTTP requests.", "endpoint", "status", "code")
        self.queue_seconds = histogram("queue_seconds", "Seconds that jobs waited.")
        self.request_seconds = histogram("request_seconds", "Seconds from acceptance to the end of jobs.", "kind")
        self.stage_seconds = histogram("stage_seconds", "Seconds by stage of a generation.", "stage")
        self.step_seconds = histogram("step_seconds", "Seconds per denoising step.")
        self.batch_size = Histogram(
            f"{_PREFIX}_batch_size", "Requests per batch.", buckets=(1, 2, 4, 8, 16, 32), registry=registry
        )
        self.frames = counter("frames", "Frames made.")
        self.pixels = counter("pixels", "Pixels made.")
        self.attention_calls = counter("attention_calls", "Attention calls.", "role", "backend", "implementation")
        self.peak_memory = Gauge(
            f"{_PREFIX}_peak_memory_bytes", "Peak memory of an engine.", ["replica", "place"], registry=registry
        )
        self.restarts = counter("engine_restarts", "Engines that ended and were started again.")
        self._replicas = Gauge(f"{_PREFIX}_replicas", "Replicas by state.", ["state"], registry=registry)
        self.jobs_of_replicas = counter("replica_results", "Finished requests.", "replica")
        self.cancelled = counter("cancelled", "Jobs that were cancelled.", "reason")

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read when it is asked for."""
        Gauge(f"{_PREFIX}_{name}", text, registry=self.registry).set_function(read)

    def count_replicas(self, state: str, read: Callable[[], float]) -> None:
        """Read the number of replicas in a state when it is asked for."""
        self._replicas.labels(state).set_function(read)

    def count_result(self, message: Mapping[str, Any], replica: int) -> None:
        """Count what one finished request of a replica's engine took and made."""
        self.jobs_of_replicas.labels(str(replica)).inc()
        for stage, seconds in message["timings"].items():
            self.stage_seconds.labels(stage).observe(seconds)
        self.frames.inc(message["num_frames"])
        self.pixels.inc(message["num_frames"] * message["height"] * message["width"])
        for row in message["attention_report"]["rows"]:
            labels = (str(row.get(name)) for name in ("role", "backend", "implementation"))
            self.attention_calls.labels(*labels).inc(row["count"])
        for place, num_bytes in message["peak_memory"].items():
            self.peak_memory.labels(str(replica), place).set(num_bytes)

    def text(self) -> bytes:
        return generate_latest(self.registry)
