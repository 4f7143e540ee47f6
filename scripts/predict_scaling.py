"""A small model of how a denoising step gets shorter with more processes, fitted to results/parallel_gpu.json.

python scripts/predict_scaling.py    # prints the tables of docs/scaling.md

    t(N) = t_cut / N + t_every + bytes / bandwidth + num_exchanges * latency

t_cut and t_every come from one GPU and from Ulysses on four; bandwidth and latency from the time of NCCL's kernels
in the same runs. Rings hide their transfers behind attention: only what is longer than a block's attention counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.parallel.volume import ForwardShape, communication_volume

ROOT = Path(__file__).parents[1]
EXCHANGES_A_LAYER = 2
MAX_PROCESSES = 64


@dataclass(frozen=True)
class ScalingModel:
    """Milliseconds; bandwidth in bytes a millisecond."""

    t_cut: float
    t_every: float
    bandwidth: float
    latency: float

    def step(self, num_processes: int, sent_bytes: float, num_exchanges: int) -> float:
        transfer = sent_bytes / self.bandwidth + num_exchanges * self.latency if num_processes > 1 else 0.0
        return self.t_cut / num_processes + self.t_every + transfer


def main() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "parallel_gpu.json").read_text())
    rows = {row["name"]: row for row in document["rows"]}
    config = document["config"]
    num_exchanges = EXCHANGES_A_LAYER * config["num_layers"]
    model = fit(rows, num_exchanges)
    print(f"t_cut {model.t_cut:.1f} ms, t_every {model.t_every:.1f} ms, {model.bandwidth / 1e6:.0f} GB/s,", end=" ")
    print(f"{1e3 * model.latency:.0f} us an exchange\n")
    print("| run | processes | ms of a forward pass | speed-up | predicted ms | off by |\n|---|---|---|---|---|---|")
    for row in rows.values():
        if row["kind"] != "dense" or row["num_head_groups"] != 1:
            continue
        processes = row["ulysses"] * row["ring"]
        predicted = model.step(processes, row["sent_bytes"], num_exchanges)
        print(
            f"| {row['name']} | {processes} | {row['ms']:.1f} | {row['speedup']:.2f} | {predicted:.1f} | "
            f"{100 * (predicted / row['ms'] - 1):+.0f} % |"
        )
    print("\n| processes | degrees | predicted speed-up | share of communication |\n|---|---|---|---|")
    one = model.step(1, 0.0, num_exchanges)
    for branches, ulysses, ring in ((1, 4, 1), (1, 12, 1), (2, 4, 1), (2, 12, 1), (2, 4, 4), (2, 8, 4)):
        shape = ForwardShape(
            num_grid_tokens=document["num_tokens"],
            num_layers=config["num_layers"],
            num_heads=config["num_heads"],
            head_dim=config["head_dim"],
            batch=1,
            has_gate=False,
            out_channels=64,
        )
        sent = communication_volume(shape, ulysses=ulysses, ring=ring, branches=branches, num_head_groups=1).total
        processes = ulysses * ring
        step = model.step(processes, sent, num_exchanges)
        share = (sent / model.bandwidth + num_exchanges * model.latency) / step
        speedup = branches * one / step
        degrees = f"branches {branches} x ulysses {ulysses} x ring {ring}"
        print(f"| {branches * processes} | {degrees} | {speedup:.1f} | {100 * share:.0f} % |")


def fit(rows: dict[str, dict[str, Any]], num_exchanges: int) -> ScalingModel:
    """bandwidth and latency from two Ulysses degrees' NCCL time, then t_cut and t_every from what is left."""
    one, two, four = rows["one GPU"], rows["ulysses 2"], rows["ulysses 4"]
    (bytes_2, nccl_2), (bytes_4, nccl_4) = ((row["sent_bytes"], row["nccl_ms"]) for row in (two, four))
    # nccl = bytes / bandwidth + num_exchanges * latency, with a latency of at least nothing.
    per_byte = max((nccl_2 - nccl_4) / (bytes_2 - bytes_4), 1e-12) if bytes_2 != bytes_4 else nccl_2 / bytes_2
    latency = max((nccl_4 - per_byte * bytes_4) / num_exchanges, 0.0)
    bare = four["ms"] - nccl_4
    t_cut = (one["ms"] - bare) * 4 / 3
    return ScalingModel(t_cut, one["ms"] - t_cut, 1 / per_byte, latency)


if __name__ == "__main__":
    main()
