"""What decoding takes on a GPU against what the memory plan says, and whether the frames stay the same in just that.

    python -m benchmarks.decode_memory_gpu --output /tmp/decode_memory.json [--only flux.2-dev,qwen-image]
    python -m benchmarks.decode_memory_gpu --tilings off,on --only flux.1-dev --sizes 2048x2048 --output tiles.json
    python -m benchmarks.decode_memory_gpu --device cpu --output /tmp/decode_memory.json    # counts tensors, at 64 x 64

Decoders of published models with random weights, at two sizes. The peak of torch's allocator above what was there
before is what the plan's activations of decoding stand for; the plan adds to them what libraries take. Then the same
latents with torch's memory fraction at exactly what the plan grants. cuDNN takes another algorithm where the workspace
of its first choice does not fit, and its sums are others: `shortages` counts that, and `is_identical` tells. With
several --tilings, `difference` is the relative L2 of the frames from those of the first.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest, RuntimeConfig
from diffusion_runtime.benchmark.random_pipeline import random_decoder
from diffusion_runtime.benchmark.step_model import published_files
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.memory.device_memory import use_expandable_segments
from diffusion_runtime.memory.live_bytes import peak_bytes
from diffusion_runtime.memory.plan import ACCELERATOR, plans_of
from diffusion_runtime.models.published_folders import write_folder

# By model: (height, width, frames).
SIZES: Mapping[str, tuple[tuple[int, int, int], ...]] = {
    "flux.2-dev": ((1024, 1024, 1), (512, 768, 1)),
    "flux.1-dev": ((1024, 1024, 1), (512, 768, 1)),
    "qwen-image": ((1024, 1024, 1), (512, 768, 1)),
    "wan2.1-1.3b": ((480, 832, 17), (720, 1280, 9)),
    "hunyuan-video": ((320, 512, 17), (480, 640, 9)),
    "ltx-video-0.9.7-dev": ((512, 704, 33), (256, 384, 17)),
}
SMALL = (64, 64, 1)


def measure(
    name: str, size: tuple[int, int, int], device: torch.device, tiling: str, untiled: list[torch.Tensor]
) -> dict[str, Any]:
    """untiled: the frames of the size's first tiling, none before that."""
    height, width, num_frames = size
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        folder = write_folder(Path(temporary), published_files(name))
        prepared = prepare(
            RuntimeConfig(model_path=str(folder), device=str(device), dtype="bfloat16", vae_tiling=tiling)
        )
        assert isinstance(prepared, PreparedModel)
        request = prepared.rules.resolve(
            GenerationRequest("a red circle", height=height, width=width, num_frames=num_frames, seed=1)
        )
        found = prepared._largest_demand(prepared.transformer, [request])
        assert found is not None
        decoder = random_decoder(prepared, folder).in_tiles(tiling).for_request(request)
    plan = plans_of(found.demand, None, ["none"])[0]
    granted = plan.parts["decode"]["activations of decode"] + plan.parts["decode"]["libraries and rounding"]
    shape = prepared.rules.sampling.geometry.latent_shape(height, width, num_frames)
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1)).to(device)

    def decode() -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat([chunk.cpu() for chunk in decoder.stream(latents).chunks], dim=1)

    row = {
        "model": name,
        "size": list(size),
        "tiling": tiling,
        "planned": found.demand.decode_activations,
        "granted": granted,
    }
    if device.type == "cpu":
        return {**row, "measured": peak_bytes(decode, device)}
    # The first decode of a size compiles, and compares with the decoder without fused kernels, which takes more: it is
    # what the plan is for.
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    decode()
    row |= {"measured_first": torch.cuda.max_memory_allocated(device) - before}
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    started = time.perf_counter()
    expected = decode()
    seconds = time.perf_counter() - started
    row |= {"measured": torch.cuda.max_memory_allocated(device) - before, "seconds": seconds}
    untiled.append(expected)
    row |= {"difference": float((expected.double() - untiled[0].double()).norm() / untiled[0].double().norm())}
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    shortages = torch.cuda.memory_stats(device)["num_ooms"]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + granted) / total, device)
    try:
        row |= {"is_identical": torch.equal(expected, decode())}
    except torch.OutOfMemoryError as error:
        row |= {"is_identical": None, "error": str(error).splitlines()[0][:200]}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    row["shortages"] = torch.cuda.memory_stats(device)["num_ooms"] - shortages
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("decode_memory.json"))
    parser.add_argument("--only", default="", help=f"of {','.join(SIZES)}, with commas between")
    parser.add_argument("--sizes", default="", help="WIDTHxHEIGHT of pictures, instead of the table's")
    parser.add_argument("--tilings", default="auto", help="values of --vae-tiling, with commas between")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    use_expandable_segments(device)
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.decode_memory_gpu/1",
        "machine": describe_machine(device),
        "workspace": ACCELERATOR.workspace,
        "rows": [],
    }
    for name in arguments.only.split(",") if arguments.only else SIZES:
        given = [tuple(map(int, reversed(size.split("x")))) for size in arguments.sizes.split(",") if size]
        sizes = [(height, width, 1) for height, width in given] or list(SIZES[name])
        for size in sizes if device.type == "cuda" else (SMALL,):
            untiled: list[torch.Tensor] = []
            for tiling in arguments.tilings.split(","):
                row = measure(name, size, device, tiling, untiled)
                document["rows"].append(row)
                arguments.output.write_text(json.dumps(document, indent=1) + "\n")
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
