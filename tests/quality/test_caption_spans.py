"""Captions say where each object's words are, and the texts themselves never change: evaluation prompts are seeded."""

from __future__ import annotations

import hashlib
from random import Random

from diffusion_runtime.quality.shapes.attributes import BACKGROUND_NAMES, COLOUR_NAMES, MOTION_NAMES, SHAPE_NAMES
from diffusion_runtime.quality.shapes.captions import EVALUATION_CAPTIONS, Caption, CaptionSettings
from scripts.shapes import ObjectAttributes, SceneAttributes, write_caption
from scripts.train_embedded.architecture import build_tokenizer
from scripts.train_embedded.object_labels import IGNORED, token_labels
from scripts.train_embedded.world import CAPTION_TOKENS

SEEDED_TEXTS = "ca2d05d0148088942a9b11a5a206d5f6e7291d21d173a5ec634be3231b047b19"
SHARED_WORDS = ("both", "same", "background", "video", "clip", "animation", "image", "picture", "drawing")


def seeded_captions(count: int, random: Random) -> list[Caption]:
    """Captions of scenes that Python's generator alone draws, so that they are the same on every machine."""

    def draw(colour: str | None, motion: str | None) -> ObjectAttributes:
        return ObjectAttributes(
            colour or random.choice(COLOUR_NAMES), random.choice(SHAPE_NAMES), motion or random.choice(MOTION_NAMES)
        )

    captions = []
    for index in range(count):
        objects = [draw(None, None)]
        if random.random() < 0.75:
            colour = objects[0].colour if random.random() < 0.3 else None
            objects.append(draw(colour, objects[0].motion if random.random() < 0.3 else None))
        scene = SceneAttributes(tuple(objects), random.choice(BACKGROUND_NAMES))
        settings = EVALUATION_CAPTIONS if index % 3 == 0 else CaptionSettings()
        captions.append(write_caption(scene, random, settings, image=index % 4 == 3))
    return captions


def test_seeded_captions_and_the_random_stream_stay_as_they_are() -> None:
    random = Random(2026)
    lines = [f"{caption.text}|{caption.attributes}" for caption in seeded_captions(400, random)]
    lines.append(str(random.random()))
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == SEEDED_TEXTS


def test_spans_hold_the_words_of_their_own_object_alone() -> None:
    relations = openings = 0
    for caption in seeded_captions(2000, Random(1)):
        assert len(caption.spans) == len(caption.attributes.objects)
        phrases = [caption.text[begin:end] for begin, end in caption.spans]
        relations += ", both" in caption.text
        openings += caption.spans[0][0] > 0
        for phrase, one in zip(phrases, caption.attributes.objects, strict=True):
            assert phrase == phrase.strip(" ,;")
            words = set(phrase.split())
            # The colour of a relation is said of both: it is no word of the second object alone.
            assert words.isdisjoint(SHARED_WORDS) or "of the same" in phrase or "in the same" in phrase, caption.text
            assert len(words & set(COLOUR_NAMES)) <= 1
            if one.colour is None:
                assert not words & set(COLOUR_NAMES), caption.text
            if one.shape is None:
                assert words & {"shape", "object"}, caption.text
            if f"a {one.colour} {one.shape}" in caption.text and len(phrases) == 1:
                assert f"{one.colour} {one.shape}" in phrase
        if ", both" not in caption.text:
            moving = [one.motion for one in caption.attributes.objects]
            for phrase, motion in zip(phrases, moving, strict=True):
                found = {side for side in ("left", "right") if side in phrase.replace("wards", "").split()}
                assert found == ({motion} if motion in ("left", "right") else set()), caption.text
    assert relations > 100
    assert openings > 100


def test_token_labels_follow_the_spans() -> None:
    tokenizer = build_tokenizer()
    captions = seeded_captions(500, Random(3))
    encoded = tokenizer(
        [caption.text.upper() for caption in captions],
        padding="max_length",
        max_length=CAPTION_TOKENS,
        return_offsets_mapping=True,
    )
    labels = token_labels(captions, encoded)
    assert labels.shape == (500, CAPTION_TOKENS, 3)
    for row, caption in enumerate(captions):
        labelled = labels[row].ne(IGNORED).any(dim=1).tolist()
        tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"][row])
        expected: list[str] = []
        for (begin, end), one in zip(caption.spans, caption.attributes.objects, strict=True):
            if one != ObjectAttributes(None, None, None):
                expected += caption.text[begin:end].split()
        assert [token for token, kept in zip(tokens, labelled, strict=True) if kept] == expected


def test_a_caption_that_names_two_objects_labels_each_with_its_own_attributes() -> None:
    text = "a video of a yellow square and a GREEN circle moving left on a plain background"
    says = SceneAttributes(
        (ObjectAttributes("yellow", "square", None), ObjectAttributes("green", "circle", "left")), "plain"
    )
    first, second = text.index("a yellow"), text.index("a GREEN")
    caption = Caption(text, says, ((first, first + 15), (second, text.index(" on a plain"))))
    encoded = build_tokenizer()([text], padding="max_length", max_length=CAPTION_TOKENS, return_offsets_mapping=True)
    (labels,) = token_labels([caption], encoded).tolist()
    yellow, green = [COLOUR_NAMES.index("yellow"), 1, IGNORED], [COLOUR_NAMES.index("green"), 0, 0]
    nothing = [IGNORED] * 3
    assert labels[:12] == [nothing] * 3 + [yellow] * 3 + [nothing] + [green] * 5
    assert labels[12:] == [nothing] * (CAPTION_TOKENS - 12)
