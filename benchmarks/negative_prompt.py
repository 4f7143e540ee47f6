"""What a negative prompt does on the embedded model of 4 steps, without guidance: normalized attention guidance (NAG).

    python -m benchmarks.negative_prompt --output benchmarks/results/negative_prompt.json [--seeds 12]

Prompts name a shape and leave its colour open. Each is made once as it is, and the colour of what was made is read off
the picture; then again from the same noise with that colour and shape as the negative prompt. The figures are shares of
pictures: without that colour, with the prompt's shape alone, with one object, and with the first two together; beside
guidance by a second branch. First it is checked that nag_scale 1 gives the picture as it is.
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
    "as it is": {},
    "NAG 3": {"nag_scale": 3.0},
    "NAG 5": {"nag_scale": 5.0},
    "NAG 9": {"nag_scale": 9.0},
    "NAG 9, alpha 0.5": {"nag_scale": 9.0, "nag_alpha": 0.5},
    "guidance 2": {"guidance_scale": 2.0},
    "guidance 4": {"guidance_scale": 4.0},
}


def seen(frames: numpy.ndarray) -> list[tuple[str | None, str | None]]:
    """The colour and the shape of every object of a picture; None for what cannot be read."""
    return [(each.colour, each.shape) for each in read_clip(torch.from_numpy(frames)).scene.objects]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12, help="of each of the five shapes")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    pipeline = load_pipeline("shapes", device="cpu", lora=["shapes-fast"])
    asked = [
        (shape, GenerationRequest(f"a {shape}", num_frames=1, seed=seed))
        for shape in SHAPE_NAMES
        for seed in range(arguments.seeds)
    ]

    def made(requests: list[GenerationRequest], values: dict[str, Any]) -> list[numpy.ndarray]:
        batch = [dataclasses.replace(pipeline.resolve(request, "fast"), **values) for request in requests]
        return [each.frames for each in pipeline.generate(batch)]

    plain = made([request for _, request in asked], WAYS["as it is"])
    off = made([request for _, request in asked], {**WAYS["as it is"], "nag_scale": 1.0})
    assert all((a == b).all() for a, b in zip(plain, off, strict=True)), "nag_scale 1 is not off"
    before = [seen(frames) for frames in plain]
    readable = [at for at, objects in enumerate(before) if len(objects) == 1 and objects[0][0] is not None]
    colours = [before[at][0][0] for at in readable]
    shapes = [asked[at][0] for at in readable]
    requests = [
        dataclasses.replace(asked[at][1], negative_prompt=f"a {colour} {shape}")
        for at, colour, shape in zip(readable, colours, shapes, strict=True)
    ]
    rows = []
    for name, values in WAYS.items():
        after = [seen(frames) for frames in made(requests, values)]
        gone = [
            bool(objects) and all(found not in (None, colour) for found, _ in objects)
            for objects, colour in zip(after, colours, strict=True)
        ]
        kept = [
            bool(objects) and all(found == shape for _, found in objects)
            for objects, shape in zip(after, shapes, strict=True)
        ]
        shares = {
            "without_the_colour": gone,
            "right_shape": kept,
            "one_object": [len(objects) == 1 for objects in after],
            "without_the_colour_of_right_shape": [a and b for a, b in zip(gone, kept, strict=True)],
        }
        rows.append({"way": name, **{what: round(sum(each) / len(each), 3) for what, each in shares.items()}})
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
