"""Requests per minute of a replica per GPU, against one replica of one GPU and one gang of all GPUs.

    python -m benchmarks.replicas_gpu --output benchmarks/results/replicas_gpu.json            # of two
    python -m benchmarks.replicas_gpu --num-gpus 8 --output replicas_8_gpus.json

The queue and the engines of `serve` without its HTTP process, so that neither fastapi nor a network is needed: jobs go
through the table on disk, and their files are published. Workloads: clips of the embedded model, and FLUX.1 [dev] at
1024 x 1024 with random weights. Correctness comes first: every job completes, and one seed has the same bytes on every
replica. All jobs are there from the start; seconds are from the first one's beginning to the last one's end, after
warm-ups. Rounds alternate the variants. `--small` is a trial run on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.engine_process import LocalEngines
from diffusion_runtime.serving.files import ResultFiles
from diffusion_runtime.serving.jobs import COMPLETED, IMAGE, VIDEO, Job, Jobs, new_id
from diffusion_runtime.serving.settings import Limits, ServerSettings

SCHEMA = "diffusion_runtime.replicas_gpu/2"
# Of a replica per GPU over one, by the number of GPUs.
BARS = {2: 1.9, 4: 3.9, 8: 7.8}
READY_SECONDS, JOBS_SECONDS = 400.0, 400.0
# A transformer of one block of each kind and a narrow decoder, for --small.
NARROW = {
    "transformer/config.json": {
        "num_layers": 1,
        "num_single_layers": 1,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 32,
    },
    "vae/config.json": {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1},
}


class _NoMetrics:
    """Metrics that nobody reads: prometheus_client need not be installed."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


def workloads(is_small: bool) -> dict[str, dict[str, Any]]:
    """Return what is made: config of the engine, fields of a request, jobs per round and replica."""
    size = {"height": 64, "width": 64, "num_inference_steps": 2}
    device = {"device": "cpu"} if is_small else {}
    return {
        "embedded": {
            "config": {"model_path": "shapes", **device},
            "fields": {**size, "num_frames": 5} if is_small else {},
            "kind": VIDEO,
            "count": 3 if is_small else 40,
        },
        "flux": {
            "config": {"model_path": "flux.1-dev", **device, **({"dtype": "float32"} if is_small else {})},
            "program": "benchmarks.random_engine",
            "changes": NARROW if is_small else None,
            "fields": size if is_small else {"height": 1024, "width": 1024, "num_inference_steps": 10},
            "kind": IMAGE,
            "count": 3 if is_small else 10,
        },
    }


@contextlib.asynccontextmanager
async def serving(workload: Mapping[str, Any], replicas: int, num_gpus: int) -> AsyncIterator[Dispatcher]:
    """Asynchronous context manager: a dispatcher whose replicas are all ready."""
    with tempfile.TemporaryDirectory() as folder:
        storage = Path(folder)
        jobs = Jobs(storage / "jobs.sqlite3")
        # One job per batch, on which requests per minute rest in all variants.
        limits = Limits(max_batch_size=1, max_queue=1000, max_queue_per_key=1000)
        settings = ServerSettings(
            storage=storage, name="x", replicas=(replicas, replicas), limits=limits, warm_up=False, preview="off"
        )
        config = {**workload["config"], **({"parallel": {"num_gpus": num_gpus}} if num_gpus > 1 else {})}
        given = {"config": config, "loras": {}, "names": {}, "changes": workload.get("changes")}
        given |= {"program": workload["program"]} if "program" in workload else {}
        metrics: Any = _NoMetrics()
        dispatcher = Dispatcher(settings, LocalEngines(), given, jobs, ResultFiles(storage), metrics)
        await dispatcher.start()
        try:
            async with asyncio.timeout(READY_SECONDS):
                while dispatcher.engines.num_ready < replicas:
                    if dispatcher.engines.failure is not None:
                        raise SystemExit(str(dispatcher.engines.failure["message"]))
                    await asyncio.sleep(0.05)
            yield dispatcher
        finally:
            await dispatcher.stop()
            jobs.close()


