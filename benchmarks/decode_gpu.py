"""Decoding, and encoding a first image, on one GPU: diffusers' own modules, and ours on the same weights.

    python -m benchmarks.decode_gpu --output benchmarks/results/decode_gpu.json
    python -m benchmarks.decode_gpu --device cpu --tiny

Random weights of published shapes, bfloat16. Wan 2.1: 81 frames of 480 x 832, decoded, decoded and written to an mp4,
and an image of that size encoded. HunyuanVideo: a tile of 17 frames of 256 x 256, as it decodes. HunyuanVideo-1.5: a
tile of 33 frames of 256 x 256. LTX-2: 121 frames of 512 x 768. Correctness comes first: what is called exact must be
diffusers' bits, for every kind of Wan's decoder at a small size and for the timed ones at their own; what is called
fast must be as near to diffusers' float32 frames as its bfloat16 ones. Peak memory is what a run adds to the weights
and its input.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Video,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
)

from benchmarks.machine import describe_machine
from diffusion_runtime.decoders.causal_decoder import CausalDecoder, ChannelsFirstDecoder, ChannelsLastDecoder
from diffusion_runtime.decoders.causal_video_decoder import exact_decoder
from diffusion_runtime.decoders.fused_norms import fuse_norms, use_last_taps, with_shared_weights
from diffusion_runtime.decoders.video_decoder import by_factor
from diffusion_runtime.media import ClipHeader, FileWriter, GeneratedMedia
from diffusion_runtime.report.attention_report import AttentionReport

# How much farther from float32 the fast decoder may be than diffusers' own bfloat16.
ALLOWED_DECIBELS = 0.5
# Channels in and out, frames, height and width: the residual blocks of a clip of 480 x 832.
CONVOLUTIONS = ((384, 384, 2, 120, 208), (192, 192, 4, 240, 416), (96, 96, 4, 480, 832))
Decode = Callable[[torch.Tensor], torch.Tensor]
# The classes of the decoders whose norms are fused, settings of a tiny one, latents that are timed, and tiny ones.
NORM_FUSED: dict[str, tuple[Any, dict[str, Any], tuple[int, int, int], tuple[int, int, int]]] = {
    "hunyuan tile": (
        AutoencoderKLHunyuanVideo,
        {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4},
        (5, 32, 32),
        (2, 4, 4),
    ),
    "hunyuan 1.5 tile": (
        AutoencoderKLHunyuanVideo15,
        {"latent_channels": 8, "block_out_channels": (4, 8, 8, 16, 16), "layers_per_block": 1},
        (9, 16, 16),
        (2, 3, 4),
    ),
    "ltx2": (
        AutoencoderKLLTX2Video,
        {
            "latent_channels": 6,
            "block_out_channels": (8, 8, 8, 8),
            "decoder_block_out_channels": (8, 16, 32),
            "layers_per_block": (1,) * 5,
            "decoder_layers_per_block": (1,) * 4,
        },
        (16, 16, 24),
        (2, 3, 4),
    ),
}


def random_autoencoder(kind: str, dtype: torch.dtype, device: str, *, is_small: bool, has_encoder: bool = False) -> Any:
    """kind: `wan21`, `wan22` (residual blocks and patches), `qwen` or one of NORM_FUSED. Norm weights and biases are
    random too."""
    torch.manual_seed(0)
    if kind in NORM_FUSED:
        made, small, *_ = NORM_FUSED[kind]
        size: dict[str, Any] = small if is_small else {}
    else:
        made = AutoencoderKLQwenImage if kind == "qwen" else AutoencoderKLWan
        size = {"base_dim": 64 if device != "cpu" else 8, "num_res_blocks": 1} if is_small else {}
        if kind == "wan22":
            channels = {"z_dim": 48, "in_channels": 12, "out_channels": 12}
            size |= {**channels, "is_residual": True, "patch_size": 2, "scale_factor_spatial": 16}
            narrow = {"decoder_base_dim": size.get("base_dim")}
            size |= narrow if is_small else {"base_dim": 160, "decoder_base_dim": 256}
    with torch.device(device):
        autoencoder = made(**size)
    for name, parameter in autoencoder.named_parameters():
        if "norm" in name or name.endswith(("gamma", "bias")):
            parameter.data = 0.1 * torch.randn_like(parameter) + (0.0 if name.endswith("bias") else 1.0)
    if not has_encoder:
        autoencoder.encoder = torch.nn.Identity()
        autoencoder.quant_conv = torch.nn.Identity()
    return autoencoder.eval().requires_grad_(False).to(device, dtype)


def random_latents(autoencoder: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    channels = autoencoder.config.get("latent_channels") or autoencoder.config.z_dim
    return torch.randn(1, channels, *shape, device=next(autoencoder.parameters()).device).to(dtype)


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


def norm_fused_decoders(autoencoder: Any) -> dict[str, Decode]:
    """`exact` where there is one: group norms have none."""

    def of(module: Any) -> Decode:
        return lambda latents: module.decode(latents, return_dict=False)[0]

    run = {"diffusers": of(autoencoder)}
    for name, is_exact in (("exact", True), ("fast", False)):
        module = with_shared_weights(autoencoder)
        if fuse_norms(module.decoder, is_exact=is_exact):
            run[name] = of(module)
    return run


def encoders(autoencoder: Any) -> dict[str, Decode]:
    """Of one image. `exact` has the bits of diffusers; whether `exact, one tap` has them too is for this to find out,
    as it is for the pipeline."""

    def of(module: Any) -> Decode:
        return lambda pixels: module.encode(pixels).latent_dist.mode()

    run = {"diffusers": of(autoencoder)}
    for name, is_exact, one_tap in (("exact", True, False), ("exact, one tap", True, True), ("fast", False, True)):
        module = with_shared_weights(autoencoder)
        fuse_norms(module.encoder, is_exact=is_exact)
        if one_tap:
            use_last_taps(module.encoder)
        run[name] = of(module)
    return run


def decibels(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Peak signal-to-noise ratio of frames in [-1, 1]."""
    error = float(((expected.float() - found.float()) / 2).square().mean())
    return -10.0 * math.log10(max(error, 1e-20))


