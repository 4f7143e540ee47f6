"""A small model of how a denoising step gets shorter with more processes, fitted to results/parallel_gpu.json.

python -m scripts.predict_scaling    # prints the figures of docs/scaling.md

    t(N) = t_cut / N + t_every + exposed bytes / bandwidth + num_exchanges * latency

t_cut, t_every and the bandwidth within a host come from one GPU and from Ulysses on two; everything else is predicted.
Head groups expose one group's transfer of all; a ring exposes what its blocks' attention does not hide. Latency and
the bandwidth between hosts are assumptions: nothing here ran on several hosts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.communication_volume import ForwardShape, communication_volume

ROOT = Path(__file__).parents[1]
# Two all-to-alls around each layer's attention.
EXCHANGES_A_LAYER = 2
GPUS_A_HOST = 8
# Assumed: a collective's start within a host, in ms, and one 400 Gb/s link a GPU between hosts, in bytes a ms.
LATENCY = 0.02
BETWEEN_HOSTS = 50e6
# Degrees of the table on paper: (branches, ulysses, ring).
ON_PAPER = ((1, 4, 1), (2, 4, 1), (1, 12, 1), (2, 6, 1), (2, 12, 1), (2, 4, 4), (2, 4, 8))


@dataclass(frozen=True)
class ScalingModel:
    """Times in milliseconds, bandwidth in bytes a millisecond within a host."""

    t_cut: float
    t_every: float
    bandwidth: float

    def step(self, num_processes: int, exposed_bytes: float) -> float:
        return self.t_cut / num_processes + self.t_every + exposed_bytes / self.bandwidth


def main() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "parallel_gpu.json").read_text())
    rows = {row["name"]: row for row in document["rows"]}
    dense = fit(rows["one GPU"], rows["ulysses 2"])
    print(f"t_cut {dense.t_cut:.0f} ms, t_every {dense.t_every:.0f} ms, {dense.bandwidth / 1e6:.0f} GB/s")
    print_measured(rows, dense)
    print_on_paper(document, dense)


def fit(one: dict[str, Any], two: dict[str, Any]) -> ScalingModel:
    """Of two processes that hide nothing of their transfers."""
    t_cut = 2 * (one["ms"] - (two["ms"] - two["exposed_ms"]))
    return ScalingModel(t_cut, one["ms"] - t_cut, two["sent_bytes"] / two["nccl_ms"])


def print_measured(rows: dict[str, dict[str, Any]], dense: ScalingModel) -> None:
    print("\n| run | GPUs | ms | speed-up | predicted ms | off by |\n|---|---|---|---|---|---|")
    ones = {
        "forward": rows["one GPU"],
        "sparse": rows["one GPU, VSA 0.9"],
        "guided": rows["one GPU, guided, two passes"],
    }
    for row in rows.values():
        branches = 2 if row["splits_branches"] else 1
        sharing = row["ulysses"] * row["ring"]
        if sharing * branches == 1:
            print(f"| {row['name']} | 1 | {row['ms']:.1f} | {row['speedup']:.2f} | | |")
            continue
        one = ones[row["kind"]]["ms"] / branches
        model = ScalingModel(one - dense.t_every, dense.t_every, dense.bandwidth)
        exposed = 0.0 if row["ring"] > 1 or sharing == 1 else row["sent_bytes"] / row["num_head_groups"]
        predicted = model.step(sharing, exposed)
        fitted = " (fitted)" if row["name"] == "ulysses 2" else ""
        print(
            f"| {row['name']} | {sharing * branches} | {row['ms']:.1f} | {row['speedup']:.2f} | {predicted:.1f} | "
            f"{100 * (predicted / row['ms'] - 1):+.0f} %{fitted} |"
        )


def print_on_paper(document: dict[str, Any], dense: ScalingModel) -> None:
    print("\n| GPUs | degrees | predicted speed-up of a guided step | share of communication |\n|---|---|---|---|")
    config = document["config"]
    num_exchanges = EXCHANGES_A_LAYER * config["num_layers"]
    one = 2 * dense.step(1, 0.0)
    for branches, ulysses, ring in ON_PAPER:
        shape = ForwardShape(
            num_grid_tokens=document["num_tokens"],
            num_layers=config["num_layers"],
            num_heads=config["num_heads"],
            head_dim=config["head_dim"],
            batch=1,
            has_gate=False,
            out_channels=64,
        )

        def sent(ulysses: int, ring: int, shape: ForwardShape = shape) -> int:
            return communication_volume(shape, ulysses=ulysses, ring=ring).total

        by_heads, whole = sent(ulysses, 1) / ring, sent(ulysses, ring)
        within = by_heads / (dense.bandwidth if ulysses <= GPUS_A_HOST else BETWEEN_HOSTS)
        # A ring between hosts: what a block's attention does not hide. Attention is most of what is cut.
        ring_time = (
            max(0.0, (whole - by_heads) / BETWEEN_HOSTS - 0.8 * dense.t_cut / (ulysses * ring)) if ring > 1 else 0.0
        )
        transfer = within + ring_time + num_exchanges * LATENCY
        passes = 2 // branches
        step = passes * (dense.step(ulysses * ring, 0.0) + transfer)
        degrees = f"branches {branches} x ulysses {ulysses} x ring {ring}"
        share = passes * transfer / step
        print(f"| {branches * ulysses * ring} | {degrees} | {one / step:.1f} | {100 * share:.0f} % |")


if __name__ == "__main__":
    main()
