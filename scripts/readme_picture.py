#!/usr/bin/env python3
"""Make docs/images/shapes.webp, README's picture: four prompts through the `generate` command, side by side.

python scripts/readme_picture.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
from PIL import Image

PROMPTS = (
    ("a red circle moving left", 0),
    ("a yellow star moving up on a checkered background", 0),
    ("a blue square moving right and a green circle standing still on stripes", 1),
    ("a purple triangle moving down and an orange ring moving up on a gradient background", 0),
)
SIZE = 176
TARGET = Path(__file__).parents[1] / "docs" / "images" / "shapes.webp"


def main() -> None:
    clips = []
    with tempfile.TemporaryDirectory() as folder:
        for index, (prompt, seed) in enumerate(PROMPTS):
            path = Path(folder) / f"{index}.npy"
            command = [sys.executable, "-m", "diffusion_runtime", "generate", prompt, "--seed", str(seed)]
            subprocess.run([*command, "--output-path", str(path), "--quiet"], check=True)
            clips.append(numpy.load(path))
    frames = []
    for row in zip(*clips, strict=True):
        strip = Image.fromarray(numpy.concatenate(row, axis=1))
        frames.append(strip.resize((SIZE * len(clips), SIZE), Image.Resampling.LANCZOS))
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(TARGET, save_all=True, append_images=frames[1:], duration=83, loop=0, quality=80, method=6)
    print(f"{TARGET}: {TARGET.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