def compare(name: str, run: dict[str, Decode], latents: torch.Tensor) -> dict[str, Any]:
    expected = run["diffusers"](latents)
    row: dict[str, Any] = {"case": name, "standard_deviation": round(float(expected.float().std()), 3)}
    for other in list(run)[1:]:
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
    whole = copy.deepcopy(autoencoder).float()
    is_image = latents.shape[1] == 3
    exact = (encoders if is_image else norm_fused_decoders)(whole)["diffusers"](latents.float()).cpu()
    row = {name: round(decibels(exact, frames), 1) for name, frames in found.items()}
    print("to float32:", row, flush=True)
    return row


def measure(decode: Decode, latents: torch.Tensor, repeats: int) -> dict[str, float]:
    """Milliseconds by CUDA's events, by the clock on a CPU, where no peak is known."""
    if not latents.is_cuda:
        times = [_milliseconds(lambda: decode(latents)) for _ in range(repeats)]
        return {"median_ms": round(statistics.median(times), 1), "lowest_ms": round(min(times), 1), "peak_gib": 0.0}
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


def _milliseconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def measure_case(
    name: str, autoencoder: Any, run: dict[str, Decode], latents: torch.Tensor, *, repeats: int, is_quick: bool
) -> dict[str, Any]:
    """Correctness and times of one case; every variant twice, in both orders."""
    row = compare(name, run, latents)
    row["to_float32"] = {} if is_quick else compare_with_float32(autoencoder, run, latents)
    row["times"] = {variant: measure(decode, latents, repeats) for variant, decode in run.items()}
    # Once more, in the other order: what differs by less than the two runs of one decoder is noise.
    row["times_again"] = row["times"]
    if not is_quick:
        row["times_again"] = {variant: measure(run[variant], latents, repeats) for variant in reversed(run)}
    for variant in run:
        one, two = row["times"][variant], row["times_again"][variant]
        print(f"{name:18} {variant:15} {one['median_ms']:8.1f} ms, again {two['median_ms']:8.1f}", end="")
        print(f"; peak {one['peak_gib']:.2f} GiB", flush=True)
    return row


