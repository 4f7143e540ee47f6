"""The procedural data: seeded, inside the frame, apart from each other, and without the combinations held out."""

from __future__ import annotations

from dataclasses import fields
from random import Random

import pytest
import torch

from diffusion_runtime.quality.shapes.attributes import COLOUR_NAMES, MOTION_NAMES, SHAPE_NAMES
from diffusion_runtime.quality.shapes.captions import UNKNOWN_FILLERS, all_words
from diffusion_runtime.quality.shapes.signed_distance import BOUNDING_RADIUS
from scripts.shapes import (
    HELD_OUT_COMBINATIONS,
    SceneBatch,
    SceneSettings,
    evaluation_prompts,
    is_held_out,
    render,
    sample_scenes,
    write_caption,
)


def scenes(seed: int, count: int = 8, settings: SceneSettings | None = None) -> SceneBatch:
    """Scenes of one seed on the CPU."""
    return sample_scenes(count, torch.Generator().manual_seed(seed), settings or SceneSettings())


def test_one_seed_gives_one_batch_of_scenes_and_pixels() -> None:
    first, again, other = scenes(3), scenes(3), scenes(4)
    assert all(torch.equal(getattr(first, field.name), getattr(again, field.name)) for field in fields(SceneBatch))
    assert not torch.equal(first.start, other.start)
    assert torch.equal(render(first, 5, 64), render(again, 5, 64))


def test_held_out_combinations_never_appear_in_training_scenes() -> None:
    batch = scenes(0, 20_000)
    shown = {
        (int(batch.colour[row, slot]), int(batch.shape[row, slot]), int(batch.motion[row, slot]))
        for row in range(len(batch))
        for slot in range(int(batch.num_objects[row]))
    }
    assert shown.isdisjoint(HELD_OUT_COMBINATIONS)
    assert len(shown) + len(HELD_OUT_COMBINATIONS) == len(COLOUR_NAMES) * len(SHAPE_NAMES) * len(MOTION_NAMES)


def test_held_out_prompts_ask_for_held_out_combinations_only() -> None:
    for prompt in evaluation_prompts("held_out", 60):
        (wanted,) = prompt.attributes.objects
        assert wanted.colour is not None
        assert wanted.shape is not None
        assert wanted.motion is not None
        assert is_held_out(
            COLOUR_NAMES.index(wanted.colour), SHAPE_NAMES.index(wanted.shape), MOTION_NAMES.index(wanted.motion)
        )


def test_objects_stay_inside_the_frame_and_apart_in_every_frame() -> None:
    batch = scenes(1, 20_000, SceneSettings(two_object_fraction=1.0))
    for time in torch.linspace(0, 1, 29):
        centre = batch.start + time * batch.travel
        reach = centre.abs().amax(dim=-1) + BOUNDING_RADIUS * batch.radius
        assert float(reach.max()) < 1.0
        distance = torch.linalg.vector_norm(centre[:, 0] - centre[:, 1], dim=-1)
        assert float((distance - BOUNDING_RADIUS * batch.radius.sum(dim=1)).min()) > 0.0


def test_two_objects_are_never_of_one_colour_and_one_shape() -> None:
    batch = scenes(2, 20_000, SceneSettings(two_object_fraction=1.0))
    same = (batch.colour[:, 0] == batch.colour[:, 1]) & (batch.shape[:, 0] == batch.shape[:, 1])
    assert not bool(same.any())


def test_evaluation_prompts_are_seeded_and_a_shorter_list_is_a_prefix() -> None:
    many = evaluation_prompts("two_objects", 24)
    assert evaluation_prompts("two_objects", 10) == many[:10]
    assert len({prompt.text for prompt in many}) > 20
    assert all(len(prompt.attributes.objects) == 2 for prompt in many)
    assert all(None not in (one.colour, one.shape, one.motion) for prompt in many for one in prompt.attributes.objects)
    assert {prompt.attributes.background is None for prompt in many} == {True, False}


def test_image_captions_mostly_leave_the_motion_out() -> None:
    descriptions = scenes(5, 400, SceneSettings(two_object_fraction=0.0)).attributes()
    captions = [write_caption(scene, Random(index), image=True) for index, scene in enumerate(descriptions)]
    silent = sum(caption.attributes.objects[0].motion is None for caption in captions)
    assert 280 < silent < 360


@pytest.mark.parametrize("image", [False, True])
def test_every_word_of_every_caption_is_in_the_vocabulary(image: bool) -> None:
    known = set(all_words()) | {word for filler in UNKNOWN_FILLERS for word in filler.split()}
    random = Random(0)
    for scene in scenes(6, 3000).attributes():
        text = write_caption(scene, random, image=image).text
        words = text.replace(",", " , ").replace(";", " ; ").split()
        assert set(words) <= known, text


def test_a_caption_says_what_it_reports() -> None:
    random = Random(1)
    for scene in scenes(7, 500, SceneSettings(two_object_fraction=0.0)).attributes():
        caption = write_caption(scene, random)
        (said,) = caption.attributes.objects
        words = set(caption.text.replace(",", " ").replace("wards", "").replace("ward", "").split())
        if said.motion in ("left", "right"):
            assert said.motion in words, caption.text
        if said.motion is None:
            assert not words & {"left", "right", "up", "down", "rising", "falling"}, caption.text
        if said.colour is None:
            assert not words & set(COLOUR_NAMES), caption.text
