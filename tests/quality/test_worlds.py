"""What the clips of prompts must show: prompts read back, and clips judged by the world of their model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch

from diffusion_runtime.cli.prompt_set import requests_of_set, without_prompts
from diffusion_runtime.cli.settings import Flags
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.quality import worlds
from diffusion_runtime.quality.emoji.captions import write_caption
from diffusion_runtime.quality.emoji.prompt_reading import read_prompt, vocabulary
from diffusion_runtime.quality.emoji.scene import SceneSettings, sample_scenes
from diffusion_runtime.quality.vocabularies import vocabulary_of
from diffusion_runtime.quality.worlds import WORLDS, proportions, wanted_of
from diffusion_runtime.text_encoders.unknown_words import Vocabulary, unknown_words_remark
from scripts.emoji.render import render


def test_prompts_of_emoji_are_read_as_they_were_written() -> None:
    random = Random(5)
    for index, scene in enumerate(sample_scenes(400, torch.Generator().manual_seed(5)).attributes()):
        caption = write_caption(scene, random, image=index % 4 == 0)
        found, wanted = read_prompt(caption.text), caption.attributes
        assert found is not None, caption.text
        assert (found.scene, found.time) == (wanted.scene, wanted.time), caption.text
        assert sorted(map(repr, found.objects)) == sorted(map(repr, wanted.objects)), caption.text


@pytest.mark.parametrize(
    "prompt",
    [
        "a purple whale jumping",
        "in the sea at night",
        "a dog and a cat and a fox",
        "a big small dog",
        "dogs walking left",
        "a dog walking left walking right",
        "a dog in the sea in the snow",
        "a dog in the sea in the night sky",
        "a dog a video of",
        "two big",
        "a dog #1",
    ],
)
def test_other_words_and_orders_are_not_read(prompt: str) -> None:
    assert read_prompt(prompt) is None


def test_a_leap_out_of_the_sea_names_a_motion_and_a_scene() -> None:
    wanted = WORLDS["emoji"].read_prompt("a whale jumping out of the sea at night")
    assert wanted is not None
    assert (wanted.scene, wanted.time, wanted.objects[0].motion) == ("sea", "night", "up")
    assert WORLDS["emoji"].read_prompt("a whale jumping out of the sea in space") is None


def test_words_that_stand_outside_their_phrases_are_found() -> None:
    """Every caption is of phrases alone; what the tokenizer does not know is not named here."""
    cases = {
        "a hot cat": {"hot"},
        "a hot dog in the blue sky": set(),
        "a Blue cat in the very dark sky, and fire": {"blue", "in", "dark", "sky"},
        "a red fox moving": {"moving"},
        "a cat in a garage": {"in"},
        "": set(),
    }
    for text, expected in cases.items():
        assert set(vocabulary().strays(text)) == expected, text
    assert vocabulary().strays("a hot blue cat") == {"hot": "hot dog", "blue": "in a blue sky"}
    random = Random(5)
    for scene in sample_scenes(100, torch.Generator().manual_seed(5)).attributes():
        assert vocabulary().strays(write_caption(scene, random).text) == {}


def test_a_remark_names_content_before_prepositions() -> None:
    emoji, shapes = vocabulary_of("emoji"), vocabulary_of("shapes")
    cases: list[tuple[str, Vocabulary | None, Sequence[str], str | None]] = [
        ("a cat in a garage", emoji, ["garage"], "does not know 'garage'; such"),
        ("a cat in a hot bat", emoji, [], "only within phrases 'hot' (as in 'hot dog'); such"),
        ("a cat on fire", emoji, [], "only within phrases 'on' (as in 'on snow'); such"),
        ("a cat on grass", emoji, [], None),
        ("a striped star", shapes, [], "docs/quality.md#what-shapes-knows"),
        ("a blue cat", None, [], None),
    ]
    for prompt, model, unknown, said in cases:
        found = unknown_words_remark(prompt, unknown, (), model)
        assert (found is None) if said is None else (found is not None and said in found), (prompt, found)


def test_only_frames_that_a_network_judges_are_copied_to_its_device() -> None:
    seen: dict[str, str] = {}
    for name, world in WORLDS.items():

        def judge(_: object, frames: torch.Tensor, name: str = name) -> torch.Tensor:
            seen[name] = frames.device.type
            return frames

        dataclasses.replace(world, judge=judge).judge_on(torch.device("meta"), None, torch.zeros(1, dtype=torch.uint8))
    assert seen == {"shapes": "cpu", "emoji": "meta"}


def test_clips_are_judged_by_what_their_prompt_names() -> None:
    scenes = sample_scenes(3, torch.Generator().manual_seed(3), SceneSettings(two_object_fraction=0.5))
    verdicts, others = [], []
    for scene, clip in zip(scenes.attributes(), render(scenes, 29, 128), strict=True):
        caption = write_caption(scene, Random(1))
        wanted, other = wanted_of("emoji", caption.text), wanted_of("emoji", "a fox spinning in the desert")
        assert wanted is not None
        assert other is not None
        verdicts.append(wanted.judge(clip))
        others.append(other.judge(clip))
    assert proportions(verdicts)["joint"].rate == 1.0
    found = proportions(others)
    assert found["joint"].rate == 0.0
    assert set(found) == {"count", "thing", "motion", "scene", "time", "size", "place", "joint"}


def test_models_without_a_world_or_a_judge_want_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wanted_of("wan2.1-1.3b", "a red circle") is None
    assert wanted_of("shapes", "a red circle") is not None
    assert wanted_of("shapes", "a fox") is None
    monkeypatch.setattr(worlds, "EMOJI_DETECTOR", tmp_path / "detector.safetensors")
    assert wanted_of("emoji", "a fox") is None
    flags = without_prompts(Flags(), "emoji:3")
    with pytest.raises(
        ConfigError,
        match=r"emoji: clips of it cannot be judged here: the network of its judge.*Use --prompt-set shapes:",
    ):
        requests_of_set([_request(flags)], "emoji:3", "emoji")


@pytest.mark.parametrize(
    ("has_judge", "said"), [(False, "COUNT:SEED, up to"), (True, "SEED, or the same of emoji, up")]
)
def test_an_unknown_prompt_set_lists_those_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_judge: bool, said: str
) -> None:
    detector = tmp_path / "detector.safetensors"
    if has_judge:
        detector.touch()
    monkeypatch.setattr(worlds, "EMOJI_DETECTOR", detector)
    with pytest.raises(ConfigError, match=r"expected shapes:COUNT or shapes:COUNT:SEED") as refused:
        without_prompts(Flags(), "animals:7")
    assert said in str(refused.value)


def test_prompt_sets_are_of_the_world_that_is_named() -> None:
    for name in WORLDS:
        requests = requests_of_set([_request(without_prompts(Flags(), f"{name}:7:1"))], f"{name}:7:1", name)
        assert len({request.seed for request in requests}) == 7
        assert all(wanted_of(name, request.prompt) is not None for request in requests)
    with pytest.raises(ConfigError, match="expected shapes:COUNT or shapes:COUNT:SEED"):
        without_prompts(Flags(), "animals:7")


def test_a_prompt_set_of_another_world_than_the_models_is_refused() -> None:
    asked = [_request(without_prompts(Flags(), "shapes:3"))]
    with pytest.raises(ConfigError, match=r"emoji was not trained on; use --prompt-set emoji:3, or --model-path"):
        requests_of_set(asked, "shapes:3", "emoji")
    # A causal model knows the words of shapes, and any other model may make them without a judge.
    for model in ("shapes-causal", "wan2.1-1.3b"):
        assert len(requests_of_set(asked, "shapes:3", model)) == 3


def _request(flags: Flags):  # type: ignore[no-untyped-def]
    from diffusion_runtime.request.generation_request import GenerationRequest

    return GenerationRequest(flags.prompts[0], seed=int(flags.seeds[0]))
