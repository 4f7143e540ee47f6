"""Reading a transformer's weights to the GPU, beside `dd` of the same files: seconds, GB/s, and the share of dd's.

    python -m benchmarks.load_gpu --output benchmarks/results/load_gpu.json [--folder /tmp/weights] [--repeats 2]
    python -m benchmarks.load_gpu --stored int8 --output load_int8.json
    python -m benchmarks.load_gpu --device cpu --layers 3 --folder /tmp/weights --output /tmp/load.json

Writes the weights of Wan 14B (28 GB, bfloat16, random; 14 GB as int8 ConvRot) as safetensors shards to --folder and
removes them at the end.
Cold: the files are dropped from the system's cache before each run; dd reads them once past it (iflag=direct) and once
through it, and the faster one is the reference. Warm: all of them are in the cache. What is timed is `load_transformer`
of the family, conversions and checks of the numbers included, until the device has everything. Rows are written as they
are measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.families_gpu import write_folder
from benchmarks.machine import describe_machine
from benchmarks.quantization_gpu import WAN_14B
from diffusion_runtime.attention import AttentionConfig, AttentionPolicy
from diffusion_runtime.kernels.int8_rows import api as int8
from diffusion_runtime.loading.native_model import build_transformer
from diffusion_runtime.memory.machine_memory import peak_in_machine
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.random_weights import draw_weight
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.weights.quantization import Quantization
from diffusion_runtime.weights.tensor_files import write_tensors
from diffusion_runtime.weights.weight_loading import MakeEmpty

DTYPE = torch.bfloat16
SHARD_BYTES = 4 * 10**9
GROUP = 256
STEM = "diffusion_pytorch_model"


def as_stored(name: str, tensor: torch.Tensor, stored: str) -> dict[str, torch.Tensor]:
    """The tensors of one weight in a file. stored: bfloat16, or int8 for the linear layers of blocks."""
    if stored == "bfloat16" or tensor.ndim != 2 or not name.startswith("blocks.") or not name.endswith(".weight"):
        return {name: tensor.cpu()}
    rows, layer = int8.quantize_rows(tensor, GROUP), name.removesuffix("weight")
    mark = json.dumps({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": GROUP}).encode()
    return {
        name: rows.values.cpu(),
        f"{layer}weight_scale": rows.scales.cpu(),
        f"{layer}comfy_quant": torch.tensor(list(mark), dtype=torch.uint8),
    }


def write_shards(folder: Path, model: Model[Any, Any], device: torch.device, stored: str) -> list[Path]:
    """The tensors of a component's checkpoint in files of about SHARD_BYTES in bfloat16, with their index."""
    pieces = [piece for several in model.weights.pieces("transformer").values() for piece in several]
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for piece in pieces:
        num_bytes = torch.Size(piece.shape).numel() * DTYPE.itemsize
        if size and size + num_bytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][piece.name] = piece.shape
        size += num_bytes
    paths, places = [], {}
    for number, shapes in enumerate(shards, start=1):
        path = folder / "transformer" / f"{STEM}-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name, shape in shapes.items():
            made = torch.empty(shape, dtype=DTYPE, device=device)
            draw_weight(name, made)
            tensors |= as_stored(name, made, stored)
        write_tensors(path, tensors)
        places |= dict.fromkeys(tensors, path.name)
        paths.append(path)
    (folder / "transformer" / f"{STEM}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return paths


def drop_from_cache(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dd(paths: list[Path], *flags: str) -> None:
    for path in paths:
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=16M", *flags], check=True, capture_output=True)


def load(model: Model[Any, Any], device: torch.device, arena: torch.Tensor | None) -> None:
    """arena: bytes that the weights are read into, None for new memory of the device."""
    policy = AttentionPolicy(cli=AttentionConfig.parse(None), device=str(device), dtype=DTYPE)
    used = 0

    def empty(shape: torch.Size, *, dtype: torch.dtype) -> torch.Tensor:
        nonlocal used
        assert arena is not None
        begin, used = used, used + shape.numel() * dtype.itemsize
        return arena[begin:used].view(dtype).view(shape)

    quantization = Quantization.of(model.family.name, "none", ())
    transformer = build_transformer(model, policy, quantization)
    # Layers whose weights the files hold in another format become layers of that format.
    model.weights.check(model.modules(transformer), ())

    def room_for(*_: object) -> MakeEmpty | None:
        return None if arena is None else empty

    model.load_transformer(transformer, device, DTYPE, quantization=quantization, room_for=room_for)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del transformer
    gc.collect()


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def rows(model: Model[Any, Any], paths: list[Path], device: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
    num_bytes = sum(path.stat().st_size for path in paths)
    # On a CPU the system clears every new page, a second per GB on some: dd has its own memory once, and so has this.
    # Twice the size, as some parameters stay in float32.
    arena = None if device.type == "cuda" else torch.zeros(2 * num_bytes, dtype=torch.uint8)
    runs: dict[str, Callable[[], object]] = {
        "dd, direct": lambda: dd(paths, "iflag=direct"),
        "dd": lambda: dd(paths),
        "load_transformer": lambda: load(model, device, arena),
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    # The first use of the device, and of the code.
    load(model, device, arena)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        load(model, device, arena)
        peak = (torch.cuda.max_memory_allocated(device) - before) / 1e9
        yield {"what": "peak of the device", "gb": num_bytes / 1e9, "peak_gb": peak}
    for _ in range(repeats):
        for name, run in runs.items():
            drop_from_cache(paths)
            seconds.setdefault((name, "cold"), []).append(timed(run))
        for name, run in runs.items():
            if "direct" not in name:
                run()
                seconds.setdefault((name, "warm"), []).append(timed(run))
    for state in ("cold", "warm") if repeats else ():
        found = {name: statistics.median(times) for (name, kind), times in seconds.items() if kind == state}
        reference = min(value for name, value in found.items() if name != "load_transformer")
        for name, value in found.items():
            yield {
                "what": name,
                "cache": state,
                "gb": num_bytes / 1e9,
                "seconds": value,
                "all_seconds": seconds[name, state],
                "gb_per_s": num_bytes / 1e9 / value,
                "share_of_dd": reference / value,
                "peak_of_process_gb": peak_in_machine() / 1e9,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/diffusion_runtime_load"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, default=40, help="of the transformer; 40 are 28 GB")
    parser.add_argument("--stored", default="bfloat16", choices=("bfloat16", "int8"))
    parser.add_argument("--repeats", type=int, default=2, help="0: the peak of memory alone")
    arguments = parser.parse_args()
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    step = dataclasses.replace(WAN_14B, config={**WAN_14B.config, "num_layers": arguments.layers})
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.load_gpu/1",
        "machine": describe_machine(device),
        "layers": arguments.layers,
        "stored": arguments.stored,
        "repeats": arguments.repeats,
        "rows": [],
    }
    arguments.folder.mkdir(parents=True)
    try:
        write_folder(arguments.folder, step)
        model = family_for_folder(arguments.folder).describe(arguments.folder)
        document["write_s"] = timed(lambda: write_shards(arguments.folder, model, device, arguments.stored))
        paths = sorted((arguments.folder / "transformer").glob("*.safetensors"))
        print(f"{len(paths)} shards written in {document['write_s']:.0f} s", flush=True)
        for row in rows(model, paths, device, arguments.repeats):
            document["rows"].append(row)
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")
            if "peak_gb" in row:
                print(f"{row['what']}: {row['peak_gb']:.2f} GB for files of {row['gb']:.2f} GB", flush=True)
                continue
            print(
                f"{row['what']:18} {row['cache']:5} {row['seconds']:7.2f} s  {row['gb_per_s']:6.2f} GB/s  "
                f"{row['share_of_dd']:5.2f} of dd",
                flush=True,
            )
    finally:
        shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
