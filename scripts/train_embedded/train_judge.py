"""Train the detector of the judge of `emoji` on rendered frames, then measure the judge on rendered clips.

python -m scripts.train_embedded.train_judge --minutes 3.8 --out $OUT
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion_runtime.quality.emoji.detector import CELLS, FRAME, Detector, Maps, load_detector
from diffusion_runtime.quality.emoji.judge import Verdict, judge, read_clips
from diffusion_runtime.quality.emoji.scene import SceneBatch
from diffusion_runtime.quality.emoji.scoring import summarise
from scripts.emoji.render import Poses, background, compose, pick_pictures, poses, render
from scripts.train_embedded.eight_bits import save_eight_bits
from scripts.train_embedded.session import Average, Clock, Log, cosine
from scripts.train_embedded.world import EMOJI

BATCH = 384
NUM_MOMENTS = 29
"""Frames of the clip of which one is drawn."""
LOG_EVERY = 100


def moments(scenes: SceneBatch, generator: torch.Generator, size: int) -> tuple[Tensor, Poses]:
    """One random frame [B, 3, size, size] in 0 to 1 of every scene's clip, and where its things are."""
    placed = poses(scenes, NUM_MOMENTS)
    count = len(scenes)
    frame = torch.randint(NUM_MOMENTS, (count,), generator=generator, device=generator.device)
    rows = torch.arange(count, device=generator.device)
    own = Poses(placed.centre[rows, frame][:, None], placed.half[rows, frame][:, None], placed.grounded)
    frames, _ = compose(scenes, own, pick_pictures(scenes, own, size), background(scenes, size), size)
    return frames[:, 0].permute(0, 3, 1, 2), own


