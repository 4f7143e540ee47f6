"""Decoding on the CPU: our codec and diffusers' own AutoencoderKLWan on the same weights, alternately in one process.

    python -m benchmarks.decode_cpu [--repeats 5] [--output benchmarks/results/decode_cpu.json]

Random weights in the embedded model's layout, float32, 29 frames. Frames are compared before anything is timed. The
allocator is set up as the `generate` command does, which serves both sides alike. Decoding and writing an mp4 is timed
too: one after the other, and the file written while the next frames are decoded; both files must have the same bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy
import torch
from diffusers import AutoencoderKLWan

from benchmarks.machine import describe_machine
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.media import ClipHeader, FileWriter, GeneratedMedia
from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator
from diffusion_runtime.models.wan.codec import load_decoder
from diffusion_runtime.report.attention_report import AttentionReport

LATENT_FRAMES, CHANNELS = 8, 16
SIZES = (128, 256, 384)
TOLERANCE = 1e-4
RESULT = Path(__file__).parent / "results" / "decode_cpu.json"


@dataclass(frozen=True)
class Row:
    """Medians of one size in pixels. ratio: ours over diffusers', the median of all pairs; best_ratio: the shortest
    over the shortest, which other work on the machine disturbs least. difference: of frames in [0, 1], the largest."""

    size: int
    difference: float
    ours_ms: float
    diffusers_ms: float
    ratio: float
    best_ratio: float


@dataclass(frozen=True)
class WriteRow:
    """Medians of one size, decoding and writing together. ratio: streamed over one after the other, of all pairs.
    decode_ms: of decoding alone."""

    size: int
    decode_ms: float
    apart_ms: float
    streamed_ms: float
    ratio: float


def write_folder(folder: Path) -> None:
    torch.manual_seed(0)
    AutoencoderKLWan(
        base_dim=24,
        decoder_base_dim=16,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        patch_size=2,
        in_channels=12,
        out_channels=12,
        is_residual=False,
        scale_factor_spatial=8,
        scale_factor_temporal=4,
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
    ).save_pretrained(folder / "vae")


def milliseconds(function: Callable[[], torch.Tensor]) -> float:
    started = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - started)


def measure(ours: LatentDecoder, theirs: AutoencoderKLWan, size: int, repeats: int) -> Row:
    """Compare, then time the two alternately. Raises SystemExit when the frames differ."""
    latents = torch.randn(1, CHANNELS, LATENT_FRAMES, size // 8, size // 8)

    def run_ours() -> torch.Tensor:
        return ours.decode(latents)

    def run_theirs() -> torch.Tensor:
        out: torch.Tensor = theirs.decode(latents, return_dict=False)[0]
        return (out / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)

    difference = float((run_ours() - run_theirs()).abs().max())
    if difference > TOLERANCE:
        raise SystemExit(f"{size} pixels: frames differ by {difference:.1e}, allowed is {TOLERANCE:.0e}")
    pairs = [(milliseconds(run_ours), milliseconds(run_theirs)) for _ in range(repeats)]
    return Row(
        size,
        difference,
        ours_ms=round(statistics.median(pair[0] for pair in pairs)),
        diffusers_ms=round(statistics.median(pair[1] for pair in pairs)),
        ratio=round(statistics.median(a / b for a, b in pairs), 3),
        best_ratio=round(min(pair[0] for pair in pairs) / min(pair[1] for pair in pairs), 3),
    )


def to_bytes(frames: torch.Tensor) -> numpy.ndarray:
    return (frames * 255).round().clamp(0, 255).to(torch.uint8).numpy()


def measure_writing(ours: LatentDecoder, size: int, repeats: int, folder: Path) -> WriteRow:
    """Raises SystemExit when the files differ."""
    # Smooth latents: an encoder takes longest for noise, which no video is.
    coarse = torch.randn(1, CHANNELS, 3, size // 64, size // 64)
    latents = torch.nn.functional.interpolate(coarse, (LATENT_FRAMES, size // 8, size // 8), mode="trilinear")

    def media(frames: numpy.ndarray) -> GeneratedMedia:
        return GeneratedMedia(frames=frames, fps=16, recipe={}, attention_report=AttentionReport((), (), ()))

    def apart() -> torch.Tensor:
        frames = ours.decode(latents)
        media(to_bytes(frames[0])).save(folder / "apart.mp4")
        return frames

    def streamed() -> torch.Tensor:
        stream = ours.stream(latents)
        with FileWriter(folder / "streamed.mp4") as writer:
            frames, position, take = numpy.empty((stream.num_frames, size, size, 3), numpy.uint8), 0, None
            for chunk in stream.chunks:
                part = frames[position : position + chunk.shape[1]]
                part[:] = to_bytes(chunk[0])
                take = take or writer.open(0, ClipHeader(*frames.shape[:3], 16, {}))
                take(part)
                position += len(part)
            media(frames).save(folder / "streamed.mp4", writer=writer)
        return latents

    pairs = [(milliseconds(apart), milliseconds(streamed)) for _ in range(repeats)]
    if (folder / "apart.mp4").read_bytes() != (folder / "streamed.mp4").read_bytes():
        raise SystemExit(f"{size} pixels: the two files differ")
    return WriteRow(
        size,
        decode_ms=round(statistics.median(milliseconds(lambda: ours.decode(latents)) for _ in range(repeats))),
        apart_ms=round(statistics.median(pair[0] for pair in pairs)),
        streamed_ms=round(statistics.median(pair[1] for pair in pairs)),
        ratio=round(statistics.median(b / a for a, b in pairs), 3),
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    tune_cpu_allocator()
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder))
        ours = load_decoder(Path(folder), torch.device("cpu"), torch.float32)
        theirs = AutoencoderKLWan.from_pretrained(Path(folder) / "vae").eval()
    rows = [measure(ours, theirs, size, arguments.repeats) for size in SIZES]
    with tempfile.TemporaryDirectory() as folder:
        written = [measure_writing(ours, size, arguments.repeats, Path(folder)) for size in SIZES]
    result = {
        "benchmark": "decode_cpu",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine("cpu"),
        "repeats": arguments.repeats,
        "num_frames": 4 * (LATENT_FRAMES - 1) + 1,
        "rows": [asdict(row) for row in rows],
        "decoding_and_writing": [asdict(row) for row in written],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{'pixels':>9} {'ours':>9} {'diffusers':>10} {'ratio':>6} {'best':>6}")
    for row in rows:
        times = f"{row.ours_ms:>6.0f} ms {row.diffusers_ms:>7.0f} ms"
        print(f"{row.size:>4}x{row.size:<4} {times} {row.ratio:>6.3f} {row.best_ratio:>6.3f}")
    print(f"{'pixels':>9} {'decode':>9} {'then write':>10} {'streamed':>9} {'ratio':>6}")
    for each in written:
        times = f"{each.decode_ms:>6.0f} ms {each.apart_ms:>7.0f} ms {each.streamed_ms:>6.0f} ms"
        print(f"{each.size:>4}x{each.size:<4} {times} {each.ratio:>6.3f}")


if __name__ == "__main__":
    main()
