"""Gather logs and measurements into the TRAINING.json that ships beside the weights; every figure comes from a file.

    python -m scripts.train_embedded.training_record FOLDER --vae-log vae_log.jsonl --logs a.jsonl b.jsonl \
        --accuracy accuracy.json --notes notes.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from diffusion_runtime.quality.shapes.scene import (
    RADIUS_RANGE_ONE,
    RADIUS_RANGE_TWO,
    TRAVEL_RANGE_ONE,
    TRAVEL_RANGE_TWO,
)
from scripts.train_embedded.evaluate import Setting

TRANSFORMER_COLUMNS = ("step", "samples", "seconds", "lr", "error", "text_accuracy", "cell_accuracy")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The measurements of one log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(lines: list[dict[str, Any]], columns: tuple[str, ...], num_points: int = 24) -> list[dict[str, Any]]:
    """About `num_points` evenly spaced steps of a log, these columns only."""
    steps = [line for line in lines if "step" in line and "lr" in line]
    stride = max(1, len(steps) // num_points)
    return [{column: line[column] for column in columns if column in line} for line in steps[stride - 1 :: stride]]


def compact(accuracy: dict[str, dict[str, float]]) -> dict[str, str]:
    """Per attribute: rate, 95 % Wilson interval, count."""
    return {
        name: f"{part['rate']:.3f} [{part['low']:.3f}, {part['high']:.3f}] ({part['right']:.0f}/{part['total']:.0f})"
        for name, part in accuracy.items()
    }


def main() -> None:
    """Write FOLDER/TRAINING.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vae-log", type=Path, required=True)
    parser.add_argument("--logs", type=Path, nargs="+", required=True, help="one log a stage of the transformer")
    parser.add_argument("--accuracy", type=Path, nargs="+", required=True, help="results of finalise")
    parser.add_argument("--notes", type=Path, required=True, help="hardware, versions, what each stage was, as JSON")
    arguments = parser.parse_args()
    vae = read_lines(arguments.vae_log)
    latents = next(line for line in vae if line.get("event") == "latents")
    results = [json.loads(path.read_text()) for path in arguments.accuracy]
    setting = Setting.parse(results[0]["chosen"])
    record: dict[str, Any] = {
        "model": "shapes: a Wan in miniature, trained from scratch on procedural clips",
        "defaults": {
            "height": 256,
            "width": 256,
            "num_frames": 29,
            "num_inference_steps": setting.num_steps,
            "guidance_scale": setting.guidance,
            "scheduler": setting.scheduler,
            "flow_shift": setting.shift,
        },
        **json.loads(arguments.notes.read_text()),
        "data": {
            "radius_half_sides": {"one_object": RADIUS_RANGE_ONE, "two_objects": RADIUS_RANGE_TWO},
            "travel_half_sides": {"one_object": TRAVEL_RANGE_ONE, "two_objects": TRAVEL_RANGE_TWO},
            "held_out_combinations": 25,
            "combinations": 200,
        },
        "vae": {
            "steps": latents["step"],
            "seconds": latents["seconds"],
            "curve": curve(vae, ("step", "seconds", "loss", "kl")),
            "reconstructions": {
                f"{line['num_frames']}x{line['size']}": compact(line["accuracy"])
                for line in vae
                if line.get("event") == "reconstruction"
            },
        },
        "transformer": [{"curve": curve(read_lines(path), TRANSFORMER_COLUMNS)} for path in arguments.logs],
        "prompt_accuracy": [
            {"frames_x_size": line["shape"]}
            | {key: line[key] for key in ("kind", "setting", "prompt_tokens", "precision") if key in line}
            | {"accuracy": compact(line["accuracy"])}
            for result in results
            for line in result["final"]
        ],
        "sampler_sweep": [
            {"setting": line["setting"], "kind": line["kind"], "prompts": line["accuracy"]["joint"]["total"]}
            | {"accuracy": {name: round(part["rate"], 3) for name, part in line["accuracy"].items()}}
            for result in results
            for line in result["sweep"]
        ],
    }
    (arguments.folder / "TRAINING.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
