"""Make the folder of a distilled LoRA: its weights, and the TRAINING.json that says how they were made.

    python -m scripts.train_embedded.distill_record FOLDER --lora fast.safetensors --logs a_log.jsonl b_log.jsonl \
        --accuracy fast_accuracy.json --notes notes.json

Every figure comes from a file of distill.py. round_folder.py --lora then writes the folder in 8 bits.
"""

from __future__ import annotations

import argparse
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

from diffusion_runtime.weights.tensor_files import SafetensorsFile
from scripts.train_embedded.eight_bits import LORA
from scripts.train_embedded.training_record import compact, curve, read_lines

COLUMNS = ("step", "seconds", "lr", "loss")


def stage_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts of one run of distill.py, of its log."""
    start = next(line for line in lines if line.get("event") == "start")
    end = next(line for line in lines if line.get("event") == "end")
    return {
        "rank": start["rank"],
        "gpus": start["ranks"],
        "steps": end["step"],
        "training_seconds": end["seconds"],
        "curve": curve(lines, COLUMNS, 20),
    }


def main() -> None:
    """Write FOLDER."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lora", type=Path, required=True)
    parser.add_argument("--logs", type=Path, nargs="+", required=True, help="one log a stage")
    parser.add_argument("--accuracy", type=Path, required=True, help="what distill.py judged")
    parser.add_argument("--notes", type=Path, required=True, help="hardware, versions, what each stage was, as JSON")
    arguments = parser.parse_args()
    with closing(SafetensorsFile(arguments.lora)) as file:
        facts = file.metadata
    sigmas = [float(sigma) for sigma in facts["sigmas"].split()]
    judged: list[dict[str, Any]] = json.loads(arguments.accuracy.read_text())
    stages = [stage_of(read_lines(path)) for path in arguments.logs]
    accuracy: dict[str, Any] = {}
    for row in judged:
        accuracy.setdefault(row["who"], {})[row["kind"]] = compact(row["accuracy"])
    record = {
        "model": f"{facts['base']} in {len(sigmas)} steps without guidance: a LoRA of rank {stages[-1]['rank']} on "
        "every linear map of the transformer",
        "script": "scripts/train_embedded/distill.py",
        **json.loads(arguments.notes.read_text()),
        "settings": {"sampler": "flow_match_euler", "sigmas": sigmas, "guidance_scale": 1.0},
        "stages": stages,
        "prompt_accuracy": accuracy,
    }
    arguments.folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(arguments.lora, arguments.folder / LORA)
    (arguments.folder / "TRAINING.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
