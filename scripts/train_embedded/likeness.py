"""How much the things that a folder of `emoji` draws look like their pictures, which its judge does not see.

python -m scripts.train_embedded.likeness FOLDER --judge DETECTOR --shape 1x256 --sweep unipc:12:2:14 unipc:12:3:14

A thing that is missing counts 0 in every figure; a wrong one is compared with the picture of what the judge took it
for. `rendered` is what the prompts were written of, drawn and sent through the VAE: no transformer can be better.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import describe_host
from diffusion_runtime.quality.emoji.detector import Detector, detect, load_detector, prepare
from diffusion_runtime.quality.emoji.judge import MIN_SCORE, judge, read_clips
from diffusion_runtime.quality.emoji.prompts import EvaluationPrompt, evaluation_prompts
from diffusion_runtime.quality.shapes.prompts import PROMPT_KINDS
from scripts.emoji.likeness import Likeness, likeness
from scripts.emoji.render import render
from scripts.train_embedded.evaluate import Model, Setting
from scripts.train_embedded.export import build_scheduler
from scripts.train_embedded.sampling import SamplerSettings

FRAMES = 5
"""Of a clip that are compared, from the first to the last."""
BATCH = 64


@torch.no_grad()
def likeness_of(detector: Detector, clips: Tensor, wanted: Tensor) -> Likeness:
    """Compare detections of uint8 clips [B, frames, size, size, 3], of each frame the `wanted` [B] likeliest."""
    device = next(detector.parameters()).device
    picked = torch.linspace(0, clips.shape[1] - 1, min(FRAMES, clips.shape[1])).round().long()
    frames = clips[:, picked].flatten(0, 1).to(device)
    found = detect(detector(prepare(frames)))
    seen = found.score > MIN_SCORE
    most = wanted.to(device).repeat_interleave(len(picked))
    frame, row = (seen & (seen.cumsum(dim=1) <= most[:, None])).nonzero(as_tuple=True)
    return likeness(frames, frame, found.box[frame, row], found.thing[frame, row].argmax(dim=1))


def figures(detector: Detector, prompts: Sequence[EvaluationPrompt], clips: Tensor) -> dict[str, float]:
    """Likeness of the things of clips, 0 where one is missing, and the share of clips that the judge finds right."""
    wanted = torch.tensor([len(prompt.attributes.objects) for prompt in prompts])
    total = int(wanted.sum()) * min(FRAMES, clips.shape[1])
    seen = likeness_of(detector, clips, wanted)
    results = {"things": len(seen) / total}
    for field in fields(Likeness):
        values = F.pad(getattr(seen, field.name), (0, total - len(seen)))
        results |= {field.name: float(values.quantile(0.5)), f"{field.name}_low": float(values.quantile(0.1))}
    readings = read_clips(detector, clips)
    right = [judge(prompt.attributes, reading).joint for prompt, reading in zip(prompts, readings, strict=True)]
    return results | {"joint": sum(right) / len(right)}


def main() -> None:
    """Print one line for the rendered scenes and one a setting; --out has all figures, 10th percentiles as `_low`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--judge", type=Path, required=True, help="detector.safetensors")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--kind", choices=PROMPT_KINDS, default="one_object")
    parser.add_argument("--shape", default="1x256", help="frames x size, such as 29x256")
    parser.add_argument("--sweep", nargs="+", type=Setting.parse, default=[Setting("unipc", 12, 2.0, 14.0)])
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--out", type=Path, help="JSON")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_frames, size = (int(part) for part in arguments.shape.split("x"))
    prompts = evaluation_prompts(arguments.kind, arguments.prompts, image=num_frames == 1)
    detector, model = load_detector(arguments.judge, device), Model(arguments.folder, device, bf16=arguments.bf16)
    results: list[dict[str, object]] = []

    def draw(batch: Sequence[EvaluationPrompt], setting: Setting | None) -> Tensor:
        if setting is None:
            return model.through_vae(torch.cat([render(prompt.scene, num_frames, size) for prompt in batch]))
        texts, seeds = [prompt.text for prompt in batch], [prompt.seed for prompt in batch]
        shape = SamplerSettings(setting.num_steps, setting.guidance, num_frames, size, 64)
        return model.frames(texts, seeds, build_scheduler(setting.scheduler, setting.shift), shape)

    for setting in (None, *arguments.sweep):
        began = time.monotonic()
        clips = [draw(prompts[first : first + BATCH], setting) for first in range(0, len(prompts), BATCH)]
        drawn = time.monotonic()
        measured = figures(detector, prompts, torch.cat(clips))
        name, ended = str(setting or "rendered"), time.monotonic()
        line = " ".join(f"{key} {value:.3g}" for key, value in measured.items())
        print(f"{name:15} {line}; {drawn - began:.0f} + {ended - drawn:.0f} s", flush=True)
        results.append({"setting": name, "shape": arguments.shape, "kind": arguments.kind, **measured})
        if arguments.out is not None:
            document = {"folder": str(arguments.folder), "machine": describe_host(), "rows": results}
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
