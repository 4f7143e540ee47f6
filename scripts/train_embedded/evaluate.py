"""Prompt accuracy of an exported folder: at its default settings, or over a sweep of sampler settings.

python -m scripts.train_embedded.evaluate FOLDER --prompts 512 --out accuracy.json
python -m scripts.train_embedded.evaluate FOLDER --prompts 256 --sweep euler:12:3:5 unipc:12:3:5 --bf16
python -m scripts.train_embedded.evaluate FOLDER --judge detector.safetensors ...      # the world `emoji`
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from diffusion_runtime.quality.emoji import prompts as emoji_prompts
from diffusion_runtime.quality.emoji import scoring as emoji_scoring
from diffusion_runtime.quality.emoji.detector import Detector, load_detector
from diffusion_runtime.quality.shapes.attributes import SceneAttributes
from diffusion_runtime.quality.shapes.checker import Verdict, check_clip
from diffusion_runtime.quality.shapes.prompts import PROMPT_KINDS, PromptKind, evaluation_prompts
from diffusion_runtime.quality.shapes.scoring import CheckClips, Generate, evaluate
from scripts.train_embedded.clip_vae import WholeClipVae
from scripts.train_embedded.contact_sheet import save_sheet
from scripts.train_embedded.export import SamplerScheduler, build_scheduler, load_component
from scripts.train_embedded.sampling import Sampler, SamplerSettings
from scripts.train_embedded.train_vae import clip_to_frames


@dataclass(frozen=True)
class Setting:
    """One sampler, named in reports as scheduler:steps:guidance:shift, and :guidance_stop where that is not 1."""

    scheduler: str
    num_steps: int
    guidance: float
    shift: float
    guidance_stop: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Setting:
        """`euler:12:3:5` -> Euler, 12 steps, guidance 3, shift 5; `euler:12:3:5:0.5` guides the first half of them."""
        scheduler, steps, *numbers = text.split(":")
        return cls(scheduler, int(steps), *map(float, numbers))

    def __str__(self) -> str:
        stop = "" if self.guidance_stop == 1 else f":{self.guidance_stop:g}"
        return f"{self.scheduler}:{self.num_steps}:{self.guidance:g}:{self.shift:g}{stop}"


class Model:
    """The parts of an exported folder on one device, and frames for prompts."""

    def __init__(self, folder: Path, device: str, *, bf16: bool) -> None:
        self._device, self._bf16 = device, bf16
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        text_encoder = load_component(folder, UMT5EncoderModel).to(device)
        transformer = load_component(folder, WanTransformer3DModel).to(device)
        self._vae = load_component(folder, AutoencoderKLWan).to(device)
        self._sampler = Sampler(transformer, text_encoder, tokenizer, device)
        self._mean, self._std = (
            torch.tensor(values, device=device).view(1, -1, 1, 1, 1)
            for values in (self._vae.config.latents_mean, self._vae.config.latents_std)
        )

    @torch.no_grad()
    def frames(
        self, prompts: Sequence[str], seeds: Sequence[int], scheduler: SamplerScheduler, settings: SamplerSettings
    ) -> Tensor:
        """uint8 [B, frames, size, size, 3] on the CPU."""
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._bf16):
            latents = self._sampler.sample(prompts, seeds, scheduler, settings)
            vae = WholeClipVae(self._vae)
            parts = [clip_to_frames(vae.decode(part * self._std + self._mean)) for part in latents.split(16)]
        return torch.cat(parts).cpu()

    @torch.no_grad()
    def through_vae(self, frames: Tensor) -> Tensor:
        """uint8 [B, frames, size, size, 3], encoded and decoded, on the CPU."""
        vae, parts = WholeClipVae(self._vae), []
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._bf16):
            for part in torch.split(frames, 16):
                clip = part.to(self._device).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
                parts.append(clip_to_frames(vae.decode(vae.encode(clip)[0])))
        return torch.cat(parts).cpu()


def _check_one(attributes: SceneAttributes, clip: np.ndarray) -> Verdict:
    torch.set_num_threads(1)
    return check_clip(attributes, torch.from_numpy(clip))


def parallel_checker(pool: ProcessPoolExecutor) -> CheckClips:
    """Clips checked by the pool's processes."""

    def check(attributes: Sequence[SceneAttributes], clips: Tensor) -> list[Verdict]:
        return list(pool.map(_check_one, attributes, [clip.numpy() for clip in clips], chunksize=2))

    return check


Figures = dict[str, dict[str, float]]
"""Per part of a verdict: right, total, rate, and its 95 % interval."""


