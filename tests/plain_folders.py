"""Model folders in 8 bits, with plain numbers in their place: what libraries are compared on that read no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from scripts.train_embedded.eight_bits import WEIGHTS, load_eight_bits


def write_plain(source: Path, target: Path) -> Path:
    """Copy a folder with one transformer, its weights in float32 whatever they are stored in."""
    if target != source:
        shutil.copytree(source, target, dirs_exist_ok=True)
    for component, name in WEIGHTS.items():
        numbers, _ = load_eight_bits(source / component / name)
        save_file(numbers, target / component / name, metadata={"format": "pt"})
        config = target / component / "config.json"
        values = json.loads(config.read_text())
        values.pop("quantization_config", None)
        config.write_text(json.dumps(values))
    return target
