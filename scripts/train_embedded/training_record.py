"""Gather logs and measurements into the TRAINING.json that ships beside the weights; every figure comes from a file.

    python -m scripts.train_embedded.training_record FOLDER --vae-log vae_log.jsonl --logs a.jsonl b.jsonl \
        --accuracy accuracy.json --notes notes.json
    python -m scripts.train_embedded.training_record FOLDER --world emoji ... --accuracy a.json --sweep s.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from diffusion_runtime.quality.emoji import scene as emoji_scene
from diffusion_runtime.quality.emoji.attributes import MOTION_NAMES, SCENE_NAMES
from diffusion_runtime.quality.emoji.things import THINGS
from diffusion_runtime.quality.shapes.scene import (
    RADIUS_RANGE_ONE,
    RADIUS_RANGE_TWO,
    TRAVEL_RANGE_ONE,
    TRAVEL_RANGE_TWO,
)
from scripts.train_embedded.evaluate import Setting

RECORDS: dict[str, dict[str, Any]] = {
    "shapes": {
        "model": "shapes: a Wan in miniature, trained from scratch on procedural clips",
        "data": {
            "radius_half_sides": {"one_object": RADIUS_RANGE_ONE, "two_objects": RADIUS_RANGE_TWO},
            "travel_half_sides": {"one_object": TRAVEL_RANGE_ONE, "two_objects": TRAVEL_RANGE_TWO},
            "held_out_combinations": 25,
            "combinations": 200,
        },
    },
    "emoji": {
        "model": "emoji: a Wan in miniature, trained from scratch on procedural clips of emoji",
        "data": {
            "things": len(THINGS),
            "scenes": SCENE_NAMES,
            "motions": MOTION_NAMES,
            "radius_half_sides": {"one_object": emoji_scene.RADIUS_ONE, "two_objects": emoji_scene.RADIUS_TWO},
            "travel_half_sides": {"one_object": emoji_scene.TRAVEL_ONE, "two_objects": emoji_scene.TRAVEL_TWO},
            "grid_half_sides": emoji_scene.GRID,
            "held_out_combinations": len(THINGS) * len(SCENE_NAMES),
            "combinations": len(THINGS) * len(SCENE_NAMES) * len(MOTION_NAMES),
            "pictures": "Noto Color Emoji 2.042, Copyright 2013 to 2023 Google Inc., SIL Open Font License 1.1",
        },
    },
}
"""Facts of each world that need no measurement."""
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


def result_of(path: Path) -> dict[str, Any]:
    """Results of finalise, or the rows of evaluate, of which the first has the setting that was chosen."""
    held = json.loads(path.read_text())
    return {"chosen": held[0]["setting"], "final": held, "sweep": []} if isinstance(held, list) else dict(held)


def vae_record(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The training of a VAE, of the log of train_vae, or of train_decoder, which leaves the latents as they are."""
    end = next(line for line in lines if line.get("event") in ("latents", "saved"))
    return {
        "steps": end["step"],
        "seconds": end["seconds"],
        "curve": curve(lines, ("step", "seconds", "loss", "kl", "psnr", "things")),
        "sharpness": [
            {key: value for key, value in line.items() if key != "event"}
            for line in lines
            if line.get("event") in ("sharpness", "after") and "bucket" in line
        ],
        "reconstructions": {
            f"{line['num_frames']}x{line['size']}": compact(line["accuracy"])
            for line in lines
            if line.get("event") == "reconstruction"
        },
    }


def main() -> None:
    """Write FOLDER/TRAINING.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vae-log", type=Path, help="without it the notes alone say how the VAE was trained")
    parser.add_argument("--logs", type=Path, nargs="+", required=True, help="one log a stage of the transformer")
    parser.add_argument("--accuracy", type=Path, nargs="+", required=True, help="results of finalise, or of evaluate")
    parser.add_argument("--sweep", type=Path, help="results of evaluate over settings")
    parser.add_argument("--world", choices=tuple(RECORDS), default="shapes")
    parser.add_argument("--notes", type=Path, required=True, help="hardware, versions, what each stage was, as JSON")
    arguments = parser.parse_args()
    results = [result_of(path) for path in arguments.accuracy]
    if arguments.sweep is not None:
        results[0]["sweep"] += json.loads(arguments.sweep.read_text())
    setting = Setting.parse(results[0]["chosen"])
    record: dict[str, Any] = {
        "model": RECORDS[arguments.world]["model"],
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
        "data": RECORDS[arguments.world]["data"],
        **({"vae": vae_record(read_lines(arguments.vae_log))} if arguments.vae_log else {}),
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
