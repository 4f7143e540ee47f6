"""Decoding on one GPU: diffusers' own module, and ours on the same weights.

    python -m benchmarks.decode_gpu --output benchmarks/results/decode_gpu.json

Random weights of Wan 2.1's decoder, bfloat16, 81 frames of 480 x 832. Correctness comes first: frames of `channels
first` and `exact` must be diffusers' bits, for every kind of decoder at a small size and for the timed one at its own;
those of `fast` must be as near to diffusers' float32 frames as its bfloat16 ones. Peak memory is what a decode adds to
the weights and latents.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

from benchmarks.machine import describe_machine
from diffusion_runtime.layers.causal_decoder import CausalDecoder, ChannelsFirstDecoder, ChannelsLastDecoder

# How much farther from float32 the fast decoder may be than diffusers' own bfloat16.
ALLOWED_DECIBELS = 0.5
# Channels in and out, frames, height and width: the residual blocks of a clip of 480 x 832.
CONVOLUTIONS = ((384, 384, 2, 120, 208), (192, 192, 4, 240, 416), (96, 96, 4, 480, 832))
Decode = Callable[[torch.Tensor], torch.Tensor]


def random_autoencoder(kind: str, dtype: torch.dtype, *, is_small: bool) -> Any:
    """kind: `wan21`, `wan22` (residual blocks and patches) or `qwen`. Norm weights and biases are random too."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"base_dim": 64, "num_res_blocks": 1} if is_small else {}
    if kind == "wan22":
        channels = {"z_dim": 48, "in_channels": 12, "out_channels": 12}
        size |= {**channels, "is_residual": True, "patch_size": 2, "scale_factor_spatial": 16}
        size |= {"decoder_base_dim": 64} if is_small else {"base_dim": 160, "decoder_base_dim": 256}
    autoencoder = (AutoencoderKLQwenImage if kind == "qwen" else AutoencoderKLWan)(**size)
    for name, parameter in autoencoder.named_parameters():
        if name.endswith(("gamma", "bias")):
            parameter.data = 0.1 * torch.randn_like(parameter) + (1.0 if name.endswith("gamma") else 0.0)
    autoencoder.encoder = torch.nn.Identity()
    autoencoder.quant_conv = torch.nn.Identity()
    return autoencoder.eval().to("cuda", dtype)


