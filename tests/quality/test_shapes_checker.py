"""The checker is the yardstick: right on every clean clip, and wrong wherever one thing is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion_runtime.quality.shapes.segmentation import segment, segment_frames
from scripts.shapes import (
    BACKGROUND_NAMES,
    COLOUR_NAMES,
    MOTION_NAMES,
    SHAPE_NAMES,
    EvaluationPrompt,
    ObjectAttributes,
    SceneAttributes,
    SceneBatch,
    SceneSettings,
    check_clip,
    evaluate,
    evaluation_prompts,
    read_clip,
    render,
    sample_scenes,
    wilson,
)


def scenes(seed: int, count: int, two: float = 0.5) -> SceneBatch:
    """Scenes of one seed on the CPU."""
    return sample_scenes(count, torch.Generator().manual_seed(seed), SceneSettings(two_object_fraction=two))


@pytest.mark.parametrize(("size", "num_frames", "count"), [(128, 29, 10), (256, 29, 3), (256, 1, 16), (384, 9, 1)])
def test_clean_clips_score_one(size: int, num_frames: int, count: int) -> None:
    batch = scenes(11, count)
    wrong = [
        says
        for row, says in enumerate(batch.attributes())
        if not check_clip(says, render(batch.select(slice(row, row + 1)), num_frames, size)[0]).joint
    ]
    assert wrong == []


@pytest.mark.parametrize("background", BACKGROUND_NAMES)
@pytest.mark.parametrize("two", [0.0, 1.0])
def test_every_background_is_read_behind_one_and_two_objects(background: str, two: float) -> None:
    batch = scenes(12, 3, two)
    batch = replace(batch, background=torch.full((3,), BACKGROUND_NAMES.index(background)))
    for row in range(3):
        reading = read_clip(render(batch.select(slice(row, row + 1)), 9, 128)[0])
        assert reading.scene.background == background


def test_a_blurred_and_noisy_clip_is_still_read_right() -> None:
    batch = scenes(13, 6)
    generator = torch.Generator().manual_seed(0)
    for row, says in enumerate(batch.attributes()):
        clip = render(batch.select(slice(row, row + 1)), 9, 128)[0].permute(0, 3, 1, 2).float()
        blurred = F.avg_pool2d(F.pad(clip, (1, 1, 1, 1), mode="replicate"), 3, 1).permute(0, 2, 3, 1)
        noisy = blurred + 8 * torch.randn(blurred.shape, generator=generator)
        assert check_clip(says, noisy.clamp(0, 255).to(torch.uint8)).joint


def one_object_clip(seed: int = 21) -> tuple[SceneBatch, SceneAttributes, Tensor]:
    """A red square moving left on stripes: the scene, its description, its clip [29, 128, 128, 3]."""
    batch = replace(
        scenes(seed, 1, 0.0),
        colour=torch.zeros(1, 2, dtype=torch.int64),
        shape=torch.ones(1, 2, dtype=torch.int64),
        motion=torch.zeros(1, 2, dtype=torch.int64),
        radius=torch.full((1, 2), 0.3),
        start=torch.tensor([[[0.4, 0.3], [0.0, -0.5]]]),
        travel=torch.tensor([[[-0.8, 0.0], [0.0, 0.0]]]),
        background=torch.tensor([BACKGROUND_NAMES.index("stripes")]),
    )
    return batch, batch.attributes()[0], render(batch, 29, 128)[0]


def changed(says: SceneAttributes, **attributes: str) -> SceneAttributes:
    """The same description with other attributes of its only object."""
    return replace(says, objects=(replace(says.objects[0], **attributes),))


def test_the_clip_of_the_rejection_tests_is_right_itself() -> None:
    _, says, clip = one_object_clip()
    assert says == SceneAttributes((ObjectAttributes("red", "square", "left"),), "stripes")
    assert check_clip(says, clip).joint


@pytest.mark.parametrize("colour", [name for name in COLOUR_NAMES if name != "red"])
def test_a_wrong_colour_is_rejected_and_nothing_else(colour: str) -> None:
    _, says, clip = one_object_clip()
    verdict = check_clip(changed(says, colour=colour), clip)
    assert (verdict.colour, verdict.joint) == (False, False)
    assert verdict.count
    assert verdict.shape
    assert verdict.motion
    assert verdict.background


@pytest.mark.parametrize("shape", [name for name in SHAPE_NAMES if name != "square"])
def test_a_wrong_shape_is_rejected(shape: str) -> None:
    _, says, clip = one_object_clip()
    verdict = check_clip(changed(says, shape=shape), clip)
    assert (verdict.count, verdict.colour, verdict.shape, verdict.motion) == (True, True, False, True)


@pytest.mark.parametrize("motion", [name for name in MOTION_NAMES if name != "left"])
def test_a_wrong_motion_is_rejected(motion: str) -> None:
    _, says, clip = one_object_clip()
    verdict = check_clip(changed(says, motion=motion), clip)
    assert (verdict.count, verdict.colour, verdict.shape, verdict.motion) == (True, True, True, False)


@pytest.mark.parametrize("background", [name for name in BACKGROUND_NAMES if name != "stripes"])
def test_a_wrong_background_is_rejected(background: str) -> None:
    _, says, clip = one_object_clip()
    verdict = check_clip(replace(says, background=background), clip)
    assert (verdict.count, verdict.background, verdict.joint) == (True, False, False)


def test_a_free_attribute_is_right_whatever_the_clip_shows() -> None:
    _, says, clip = one_object_clip()
    assert check_clip(replace(says, background=None), clip).joint
    assert check_clip(SceneAttributes((ObjectAttributes("red", None, None),), None), clip).joint


def test_a_missing_and_an_extra_object_are_rejected() -> None:
    batch, says, clip = one_object_clip()
    two_wanted = replace(says, objects=(says.objects[0], ObjectAttributes("blue", "ring", "still")))
    assert not check_clip(two_wanted, clip).count
    pair = replace(batch, num_objects=torch.tensor([2]), radius=torch.full((1, 2), 0.24))
    assert not check_clip(says, render(pair, 29, 128)[0]).count


def test_a_copy_of_the_object_is_rejected() -> None:
    _, says, clip = one_object_clip()
    copied = clip.clone()
    red = (clip[..., 0].int() - clip[..., 1].int()) > 80
    up = torch.roll(clip, -60, dims=1)
    copied[torch.roll(red, -60, dims=1)] = up[torch.roll(red, -60, dims=1)]
    assert not check_clip(says, copied).count


def test_an_object_that_comes_and_goes_is_rejected() -> None:
    batch, says, clip = one_object_clip()
    empty = render(replace(batch, num_objects=torch.tensor([0])), 29, 128)[0]
    assert not check_clip(says, torch.cat([clip[:20], empty[20:]])).count


def test_an_object_that_turns_back_does_not_move_left() -> None:
    _, says, clip = one_object_clip()
    there_and_back = torch.cat([clip[::2], clip[::2].flip(0)])
    assert not check_clip(says, there_and_back).motion


def test_a_colour_that_changes_within_the_clip_is_rejected() -> None:
    batch, says, clip = one_object_clip()
    blue = render(replace(batch, colour=torch.full((1, 2), COLOUR_NAMES.index("blue"))), 29, 128)[0]
    assert not check_clip(says, torch.cat([clip[:15], blue[15:]])).colour


def test_a_formless_blob_has_no_shape() -> None:
    _, says, clip = one_object_clip()
    blob = clip.clone()
    red = (clip[..., 0].int() - clip[..., 1].int()) > 80
    blob[torch.roll(red, 12, dims=1) | torch.roll(red, -25, dims=2)] = torch.tensor([226, 30, 36], dtype=torch.uint8)
    assert read_clip(blob).scene.objects[0].shape is None
    assert not check_clip(says, blob).joint


def test_the_attributes_of_two_objects_must_not_be_swapped() -> None:
    says = SceneAttributes(
        (ObjectAttributes("red", "circle", "left"), ObjectAttributes("blue", "square", "up")), "plain"
    )
    swapped = SceneAttributes(
        (ObjectAttributes("blue", "circle", "left"), ObjectAttributes("red", "square", "up")), None
    )
    batch = replace(
        scenes(3, 1, 1.0),
        colour=torch.tensor([[COLOUR_NAMES.index("red"), COLOUR_NAMES.index("blue")]]),
        shape=torch.tensor([[0, 1]]),
        motion=torch.tensor([[0, 2]]),
        radius=torch.full((1, 2), 0.25),
        start=torch.tensor([[[0.4, -0.5], [0.5, 0.6]]]),
        travel=torch.tensor([[[-0.8, 0.0], [0.0, -0.6]]]),
        background=torch.zeros(1, dtype=torch.int64),
    )
    clip = render(batch, 17, 128)[0]
    assert check_clip(says, clip).joint
    assert not check_clip(swapped, clip).joint


def test_evaluate_counts_right_clips_and_checks_the_shape_of_what_is_generated() -> None:
    prompts = evaluation_prompts("one_object", 6)
    by_text: dict[str, EvaluationPrompt] = {prompt.text: prompt for prompt in prompts}

    def render_all_but_the_first(texts: Sequence[str], seeds: Sequence[int]) -> Tensor:
        clips = []
        for text, seed in zip(texts, seeds, strict=True):
            assert by_text[text].seed == seed
            (wanted,) = by_text[text].attributes.objects
            batch = scenes(seed, 1, 0.0)
            motion = MOTION_NAMES.index(str(wanted.motion))
            direction = torch.tensor([[-1.0, 0], [1, 0], [0, -1], [0, 1], [0, 0]])[motion]
            right = text != prompts[0].text
            batch = replace(
                batch,
                colour=torch.full((1, 2), COLOUR_NAMES.index(str(wanted.colour))),
                shape=torch.full((1, 2), SHAPE_NAMES.index(str(wanted.shape))),
                start=(-0.4 * direction).expand(1, 2, 2) if right else torch.full((1, 2, 2), 0.5),
                travel=(0.8 * direction).expand(1, 2, 2),
                background=torch.tensor([BACKGROUND_NAMES.index(by_text[text].attributes.background or "plain")]),
                radius=torch.full((1, 2), 0.3),
            )
            if not right:
                batch = replace(batch, num_objects=torch.tensor([0]))
            clips.append(render(batch, 9, 128)[0])
        return torch.stack(clips)

    accuracy, verdicts = evaluate(render_all_but_the_first, prompts, batch_size=4)
    assert [verdict.joint for verdict in verdicts] == [False, *[True] * 5]
    assert (accuracy.joint.right, accuracy.joint.total, accuracy.background.right) == (5, 6, 6)
    with pytest.raises(ValueError, match="uint8"):
        evaluate(lambda texts, seeds: torch.zeros(1, 2, 8, 8, 3), prompts)


def test_wilson_interval_of_textbook_values() -> None:
    interval = wilson(81, 263)  # Newcombe 1998, table I: 0.2553 to 0.3662
    assert interval.low == pytest.approx(0.2553, abs=1e-4)
    assert interval.high == pytest.approx(0.3662, abs=1e-4)
    assert wilson(0, 10).low == 0.0
    assert wilson(10, 10).high == 1.0
    with pytest.raises(ValueError, match="between"):
        wilson(3, 2)


def test_clips_of_frames_that_were_segmented_once_are_those_segmented_alone() -> None:
    """A part of a stream with other colours in every part, across the borders at which it is segmented."""
    clips = [render(sample_scenes(3, torch.Generator().manual_seed(seed)), 29, 96) for seed in range(2)]
    frames = torch.cat([clip for each in clips for clip in each])
    whole = segment_frames(frames, at_once=20)
    for first, last, step in ((0, 29, 1), (11, 40, 1), (50, 79, 7), (140, 174, 1)):
        mine, alone = whole.clip(slice(first, last, step)), segment(frames[first:last:step])
        assert mine.regions == alone.regions
        assert mine.regions
        assert mine.plane_colours == alone.plane_colours
        for name in ("frames", "coverage", "colour"):
            assert torch.equal(getattr(mine, name), getattr(alone, name))
        own = torch.stack([alone.labels[each.frame, each.plane] == each.label for each in alone.regions])
        seen = torch.stack([mine.labels[each.frame, each.plane] == each.label for each in mine.regions])
        assert torch.equal(own, seen)
