"""A server with the embedded model under load and under SIGKILL, on the CPU.

    python -m benchmarks.serving_cpu [--parts start,crowd,...] [--output benchmarks/results/serving_cpu.json]

Correctness comes first: every accepted job must end completed, once, with the bytes of a pipeline that makes it alone.
CPU seconds are the engine's own, so that other work on the machine does not count; wall-clock figures are marked so.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest, load_pipeline

PROMPT = "a red circle moving left"
SMALL = {"prompt": PROMPT, "size": "64x64", "num_frames": 5, "num_inference_steps": 2}
# As the embedded model has it where a request says nothing.
OWN_STEPS = 12
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
# Without bytecode every process compiles the package again.
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)
SECONDS = 300.0


class Server:
    """One `serve` on a storage folder, which may be started again."""

    def __init__(self, storage: Path, *arguments: str) -> None:
        self._arguments = ("--storage", str(storage), "--port", "0", "--log-format", "json", *arguments)
        self.start()

    def start(self) -> None:
        """Start the process; seconds until it answers are wall-clock time."""
        began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "diffusion_runtime", "serve", "shapes", *self._arguments],
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        lines = self.process.stderr
        self.address = next(json.loads(line)["address"] for line in lines if '"address"' in line)
        threading.Thread(target=lambda: list(lines), daemon=True).start()
        self.http = httpx.Client(base_url=self.address, timeout=SECONDS, trust_env=False)
        self.http.get("/liveness")
        self.seconds_to_liveness = time.monotonic() - began
        self.wait(lambda: self.http.get("/health").status_code == 200)
        self.seconds_to_ready = time.monotonic() - began

    @staticmethod
    def wait(condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if found := condition():
                    return found
            time.sleep(0.05)
        raise TimeoutError

    @property
    def engine(self) -> int:
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def create(self, **fields: Any) -> str:
        """Accept a job, once the server takes one."""

        def sent() -> str | None:
            answer = self.http.post("/v1/videos", json={**SMALL, **fields})
            return None if answer.status_code in (429, 503) else str(answer.json()["id"])

        return str(self.wait(sent))

    def finished(self, video_id: str) -> dict[str, Any]:
        def over() -> dict[str, Any] | None:
            video: dict[str, Any] = self.http.get(f"/v1/videos/{video_id}").json()
            return video if video["status"] in ("completed", "failed") else None

        found: dict[str, Any] = self.wait(over)
        return found

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(SECONDS)


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), *arguments)
        try:
            yield server
        finally:
            server.stop()


def memory_megabytes(pid: int) -> float:
    """Proportional set size."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    # Of children that have ended, too: the encoder.
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Expected:
    """Digests of the files that a pipeline makes alone."""

    def __init__(self) -> None:
        self.pipeline: Any = load_pipeline("shapes")
        self._known: dict[tuple[int, int], str] = {}

    def __call__(self, seed: int, steps: int = 2) -> str:
        if (seed, steps) not in self._known:
            request = GenerationRequest(PROMPT, height=64, width=64, num_frames=5, num_inference_steps=steps, seed=seed)
            with tempfile.TemporaryDirectory() as folder:
                content = self.pipeline(request).save(Path(folder) / "clip.mp4").read_bytes()
            self._known[seed, steps] = hashlib.sha256(content).hexdigest()
        return self._known[seed, steps]

    def cpu_seconds(self, count: int, steps: int = 2) -> float:
        """CPU seconds per request of a warm pipeline, the file included."""
        self._known.clear()
        began = time.process_time()
        children = os.times().children_user + os.times().children_system
        for seed in range(count):
            self(seed, steps)
        ended = os.times().children_user + os.times().children_system
        return (time.process_time() - began + ended - children) / count


def start(_: Expected) -> dict[str, Any]:
    with serving() as server:
        warm = server.seconds_to_ready
    with serving("--no-warmup") as server:
        time.sleep(2)
        return {
            "wall_seconds_to_liveness": round(server.seconds_to_liveness, 2),
            "wall_seconds_to_ready_without_warm_up": round(server.seconds_to_ready, 2),
            "wall_seconds_to_ready": round(warm, 2),
            "http_process_megabytes": round(memory_megabytes(server.process.pid), 1),
        }


def crowd(expected: Expected, clients: int = 20, each: int = 10) -> dict[str, Any]:
    """Jobs of many clients at once, and how long a GET takes meanwhile."""
    made: list[tuple[int, dict[str, Any]]] = []
    waits: list[float] = []
    falls: list[str] = []
    with serving("--max-queue-per-key", "64") as server:

        def client(number: int) -> None:
            with httpx.Client(base_url=server.address, timeout=SECONDS, trust_env=False) as http:
                for index in range(each):
                    seed = (number * each + index) % 25
                    while (answer := http.post("/v1/videos", json={**SMALL, "seed": seed})).status_code == 429:
                        time.sleep(min(2.0, float(answer.headers["retry-after"])))
                    video, before = answer.json(), -1
                    while video["status"] not in ("completed", "failed"):
                        time.sleep(0.2)
                        began = time.monotonic()
                        video = http.get(f"/v1/videos/{video['id']}").json()
                        waits.append(time.monotonic() - began)
                        falls.extend([video["id"]] * (video["progress"] < before))
                        before = video["progress"]
                    made.append((seed, video))

        threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        listed, after = [], {}
        while True:
            page = server.http.get("/v1/videos", params={"limit": "100", **after}).json()
            listed += [video["id"] for video in page["data"]]
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
    assert sorted(listed) == sorted(video["id"] for _, video in made), "a job was lost, or made twice"
    wrong = [video["id"] for seed, video in made if video["sha256"] != expected(seed)]
    assert not wrong, wrong
    assert not falls, falls
    waits.sort()
    return {
        "jobs": len(made),
        "clients": clients,
        "wall_seconds": round(seconds, 1),
        "gets": len(waits),
        "get_wall_milliseconds_median": round(1000 * statistics.median(waits), 1),
        "get_wall_milliseconds_p99": round(1000 * waits[int(len(waits) * 0.99)], 1),
    }


