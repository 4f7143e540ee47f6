"""Likeness: a rendering is like its pictures; blurred, elsewhere or of another thing it is less so."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion_runtime.quality.emoji.detector import load_detector
from diffusion_runtime.quality.emoji.prompts import evaluation_prompts
from diffusion_runtime.quality.emoji.scene import SPINNING, SceneBatch, sample_scenes
from diffusion_runtime.quality.emoji.things import THINGS
from scripts.emoji import likeness as module
from scripts.emoji.likeness import Likeness, likeness
from scripts.emoji.render import poses, render
from scripts.train_embedded.likeness import figures

COUNT, SIZE = 6, 256
DETECTOR = Path(__file__).parents[2] / "diffusion_runtime" / "assets" / "emoji_judge" / "detector.safetensors"


@cache
def scenes() -> SceneBatch:
    drawn = sample_scenes(COUNT, torch.Generator().manual_seed(3))
    return replace(drawn, num_objects=torch.ones_like(drawn.num_objects), mirrored=torch.arange(COUNT)[:, None] % 2 > 0)


def boxes(shown: SceneBatch, num_frames: int = 1) -> Tensor:
    """Where the first thing of each frame is, as far off as a detector may be: [B x frames, 4]."""
    placed = poses(shown, num_frames)
    box = torch.cat([placed.centre[:, :, 0], placed.half[:, :, 0].abs()], dim=-1).flatten(0, 1)
    off = torch.tensor([0.04, -0.03, 0.05, -0.04])
    return box + off * box[:, 2:].amax(dim=1, keepdim=True)


def measured(frames: Tensor, box: Tensor | None = None, thing: Tensor | None = None) -> Likeness:
    """Of stills of the scenes."""
    box = boxes(scenes()) if box is None else box
    return likeness(frames, torch.arange(COUNT), box, scenes().thing[:, 0] if thing is None else thing)


def test_a_rendering_is_like_its_pictures() -> None:
    found = measured(render(scenes(), 1, SIZE)[:, 0])
    assert found.structure.min() > 0.95, found
    assert found.psnr.min() > 30, found
    assert ((found.sharpness > 0.8) & (found.sharpness < 1.2)).all(), found


def test_a_spinning_picture_is_found_at_every_width_and_mirrored() -> None:
    spinning = replace(scenes(), motion=torch.full_like(scenes().motion, SPINNING)).select(slice(0, 4))
    frames = render(spinning, 9, SIZE).flatten(0, 1)
    thing = spinning.thing[:, :1].expand(-1, 9).flatten()
    found = likeness(frames, torch.arange(len(frames)), boxes(spinning, 9), thing)
    assert found.structure.median() > 0.97, found
    # Seen from its side a picture is a tenth as wide: some ten pixels.
    assert found.structure.min() > 0.7, found


def test_every_figure_falls_with_blur() -> None:
    frames = render(scenes(), 1, SIZE)[:, 0]
    results = [measured(frames)]
    for side in (3, 7, 15):
        wide = F.avg_pool2d(frames.permute(0, 3, 1, 2).float(), side, 1, side // 2, count_include_pad=False)
        results.append(measured(wide.round().to(torch.uint8).permute(0, 2, 3, 1)))
    for sharper, softer in pairwise(results):
        for figure in ("structure", "psnr", "sharpness"):
            assert (getattr(sharper, figure) > getattr(softer, figure)).all(), (figure, results)


def test_another_thing_is_not_alike_and_its_neighbours_in_the_batch_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows are compared by size, a few at a time, and go back to their places.
    monkeypatch.setattr(module, "AT_ONCE", 3)
    wrong = torch.arange(COUNT) % 3 == 1
    thing = torch.where(wrong, (scenes().thing[:, 0] + 7) % len(THINGS), scenes().thing[:, 0])
    found = measured(render(scenes(), 1, SIZE)[:, 0], thing=thing)
    assert torch.equal(found.structure < 0.6, wrong), found
    assert torch.equal(found.psnr < 20, wrong), found


def test_a_thing_that_is_elsewhere_is_not_alike() -> None:
    box = boxes(scenes())
    box = box + torch.tensor([0.6, 0.0, 0.0, 0.0]) * box[:, 2:3] * -box[:, :1].sign()
    found = measured(render(scenes(), 1, SIZE)[:, 0], box)
    assert found.structure.max() < 0.75, found
    assert found.psnr.max() < 20, found


def test_a_thing_that_no_frame_shows_counts_as_nothing() -> None:
    prompts = evaluation_prompts("one_object", 4, image=True)
    clips = torch.cat([render(prompt.scene, 1, SIZE) for prompt in prompts])
    detector = load_detector(DETECTOR, "cpu")
    whole = figures(detector, prompts, clips)
    assert whole["things"] == whole["joint"] == 1, whole
    assert whole["structure_low"] > 0.9, whole
    empty = figures(detector, prompts, torch.full_like(clips, 128))
    assert set(empty.values()) == {0.0}, empty
    clips[0] = 128
    assert figures(detector, prompts, clips)["structure_low"] < 0.5
