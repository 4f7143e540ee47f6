"""What 2, 4 or 8 GPUs of one host give: every row of a plan in one call of under ten minutes, the most valuable first.

    python -m benchmarks.scaling_gpu --plan eight --output $OUT/scaling_8_gpus.json      # one line per row as it ends
    python -m benchmarks.scaling_gpu --plan eight --device cpu --small --output /tmp/8.json    # every path, tiny, gloo

It starts the ranks itself. Rows in succession that need the same processes share them; a row that fails or exceeds its
seconds is kept with its reason, its processes are killed, and the next row begins with fresh ones. The file is written
after each row, so a run that is cut short leaves what it measured; what no time was left for is listed as `left out`.

Kinds of rows, all with random weights. `step`: a forward pass, or a guided step of two: two blocks against one GPU in
float32 first, then the median of the slowest rank, GB of weights and at most, NCCL's milliseconds and how many of them
nothing hid. `clip`: a whole generation, with what its decoding by bands or tiles takes. `stream`: a causal stream.
`program`: another benchmark as a process. Beside each stands what `scaling_model.py` says, with the difference.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.scaling_model import Constants, Degrees, decode_seconds, fit, models, predict, programs

ROOT = Path(__file__).parents[1]
SCHEMA = "diffusion_runtime.scaling_gpu/1"
WAN_1B, WAN_14B, H3, FLUX2 = "wan2.1-1.3b", "wan2.2-t2v-a14b", "minimax-h3", "flux.2-dev"
# Height, width, frames.
SIZES = {"480p": (480, 832, 81), "720p": (720, 1280, 81), "5 s": (768, 1344, 124), "1024": (1024, 1024, 1)}
SMALL_SIZES = {WAN_1B: (64, 96, 5), WAN_14B: (64, 96, 5), H3: (64, 96, 124), FLUX2: (64, 64, 1)}
# Of --small: as many heads as the real models have, which is what degrees divide, and little else.
SMALL: Mapping[str, Mapping[str, Any]] = {
    WAN_1B: {"num_layers": 2, "attention_head_dim": 16, "ffn_dim": 64, "text_dim": 32},
    WAN_14B: {"num_layers": 2, "attention_head_dim": 16, "ffn_dim": 64, "text_dim": 32},
    H3: {
        "attention_head_dim": 32,
        "hidden_size": 64,
        "num_layers": 3,
        "num_refiner_layers": 1,
        "ffn_dim": 128,
        "text_dim": 32,
        "freq_dim": 32,
        "time_embed_hidden_dim": 32,
        "time_embed_dim": 32,
        "rope_freq_dim": 4,
    },
    FLUX2: {
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "axes_dims_rope": [4, 4, 4, 4],
        "joint_attention_dim": 32,
    },
}
SMALL_DECODERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    WAN_1B: {"vae/config.json": {"base_dim": 8, "num_res_blocks": 1}},
    H3: {
        "vae/config.json": {
            "block_out_channels": [8, 8, 8, 8, 16, 16],
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "decoder_num_layers": 2,
            "decoder_num_attention_heads": 2,
            "decoder_attention_head_dim": 64,
        },
        "audio_vae/config.json": {"encoder_dim": 4, "num_attention_heads": 2, "decoder_dim": 128},
    },
}
NUM_CHECKED_LAYERS = 2
CHECKED_SIZES = {**SIZES, "480p": (240, 416, 17), "720p": (240, 416, 17), "5 s": (192, 320, 124), "1024": (512, 512, 1)}
# How far rounding may take a row from float32, over what it takes one GPU.
MAX_ERROR_RATIO = 1.2
# Of the rounds of one row; at least one is timed.
ROUND_SECONDS, MAX_ROUNDS = 2.0, 5
# What stays of the whole time for the last row's processes to be killed and the file to be written.
LAST_SECONDS = 5.0


@dataclass(frozen=True)
class Row:
    """One measurement. seconds: that it may take, its processes' start included. num_processes: that run it; of a
    `step` without degrees all ranks compute it alone. bar: speed-up over one GPU, or seconds, as its kind has it.
    environment: variables of its processes. arguments: of a program's module, `{output}` where it writes its JSON."""

    name: str
    kind: str
    num_processes: int
    seconds: float = 60.0
    model: str = ""
    size: str = ""
    degrees: Degrees = field(default_factory=Degrees)
    quantization: str = "none"
    is_guided: bool = False
    bar: float | None = None
    num_steps: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    @property
    def alone(self) -> tuple[str, str, str, str]:
        """The key of the row on one GPU that this one is compared with; a guided step has twice its time."""
        return self.kind, self.model, self.size, self.quantization

    @property
    def team(self) -> tuple[Any, ...]:
        """Rows of one team share their processes."""
        return self.kind, self.num_processes, tuple(sorted(self.environment.items()))