async def make(dispatcher: Dispatcher, workload: Mapping[str, Any], seeds: list[int]) -> list[Job]:
    """Make one job per seed, all of them waiting at once."""
    made = []
    for seed in seeds:
        request = {"prompt": "a red circle moving left", "seed": seed, **workload["fields"]}
        checked = await dispatcher.engines.ask("check", {"requests": [request]})
        work = {"requests": checked["requests"], "key": checked["key"], "options": {}, "inputs": []}
        kind = workload["kind"]
        made.append(Job(id=new_id(kind), kind=kind, created=time.time(), work=work))
    for job in made:
        await dispatcher.submit(job)
    # Few questions: the process that hands out the jobs answers them, and two replicas have twice the jobs to ask for.
    # Times are those that the jobs keep.
    waiting, ended = [job.id for job in made], dict[str, Job]()
    async with asyncio.timeout(JOBS_SECONDS):
        while waiting:
            job = dispatcher.jobs.get(waiting[0])
            if job is None or not job.is_over:
                await asyncio.sleep(0.25)
                continue
            ended[job.id] = job
            del waiting[0]
    for job in ended.values():
        if job.status != COMPLETED:
            raise SystemExit(f"a job failed: {job.error}")
    return [ended[job.id] for job in made]


def digest(job: Job) -> str:
    assert job.result is not None
    return str(job.result["parts"][0]["file"]["sha256"])


async def measure(workload: Mapping[str, Any], replicas: int, num_gpus: int, rounds: int) -> dict[str, Any]:
    """Return requests per minute and seconds per request, the digest of seed 0 on each replica that made it."""
    began = time.monotonic()
    async with serving(workload, replicas, num_gpus) as dispatcher:
        ready = time.monotonic() - began
        # Each replica takes some of them: seed 0 everywhere, and what the first request compiles.
        warm = [digest(job) for job in await make(dispatcher, workload, [0] * 4 * replicas)]
        found: dict[str, list[float]] = {"per_minute": [], "seconds_each": []}
        peak = 0
        for number in range(rounds):
            count = workload["count"] * replicas
            jobs = await make(dispatcher, workload, [number * 1000 + seed for seed in range(1, count + 1)])
            first = min(job.started or 0.0 for job in jobs)
            last = max(job.ended or 0.0 for job in jobs)
            found["per_minute"].append(60.0 * count / (last - first))
            found["seconds_each"].append(statistics.median((job.ended or 0.0) - (job.started or 0.0) for job in jobs))
            assert jobs[0].result is not None
            peak = max(peak, *jobs[0].result["parts"][0]["peak_memory"].values())
        return {
            "replicas": replicas,
            "gpus_per_replica": num_gpus,
            "requests_per_minute": round(statistics.median(found["per_minute"]), 2),
            "seconds_per_request": round(statistics.median(found["seconds_each"]), 4),
            "rounds": {name: [round(value, 4) for value in values] for name, values in found.items()},
            "seconds_until_ready": round(ready, 1),
            "peak_memory_bytes": peak,
            "same_bytes_on_all": len(set(warm)) == 1,
            "sha256_of_seed_0": sorted(set(warm)),
        }


async def run(arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure every workload; keep: takes what was found so far after each."""
    found: dict[str, Any] = {}
    for name, workload in workloads(arguments.small).items():
        if name not in arguments.parts.split(","):
            continue
        # Random weights are not split among processes.
        num = arguments.num_gpus
        variants = [(1, 1), (num, 1), *([(1, num)] if "program" not in workload else [])]
        rows = []
        for replicas, num_gpus in variants:
            row = await measure(workload, replicas, num_gpus, arguments.rounds)
            print(name, json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
            # After each, so that a run that is cut short leaves what it measured.
            found[name] = {"rows": rows}
            keep(found)
        ratio = rows[1]["requests_per_minute"] / rows[0]["requests_per_minute"]
        fields, bar = {**workload["fields"], "model": workload["config"]["model_path"]}, BARS[num]
        found[name] |= {"request": fields, "replicas_over_one": round(ratio, 3), "bar": bar, "is_met": ratio >= bar}
        equal = {digest for row in rows[:2] for digest in row["sha256_of_seed_0"]}
        found[name]["same_bytes_on_one_and_all_replicas"] = len(equal) == 1
        print(f"{name}: {num} replicas over one {ratio:.2f}x (bar {bar})", file=sys.stderr, flush=True)
        keep(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--parts", default="embedded,flux")
    parser.add_argument("--num-gpus", type=int, choices=tuple(BARS), default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    machine = describe_machine("cpu" if arguments.small else "cuda")

    def keep(found: dict[str, Any]) -> None:
        result = {"schema": SCHEMA, "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine}
        text = json.dumps(result | found, indent=1) + "\n"
        if arguments.output is None:
            print(text, end="")
        else:
            arguments.output.write_text(text)

    asyncio.run(run(arguments, keep))


if __name__ == "__main__":
    main()