def batch(expected: Expected, count: int = 8, rounds: int = 3) -> dict[str, Any]:
    """CPU seconds of the engine for jobs of one key: one by one, and as one batch; and of a warm pipeline.

    At two steps, where decoding and the file are most of a request, and at the model's own number of them."""
    return {f"{steps}_steps": _batch(expected, count, rounds, steps) for steps in (2, OWN_STEPS)}


def _batch(expected: Expected, count: int, rounds: int, steps: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"single": [], "batch": []}
    for name, size in (("single", 1), ("batch", count)):
        with serving("--max-batch-size", str(size)) as server:
            # The first is for what is made once, the second holds the others together.
            server.finished(server.create(seed=0))
            for _ in range(rounds):
                blocker = server.create(seed=0, num_inference_steps=40)
                ids = [server.create(seed=seed, num_inference_steps=steps) for seed in range(count)]
                server.finished(blocker)
                began = cpu_seconds(server.engine)
                videos = [server.finished(each) for each in ids]
                found[name].append((cpu_seconds(server.engine) - began) / count)
                assert [video["sha256"] for video in videos] == [expected(seed, steps) for seed in range(count)]
    alone = [expected.cpu_seconds(count, steps) for _ in range(rounds)]
    single, joined, warm = (statistics.median(each) for each in (found["single"], found["batch"], alone))
    return {
        "engine_cpu_seconds_per_request": {"single": round(single, 4), f"batch_of_{count}": round(joined, 4)},
        "batch_over_singles": round(joined / single, 3),
        "warm_pipeline_cpu_seconds_per_request": round(warm, 4),
        "single_over_warm_pipeline": round(single / warm, 3),
    }


def overhead(expected: Expected, rounds: int = 4) -> dict[str, Any]:
    """CPU seconds of a request with the `draft` preset: of the engine, and of a warm pipeline that writes its file."""

    def alone(seed: int) -> str:
        pipeline = expected.pipeline
        request = pipeline.resolve(GenerationRequest(PROMPT, seed=seed), "draft")
        with tempfile.TemporaryDirectory() as folder:
            return hashlib.sha256(pipeline(request).save(Path(folder) / "clip.mp4").read_bytes()).hexdigest()

    def used() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    found: dict[str, list[float]] = {"engine": [], "pipeline": []}
    with serving() as server:
        for seed in range(rounds + 1):
            began = cpu_seconds(server.engine)
            answer = server.http.post("/v1/videos", json={"prompt": PROMPT, "preset": "draft", "seed": seed})
            video = server.finished(answer.json()["id"])
            found["engine"].append(cpu_seconds(server.engine) - began)
            began = used()
            digest = alone(seed)
            found["pipeline"].append(used() - began)
            assert video["sha256"] == digest, seed
    # The first of each is for what is made once.
    engine, pipeline = (statistics.median(each[1:]) for each in found.values())
    return {
        "engine_cpu_seconds": round(engine, 3),
        "warm_pipeline_cpu_seconds": round(pipeline, 3),
        "ratio": round(engine / pipeline, 3),
    }


def kills(expected: Expected, count: int = 20) -> dict[str, Any]:
    """SIGKILL of the engine and of the server at random moments of a job."""
    draw, ends = random.Random(0), {"engine": 0, "server": 0}
    with serving() as server:
        for victim in ends:
            for number in range(count):
                jobs = {server.create(seed=number, num_inference_steps=10): number for _ in range(2)}
                time.sleep(draw.uniform(0.0, 1.5))
                if victim == "engine":
                    os.kill(server.engine, signal.SIGKILL)
                else:
                    server.stop(signal.SIGKILL)
                    server.start()
                for video_id, seed in jobs.items():
                    video = server.finished(video_id)
                    assert video["sha256"] == expected(seed, 10), (victim, number, video)
                    ends[victim] += 1
    return {"kills_each": count, "jobs_completed_with_equal_bytes": ends}


def memory(_: Expected, count: int = 1000, settled: int = 200) -> dict[str, Any]:
    """Memory of both processes over many jobs, of two sizes in turns."""
    with serving() as server:
        points = []
        for number in range(count):
            server.finished(server.create(seed=number % 7, num_frames=5 if number % 2 else 1))
            if number % 100 == 99:
                pids = {"http": server.process.pid, "engine": server.engine}
                points.append({name: round(memory_megabytes(pid), 1) for name, pid in pids.items()})
    first, last = points[min(settled // 100, len(points)) - 1], points[-1]
    growth = {name: round(last[name] - first[name], 1) for name in last}
    return {"jobs": count, "megabytes_by_100_jobs": points, "growth_after_200_jobs": growth}


PARTS: dict[str, Callable[[Expected], dict[str, Any]]] = {
    "start": start,
    "crowd": crowd,
    "batch": batch,
    "overhead": overhead,
    "kills": kills,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    expected = Expected()
    results: dict[str, Any] = {"schema": "diffusion_runtime.serving_cpu/1", "machine": describe_machine("cpu")}
    if arguments.output is not None and arguments.output.exists():
        # Parts take minutes each, and are run one by one.
        results |= json.loads(arguments.output.read_text())
    for name in arguments.parts.split(","):
        when = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "load_average": round(os.getloadavg()[0], 1)}
        results[name] = {**PARTS[name](expected), **when}
        print(name, json.dumps(results[name]), flush=True)
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
