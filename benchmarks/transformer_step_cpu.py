"""One denoising step on the CPU: our transformer and diffusers' own on the same weights, alternately in one process.

    python -m benchmarks.transformer_step_cpu [--repeats 9] [--output benchmarks/results/transformer_step_cpu.json]

Random weights in the embedded model's shape (6 layers, 4 heads of 64, feed-forward 1024; text 64 tokens of 128), in
float32. Outputs are compared before anything is timed. Every forward of ours starts without a request's state, so that
it projects the text as diffusers does; within a generation it does so once. Each size is timed with glibc's allocator
as it is, then as the `generate` command sets it up, which serves both sides alike.
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

import torch
from diffusers import WanTransformer3DModel

from benchmarks.machine import describe_machine
from diffusion_runtime.attention import AttentionContext, AttentionPolicy
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.text_encoders.interface import Conditions

GRIDS = ((8, 8, 8), (8, 16, 16), (8, 24, 24))
BATCHES = (1, 2)
NUM_TEXT_TOKENS, TEXT_DIM, CHANNELS = 64, 128, 16
TOLERANCE = 1e-5
RESULT = Path(__file__).parent / "results" / "transformer_step_cpu.json"


@dataclass(frozen=True)
class Row:
    """Medians of one size. ratio: ours over diffusers', the median of all pairs; best_ratio: the shortest over the
    shortest, which other work on the machine disturbs least. difference: of outputs, relative to the largest value."""

    allocator: str
    grid: tuple[int, int, int]
    batch: int
    difference: float
    ours_ms: float
    diffusers_ms: float
    ratio: float
    best_ratio: float


def write_folder(folder: Path) -> None:
    """A folder that both sides load, with the files that ours reads."""
    torch.manual_seed(0)
    WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=64,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=256,
        ffn_dim=1024,
        num_layers=6,
    ).save_pretrained(folder / "transformer")
    (folder / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", "WanTransformer3DModel"]}))
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text("{}")
    (folder / "scheduler").mkdir()
    scheduler = '{"_class_name": "FlowMatchEulerDiscreteScheduler"}'
    (folder / "scheduler" / "scheduler_config.json").write_text(scheduler)


def load_ours(folder: Path) -> DiffusionTransformer:
    model = family_for_folder(folder).describe(folder)
    return model.load_transformer(model.build_transformer(AttentionPolicy()), torch.device("cpu"), torch.float32)


def milliseconds(function: Callable[[], torch.Tensor]) -> float:
    started = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - started)


def measure(
    ours: DiffusionTransformer,
    theirs: WanTransformer3DModel,
    grid: tuple[int, int, int],
    batch: int,
    allocator: str,
    repeats: int,
) -> Row:
    """Compare, warm up, then time the two alternately. Raises SystemExit when the outputs differ."""
    latents = torch.randn(batch, CHANNELS, grid[0], 2 * grid[1], 2 * grid[2])
    timestep, text = torch.full((batch,), 500.0), torch.randn(batch, NUM_TEXT_TOKENS, TEXT_DIM)

    inputs = DenoiserInputs(Conditions.of(text), ClipSize(grid[1] * 16, grid[2] * 16, 4 * grid[0] - 3, 16))

    def run_ours() -> torch.Tensor:
        out: torch.Tensor = ours(latents, timestep, inputs, AttentionContext())
        return out

    def run_theirs() -> torch.Tensor:
        out: torch.Tensor = theirs(latents, timestep, text, return_dict=False)[0]
        return out

    expected = run_theirs()
    difference = float((run_ours() - expected).abs().max() / expected.abs().max())
    if difference > TOLERANCE:
        raise SystemExit(f"grid {grid}, batch {batch}: outputs differ by {difference:.1e}, allowed is {TOLERANCE:.0e}")
    run_theirs(), run_ours()
    pairs = [(milliseconds(run_ours), milliseconds(run_theirs)) for _ in range(repeats)]
    return Row(
        allocator,
        grid,
        batch,
        difference,
        ours_ms=round(statistics.median(pair[0] for pair in pairs), 1),
        diffusers_ms=round(statistics.median(pair[1] for pair in pairs), 1),
        ratio=round(statistics.median(a / b for a, b in pairs), 3),
        best_ratio=round(min(pair[0] for pair in pairs) / min(pair[1] for pair in pairs), 3),
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder))
        ours = load_ours(Path(folder))
        theirs = WanTransformer3DModel.from_pretrained(Path(folder) / "transformer").eval()
    rows = []
    for allocator in ("default", "tuned"):
        if allocator == "tuned" and not tune_cpu_allocator():
            break
        rows += [
            measure(ours, theirs, grid, batch, allocator, arguments.repeats) for grid in GRIDS for batch in BATCHES
        ]
    result = {
        "benchmark": "transformer_step_cpu",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine("cpu"),
        "repeats": arguments.repeats,
        "worst_ratio": max(row.ratio for row in rows),
        "rows": [asdict(row) for row in rows],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{'allocator':>9} {'grid':>10} {'batch':>5} {'ours':>10} {'diffusers':>12} {'ratio':>6} {'best':>6}")
    for row in rows:
        grid = "x".join(map(str, row.grid))
        times = f"{row.ours_ms:>7.1f} ms {row.diffusers_ms:>9.1f} ms"
        print(f"{row.allocator:>9} {grid:>10} {row.batch:>5} {times} {row.ratio:>6.3f} {row.best_ratio:>6.3f}")


if __name__ == "__main__":
    main()