def worsen(frames: Tensor, generator: torch.Generator) -> Tensor:
    """Blur, contrast and noise as a decoder may leave them; frames [B, 3, H, W] in 0 to 1."""
    device, count = frames.device, frames.shape[0]

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, 1, generator=generator, device=device)

    blurred = F.avg_pool2d(F.pad(frames, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    frames = torch.lerp(frames, blurred, uniform(-0.3, 1.0))
    coarse = F.avg_pool2d(frames, 2)
    coarse = F.interpolate(coarse, scale_factor=2.0, mode="bilinear", align_corners=False)
    frames = torch.lerp(frames, coarse, uniform(-0.5, 0.7).clamp(min=0))
    frames = (frames - 0.5) * uniform(0.85, 1.15) + 0.5 + uniform(-0.08, 0.08)
    noise = torch.randn(frames.shape, generator=generator, device=device)
    return (frames + noise * uniform(-0.03, 0.06).clamp(min=0)).clamp(0, 1)


def training_frames(count: int, generator: torch.Generator, two: float = 0.7) -> tuple[Tensor, SceneBatch, Poses]:
    """Worsened frames [B, 3, FRAME, FRAME] in -1 to 1: drawn at this size, or at twice the size and averaged."""
    scenes = EMOJI.sample(count, generator, two)
    half = count // 2
    small, first = moments(scenes.select(slice(0, half)), generator, FRAME)
    large, second = moments(scenes.select(slice(half, count)), generator, 2 * FRAME)
    frames = worsen(torch.cat([small, F.avg_pool2d(large, 2)]), generator)
    placed = Poses(
        *(torch.cat([getattr(first, part), getattr(second, part)]) for part in ("centre", "half", "grounded"))
    )
    return frames * 2 - 1, scenes, placed


def detector_loss(maps: Maps, scenes: SceneBatch, placed: Poses) -> dict[str, Tensor]:
    """Return the losses of centres (a focal loss about soft peaks), things and boxes (in the 3 x 3 cells about a
    centre), scene and time."""
    device = maps.centre.device
    centre, half = placed.centre[:, 0], placed.half[:, 0].abs()
    cells = (centre + 1) / 2 * CELLS - 0.5
    axis = torch.arange(CELLS, device=device, dtype=torch.float32)
    across = axis[None, None, None, :] - cells[:, :, 0, None, None]
    down = axis[None, None, :, None] - cells[:, :, 1, None, None]
    shown = torch.stack([torch.ones_like(scenes.num_objects), scenes.num_objects - 1], dim=1).bool()[:, :, None, None]
    peak = torch.exp(-(across**2 + down**2) / (2 * 0.8**2)) * shown
    is_centre = (across.abs() <= 0.5) & (down.abs() <= 0.5) & shown
    target = torch.where(is_centre, 1.0, peak).amax(dim=1)
    logit = maps.centre.float()
    share = logit.sigmoid()
    positive = (target == 1).float()
    loss = -positive * (1 - share) ** 2 * F.logsigmoid(logit)
    loss = loss - (1 - positive) * (1 - target) ** 4 * share**2 * F.logsigmoid(-logit)
    near = (across.abs() <= 1.5) & (down.abs() <= 1.5) & shown
    # Where two things meet, the nearer one's.
    order = torch.where(near, across**2 + down**2, torch.inf)
    nearest = order.argmin(dim=1)
    covered = near.any(dim=1)

    def of_nearest(values: Tensor) -> Tensor:
        return values.gather(1, nearest[:, None])[:, 0]

    wide = scenes.thing[:, :, None, None].expand(-1, -1, CELLS, CELLS)
    wanted = of_nearest(wide).masked_fill(~covered, -100)
    thing = F.cross_entropy(maps.thing.float(), wanted, ignore_index=-100)
    logs = half.clamp(min=0.01).log()[..., None, None].expand(-1, -1, -1, CELLS, CELLS)
    box = torch.stack(
        [of_nearest(-across.expand_as(order)), of_nearest(-down.expand_as(order)), of_nearest(logs[:, :, 0]),
         of_nearest(logs[:, :, 1])], dim=1,
    )  # fmt: skip
    distance = (maps.box.float() - box).abs() * covered[:, None]
    time_shown = torch.where(scenes.scene == 7, -100, scenes.time)
    return {
        "centre": loss.sum() / positive.sum().clamp(min=1),
        "thing": thing,
        "box": distance.sum() / covered.sum().clamp(min=1),
        "scene": F.cross_entropy(maps.scene.float(), scenes.scene),
        "time": F.cross_entropy(maps.time.float(), time_shown, ignore_index=-100),
    }


@torch.no_grad()
def measure(detector: Detector, device: str, count: int, two: float, size: int, num_frames: int = 29) -> list[Verdict]:
    """Verdicts on seeded rendered clips against everything that is true of them."""
    generator = torch.Generator(device).manual_seed(4242 + size)
    verdicts: list[Verdict] = []
    for first in range(0, count, 32):
        scenes = EMOJI.sample(min(32, count - first), generator, two)
        readings = read_clips(detector, render(scenes, num_frames, size))
        verdicts += [judge(says, seen) for says, seen in zip(scenes.attributes(), readings, strict=True)]
    return verdicts


def main() -> None:
    """Train by the clock, save detector.safetensors, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.8, help="wall minutes of training, preparation included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--clips", type=int, default=1024, help="rendered clips on which the judge is measured")
    parser.add_argument("--toy", action="store_true", help="small batches, for a dry run on a CPU")
    arguments = parser.parse_args()
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(arguments.seed)
    log = Log(arguments.out / "judge_log.jsonl")
    generator = torch.Generator(device).manual_seed(arguments.seed)
    detector = Detector().to(device, memory_format=torch.channels_last)
    parameters = list(detector.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=device == "cuda")
    average = Average(parameters, decay=0.998)
    log.write(event="start", device=device, parameters=sum(each.numel() for each in parameters))
    clock, step, since = Clock(arguments.minutes * 60 - (time.monotonic() - began)), 0, time.monotonic()
    every = 5 if arguments.toy else LOG_EVERY
    while not clock.is_over:
        with torch.no_grad():
            frames, scenes, placed = training_frames(16 if arguments.toy else BATCH, generator)
        for group in optimizer.param_groups:
            group["lr"] = cosine(clock.progress, arguments.peak, 1e-5)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            maps = detector(frames.contiguous(memory_format=torch.channels_last))
        losses = detector_loss(maps, scenes, placed)
        total = losses["centre"] + losses["thing"] + losses["box"] + 0.3 * (losses["scene"] + losses["time"])
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 2.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update()
        step += 1
        if step % every == 0:
            speed = 1000 * (time.monotonic() - since) / every
            log.write(
                step=step,
                seconds=clock.trained,
                ms=speed,
                **{name: float(loss.detach()) for name, loss in losses.items()},
            )
            since = time.monotonic()
    average.swap()
    save_eight_bits(detector.state_dict(), arguments.out / "detector.safetensors")
    log.write(event="saved", step=step, seconds=time.monotonic() - began)
    detector = load_detector(arguments.out / "detector.safetensors", device)
    for two, size in ((0.0, 256), (1.0, 256), (1.0, 128)):
        verdicts = measure(detector, device, arguments.clips, two, size, 9 if arguments.toy else 29)
        rates = {part: [each.right, each.total] for part, each in summarise(verdicts).items()}
        log.write(event="judge", things=1 + int(two), size=size, rendered=rates, seconds=time.monotonic() - began)


if __name__ == "__main__":
    main()