def measure_writing(autoencoder: Any, latents: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Milliseconds of decoding and writing an mp4: one after the other, and written while the next frames are decoded.

    Raises SystemExit when the two files differ.
    """
    decoder = exact_decoder(autoencoder, by_factor(1.0))

    def pixels(frames: torch.Tensor) -> numpy.ndarray:
        return (frames[0] * 255).round().clamp(0, 255).to("cpu", torch.uint8).numpy()

    def media(frames: numpy.ndarray) -> GeneratedMedia:
        return GeneratedMedia(frames=frames, fps=16, recipe={}, attention_report=AttentionReport((), (), ()))

    with tempfile.TemporaryDirectory() as folder:
        apart_file, streamed_file = Path(folder) / "apart.mp4", Path(folder) / "streamed.mp4"

        def apart() -> None:
            media(pixels(decoder.decode(latents))).save(apart_file)

        def streamed() -> None:
            stream = decoder.stream(latents)
            parts: list[numpy.ndarray] = []
            with FileWriter(streamed_file) as writer:
                for chunk in stream.chunks:
                    parts.append(pixels(chunk))
                    if len(parts) == 1:
                        take = writer.open(0, ClipHeader(stream.num_frames, *parts[0].shape[1:3], 16, {}))
                    take(parts[-1])
                media(numpy.concatenate(parts)).save(streamed_file, writer=writer)

        apart(), streamed()
        pairs = [(_milliseconds(apart), _milliseconds(streamed)) for _ in range(repeats)]
        if apart_file.read_bytes() != streamed_file.read_bytes():
            raise SystemExit("not as promised: a file written while it is decoded differs")
    row = {
        "decode_ms": round(statistics.median(_milliseconds(lambda: pixels(decoder.decode(latents))) for _ in pairs), 1),
        "apart_ms": round(statistics.median(pair[0] for pair in pairs), 1),
        "streamed_ms": round(statistics.median(pair[1] for pair in pairs), 1),
    }
    print("decoding and writing:", row, flush=True)
    return row


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
    import triton

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
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--latents", type=int, nargs=3, default=(21, 60, 104), metavar=("FRAMES", "HEIGHT", "WIDTH"))
    parser.add_argument("--quick", action="store_true", help="two small cases, no float32, every time once")
    parser.add_argument("--tiny", action="store_true", help="tiny weights and sizes everywhere: whether it runs")
    parser.add_argument("--profile", action="store_true", help="device time by kernel, and of single convolutions")
    arguments = parser.parse_args()
    device, is_quick, is_tiny = arguments.device, arguments.quick, arguments.tiny
    rows = []
    for kind in ("wan21", "wan22") if is_quick else ("wan21", "wan22", "qwen"):
        for dtype in (torch.bfloat16,) if is_quick else (torch.float32, torch.bfloat16):
            small = random_autoencoder(kind, dtype, device, is_small=True)
            latents = random_latents(small, (3, 2, 3) if is_tiny else (3, 12, 20), dtype)
            rows.append(compare(f"{kind} small {str(dtype)[6:]}", decoders(small), latents))

    def case(name: str, autoencoder: Any, run: dict[str, Decode], latents: torch.Tensor) -> dict[str, Any]:
        return measure_case(name, autoencoder, run, latents, repeats=arguments.repeats, is_quick=is_quick)

    autoencoder = random_autoencoder("wan21", torch.bfloat16, device, is_small=is_tiny)
    latents = random_latents(autoencoder, (3, 3, 4) if is_tiny else tuple(arguments.latents), torch.bfloat16)
    run = decoders(autoencoder)
    cases = [case("wan21", autoencoder, run, latents)]
    written = measure_writing(autoencoder, latents, arguments.repeats)
    kernels = {}
    if arguments.profile and device != "cpu":
        kernels = {name: kernel_table(decode, latents) for name, decode in run.items()}
    height, width = (8 * side for side in latents.shape[-2:])
    del autoencoder, run
    autoencoder = random_autoencoder("wan21", torch.bfloat16, device, is_small=is_tiny, has_encoder=True)
    pixels = 2 * torch.rand(1, 3, 1, height, width, device=device).to(torch.bfloat16) - 1
    cases.append(case("wan21 encode", autoencoder, encoders(autoencoder), pixels))
    for name, (_, _, shape, tiny_shape) in NORM_FUSED.items():
        autoencoder = random_autoencoder(name, torch.bfloat16, device, is_small=is_tiny)
        latents = random_latents(autoencoder, tiny_shape if is_tiny else shape, torch.bfloat16)
        cases.append(case(name, autoencoder, norm_fused_decoders(autoencoder), latents))
    document: dict[str, Any] = {
        "benchmark": "decode_gpu",
        "machine": describe_machine(device),
        "latents": list(arguments.latents),
        "correctness": rows,
        "cases": cases,
        "decoding_and_writing": written,
    }
    if device != "cpu" and (arguments.profile or is_quick):
        document["convolutions"] = [convolution_times(*shape) for shape in CONVOLUTIONS]
    if arguments.profile:
        document["kernels"] = kernels
        for name, table in kernels.items():
            print(f"-- {name}: {sum(line['ms'] for line in table):.0f} ms in the longest 25")
            for line in table[:14]:
                print(f"{line['ms']:9.2f} ms {line['calls']:5d} {line['kernel'][:75]}")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    wrong = [
        f"{row['case']}, {name}"
        for row in (*rows, *cases)
        for name in ("channels first", "exact")
        if name in row and not row[name]["equal"]
        # On a CPU Wan's decoder with channels last sums in another order.
        if device != "cpu" or name != "exact" or "channels first" not in row
    ]
    for row in cases:
        if row["to_float32"] and row["to_float32"]["fast"] < row["to_float32"]["diffusers"] - ALLOWED_DECIBELS:
            wrong.append(f"{row['case']}: fast is farther from float32")
    raise SystemExit(f"not as promised: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
