"""One rank of a row of `scaling_gpu.py`: steps of a transformer, whole generations and streams, with random weights."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.scaling_model import Degrees
from benchmarks.scaling_rows import SIZES, SMALL, SMALL_DECODERS, SMALL_SIZES, Row

NUM_CHECKED_LAYERS = 2
CHECKED_SIZES = {**SIZES, "480p": (240, 416, 17), "720p": (240, 416, 17), "5 s": (192, 320, 124), "1024": (512, 512, 1)}
# How far rounding may take a row from float32, over what it takes one GPU.
MAX_ERROR_RATIO = 1.2
# Of the rounds of one row; at least one is timed.
ROUND_SECONDS, MAX_ROUNDS = 2.0, 5


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