def step(model: str, size: str, num: int, degrees: Degrees, **changes: Any) -> Row:
    """Return the row of a step on `num` ranks. A mesh of fewer processes is not made: all ranks are its processes."""
    quantization = changes.get("quantization", "none")
    words = [
        f"branches {degrees.branches}" if degrees.branches > 1 else "",
        f"tensor {degrees.tensor}" if degrees.tensor > 1 else "",
        f"ulysses {degrees.ulysses}" if degrees.ulysses > 1 else "",
        f"ring {degrees.ring}" if degrees.ring > 1 else "",
    ]
    shown = " x ".join(word for word in words if word) or "one GPU"
    if degrees.ulysses > 1 and degrees.num_head_groups != 2:
        shown += f", {degrees.num_head_groups} head group" + ("s" if degrees.num_head_groups > 1 else "")
    shown += ", guided" if changes.get("is_guided") else ""
    shown += "" if quantization == "none" else f", {quantization}"
    shown += "".join(f", {name}={value}" for name, value in changes.get("environment", {}).items())
    return Row(f"{model} {size}: {shown}", "step", num, model=model, size=size, degrees=degrees, **changes)


def by(num_head_groups: int = 2, **degrees: int) -> Degrees:
    """Return degrees with the head groups that a GPU has by default."""
    return Degrees(num_head_groups=num_head_groups, **degrees)


