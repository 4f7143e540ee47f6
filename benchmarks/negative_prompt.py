"""What a negative prompt does on the embedded model without guidance, by normalized attention guidance (NAG).

    python -m benchmarks.negative_prompt --output benchmarks/results/negative_prompt.json [--seeds 4]

Prompts name a shape and leave its colour open. Each is made once as it is, and the colour of what was made is read off
the picture; then again from the same noise with that colour as the negative prompt. A figure is the share of pictures
whose colour is another one, and the share whose shape is still the prompt's, beside guidance by a second branch. First
it is checked that nag_scale 1 gives the picture as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy
import torch

from benchmarks.machine import describe_host
from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.quality.shapes.attributes import SHAPE_NAMES
from diffusion_runtime.quality.shapes.checker import read_clip

WAYS: dict[str, dict[str, float]] = {
    "as it is": {"guidance_scale": 1.0},
    "NAG 3": {"guidance_scale": 1.0, "nag_scale": 3.0},
    "NAG 5": {"guidance_scale": 1.0, "nag_scale": 5.0},
    "NAG 9": {"guidance_scale": 1.0, "nag_scale": 9.0},
    "NAG 5, alpha 0.5": {"guidance_scale": 1.0, "nag_scale": 5.0, "nag_alpha": 0.5},
    "NAG 9, alpha 1": {"guidance_scale": 1.0, "nag_scale": 9.0, "nag_alpha": 1.0},
    "guidance 2": {"guidance_scale": 2.0},
    "guidance 2 and NAG 5": {"guidance_scale": 2.0, "nag_scale": 5.0},
}


def seen(frames: numpy.ndarray) -> tuple[str | None, str | None]:
    """The colour and the shape of the one object of a picture; None for what cannot be read."""
    objects = read_clip(torch.from_numpy(frames)).scene.objects
    return (objects[0].colour, objects[0].shape) if len(objects) == 1 else (None, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="of each of the five shapes")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    pipeline = load_pipeline("shapes", device="cpu")
    asked = [
        (shape, GenerationRequest(f"a {shape}", num_frames=1, seed=seed))
        for shape in SHAPE_NAMES
        for seed in range(arguments.seeds)
    ]

    def made(requests: list[GenerationRequest], values: dict[str, Any]) -> list[numpy.ndarray]:
        batch = [dataclasses.replace(request, **values) for request in requests]
        return [each.frames for each in pipeline.generate(batch)]

    plain = made([request for _, request in asked], WAYS["as it is"])
    off = made([request for _, request in asked], {**WAYS["as it is"], "nag_scale": 1.0})
    assert all((a == b).all() for a, b in zip(plain, off, strict=True)), "nag_scale 1 is not off"
    before = [seen(frames) for frames in plain]
    readable = [at for at, (colour, _) in enumerate(before) if colour is not None]
    requests = [dataclasses.replace(asked[at][1], negative_prompt=f"{before[at][0]}") for at in readable]
    rows = []
    for name, values in WAYS.items():
        after = [seen(frames) for frames in made(requests, values)]
        gone = [colour not in (None, before[at][0]) for at, (colour, _) in zip(readable, after, strict=True)]
        kept = [shape == asked[at][0] for at, (_, shape) in zip(readable, after, strict=True)]
        unread = sum(colour is None for colour, _ in after)
        rows.append(
            {
                "way": name,
                "another_colour": round(sum(gone) / len(gone), 3),
                "right_shape": round(sum(kept) / len(kept), 3),
                "unreadable": round(unread / len(after), 3),
            }
        )
        print(rows[-1], flush=True)
    document = {
        "schema": "diffusion_runtime.negative_prompt/1",
        "machine": describe_host(),
        "num_pictures": len(readable),
        "num_unreadable_before": len(asked) - len(readable),
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
