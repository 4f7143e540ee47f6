"""What a negative prompt does on the embedded model `emoji` in 4 steps, without guidance: normalized attention guidance
(NAG).

    python -m benchmarks.negative_prompt --output benchmarks/results/negative_prompt.json [--every 4] [--seeds 1]

Prompts name a thing and leave its scene open. Each is made once as it is, and the scene of what was made is read off
the picture; then again from the same noise with that thing in that scene as the negative prompt. The figures are shares
of pictures: without that scene, with the prompt's thing alone, with one thing, and with the first two together; beside
guidance by a second branch. First it is checked that nag_scale 1 gives the picture as it is. --picture
shows PICTURED in the ways of ROWS, with space as the negative prompt: that is what is drawn without a scene.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image

from benchmarks.machine import describe_host
from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.quality.emoji.detector import load_detector
from diffusion_runtime.quality.emoji.judge import Reading, read_clips
from diffusion_runtime.quality.emoji.things import THING_NAMES
from diffusion_runtime.quality.emoji.wording import SCENES, article
from diffusion_runtime.quality.worlds import EMOJI_DETECTOR

WAYS: dict[str, dict[str, float]] = {
    "as it is": {},
    "NAG 3": {"nag_scale": 3.0},
    "NAG 5": {"nag_scale": 5.0},
    "NAG 9": {"nag_scale": 9.0},
    "NAG 9, alpha 0.5": {"nag_scale": 9.0, "nag_alpha": 0.5},
    "guidance 2": {"guidance_scale": 2.0},
    "guidance 4": {"guidance_scale": 4.0},
}
PICTURED = ("dog", "taxi", "rose", "guitar")
ROWS = ("as it is", "NAG 9", "guidance 4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=4, help="of so many things one")
    parser.add_argument("--seeds", type=int, default=1, help="of each thing")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    pipeline = load_pipeline("emoji", device="cpu", lora=["emoji-fast"])
    detector = load_detector(EMOJI_DETECTOR, "cpu")
    asked = [
        (thing, GenerationRequest(f"{article(thing)} {thing}", num_frames=1, seed=seed))
        for thing in THING_NAMES[:: arguments.every]
        for seed in range(arguments.seeds)
    ]

    def made(requests: list[GenerationRequest], values: dict[str, Any]) -> list[numpy.ndarray]:
        batch = [dataclasses.replace(pipeline.resolve(request, "fast"), **values) for request in requests]
        return [each.frames for each in pipeline.generate(batch)]

    if arguments.picture is not None:
        shown = [
            GenerationRequest(text, negative_prompt=f"{text} in space", num_frames=1, seed=0)
            for text in (f"{article(thing)} {thing}" for thing in PICTURED)
        ]
        rows_shown = [numpy.concatenate([each[0] for each in made(shown, WAYS[name])], axis=1) for name in ROWS]
        whole = Image.fromarray(numpy.concatenate(rows_shown))
        whole.resize((whole.width // 2, whole.height // 2)).save(arguments.picture, quality=85)

    def seen(pictures: list[numpy.ndarray]) -> list[Reading]:
        return read_clips(detector, torch.from_numpy(numpy.stack(pictures)))

    plain = made([request for _, request in asked], WAYS["as it is"])
    off = made([request for _, request in asked], {**WAYS["as it is"], "nag_scale": 1.0})
    assert all((a == b).all() for a, b in zip(plain, off, strict=True)), "nag_scale 1 is not off"
    before = seen(plain)
    readable = [
        at for at, ((thing, _), found) in enumerate(zip(asked, before, strict=True))
        if [each.thing for each in found.things] == [thing]
    ]  # fmt: skip
    things = [asked[at][0] for at in readable]
    scenes = [before[at].scene for at in readable]
    requests = [
        dataclasses.replace(asked[at][1], negative_prompt=f"{asked[at][1].prompt} {SCENES[scene][0]}")
        for at, scene in zip(readable, scenes, strict=True)
    ]
    rows = []
    for name, values in WAYS.items():
        after = seen(made(requests, values)) if values else [before[at] for at in readable]
        gone = [found.scene != scene for found, scene in zip(after, scenes, strict=True)]
        kept = [{each.thing for each in found.things} == {thing} for found, thing in zip(after, things, strict=True)]
        shares = {
            "without_the_scene": gone,
            "right_thing": kept,
            "one_thing": [len(found.things) == 1 for found in after],
            "without_the_scene_of_right_thing": [a and b for a, b in zip(gone, kept, strict=True)],
        }
        rows.append({"way": name, **{what: round(sum(each) / len(each), 3) for what, each in shares.items()}})
        print(rows[-1], flush=True)
    document = {
        "schema": "diffusion_runtime.negative_prompt/2",
        "machine": describe_host(),
        "num_pictures": len(readable),
        "num_unreadable_before": len(asked) - len(readable),
        "scenes": {name: scenes.count(name) for name in sorted(set(scenes))},
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