def plan(num: int) -> list[Row]:
    """Return the rows for `num` GPUs, the most valuable first."""
    half = num // 2
    if num == 2:
        return two_gpus()
    bars = {4: 3.5, 8: 6.6}
    h3_clip = Row(
        f"{H3} 5 s: a whole clip, ulysses {num}, fp8",
        "clip",
        num,
        150.0,
        H3,
        "5 s",
        by(ulysses=num),
        "fp8",
        num_steps=49,
        bar=45.0 if num == 8 else None,
    )
    start = Row(
        f"start to first step, {num} processes",
        "program",
        num,
        110.0,
        arguments=("benchmarks.start_gpu", "--only", "cold-warm", "--num-gpus", str(num), "--output", "{output}"),
        bar=15.0,
    )
    replicas, gangs = (
        Row(
            f"{num} replicas{beside}, {label}",
            "program",
            num,
            130.0,
            arguments=(
                *("benchmarks.replicas_gpu", "--num-gpus", str(num), "--parts", part, "--rounds", "2"),
                *("--output", "{output}"),
            ),
            bar=bar,
        )
        for part, label, beside, bar in (
            ("flux", "FLUX.1 [dev]", "", 0.975 * num),
            ("embedded", "the embedded model", f" and a gang of {num}", None),
        )
    )
    of_14b = [
        step(WAN_14B, "720p", num, Degrees(), seconds=90.0),
        step(WAN_14B, "720p", num, by(ulysses=half, branches=2), is_guided=True, bar=bars[num]),
        step(WAN_14B, "720p", num, by(ulysses=num), bar=bars[num]),
        step(WAN_14B, "720p", num, by(1, ulysses=num)),
        step(WAN_14B, "720p", num, by(ulysses=half, ring=2)),
        step(WAN_14B, "720p", num, by(ring=num)),
        step(WAN_14B, "720p", num, by(tensor=num)),
        step(WAN_14B, "720p", num, by(ulysses=half, tensor=2)),
    ]
    of_h3 = [
        step(H3, "5 s", num, Degrees(), quantization="fp8"),
        step(H3, "5 s", num, by(ulysses=num), quantization="fp8"),
        step(H3, "5 s", num, Degrees()),
        step(H3, "5 s", num, by(ulysses=num)),
    ]
    of_flux2 = [
        step(FLUX2, "1024", num, Degrees()),
        step(FLUX2, "1024", num, by(tensor=4, **({"ulysses": num // 4} if num > 4 else {}))),
        step(FLUX2, "1024", num, by(ulysses=num)),
    ]
    of_480p = [
        row
        for model in (WAN_14B, WAN_1B)
        for row in (
            step(model, "480p", num, Degrees()),
            step(model, "480p", num, by(ulysses=half, branches=2), is_guided=True),
            step(model, "480p", num, by(ulysses=num)),
            step(model, "480p", num, by(ulysses=half, ring=2)),
            step(model, "480p", num, by(ulysses=half, tensor=2)),
        )
    ]
    of_1b_720p = [
        step(WAN_1B, "720p", num, Degrees()),
        step(WAN_1B, "720p", num, by(ulysses=half, branches=2), is_guided=True),
        step(WAN_1B, "720p", num, by(ulysses=half, ring=2)),
    ]
    decodes = [
        Row(f"{WAN_1B} {size}: a clip of 2 steps, {num} processes", "clip", num, 60.0, WAN_1B, size)
        for size in ("720p", "480p")
    ]
    stream = Row(
        f"causal {WAN_1B} 480p: a stream, {num} processes", "stream", num, 60.0, WAN_1B, "480p", by(ulysses=num)
    )
    variants = Row(
        "wan2.1-1.3b 480p: sparse and other variants (parallel_gpu)",
        "program",
        num,
        90.0,
        arguments=(
            *("torch.distributed.run", "--standalone", "--nproc-per-node", str(num), "-m", "benchmarks.parallel_gpu"),
            *("--rounds", "3", "--output", "{output}"),
        ),
    )
    first = [*of_14b, *of_h3, h3_clip, start, replicas]
    return [*first, *of_flux2, *of_480p, *of_1b_720p, *decodes, stream, gangs, variants]


def two_gpus() -> list[Row]:
    """Return the rows that tell what an overlapping exchange costs, in a minute: 14B's is where the model is farthest
    off. NCCL with fewer multiprocessors leaves more of them to attention."""
    rows = [step(WAN_14B, "480p", 2, Degrees())]
    for channels in ("", "8", "4"):
        environment = {"NCCL_MAX_CTAS": channels} if channels else {}
        for num_head_groups in (1, 2, 4) if not channels else (2, 4):
            rows.append(step(WAN_14B, "480p", 2, by(num_head_groups, ulysses=2), environment=environment))
    rows.insert(4, step(WAN_14B, "480p", 2, by(ring=2)))
    return rows


# --- one rank ---


def run_rank(rows: Sequence[Row], *, is_cuda: bool, is_small: bool) -> None:
    """Run rows in this rank. Rank 0 prints a JSON line when a row begins and when it ends."""
    import torch

    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if is_cuda else torch.device("cpu")
    runner = _Steps(device, is_small) if rows[0].kind == "step" else _Pipelines(device, is_small)
    with runner:
        for row in rows:
            _say_line({"begun": row.name})
            began = time.perf_counter()
            found = runner.measure(row)
            _say_line({"row": row.name, "found": {**found, "seconds": round(time.perf_counter() - began, 2)}})


def _say_line(line: dict[str, Any]) -> None:
    if os.environ["RANK"] == "0":
        print(json.dumps(line), flush=True)


class _Steps:
    """Steps of a transformer, over torch.distributed."""

    def __init__(self, device: Any, is_small: bool) -> None:
        self.device, self.is_small = device, is_small
        self.exact: dict[tuple[str, bool], Any] = {}
        self.of_one: dict[tuple[str, str, bool], float] = {}

    def __enter__(self) -> _Steps:
        import torch
        import torch.distributed as dist

        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        return self

    def __exit__(self, *_: object) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()

    def measure(self, row: Row) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        from benchmarks.parallel_gpu import measure_communication, milliseconds, over_processes
        from benchmarks.tensor_parallel_gpu import build, guided_run_of, run_of
        from diffusion_runtime.parallel.groups import ProcessMesh

        mesh = self.mesh(row.degrees)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        with torch.inference_mode():
            errors = self.errors(row, mesh, dtype)
            opened = self.opened(row, None)
            model = build(opened, mesh, self.device, dtype, self.quantization(row), row.degrees.num_head_groups)
            weights = sum(tensor.nbytes for tensor in model.state_dict().values()) / 1e9
            make = guided_run_of if row.is_guided else run_of
            run = make(opened, model, mesh, self.device, dtype)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            largest = dist.ReduceOp.MAX
            # What it compiles and tunes.
            first = over_processes(milliseconds(run, self.device), largest, self.device)
            peak = torch.cuda.max_memory_allocated(self.device) / 1e9 if self.device.type == "cuda" else 0.0
            times: list[float] = []
            while not times or (sum(times) < 1e3 * ROUND_SECONDS and len(times) < MAX_ROUNDS):
                times.append(over_processes(milliseconds(run, self.device), largest, self.device))
            found = {
                "ms": statistics.median(times),
                "rounds_ms": times,
                "first_ms": first,
                "weights_gb": over_processes(weights, largest, self.device),
                "peak_gb": over_processes(peak, largest, self.device),
                **errors,
            }
            if self.device.type == "cuda" and mesh != ProcessMesh():
                found |= measure_communication(run, self.device)
        del model, run
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if not errors["error"] <= MAX_ERROR_RATIO * errors["error_of_one_gpu"] + 1e-5:
            found["reason"] = "WRONG: it is further from float32 than one GPU is"
        return found

    def mesh(self, degrees: Degrees) -> Any:
        from diffusion_runtime.parallel.groups import ProcessMesh

        if degrees.num_processes == 1:
            return ProcessMesh()
        return ProcessMesh.create(
            ulysses_degree=degrees.ulysses,
            ring_degree=degrees.ring,
            branch_degree=degrees.branches,
            tensor_degree=degrees.tensor,
        )

    def opened(self, row: Row, num_layers: int | None) -> Any:
        from diffusion_runtime.benchmark.step_model import open_step_model, with_size

        sizes = SIZES if num_layers is None else CHECKED_SIZES
        height, width, num_frames = SMALL_SIZES[row.model] if self.is_small else sizes[row.size]
        if self.is_small:
            opened = open_step_model(row.model, None, SMALL[row.model])
        else:
            opened = open_step_model(row.model, num_layers)
        return with_size(opened, height=height, width=width, num_frames=num_frames, batch=1)

    def quantization(self, row: Row) -> str:
        """A CPU has no products in 8 bits."""
        return row.quantization if self.device.type == "cuda" else "none"

    def errors(self, row: Row, mesh: Any, dtype: Any) -> dict[str, float]:
        """Relative L2 of a step of two blocks from float32 on one GPU, and that of one GPU in the row's own dtype."""
        import torch
        import torch.distributed as dist

        from benchmarks.parallel_gpu import over_processes
        from benchmarks.tensor_parallel_gpu import build, guided_run_of, run_of
        from diffusion_runtime.parallel.groups import ProcessMesh

        opened = self.opened(row, NUM_CHECKED_LAYERS)
        make = guided_run_of if row.is_guided else run_of

        def output(mesh: Any, dtype: Any, quantization: str) -> Any:
            model = build(opened, mesh, self.device, dtype, quantization, row.degrees.num_head_groups)
            return make(opened, model, mesh, self.device, dtype)().double()

        exact_key = row.model, row.is_guided
        if exact_key not in self.exact:
            self.exact[exact_key] = output(ProcessMesh(), torch.float32, "none")
        exact = self.exact[exact_key]

        def error(mesh: Any) -> float:
            made = output(mesh, dtype, self.quantization(row))
            return over_processes(float((made - exact).norm() / exact.norm()), dist.ReduceOp.MAX, self.device)

        key = row.model, row.quantization, row.is_guided
        if key not in self.of_one:
            self.of_one[key] = error(ProcessMesh())
        found = self.of_one[key] if mesh == ProcessMesh() else error(mesh)
        return {"error": found, "error_of_one_gpu": self.of_one[key]}


class _Pipelines:
    """Whole generations and streams, by processes that join as those of the command do."""

    def __init__(self, device: Any, is_small: bool) -> None:
        self.device, self.is_small = device, is_small
        self.joined = contextlib.ExitStack()

    def __enter__(self) -> _Pipelines:
        from diffusion_runtime import join_processes

        world = self.joined.enter_context(join_processes())
        self.world = world if world.size > 1 else None
        return self

    def __exit__(self, *error: Any) -> None:
        self.joined.__exit__(*error)

    def measure(self, row: Row) -> dict[str, Any]:
        return self.stream(row) if row.kind == "stream" else self.clip(row)

    def config(self, row: Row) -> Any:
        from diffusion_runtime.config import ParallelConfig, RuntimeConfig

        parallel = ParallelConfig()
        if row.degrees.num_processes > 1:
            degrees = row.degrees
            parallel = ParallelConfig(
                None,
                degrees.ulysses,
                degrees.ring,
                degrees.branches > 1,
                degrees.tensor if degrees.tensor > 1 else None,
            )
        is_cuda = self.device.type == "cuda"
        return RuntimeConfig(
            device="cuda" if is_cuda else "cpu",
            dtype="bfloat16" if is_cuda else "float32",
            quantization=row.quantization if is_cuda else "none",
            parallel=parallel,
        )

    def clip(self, row: Row) -> dict[str, Any]:
        """Seconds of a generation by stage, after one of two steps that compiles what it needs."""
        from diffusion_runtime import GenerationRequest
        from diffusion_runtime.benchmark.random_pipeline import random_pipeline

        changes: dict[str, Mapping[str, Any]] = {}
        if self.is_small:
            changes = {"transformer/config.json": SMALL[row.model], **SMALL_DECODERS.get(row.model, {})}
        began = time.perf_counter()
        pipeline = random_pipeline(row.model, self.config(row), lambda _: None, changes, self.world)
        built = time.perf_counter() - began
        height, width, num_frames = SMALL_SIZES[row.model] if self.is_small else SIZES[row.size]
        num_steps = 2 if self.is_small else row.num_steps
        request = GenerationRequest(
            "a red circle", seed=1, height=height, width=width, num_frames=num_frames, num_inference_steps=2
        )
        pipeline(request)
        began = time.perf_counter()
        media = pipeline(dataclasses.replace(request, num_inference_steps=num_steps))
        whole = time.perf_counter() - began
        pipeline.close()
        report = media.attention_report
        return {
            "s": whole,
            "num_steps": num_steps,
            "stages_s": dict(media.timings),
            "build_s": built,
            "peak_memory": dict(media.peak_memory or {}),
            "attention": sorted({f"{each.role}: {each.backend}, {each.implementation}" for each in report.rows}),
            "libraries": [f"{each.component}: {each.implementation}" for each in report.libraries],
        }

    def stream(self, row: Row) -> dict[str, Any]:
        from benchmarks.causal_gpu import CASES, measure, open_pipeline

        pipeline = open_pipeline(self.device, {"parallel": self.config(row).parallel}, self.world)
        measure(pipeline, CASES[0], 3)
        found = measure(pipeline, CASES[0], 3 if self.is_small else 12)
        pipeline.close()
        return found


# --- the process that starts them ---


class _Failed(Exception):
    """A row has no figure; the reason."""


class _Team:
    """Ranks that run rows in order. Their standard error goes to files, which are quoted when one fails."""

    def __init__(self, rows: Sequence[Row], arguments: argparse.Namespace) -> None:
        first, self.folder = rows[0], tempfile.TemporaryDirectory(prefix="scaling_gpu_")
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.has_begun = False
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.ranks: list[subprocess.Popen[bytes]] = []
        command = [
            sys.executable,
            "-m",
            "benchmarks.scaling_gpu",
            "--plan",
            arguments.plan,
            "--device",
            arguments.device,
        ]
        command += ["--small"] if arguments.small else []
        command += ["--rank-rows", json.dumps([row.name for row in rows])]
        for rank in range(first.num_processes):
            environment = {
                **os.environ,
                **first.environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(first.num_processes),
                "LOCAL_WORLD_SIZE": str(first.num_processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
            }
            if arguments.device == "cpu":
                environment["OMP_NUM_THREADS"] = "1"
            with self.errors_of(rank).open("wb") as errors:
                self.ranks.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                        stderr=errors,
                        start_new_session=True,
                    )
                )
        threading.Thread(target=self._read, daemon=True).start()

    def errors_of(self, rank: int) -> Path:
        return Path(self.folder.name) / f"{rank}.txt"

    def _read(self) -> None:
        stdout = self.ranks[0].stdout
        assert stdout is not None
        for line in stdout:
            # What a library prints is none of them.
            with contextlib.suppress(ValueError):
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def result_of(self, row: Row, seconds: float) -> dict[str, Any]:
        """Wait for a row's result. Raises _Failed where a rank ends first, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            failed = [rank for rank, process in enumerate(self.ranks) if process.poll() not in (None, 0)]
            if failed:
                raise _Failed(f"rank {failed[0]} ended with {self.ranks[failed[0]].returncode}: {self._quoted()}")
            if time.monotonic() > deadline:
                raise _Failed(f"it took more than {seconds:.0f} s; {self._quoted()}")
            try:
                line = self.lines.get(timeout=0.2)
            except queue.Empty:
                continue
            if line is None:
                raise _Failed(f"rank 0 ended without a result: {self._quoted()}")
            self.has_begun = True
            if line.get("row") == row.name:
                return dict(line["found"])

    def _quoted(self) -> str:
        """The last line of each rank's standard error, once each, that of an exception first."""
        time.sleep(0.5)
        texts = [self.errors_of(rank).read_text(errors="replace").strip() for rank in range(len(self.ranks))]
        last = [text.splitlines()[-1][:400] for text in texts if text]
        return " | ".join(sorted(dict.fromkeys(last), key=lambda line: "Error" not in line)[:3]) or "no rank said why"

    def end(self, seconds: float = 0.0) -> None:
        """Wait for the ranks to end, then kill them with what they started."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.poll() is None for process in self.ranks):
            time.sleep(0.05)
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.folder.cleanup()


def run_program(row: Row, seconds: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run another benchmark and return its document. Raises _Failed; what it wrote until then is kept in that case."""
    small = ["--small"] if "replicas_gpu" in row.arguments[0] else ["--device", "cpu", "--seconds", "500"]
    if "torch.distributed.run" in row.arguments[0]:
        small = ["--device", "cpu", "--small"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", *(each.format(output=path) for each in row.arguments)]
        command += small if arguments.small else []
        with (Path(folder) / "errors.txt").open("w+b") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True, cwd=ROOT
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()[-3:]
        found = json.loads(path.read_text()) if path.is_file() else {}
        for key in ("schema", "machine"):
            found.pop(key, None)
        if code != 0:
            how = f"took more than {seconds:.0f} s" if code is None else f"ended with {code}"
            found["reason"] = f"{row.arguments[0]} {how}: {' | '.join(said)[-600:]}"
        return found


def predicted(row: Row, constants: Constants) -> dict[str, Any]:
    """What the model says of a row: ms of a step with its bound, seconds of a clip's decoding, figures of a program."""
    if row.kind == "program":
        of_row = [each for each in programs(row.num_processes) if each.topic in row.name]
        return {"predicted": {each.name: round(each.predicted, 2) for each in of_row}} if of_row else {}
    if row.kind == "clip":
        decode = decode_seconds()[row.model, row.size] / row.num_processes
        if row.model != H3:
            return {"predicted_decode_s": decode}
        steps = row.num_steps * _step(row, constants)["predicted_ms"] / 1e3
        return {"predicted_s": steps + decode, "predicted_decode_s": decode}
    return _step(row, constants) if row.kind == "step" else {}


def _step(row: Row, constants: Constants) -> dict[str, Any]:
    model = models()[row.model]
    num_tokens = model.num_tokens
    if row.model in (WAN_1B, WAN_14B):
        height, width, num_frames = SIZES[row.size]
        num_tokens = ((num_frames - 1) // 4 + 1) * (height // 16) * (width // 16)
    made = predict(
        model, row.degrees, constants, num_tokens=num_tokens, quantization=row.quantization, is_guided=row.is_guided
    )
    return {"predicted_ms": made.total, "predicted_bound": made.bound}


@dataclass
class _Document:
    """The rows so far, written after each."""

    path: Path
    values: dict[str, Any]
    constants: Constants
    is_small: bool
    alone: dict[tuple[str, str, str, str], float] = field(default_factory=dict)

    def add(self, row: Row, found: Mapping[str, Any]) -> None:
        kept: dict[str, Any] = {
            "name": row.name,
            "kind": row.kind,
            "num_processes": row.num_processes,
            "degrees": dataclasses.asdict(row.degrees),
            "quantization": row.quantization,
            "is_guided": row.is_guided,
            "bar": row.bar,
            **found,
        }
        # Tiny sizes have other times.
        kept |= {} if self.is_small else predicted(row, self.constants)
        time_of = kept.get("ms", kept.get("s"))
        if time_of is not None:
            if row.degrees.num_processes == 1 and (row.kind == "step" or row.num_processes == 1):
                self.alone[row.alone] = time_of
            if row.alone in self.alone:
                kept["speedup"] = (2 if row.is_guided else 1) * self.alone[row.alone] / time_of
        for unit in ("ms", "s"):
            if unit in kept and f"predicted_{unit}" in kept:
                kept["predicted_off_percent"] = 100 * (kept[f"predicted_{unit}"] / kept[unit] - 1)
        self.values["rows"].append(kept)
        self.write()
        print(shown(kept), flush=True)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.values, indent=1) + "\n")


def shown(row: Mapping[str, Any]) -> str:
    """One line of a row."""
    parts = [f"{row['name']}:"]
    for key, form in (
        ("ms", "{:.1f} ms"),
        ("s", "{:.2f} s"),
        ("speedup", "{:.2f}x"),
        ("bar", "bar {}"),
        ("predicted_ms", "predicted {:.1f}"),
        ("predicted_s", "predicted {:.1f}"),
        ("predicted_decode_s", "of which decoding {:.2f}"),
        ("predicted", "predicted {}"),
        ("predicted_off_percent", "off {:+.1f} %"),
        ("nccl_ms", "nccl {:.1f}"),
        ("exposed_ms", "exposed {:.1f}"),
        ("peak_gb", "{:.1f} GB"),
        ("error", "error {:.1e}"),
        ("stages_s", "{}"),
        ("reason", "REASON: {}"),
        ("seconds", "({:.0f} s)"),
    ):
        if row.get(key) is not None:
            value = row[key]
            if isinstance(value, Mapping):
                value = {name: round(each, 3) for name, each in value.items()}
            parts.append(form.format(value))
    return " ".join(parts)


def teams(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows in succession that share processes; a program is one alone."""
    team: list[Row] = []
    for row in rows:
        if team and (row.kind == "program" or row.team != team[0].team):
            yield team
            team = []
        team.append(row)
    if team:
        yield team


def run_all(rows: Sequence[Row], arguments: argparse.Namespace, document: _Document) -> None:
    """Run every row, within the seconds of all of them."""
    deadline = time.monotonic() + arguments.seconds - LAST_SECONDS
    factor = arguments.row_factor
    for of_team in teams(rows):
        left = list(of_team)
        may_not_begin = True
        while left and time.monotonic() < deadline:
            if left[0].kind == "program":
                row = left.pop(0)
                began = time.perf_counter()
                found = run_program(row, min(factor * row.seconds, deadline - time.monotonic()), arguments)
                document.add(row, {**found, "seconds": round(time.perf_counter() - began, 2)})
                continue
            team = _Team(left, arguments)
            try:
                while left:
                    row = left.pop(0)
                    document.add(row, team.result_of(row, min(factor * row.seconds, deadline - time.monotonic())))
                team.end(10.0)
            except _Failed as error:
                if not team.has_begun and may_not_begin:
                    # The ranks did not meet, or a module cannot be imported: once more, then no row of them can run.
                    may_not_begin = False
                    left.insert(0, row)
                    continue
                document.add(row, {"reason": str(error)})
                while not team.has_begun and left:
                    document.add(left.pop(0), {"reason": "left out: its processes did not begin"})
            finally:
                team.end()
        for row in left:
            document.add(row, {"reason": "left out: no time was left"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=("two", "four", "eight"), required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seconds", type=float, default=580.0, help="of all rows together")
    parser.add_argument("--row-factor", type=float, default=1.0, help="of the seconds that each row may take")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--skip", type=int, default=0, help="rows to begin after, in the order of the plan")
    parser.add_argument("--list", action="store_true", help="print the rows and what is predicted")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny models and sizes, to try every path")
    parser.add_argument("--rank-rows", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rows = plan({"two": 2, "four": 4, "eight": 8}[arguments.plan])
    if arguments.rank_rows is not None:
        names = json.loads(arguments.rank_rows)
        run_rank(
            [row for row in rows if row.name in names],
            is_cuda=arguments.device == "cuda",
            is_small=arguments.small,
        )
        return
    rows = [row for row in rows[arguments.skip :] if arguments.only in row.name]
    constants = fit()
    if arguments.list:
        for row in rows:
            print(shown({"name": row.name, "bar": row.bar, **predicted(row, constants)}))
        return
    if arguments.output is None:
        parser.error("--output: expected a file")
    # So that its ranks end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    machine = describe_machine(arguments.device)
    values = {"schema": SCHEMA, "machine": machine, "plan": arguments.plan, "small": arguments.small, "rows": []}
    run_all(rows, arguments, _Document(arguments.output, values, constants, arguments.small))


if __name__ == "__main__":
    try:
        main()
    except Exception:
        if "RANK" not in os.environ:
            raise
        traceback.print_exc()
        sys.stderr.flush()
        # Not by way of what torch does at an exit: the others may never come to it.
        os._exit(1)
