"""A forward pass of Wan 2.1 1.3B whose tokens stand in the order of its sparse layers' tiles, beside one that packs
them in every layer, and dense attention; on one GPU, random weights.

    python -m benchmarks.static_order_gpu --output benchmarks/results/static_order_gpu.json [--only vsa-4x4x8]
    python -m benchmarks.static_order_gpu --device cpu --output static_order_cpu.json       # two small layers

The velocities of both orders are compared first: packing moves no value, so what differs is the sum of a tile's mean,
and the tiles that it selects where two are alike. Then all are timed by turns: milliseconds of one forward pass, as the
second step of a request. Its parts are timed in passes of their own, with events around every call.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.families import wan
from benchmarks.families.step import FamilyStep, StepInputs
from benchmarks.families_gpu import DTYPE, build_ours, build_theirs
from benchmarks.machine import describe_machine
from diffusion_runtime.attention import AttentionContext, AttentionRecorder, RequestCache, StepInfo, token_order
from diffusion_runtime.attention.force import force_attention_backend
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.sparse import video_sparse
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.token_layout import RASTER
from diffusion_runtime.kernels.block_sparse import triton
from diffusion_runtime.layers import rotated_attention
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.models.wan.transformer import WanSelfAttention, WanTransformer
from diffusion_runtime.text_encoders.interface import Conditions

MAX_DIFFERENCE = 0.05


@dataclasses.dataclass(frozen=True)
class Variant:
    """choice: of self-attention. in_tiles: whether tokens stand in its tiles through all blocks. in_rows: whether QK
    norm and rotary positions then write q, k and v as the rows of blocks that the kernel reads, with means of tiles."""

    name: str
    choice: Any
    in_tiles: bool
    in_rows: bool = False


def sparse_variants(name: str, backend: str, **options: Any) -> tuple[Variant, ...]:
    choice = {"backend": backend, "options": options}
    return (
        Variant(f"{name}, packed in every layer", choice, False),
        Variant(f"{name}, in tiles, read in place", choice, True),
        Variant(f"{name}, in tiles, written as rows of blocks", choice, True, True),
    )


SPARSE = {
    "vsa-4x4x8": sparse_variants("VSA 0.9, 4x4x8", "video_sparse_attn", sparsity=0.9, tile_size=(4, 4, 8)),
    "vsa-4x4x4": sparse_variants("VSA 0.9, 4x4x4", "video_sparse_attn", sparsity=0.9, tile_size=(4, 4, 4)),
    "sta": sparse_variants("STA 3x3x3 of 6x8x8", "sliding_tile_attn", window=(3, 3, 3), tile_size=(6, 8, 8)),
}


def small_step() -> FamilyStep:
    """Two layers of two heads, for a grid of 5 x 6 x 40 tokens."""
    config = {**wan.STEPS[0].config, "attention_head_dim": 16, "num_attention_heads": 2, "num_layers": 2}
    config |= {"ffn_dim": 32, "text_dim": 16, "freq_dim": 16}

    def make_inputs(device: torch.device, dtype: torch.dtype) -> StepInputs:
        latents = torch.randn(1, 16, 5, 12, 80, device=device, dtype=dtype)
        inputs = DenoiserInputs(Conditions.of(torch.randn(1, 7, 16, dtype=dtype)), ClipSize(96, 640, 17, 16))
        return StepInputs((latents, torch.full((1,), 700.0), inputs), {}, lambda out: out)

    return dataclasses.replace(wan.STEPS[0], name="Wan, two small layers", config=config, make_inputs=make_inputs)


class Clock:
    """Milliseconds between two moments, by the device's clock where it has one."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop)) if self.on_gpu else 1e3 * (stop - start)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def milliseconds(self, run: Callable[[], object]) -> float:
        self.wait()
        start = self.now()
        run()
        stop = self.now()
        self.wait()
        return self.between(start, stop)


