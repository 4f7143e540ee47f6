"""The world of `emoji`: what captions say is drawn, and the judge sees it, and sees what is wrong."""

from __future__ import annotations

import runpy
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from diffusion_runtime.quality.emoji.attributes import (
    MOTION_NAMES,
    SCENE_NAMES,
    ObjectAttributes,
    SceneAttributes,
    held_out_motion,
)
from diffusion_runtime.quality.emoji.captions import all_words, write_caption
from diffusion_runtime.quality.emoji.detector import Detector, load_detector
from diffusion_runtime.quality.emoji.judge import Reading, Verdict, judge, read_clips, read_motion
from diffusion_runtime.quality.emoji.scene import BOUNCING, GRID, MAX_OBJECTS, SceneBatch, SceneSettings, sample_scenes
from diffusion_runtime.quality.emoji.things import THING_NAMES, THINGS
from diffusion_runtime.quality.worlds import EMOJI_DETECTOR
from scripts.emoji.render import render, render_slots

FRAMES, SIZE = 29, 128


def scenes_of(count: int, two: float = 0.0, *, held_out: bool = False, seed: int = 1) -> SceneBatch:
    return sample_scenes(count, torch.Generator().manual_seed(seed), SceneSettings(two, held_out=held_out))


@cache
def detector() -> Detector:
    return load_detector(EMOJI_DETECTOR, "cpu")


@cache
def rendered() -> tuple[list[SceneAttributes], list[Reading]]:
    scenes = scenes_of(4, 0.5)
    return scenes.attributes(), read_clips(detector(), render(scenes, FRAMES, SIZE))


def test_captions_use_known_words_and_say_where_each_thing_is_named() -> None:
    known, random = set(all_words()), Random(3)
    names = {thing.name: thing.words for thing in THINGS}
    for scene in scenes_of(200, 0.6).attributes():
        caption = write_caption(scene, random)
        words = caption.text.replace(",", " , ").replace(";", " ; ").split()
        assert set(words) <= known, caption.text
        for one, (first, last) in zip(caption.attributes.objects, caption.spans, strict=True):
            # The first three letters stay in the plural too.
            assert any(noun[:3] in caption.text[first:last] for noun in names[str(one.thing)]), caption


def test_held_out_combinations_are_never_trained_on_and_always_asked_for() -> None:
    for held_out in (False, True):
        scenes = scenes_of(2000, 0.5, held_out=held_out)
        for row in range(len(scenes)):
            slots = range(1 if held_out else int(scenes.num_objects[row]))
            for slot in slots:
                forbidden = held_out_motion(int(scenes.thing[row, slot]), int(scenes.scene[row]))
                assert (int(scenes.motion[row, slot]) == forbidden) is held_out


def test_things_lie_on_the_grid_at_every_latent_frame() -> None:
    """A model of latents and tokens then sees few positions of each picture."""
    for two in (0.0, 1.0):
        scenes = scenes_of(500, two)
        shown = slice(0, 1 + int(two))
        hops = (scenes.motion == BOUNCING)[..., None]
        for latent in range(8):
            place = scenes.start + torch.where(hops, 0.0, scenes.travel) * latent / 7
            # Half a token: two things move by that much a latent.
            for position in (place, place - scenes.radius[..., None]):
                steps = position[:, shown] / (GRID / 2)
                assert torch.equal(steps, steps.round()), (two, latent)
        assert torch.equal(scenes.start / GRID, (scenes.start / GRID).round())


def test_every_thing_scene_and_motion_is_drawn_and_stays_in_the_frame() -> None:
    scenes = scenes_of(3000, 0.5)
    assert len(scenes.thing.unique()) == len(THING_NAMES)
    assert len(scenes.scene.unique()) == len(SCENE_NAMES)
    assert len(scenes.motion.unique()) == len(MOTION_NAMES)
    for share in (0.0, 1.0):
        centre = scenes.start + share * scenes.travel
        shown = torch.arange(MAX_OBJECTS) < scenes.num_objects[:, None]
        assert bool(((centre.abs().amax(dim=-1) + scenes.radius)[shown] <= 1.0).all())


