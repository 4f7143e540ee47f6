"""Quality of an embedded model's clips under a setting, beside the same seeded prompts of a full run.

What sparse_quality.py, step_cache_quality.py and faster_quality.py share: prompts of one and of two objects, their
clips, prompt accuracy with its 95 % interval, the relative L2 distance of the final latents and the PSNR of the frames.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy
import torch

from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest, Pipeline
from diffusion_runtime.attention import AttentionReport
from diffusion_runtime.core.hardware import resolve_device
from diffusion_runtime.memory.cpu_memory import tune_cpu_allocator
from diffusion_runtime.quality.shapes.attributes import SceneAttributes
from diffusion_runtime.quality.shapes.checker import Verdict, check_clip
from diffusion_runtime.quality.shapes.prompts import PromptKind
from diffusion_runtime.quality.worlds import WORLDS, EvaluationPrompt, proportions

KINDS: tuple[PromptKind, ...] = ("one_object", "two_objects")


@dataclass(frozen=True)
class Clips:
    """latents: [n, ...], float32; frames: uint8 [n, T, H, W, 3]; verdicts, seconds of denoising: one per clip; reports:
    those of each batch. kinds: of the prompts, see `quality_prompts`."""

    latents: torch.Tensor
    frames: torch.Tensor
    verdicts: list[Verdict]
    denoise_seconds: list[float]
    reports: list[list[AttentionReport]]
    kinds: Sequence[PromptKind] = KINDS

    def beside(self, full: Clips) -> dict[str, Any]:
        """Their distances from the same prompts of a full run, and their accuracy by kind of prompt."""
        distance = (self.latents - full.latents).flatten(1).norm(dim=1) / full.latents.flatten(1).norm(dim=1)
        return {
            "latent_relative_l2": float(distance.mean()),
            "psnr_db": psnr(self.frames, full.frames),
            "accuracy": self.accuracy(),
        }

    def accuracy(self) -> dict[str, Any]:
        """By kind of prompt; the clips are those of `quality_prompts`, as many of each kind."""
        each = len(self.verdicts) // len(self.kinds)
        parts = {kind: self.verdicts[index * each : (index + 1) * each] for index, kind in enumerate(self.kinds)}
        return {
            kind: {part: asdict(each) for part, each in proportions(verdicts).items()}
            for kind, verdicts in parts.items()
        }


class LatentRecorder:
    """A pipeline's decoder, keeping the latents that it is given."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.latents: list[torch.Tensor] = []

    def for_request(self, request: GenerationRequest) -> Any:
        self.decoder = self.decoder.for_request(request)
        return self

    def recording(self, recorder: Any) -> Any:
        self.decoder = self.decoder.recording(recorder)
        return self

    def stream(self, latents: torch.Tensor) -> Any:
        self.latents.append(latents.detach().float().cpu())
        return self.decoder.stream(latents)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)


@contextmanager
def recorded_latents(pipeline: Pipeline) -> Iterator[list[torch.Tensor]]:
    """The final latents of every clip that is generated meanwhile, [1, ...] each."""
    recorder = LatentRecorder(pipeline.decoder)
    pipeline.parts = dataclasses.replace(pipeline.parts, decoder=recorder)  # type: ignore[arg-type]
    try:
        yield recorder.latents
    finally:
        pipeline.parts = dataclasses.replace(pipeline.parts, decoder=recorder.decoder)


def quality_prompts(
    num_prompts: int, world: str = "shapes", kinds: Sequence[PromptKind] = KINDS
) -> list[EvaluationPrompt]:
    """So many of each kind, in their order."""
    return [prompt for kind in kinds for prompt in WORLDS[world].evaluation_prompts(kind, num_prompts)]


def generate_clips(
    pipeline: Pipeline,
    prompts: Sequence[Any],
    values: Mapping[str, Any],
    *,
    preset: str | None = None,
    batch_size: int = 1,
    checkers: Executor | None = None,
    judge: Callable[[Any, torch.Tensor], Any] = check_clip,
    kinds: Sequence[PromptKind] = KINDS,
) -> Clips:
    """values: of request fields beside prompt and seed. checkers: processes that check clips while others are made.
    judge: (attributes, frames) -> verdict, without them."""
    frames: list[torch.Tensor] = []
    verdicts: list[Callable[[], Verdict]] = []
    seconds: list[float] = []
    reports: list[list[AttentionReport]] = []
    with recorded_latents(pipeline) as latents:
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            requests = [GenerationRequest(prompt.text, seed=prompt.seed, **values) for prompt in batch]
            media = pipeline.generate([pipeline.resolve(request, preset=preset) for request in requests])
            for prompt, one in zip(batch, media, strict=True):
                frames.append(torch.from_numpy(one.frames))
                if checkers is None:
                    verdict = judge(prompt.attributes, frames[-1])
                    verdicts.append(lambda verdict=verdict: verdict)
                else:
                    verdicts.append(checkers.submit(_check, prompt.attributes, one.frames).result)
            seconds += [one.timings["denoise"] for one in media]
            reports.append([one.attention_report for one in media])
    checked = [verdict() for verdict in verdicts]
    return Clips(torch.cat(latents), torch.stack(frames), checked, seconds, reports, kinds)


def _check(wanted: SceneAttributes, clip: numpy.ndarray) -> Verdict:
    torch.set_num_threads(1)
    return check_clip(wanted, torch.from_numpy(clip))


def psnr(frames: torch.Tensor, full: torch.Tensor) -> float:
    """Mean over clips, in dB; equal clips count as 100."""
    # One by one: 1,024 clips of 29 frames of 256 x 256 are 6 GB in 8 bits and 23 GB in float32.
    pairs = zip(frames, full, strict=True)
    error = torch.stack([(one.float() - other.float()).square().mean() for one, other in pairs])
    return float(torch.where(error > 0, 10 * torch.log10(255.0**2 / error.clamp(min=1e-9)), 100.0).mean())


def joint_rates(row: Mapping[str, Any]) -> dict[str, str]:
    """For a printed line: the share of clips with everything right, by kind of prompt."""
    return {kind: f"{rates['joint']['rate']:.3f}" for kind, rates in row["accuracy"].items()}


def write_rows(
    arguments: argparse.Namespace, schema: str, rows: Iterable[Mapping[str, Any]], **about: Any
) -> dict[str, Any]:
    """Write `arguments.output` after each row. about: what stands in the document beside schema, machine and rows."""
    device = resolve_device(arguments.device)
    if device.type == "cpu":
        tune_cpu_allocator()
    document: dict[str, Any] = {"schema": schema, "machine": describe_machine(device), **about, "rows": []}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for row in rows:
        document["rows"].append(row)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    return document