@dataclass(frozen=True)
class Examined:
    """What a model's clips are worth on seeded prompts."""

    accuracy: Figures
    wrong: list[str]
    """Prompts whose clips are wrong, and the verdicts."""


Examine = Callable[[Generate, PromptKind, int, int, bool], Examined]
"""(generate, kind, prompts, batch size, whether images) -> figures."""


def _wrong(prompts: Sequence[Any], verdicts: Sequence[Any]) -> list[str]:
    pairs = zip(prompts, verdicts, strict=True)
    return [f"{prompt.text!r}: {verdict}" for prompt, verdict in pairs if not verdict.joint]


def examine_shapes(check: CheckClips) -> Examine:
    """The checker of the world `shapes`."""

    def examine(generate: Generate, kind: PromptKind, count: int, batch_size: int, image: bool) -> Examined:
        prompts = evaluation_prompts(kind, count, image=image)
        accuracy, verdicts = evaluate(generate, prompts, batch_size=batch_size, check=check)
        return Examined(accuracy.to_dict(), _wrong(prompts, verdicts))

    return examine


def examine_emoji(detector: Detector) -> Examine:
    """The judge of the world `emoji`."""

    def examine(generate: Generate, kind: PromptKind, count: int, batch_size: int, image: bool) -> Examined:
        prompts = emoji_prompts.evaluation_prompts(kind, count, image=image)
        verdicts = emoji_scoring.evaluate(generate, prompts, detector, batch_size=batch_size)
        accuracy = {part: asdict(each) for part, each in emoji_scoring.summarise(verdicts).items()}
        return Examined(accuracy, _wrong(prompts, verdicts))

    return examine


def measure(
    model: Model,
    setting: Setting,
    shape: SamplerSettings,
    kind: PromptKind,
    count: int,
    examine: Examine,
    sheet: Path | None,
) -> Figures:
    """Accuracy of one setting on one kind of prompts; the first clips go to a contact sheet."""
    scheduler = build_scheduler(setting.scheduler, setting.shift)
    settings = replace(
        shape, num_steps=setting.num_steps, guidance=setting.guidance, guidance_stop=setting.guidance_stop
    )
    kept: list[Tensor] = []

    def generate(prompts: Sequence[str], seeds: Sequence[int]) -> Tensor:
        frames = model.frames(prompts, seeds, scheduler, settings)
        if len(kept) < 16:
            kept.extend(frames[:16])
        return frames

    run: Generate = generate
    examined = examine(run, kind, count, 128 if shape.size <= 256 else 32, shape.num_frames == 1)
    if sheet is not None:
        save_sheet(sheet, kept[:16], size=160)
        sheet.with_suffix(".txt").write_text("\n".join(examined.wrong) + "\n")
    return examined.accuracy


def main() -> None:
    """Print one line a measurement and write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--kinds", nargs="+", choices=PROMPT_KINDS, default=list(PROMPT_KINDS))
    parser.add_argument("--sweep", nargs="+", type=Setting.parse, default=[Setting("unipc", 12, 3.0, 5.0)])
    parser.add_argument("--shapes", nargs="+", default=["29x256"], help="frames x size, such as 29x128 1x256")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--judge", type=Path, help="detector.safetensors: the folder's world is `emoji`")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16, for sweeps")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sheets", type=Path, help="folder for contact sheets and lists of wrong prompts")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, object]] = []
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        if arguments.judge is None:
            examine = examine_shapes(parallel_checker(pool))
        else:
            examine = examine_emoji(load_detector(arguments.judge, device))
        model = Model(arguments.folder, device, bf16=arguments.bf16)
        for setting in arguments.sweep:
            for shape_name in arguments.shapes:
                num_frames, size = (int(part) for part in shape_name.split("x"))
                shape = SamplerSettings(1, 1.0, num_frames, size, arguments.prompt_tokens)
                for kind in arguments.kinds:
                    start = time.monotonic()
                    sheet = None
                    if arguments.sheets is not None:
                        arguments.sheets.mkdir(parents=True, exist_ok=True)
                        sheet = arguments.sheets / f"{kind}_{shape_name}_{str(setting).replace(':', '_')}.png"
                    accuracy = measure(model, setting, shape, kind, arguments.prompts, examine, sheet)
                    rates = {name: round(part["rate"], 3) for name, part in accuracy.items()}
                    print(
                        f"{setting!s:18} {shape_name:8} {kind:12} {rates} {time.monotonic() - start:.1f} s", flush=True
                    )
                    figures = {"setting": str(setting), "shape": shape_name, "kind": kind}
                    results.append(figures | {"prompt_tokens": arguments.prompt_tokens, "accuracy": accuracy})
                    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
