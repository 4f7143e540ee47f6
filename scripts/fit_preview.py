#!/usr/bin/env python3
"""Fit the linear map from latents to colours that `serve` shows previews with, to a model's own decoder.

python scripts/fit_preview.py [MODEL] [--world emoji | --prompts FILE] [--clips 48] [--output FILE]

Clips of the model are made; each latent's target is the mean colour of the pixels that it stands for. A quarter of the
clips is held out: their explained variance (R2) is in the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import diffusion_runtime
from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.profiling.instruments import watched_latents
from diffusion_runtime.quality.worlds import WORLDS
from diffusion_runtime.serving.previews import FILE

SIZES = (
    {"height": 128, "width": 128, "num_frames": 13},
    {"height": 64, "width": 64, "num_frames": 5},
    {"num_frames": 1},
)
ASSETS = Path(diffusion_runtime.__file__).parent / "assets"


def pairs_of(pipeline: Any, prompt: str, seed: int, **values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents of a clip, [positions, channels], and the mean colour of each one's pixels, [positions, 3]."""
    kept: list[torch.Tensor] = []
    request = pipeline.resolve(GenerationRequest(prompt, seed=seed, **values))
    with watched_latents(pipeline, lambda _, latents: kept.append(latents.clone())):
        media = pipeline(request)
    settings = pipeline.rules.settings(request)
    geometry = settings.sampling.geometry
    video = geometry.parts(kept[-1], settings.size).video[0, :, geometry.num_latents_before :]
    frames = torch.from_numpy(media.frames).float() / 255.0
    block = geometry.spatial_factor
    blocks = frames.unflatten(2, (-1, block)).unflatten(1, (-1, block)).mean((2, 4))
    # The first latent frame is one frame, each other one temporal_factor of them.
    after = blocks[1:].unflatten(0, (-1, geometry.temporal_factor)).mean(1) if len(blocks) > 1 else blocks[1:]
    colours = torch.cat([blocks[:1], after])
    return video.permute(1, 2, 3, 0).reshape(-1, video.shape[0]).float(), colours.reshape(-1, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="shapes")
    parser.add_argument("--prompts", type=Path, help="one per line; the default is of --world")
    parser.add_argument("--world", choices=tuple(WORLDS), default="shapes")
    parser.add_argument("--clips", type=int, default=48)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    pipeline = load_pipeline(arguments.model)
    if arguments.prompts is None:
        found = WORLDS[arguments.world].evaluation_prompts("two_objects", arguments.clips)
        prompts = [each.text for each in found]
    else:
        prompts = arguments.prompts.read_text(encoding="utf-8").splitlines()
    made = [
        pairs_of(pipeline, prompts[number % len(prompts)], number, **SIZES[number % len(SIZES)])
        for number in range(arguments.clips)
    ]
    held_out, fitted = made[: len(made) // 4], made[len(made) // 4 :]
    latents, colours = (torch.cat(parts).double() for parts in zip(*fitted, strict=True))
    solution = torch.linalg.lstsq(torch.cat([latents, torch.ones(len(latents), 1)], 1), colours).solution
    matrix, offset = solution[:-1], solution[-1]
    latents, colours = (torch.cat(parts).double() for parts in zip(*held_out, strict=True))
    left = (latents @ matrix + offset - colours).square().sum()
    r2 = 1.0 - float(left / (colours - colours.mean(0)).square().sum())
    target = arguments.output or ASSETS / arguments.model.replace("-", "_") / FILE
    rounded = {"matrix": matrix.tolist(), "offset": offset.tolist()}
    rounded = json.loads(json.dumps(rounded), parse_float=lambda text: round(float(text), 5))
    target.write_text(json.dumps({**rounded, "r2": round(r2, 3), "clips": len(made)}) + "\n", encoding="utf-8")
    print(f"{target}: R2 {r2:.3f} on {len(held_out)} clips that were held out")


if __name__ == "__main__":
    main()
