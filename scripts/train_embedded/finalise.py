"""Choose the sampler by a sweep, write it into the exported folder, and measure the folder at those defaults.

python -m scripts.train_embedded.finalise FOLDER --out $OUT
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.quality.shapes.prompts import PROMPT_KINDS, PromptKind
from scripts.train_embedded.evaluate import Examine, Model, Setting, examine_shapes, measure, parallel_checker
from scripts.train_embedded.export import build_scheduler
from scripts.train_embedded.sampling import SamplerSettings

SWEEP = tuple(
    Setting.parse(text)
    for text in (
        "unipc:24:1:14", "unipc:12:1.5:14", "unipc:12:2:14", "unipc:12:3:14", "unipc:12:2:9", "unipc:12:2:20",
    )
)  # fmt: skip
FINAL: tuple[tuple[str, int, int], ...] = (
    ("29x256", 512, 64),
    ("29x128", 512, 64),
    ("1x256", 512, 64),
    ("29x384", 128, 64),
    ("29x256", 256, 512),
)
"""Frames x size, prompts per kind, length of the padded prompt."""


def record(
    model: Model,
    setting: Setting,
    shape_name: str,
    tokens: int,
    kind: PromptKind,
    count: int,
    examine: Examine,
    sheets: Path,
) -> dict[str, Any]:
    """Measure once, print a line, return the figures."""
    start = time.monotonic()
    num_frames, size = (int(part) for part in shape_name.split("x"))
    shape = SamplerSettings(1, 1.0, num_frames, size, tokens)
    sheet = sheets / f"{kind}_{shape_name}.png" if tokens == 64 and count >= 128 else None
    accuracy = measure(model, setting, shape, kind, count, examine, sheet)
    rates = {name: round(part["rate"], 3) for name, part in accuracy.items()}
    print(f"{setting!s:16} {shape_name:7} {tokens:3} {kind:11} {rates} {time.monotonic() - start:.1f} s", flush=True)
    return {"setting": str(setting), "shape": shape_name, "prompt_tokens": tokens, "kind": kind, "accuracy": accuracy}


def main() -> None:
    """Sweep in bfloat16 on a few prompts, then the final figures in float32 on all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep-prompts", type=int, default=112)
    parser.add_argument("--seconds", type=float, default=200.0, help="start no further measurement after this long")
    arguments = parser.parse_args()
    started = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    sheets = arguments.out / "sheets"
    sheets.mkdir(parents=True, exist_ok=True)
    sweep: list[dict[str, Any]] = []
    final: list[dict[str, Any]] = []
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=multiprocessing.get_context("spawn")) as pool:
        examine = examine_shapes(parallel_checker(pool))
        fast = Model(arguments.folder, device, bf16=True)
        kinds: tuple[PromptKind, ...] = ("one_object", "two_objects")
        for setting in SWEEP:
            sweep += [
                record(fast, setting, "29x256", 64, kind, arguments.sweep_prompts, examine, sheets) for kind in kinds
            ]
        joint = {str(s): sum(r["accuracy"]["joint"]["rate"] for r in sweep if r["setting"] == str(s)) for s in SWEEP}
        chosen = max(SWEEP, key=lambda setting: joint[str(setting)])
        print("chosen:", chosen, flush=True)
        build_scheduler(chosen.scheduler, chosen.shift).save_pretrained(arguments.folder / "scheduler")
        exact = Model(arguments.folder, device, bf16=False)
        for shape_name, count, tokens in FINAL:
            for kind in PROMPT_KINDS:
                if time.monotonic() - started > arguments.seconds:
                    continue
                final.append(record(exact, chosen, shape_name, tokens, kind, count, examine, sheets))
                result = {"chosen": str(chosen), "sweep": sweep, "final": final}
                (arguments.out / "accuracy.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
