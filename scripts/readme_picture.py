#!/usr/bin/env python3
"""Make a picture of what prompts become, through the `generate` command, such as README's docs/images/emoji.webp.

python scripts/readme_picture.py
python scripts/readme_picture.py --model FOLDER --world emoji --output docs/images/emoji.webp --rows 2
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
from PIL import Image

# (prompt, seed) by world.
PROMPTS = {
    "shapes": (
        ("a red circle moving left", 0),
        ("a yellow star moving up on a checkered background", 0),
        ("a blue square moving right and a green circle standing still on stripes", 1),
        ("a purple triangle moving down and an orange ring moving up on a gradient background", 0),
    ),
    "emoji": (
        ("a sailboat moving right on the sea at sunset", 0),
        ("a fox running left in the snow", 0),
        ("a pizza moving left in the street at sunset", 0),
        ("a rocket flying up and a flying saucer hovering in space", 0),
        ("two penguins standing still in a snowy landscape", 0),
        ("a big balloon flying up in the evening sky", 0),
        ("a clown spinning on grass", 0),
        ("a pumpkin growing in the forest at night", 1),
    ),
}
SIZE = 176
IMAGES = Path(__file__).parents[1] / "docs" / "images"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=tuple(PROMPTS), default="emoji")
    parser.add_argument("--model", help="a name or a folder; by default the world's own model")
    parser.add_argument("--output", type=Path, help="by default docs/images/WORLD.webp")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of `generate`, such as --preset draft")
    arguments = parser.parse_args()
    target = arguments.output or IMAGES / f"{arguments.world}.webp"
    clips = []
    with tempfile.TemporaryDirectory() as folder:
        for index, (prompt, seed) in enumerate(PROMPTS[arguments.world]):
            path = Path(folder) / f"{index}.npy"
            command = [sys.executable, "-m", "diffusion_runtime", "generate", prompt, "--seed", str(seed)]
            command += ["--model-path", arguments.model or arguments.world, *arguments.flags]
            subprocess.run([*command, "--output-path", str(path), "--quiet"], check=True)
            clips.append(numpy.load(path))
    columns = -(-len(clips) // arguments.rows)
    frames = []
    for together in zip(*clips, strict=True):
        rows = [numpy.concatenate(together[at : at + columns], axis=1) for at in range(0, len(clips), columns)]
        strip = Image.fromarray(numpy.concatenate(rows, axis=0))
        frames.append(strip.resize((SIZE * columns, SIZE * arguments.rows), Image.Resampling.LANCZOS))
    target.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(target, save_all=True, append_images=frames[1:], duration=83, loop=0, quality=80, method=6)
    print(f"{target}: {target.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