def test_a_thing_is_drawn_where_its_scene_says() -> None:
    scenes = scenes_of(24)
    _, covered = render_slots(scenes, 2, SIZE)
    x = (torch.arange(SIZE) + 0.5) * 2 / SIZE - 1
    seen = covered[:, 0]
    across = (seen * x).sum(dim=(2, 3)) / seen.sum(dim=(2, 3))
    moved = across[:, -1] - across[:, 0]
    # A picture's middle of mass stays where it is in the picture, unless the picture changes its outline.
    plain = ~torch.isin(
        scenes.motion[:, 0], torch.tensor([MOTION_NAMES.index("spinning"), MOTION_NAMES.index("growing")])
    )
    torch.testing.assert_close(moved[plain], scenes.travel[plain, 0, 0], atol=0.01, rtol=0)
    assert float(covered[:, 1].abs().max()) == 0.0


def verdicts(wanted: list[SceneAttributes], readings: list[Reading]) -> list[Verdict]:
    return [judge(says, seen) for says, seen in zip(wanted, readings, strict=True)]


def test_the_judge_finds_rendered_clips_right() -> None:
    assert all(each.joint for each in verdicts(*rendered()))


def other(names: tuple[str, ...], name: str | None) -> str:
    return names[(names.index(str(name)) + 1) % len(names)]


def with_first(scene: SceneAttributes, one: ObjectAttributes) -> SceneAttributes:
    return replace(scene, objects=(one, *scene.objects[1:]))


def changed(scene: SceneAttributes, part: str) -> SceneAttributes:
    """The scene with another value of one part."""
    first = scene.objects[0]
    if part == "thing":
        return with_first(scene, replace(first, thing=other(THING_NAMES, first.thing)))
    if part == "motion":
        return with_first(scene, replace(first, motion=other(MOTION_NAMES, first.motion)))
    if part == "scene":
        return replace(scene, scene=other(SCENE_NAMES, scene.scene))
    return replace(scene, objects=(scene.objects * 2)[: 3 - len(scene.objects)])


def test_the_judge_finds_what_is_wrong() -> None:
    wanted, readings = rendered()
    for part in ("thing", "motion", "scene", "count"):
        found = verdicts([changed(one, part) for one in wanted], readings)
        assert not any(getattr(each, part) or each.joint for each in found), part


def test_a_thing_that_vanishes_is_wrong() -> None:
    scenes = scenes_of(4, seed=4)
    clips = render(scenes, 9, SIZE)
    empty = render(replace(scenes, num_objects=torch.zeros_like(scenes.num_objects)), 9, SIZE)
    clips[:, 6:] = empty[:, 6:]
    assert not any(each.count for each in verdicts(scenes.attributes(), read_clips(detector(), clips)))


def path(kind: str, frames: int = 29) -> Tensor:
    """Boxes of a motion, computed here: centre, half width, half height."""
    time = torch.linspace(0, 1, frames)
    zero, half = torch.zeros(frames), torch.full((frames,), 0.3)
    hops = 4 * (2 * time % 1) * (1 - 2 * time % 1)
    x, y, wide, high = {
        "still": (zero, zero, half, half),
        "left": (-0.8 * time, zero, half, half),
        "right": (0.8 * time, zero, half, half),
        "up": (zero, -0.8 * time, half, half),
        "down": (zero, 0.8 * time, half, half),
        "bouncing": (zero, -0.45 * hops, half, half),
        "spinning": (zero, zero, 0.3 * (2 * torch.pi * time).cos().abs().clamp(min=0.1), half),
        "growing": (zero, zero, 0.3 * 0.4 ** (1 - time), 0.3 * 0.4 ** (1 - time)),
        "shrinking": (zero, zero, 0.3 * 0.4**time, 0.3 * 0.4**time),
        "aslant": (0.6 * time, 0.6 * time, half, half),
    }[kind]
    return torch.stack([x, y, wide, high], dim=1)


def test_motions_are_read_off_boxes() -> None:
    read = {kind: read_motion(path(kind)) for kind in (*MOTION_NAMES, "shrinking", "aslant")}
    assert read == {**{name: name for name in MOTION_NAMES}, "shrinking": None, "aslant": None}


def test_the_page_lists_what_the_model_knows() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "write_known_words.py"))
    page = script["PAGE"].read_text()
    assert script["written"](page) == page, "run: python scripts/write_known_words.py"
