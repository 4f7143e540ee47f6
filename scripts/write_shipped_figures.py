"""Write diffusion_runtime/serving/shipped_figures.json from the measured quality of the embedded model:
python scripts/write_shipped_figures.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "benchmarks" / "results" / "faster_quality.json"
TARGET = ROOT / "diffusion_runtime" / "serving" / "shipped_figures.json"


def document() -> dict[str, Any]:
    """Return the settings that were measured, each with its seconds and its quality."""
    measured = json.loads(SOURCE.read_text(encoding="utf-8"))
    return {
        "model": "shapes",
        "device": measured["machine"]["device"],
        "num_prompts": measured["num_prompts"],
        "rows": [_row(row) for row in measured["rows"]],
    }


def _row(row: dict[str, Any]) -> dict[str, Any]:
    chosen, options = row["attention"]["self"], row["attention"]["options"]
    is_default = chosen == "torch_sdpa" and not options
    return {
        "name": row["name"],
        "denoise_seconds": round(row["denoise_seconds"], 4),
        "psnr_db": round(row["psnr_db"], 2),
        "right": round(row["accuracy"]["one_object"]["joint"]["rate"], 4),
        "values": row["request"],
        "attention": None if is_default else {"per_role": {"self": {"backend": chosen, "extra": options}}},
    }


def text() -> str:
    return json.dumps(document(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
