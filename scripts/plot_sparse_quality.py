"""Draw what sparse attention costs on the embedded model, from benchmarks/results/sparse_quality.json.

python scripts/plot_sparse_quality.py    # needs: pip install 'diffusion-runtime[plot]'
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
NAMES = {
    "sliding_tile_attn": ("STA", "o"),
    "video_sparse_attn": ("VSA, without a trained gate", "s"),
    "vmoba_attn": ("V-MoBA", "^"),
    "sparse_video_gen_2_attn": ("SVG2", "D"),
}
PANELS = (
    ("prompt accuracy, one object", lambda row: row["accuracy"]["one_object"]["joint"]["rate"]),
    ("prompt accuracy, two objects", lambda row: row["accuracy"]["two_objects"]["joint"]["rate"]),
    ("latents: relative L2 distance", lambda row: row.get("latent_relative_l2", 0.0)),
    ("frames: PSNR, dB", lambda row: row.get("psnr_db")),
)


def is_warm(row: dict[str, Any]) -> bool:
    """Whether the first steps are dense by the method's own option."""
    names = ("skip_time_steps", "dense_first_steps", "first_full_step", "svg2_first_times_fp")
    return any(row["options"].get(name) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, default=ROOT / "benchmarks/results/sparse_quality.json")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/sparse_quality.png")
    arguments = parser.parse_args()
    document = json.loads(arguments.input.read_text())
    rows: list[dict[str, Any]] = document["rows"]
    dense = next(row for row in rows if row["backend"] == "torch_sdpa")
    figure, axes = plt.subplots(2, 2, figsize=(10, 8), sharex=True, layout="constrained")
    for axis, (title, value) in zip(axes.flat, PANELS, strict=True):
        for index, (backend, (label, marker)) in enumerate(NAMES.items()):
            mine = sorted((row for row in rows if row["backend"] == backend), key=lambda row: row["density"])
            for warm, line, note in ((False, "-", ""), (True, ":", ", first quarter of the steps dense")):
                part = [row for row in mine if is_warm(row) == warm]
                if not part:
                    continue
                points = [row["density"] for row in part], [value(row) for row in part]
                axis.plot(
                    *points,
                    line,
                    marker=marker,
                    color=f"C{index}",
                    label=label + note,
                    fillstyle="none" if warm else "full",
                )
        if value(dense) is not None:
            axis.axhline(value(dense), color="grey", linewidth=1, linestyle="--", label="dense")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("share of (query, key) pairs kept in self-attention")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
    counts = sorted({row["num_prompts"] for row in rows})
    prompts = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    figure.suptitle(f"The embedded model under sparse attention, {prompts} prompts of each kind a point")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.output, dpi=110)
    print(arguments.output)


if __name__ == "__main__":
    main()