class Run:
    """One variant of one model, warm: its request has made a step."""

    def __init__(self, model: WanTransformer, inputs: StepInputs, variant: Variant, clock: Clock) -> None:
        self.model, self.inputs, self.variant, self.clock = model, inputs, variant, clock
        self.state = RequestCache()

    def __call__(self, recorder: AttentionRecorder | None = None) -> torch.Tensor:
        context = AttentionContext(
            step=StepInfo(1, 3), state=self.state, recorder=AttentionRecorder() if recorder is None else recorder
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(force_attention_backend(self.variant.choice, role="self"))
            if not self.variant.in_tiles:
                stack.enter_context(mock.patch.object(token_order, "shared_tile", return_value=RASTER))
            if not self.variant.in_rows:
                stack.enter_context(mock.patch.object(AttentionLayer, "token_blocks", return_value=None))
            velocity: torch.Tensor = self.model(*self.inputs.ours, context)
        return velocity

    def first(self) -> tuple[torch.Tensor, str, float]:
        """What it computes, who computed self-attention, and the most that was allocated, in GB (0 on a CPU)."""
        if self.clock.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self()
        recorder = AttentionRecorder()
        velocity = self(recorder)
        report = recorder.report()
        (row,) = [row for row in report.rows if row.role == "self"]
        if any("tiles of" in note for note in report.notes) != self.variant.in_tiles:
            raise ValueError(f"{self.variant.name}: the report says {report.notes}")
        peak = torch.cuda.max_memory_allocated() / 1e9 if self.clock.on_gpu else 0.0
        return velocity, f"{row.backend}: {row.implementation}", peak

    def parts(self) -> dict[str, float]:
        """Milliseconds in all layers: calls of self-attention, and of them permuting and averaging; QK norm and rotary
        positions before them, which are a part of the rest."""
        spans: dict[str, list[tuple[Any, Any]]] = {"self_attention": [], "packing": [], "means": [], "norm_rope": []}
        with contextlib.ExitStack() as stack:
            for module in self.model.modules():
                if isinstance(module, WanSelfAttention):
                    stack.enter_context(self._timed(module.attention, "forward", spans["self_attention"]))
            for owner, name, part in (
                (triton, "pack_tokens", "packing"),
                (video_sparse, "pack_tokens", "packing"),
                (video_sparse, "tile_means", "means"),
                (rotated_attention, "norm_and_rotate", "norm_rope"),
                (rotated_attention, "norm_rope_into_blocks", "norm_rope"),
            ):
                stack.enter_context(self._timed(owner, name, spans[part]))
            whole = self.clock.milliseconds(self)
        times = {part: sum(self.clock.between(*span) for span in of_part) for part, of_part in spans.items()}
        return {**times, "rest": whole - times["self_attention"], "whole": whole}

    @contextlib.contextmanager
    def _timed(self, owner: Any, name: str, spans: list[tuple[Any, Any]]) -> Iterator[None]:
        function = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            start = self.clock.now()
            result = function(*arguments, **named)
            spans.append((start, self.clock.now()))
            return result

        with mock.patch.object(owner, name, timed):
            yield


@torch.inference_mode()
def measure(device: torch.device, dense: str, sparse: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    step = wan.STEPS[0] if device.type == "cuda" else small_step()
    model = build_ours(step, None, dict(build_theirs(step, device).state_dict()), device, takes=True)
    assert isinstance(model, WanTransformer)
    inputs, clock = step.make_inputs(device, DTYPE), Clock(device)
    variants = [Variant(f"dense, {dense}", dense, False), *(variant for name in sparse for variant in SPARSE[name])]
    runs = [Run(model, inputs, variant, clock) for variant in variants]
    rows: dict[str, dict[str, Any]] = {}
    packed = torch.empty(0)
    for run in runs:
        velocity, who, peak = run.first()
        row = {"name": run.variant.name, "step": step.name, "self_attention": who, "peak_gb": peak}
        rows[run.variant.name] = row
        if run.variant.in_tiles:
            row["difference"] = float((velocity.float() - packed.float()).norm() / packed.float().norm())
            print(f"{run.variant.name}: {who}, differs from packed by {row['difference']:.2e}", flush=True)
            if not row["difference"] < MAX_DIFFERENCE:
                raise ValueError(f"{run.variant.name}: differs by {row['difference']}, expected {MAX_DIFFERENCE}")
        else:
            print(f"{run.variant.name}: {who}, {peak:.1f} GB at most", flush=True)
        packed = velocity
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for run in runs:
            times[run.variant.name].append(clock.milliseconds(run))
    medians = {name: statistics.median(of_run) for name, of_run in times.items()}
    baseline = medians[runs[0].variant.name]
    for run in runs:
        name = run.variant.name
        run.parts()
        parts = run.parts()
        rows[name] |= {
            "milliseconds": medians[name],
            "all_milliseconds": times[name],
            "over_dense": baseline / medians[name],
            "parts_ms": parts,
        }
        of_parts = ", ".join(f"{part} {value:.1f}" for part, value in parts.items())
        print(f"{name}: {medians[name]:.1f} ms, {baseline / medians[name]:.2f}x over dense; {of_parts}", flush=True)
        yield rows[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dense", help="the dense backend; fa on a GPU, torch_sdpa on a CPU")
    parser.add_argument("--only", nargs="+", choices=list(SPARSE), default=list(SPARSE), help="beside the dense one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    dense = arguments.dense or ("fa" if arguments.device == "cuda" else "torch_sdpa")
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.static_order_gpu/1",
        "machine": describe_machine(arguments.device),
        "dtype": str(DTYPE).removeprefix("torch."),
        "rows": [],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for row in measure(torch.device(arguments.device), dense, arguments.only, arguments.rounds):
        document["rows"].append(row)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