def random_latents(autoencoder: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(1, autoencoder.config.z_dim, *shape, device="cuda").to(dtype)


def collect(chunks: Iterator[torch.Tensor], num_frames: int) -> torch.Tensor:
    """The frames of all chunks in one tensor, written in place."""
    out, position = None, 0
    for chunk in chunks:
        if out is None:
            out = chunk.new_empty(*chunk.shape[:2], num_frames, *chunk.shape[3:])
        out[:, :, position : position + chunk.shape[2]] = chunk
        position += chunk.shape[2]
    assert out is not None
    assert position == num_frames, (position, num_frames)
    return out


def decoders(autoencoder: Any) -> dict[str, Decode]:
    def of(decoder: CausalDecoder[Any]) -> Decode:
        return lambda latents: collect(decoder.decode(latents), 4 * (latents.shape[2] - 1) + 1)

    return {
        "diffusers": lambda latents: autoencoder.decode(latents, return_dict=False)[0],
        "channels first": of(ChannelsFirstDecoder(autoencoder)),
        "exact": of(ChannelsLastDecoder(autoencoder, is_exact=True)),
        "fast": of(ChannelsLastDecoder(autoencoder)),
    }


def decibels(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Peak signal-to-noise ratio of frames in [-1, 1]."""
    error = float(((expected.float() - found.float()) / 2).square().mean())
    return -10.0 * math.log10(max(error, 1e-20))


def compare(name: str, run: dict[str, Decode], latents: torch.Tensor) -> dict[str, Any]:
    expected = run["diffusers"](latents)
    row: dict[str, Any] = {"case": name, "standard_deviation": round(float(expected.float().std()), 3)}
    for other in ("channels first", "exact", "fast"):
        found = run[other](latents)
        row[other] = {
            "equal": torch.equal(expected, found),
            "different": float((expected != found).float().mean()),
            "decibels": round(decibels(expected, found), 1),
        }
    print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return row


def compare_with_float32(autoencoder: Any, run: dict[str, Decode], latents: torch.Tensor) -> dict[str, float]:
    """Decibels of each decoder's frames in bfloat16 to diffusers' in float32: what bfloat16 itself costs."""
    found = {name: decode(latents).cpu() for name, decode in run.items()}
    exact = copy.deepcopy(autoencoder).float().decode(latents.float(), return_dict=False)[0].cpu()
    row = {name: round(decibels(exact, frames), 1) for name, frames in found.items()}
    print("to float32:", row, flush=True)
    return row


def measure(decode: Decode, latents: torch.Tensor, repeats: int) -> dict[str, float]:
    for _ in range(2):
        decode(latents)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        decode(latents)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "median_ms": round(statistics.median(times), 1),
        "lowest_ms": round(min(times), 1),
        "peak_gib": round(peak / 2**30, 2),
    }


def convolution_times(channels: int, outputs: int, frames: int, height: int, width: int) -> dict[str, Any]:
    """One convolution in each layout: where the time of a decode goes whatever is around it."""
    x = torch.randn(1, channels, frames + 2, height, width, device="cuda", dtype=torch.bfloat16)
    weight = 0.02 * torch.randn(outputs, channels, 3, 3, 3, device="cuda", dtype=torch.bfloat16)
    padded = F.pad(x, (1, 1, 1, 1))
    x_last, padded_last, weight_last = (
        value.contiguous(memory_format=torch.channels_last_3d) for value in (x, padded, weight)
    )
    filled_last = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, 0, 0, -outputs % 64)).contiguous(
        memory_format=torch.channels_last_3d
    )
    wide_last, wide_weight = (
        F.pad(value, (0, 0, 0, 0, 0, 0, 0, -channels % 64)).contiguous(memory_format=torch.channels_last_3d)
        for value in (x, filled_last)
    )
    variants: dict[str, Callable[[], object]] = {
        "first": lambda: torch.conv3d(padded, weight),
        "last_padded": lambda: torch.conv3d(padded_last, weight_last),
        "last": lambda: torch.conv3d(x_last, weight_last, padding=(0, 1, 1)),
        "outputs_filled": lambda: torch.conv3d(x_last, filled_last, padding=(0, 1, 1)),
        "both_filled": lambda: torch.conv3d(wide_last, wide_weight, padding=(0, 1, 1)),
    }
    row: dict[str, Any] = {"convolution": f"{channels} to {outputs}, {frames} x {height} x {width}"}
    work = 2 * 27 * channels * outputs * frames * height * width
    for name, function in variants.items():
        ms = float(triton.testing.do_bench(function, warmup=20, rep=60, return_mode="median"))
        row[name] = f"{ms:.3f} ms {work / ms / 1e9:.0f} TF/s"
    print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return row


def kernel_table(decode: Decode, latents: torch.Tensor) -> list[dict[str, Any]]:
    """Device time of one decode by kernel, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        decode(latents)
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    return [
        {"kernel": event.key[:90], "ms": round(event.self_device_time_total / 1e3, 2), "calls": event.count}
        for event in events[:25]
    ]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--latents", type=int, nargs=3, default=(21, 60, 104), metavar=("FRAMES", "HEIGHT", "WIDTH"))
    parser.add_argument("--quick", action="store_true", help="two small cases, no float32, every time once")
    parser.add_argument("--profile", action="store_true", help="device time by kernel, and of single convolutions")
    arguments = parser.parse_args()
    rows = []
    for kind in ("wan21", "wan22") if arguments.quick else ("wan21", "wan22", "qwen"):
        for dtype in (torch.bfloat16,) if arguments.quick else (torch.float32, torch.bfloat16):
            small = random_autoencoder(kind, dtype, is_small=True)
            latents = random_latents(small, (3, 12, 20), dtype)
            rows.append(compare(f"{kind} small {str(dtype)[6:]}", decoders(small), latents))
    autoencoder = random_autoencoder("wan21", torch.bfloat16, is_small=False)
    latents = random_latents(autoencoder, tuple(arguments.latents), torch.bfloat16)
    run = decoders(autoencoder)
    rows.append(compare("wan21 timed size", run, latents))
    to_float32 = {} if arguments.quick else compare_with_float32(autoencoder, run, latents)
    times = {name: measure(decode, latents, arguments.repeats) for name, decode in run.items()}
    # Once more, in the other order: what differs by less than the two runs of one decoder is noise.
    again = times
    if not arguments.quick:
        again = {name: measure(decode, latents, arguments.repeats) for name, decode in reversed(run.items())}
    document: dict[str, Any] = {
        "benchmark": "decode_gpu",
        "machine": describe_machine("cuda"),
        "latents": list(arguments.latents),
        "correctness": rows,
        "decibels_to_float32": to_float32,
        "times": times,
        "times_again": again,
    }
    if arguments.profile or arguments.quick:
        document["convolutions"] = [convolution_times(*shape) for shape in CONVOLUTIONS]
    if arguments.profile:
        document["kernels"] = {name: kernel_table(decode, latents) for name, decode in run.items()}
        for name, table in document["kernels"].items():
            print(f"-- {name}: {sum(line['ms'] for line in table):.0f} ms in the longest 25")
            for line in table[:14]:
                print(f"{line['ms']:9.2f} ms {line['calls']:5d} {line['kernel'][:75]}")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    for name in run:
        one, two = times[name], again[name]
        print(f"{name:15} {one['median_ms']:8.1f} ms, again {two['median_ms']:8.1f}; peak {one['peak_gib']:.2f} GiB")
    wrong = [f"{row['case']}, {name}" for row in rows for name in ("channels first", "exact") if not row[name]["equal"]]
    if to_float32 and to_float32["fast"] < to_float32["diffusers"] - ALLOWED_DECIBELS:
        wrong.append("fast is farther from float32")
    raise SystemExit(f"not as promised: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
