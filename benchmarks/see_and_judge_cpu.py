"""What it takes on a CPU to ask what would run and which setting to use: `explain`, `compare`, its page, completion.

    python -m benchmarks.see_and_judge_cpu --output benchmarks/results/see_and_judge_cpu.json [--repeats 5]

Every command runs as a process of its own. `explain` and a shell's completion: the median of several. `compare`: five
settings, 8 prompts and the draft preset, with the rows "fewer steps at the same time" and the clips that time attention
and count density; and the bytes of the page of four settings and four prompts. The load before and after each part is
recorded: figures taken beside other work are worthless.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_host

REPOSITORY = Path(__file__).parents[1]
# Of two idle cores.
BARS = {"explain_s": 3.0, "compare_s": 240.0, "page_bytes": 8_000_000, "completion_s": 0.3}
MODEL = "wan2.1-14b"
SETTINGS = (
    "dense:",
    "6 steps: --num-inference-steps 6",
    "sparse: --attention-backend video_sparse_attn --attention-config.default.extra.sparsity 0.6",
    "fp8: --attention-backend fp8_attn",
    "cache: --step-cache easycache:force=true",
)


def run(*arguments: str) -> tuple[float, str]:
    """Seconds of one command from a cold start, and its standard output."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "diffusion_runtime", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return time.perf_counter() - begin, done.stdout


def timed(repeats: int, *arguments: str) -> dict[str, Any]:
    """The first one, whose files may not be in the disk's cache, is listed and does not count."""
    before = os.getloadavg()[0]
    first, *seconds = (run(*arguments)[0] for _ in range(repeats + 1))
    return {
        "command": " ".join(arguments),
        "median_s": round(statistics.median(seconds), 3),
        "seconds": [round(each, 3) for each in seconds],
        "first_s": round(first, 3),
        "load": [round(before, 2), round(os.getloadavg()[0], 2)],
    }


def compared(folder: Path, num_settings: int, num_prompts: int) -> dict[str, Any]:
    page = folder / f"{num_settings}x{num_prompts}.html"
    texts = [word for text in SETTINGS[:num_settings] for word in ("--setting", text)]
    model = ("--model-path", "shapes", "--device", "cpu")
    shared = (*model, "--prompt-set", f"shapes:{num_prompts}", "--preset", "draft", "--quiet")
    before = os.getloadavg()[0]
    seconds, out = run("compare", *shared, *texts, "--html", str(page), "--json")
    rows = json.loads(out)["rows"]
    return {
        "settings": list(SETTINGS[:num_settings]),
        "num_prompts": num_prompts,
        "seconds": round(seconds, 1),
        "page_bytes": page.stat().st_size,
        "num_clips": sum(len(row["clips"]) for row in rows),
        "states": {row["name"]: row["state"] for row in rows},
        "attention_seconds": {row["name"]: row["attention_seconds"] for row in rows},
        "load": [round(before, 2), round(os.getloadavg()[0], 2)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="of explain and of the completion")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.see_and_judge_cpu/1",
        "machine": describe_host(),
        "bars": BARS,
        "completion": timed(arguments.repeats, "completion", "bash"),
        "explain": timed(arguments.repeats, "explain", "--model-path", MODEL, "--device", "cpu"),
    }
    with tempfile.TemporaryDirectory() as folder:
        document["page"] = compared(Path(folder), 4, 4)
        document["compare"] = compared(Path(folder), 5, 8)
    figures = {
        "explain_s": document["explain"]["median_s"],
        "compare_s": document["compare"]["seconds"],
        "page_bytes": document["page"]["page_bytes"],
        "completion_s": document["completion"]["median_s"],
    }
    document["figures"] = figures
    document["missed"] = [name for name, value in figures.items() if value > BARS[name]]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    for name, value in figures.items():
        print(f"{name}: {value}, bar {BARS[name]}", flush=True)
    if document["missed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
