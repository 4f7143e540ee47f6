"""GenerationRequest: what may be asked for."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from tables import table

from diffusion_runtime import GenerationRequest
from diffusion_runtime.errors import RequestError
from diffusion_runtime.request.fields import (
    ANY_GUIDANCE,
    ATTENTION_GUIDANCE,
    GUIDANCE,
    GUIDED_CHUNKS,
    IMAGES,
    NEGATIVE_TEXT,
    PLACED_IMAGES,
    SHIFT,
    VIDEO,
    AsGiven,
)
from diffusion_runtime.request.generation_request import REQUEST_FIELDS, SAMPLERS, request_field_types
from diffusion_runtime.request.layers import layered


@table(
    ("values", "message"),
    [
        ({"prompt": ""}, "empty prompt"),
        ({"prompt": "  \n"}, "empty prompt"),
        ({"prompt": "a\0b"}, r"prompt: expected a text, got a control character, '\\x00' at 1; take it out"),
        ({"prompt": "a", "negative_prompt": "\x1b[2J"}, "negative_prompt: .* control character"),
        ({"height": 0}, "height: expected a whole number of 1 or more, got 0"),
        ({"width": 12.5}, "width"),
        ({"num_frames": True}, "num_frames"),
        ({"num_inference_steps": -3}, "num_inference_steps: expected a whole number of 1 or more, got -3"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"guidance_scale": -1.0}, "guidance_scale"),
        ({"flow_shift": 0.0}, "flow_shift"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"sampler": "unipcc"}, "sampler.*'unipc'"),
        ({"guidance_mode": "two-pass"}, "guidance_mode.*'two_pass'"),
    ],
)
def test_what_cannot_be_generated_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GenerationRequest(**{"prompt": "a red circle", **values})


def test_line_ends_and_tabs_are_part_of_a_prompt() -> None:
    assert GenerationRequest(prompt="a\n\tb\r\n\x85").prompt == "a\n\tb\r\n\x85"


def test_defaults_fill_what_is_missing_and_nothing_else() -> None:
    request = GenerationRequest("a red circle", height=64, seed=3)
    filled = request.with_defaults({"height": 256, "width": 128, "guidance_scale": 3.0})
    assert (filled.height, filled.width, filled.guidance_scale, filled.seed) == (64, 128, 3.0, 3)


@table(
    ("own", "expected"),
    [
        ({}, (4.0, 3.0)),
        ({"guidance_scale": 7.0}, (7.0, None)),
        ({"guidance_scale": 7.0, "guidance_scale_2": 2.0}, (7.0, 2.0)),
        ({"guidance_scale_2": 2.0}, (4.0, 2.0)),
    ],
)
def test_a_guidance_scale_alone_is_that_of_both_experts(
    own: dict[str, float], expected: tuple[float, float | None]
) -> None:
    """As the docstring says: guidance_scale_2 of None is the same. The second expert had the model's default."""
    defaults = {"guidance_scale": 4.0, "guidance_scale_2": 3.0, "height": 32}
    filled = GenerationRequest("a red circle", **own).with_defaults(defaults)
    assert (filled.guidance_scale, filled.guidance_scale_2, filled.height) == (*expected, 32)
    assert filled.with_defaults(defaults) == filled
    values = layered(defaults, own)
    assert (values["guidance_scale"], values.get("guidance_scale_2"), values["height"]) == (*expected, 32)


@table(
    ("own", "defaults", "expected"),
    [
        # Levels say the number of steps.
        ({"sigmas": "1,0.5"}, {"num_inference_steps": 50}, ((1.0, 0.5), None, 2)),
        ({"sigmas_before_shift": [1, 0.5]}, {"sigmas": [1.0], "num_inference_steps": 1}, (None, (1.0, 0.5), 2)),
        # Another number of steps, or a sampler that spaces its own, has no use for them.
        ({"num_inference_steps": 50}, {"sigmas": [1.0, 0.5], "num_inference_steps": 2}, (None, None, 50)),
        ({"num_inference_steps": 2}, {"sigmas": [1.0, 0.5], "num_inference_steps": 2}, ((1.0, 0.5), None, 2)),
        ({"sampler": "unipc"}, {"sigmas": [1.0, 0.5], "num_inference_steps": 2}, (None, None, 2)),
        ({"sampler": "dmd"}, {"sigmas": [1.0, 0.5], "num_inference_steps": 2}, ((1.0, 0.5), None, 2)),
    ],
)
def test_noise_levels_and_steps_of_two_sources(
    own: dict[str, Any], defaults: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    request = GenerationRequest("a", **own).with_defaults(defaults)
    assert (request.sigmas, request.sigmas_before_shift, request.num_inference_steps) == expected
    assert request.with_defaults(defaults) == request
    assert GenerationRequest.from_dict(request.to_dict()) == request


@table(
    ("values", "message"),
    [
        (
            {"sigmas": "1,half"},
            "sigmas: expected numbers with commas between them, such as 1,0.75,0.5,0.25, got '1,half'",
        ),
        ({"sigmas": [1, None]}, "expected numbers with commas"),
        ({"sigmas": []}, "expected numbers with commas"),
        ({"sigmas": "nan"}, "expected numbers with commas"),
        ({"sigmas": "1,inf"}, "expected numbers with commas"),
        ({"sigmas": 0.5}, "expected numbers with commas"),
        ({"sigmas": "1.5,0.5"}, "sigmas: expected noise levels above 0 and at most 1, got 1.5 for step 1"),
        ({"sigmas": "1000,757"}, r"\(timesteps of 1000 are noise levels times 1000\), got 1000.0 for step 1"),
        ({"sigmas": [10**400]}, "expected numbers with commas"),
        ({"sigmas": "1,0.5,0"}, r"at most 1 \(the 0 behind the last step is added by itself\), got 0.0 for step 3"),
        ({"sigmas_before_shift": "1,0.5,0.6"}, "fall from step to step, got 0.6 for step 3 after 0.5"),
        ({"sigmas_before_shift": "1,1"}, "fall from step to step, got 1 for step 2 after 1"),
        ({"sigmas": [1 - i / 2000 for i in range(1001)]}, "at most 1000 noise levels, got 1001"),
        ({"sigmas": "1", "sigmas_before_shift": "1"}, "expected one of them, got both"),
        ({"shift_terminal": 1.0}, "shift_terminal: expected a number from 0 to 0.999, got 1.0"),
    ],
)
def test_noise_levels_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GenerationRequest("a", **values)


def test_dictionaries_go_both_ways() -> None:
    request = GenerationRequest("a red circle", height=64, seed=3)
    assert GenerationRequest.from_dict(request.to_dict()) == request
    with pytest.raises(RequestError, match=r"'hieght'.*'height'"):
        GenerationRequest.from_dict({"prompt": "a", "hieght": 64})
    with pytest.raises(RequestError, match="'prompt' is missing"):
        GenerationRequest.from_dict({"height": 64})


def test_every_field_has_a_plain_type() -> None:
    types = request_field_types()
    assert types["prompt"] is str
    assert types["height"] is int
    assert types["guidance_scale"] is float
    assert set(types) == set(GenerationRequest("a").to_dict())


USES = (
    None,
    *(GUIDANCE, ANY_GUIDANCE, ATTENTION_GUIDANCE, NEGATIVE_TEXT, GUIDED_CHUNKS),
    *(IMAGES, PLACED_IMAGES, SHIFT, VIDEO),
)


def test_declarations_agree_with_the_fields() -> None:
    """One list of what is wrong: a declaration that its field's type or default contradicts."""
    wrong = []
    unset = GenerationRequest("a").to_dict()
    hints = get_type_hints(GenerationRequest)
    for name, declared in REQUEST_FIELDS.items():
        annotated = (get_args(hints[name]) or (hints[name],))[0]
        if type(declared.check).read is AsGiven.read and declared.check.kind is not annotated:
            wrong.append(f"{name}: the check is of {declared.check.kind.__name__}")
        if declared.refusal is not None and not (declared.may_stay_none and unset[name] is None):
            wrong.append(f"{name}: a field that only some models use must be open by default")
        if declared.used_with not in USES:
            wrong.append(f"{name}: used_with {declared.used_with}")
        if declared.repeatable and not declared.differs_in_batch:
            wrong.append(f"{name}: several values of one batch that must be equal")
    assert not wrong


def test_registered_samplers_are_what_a_request_and_the_help_name() -> None:
    for name in SAMPLERS:
        assert GenerationRequest("a", sampler=name).sampler == name
        assert name in REQUEST_FIELDS["sampler"].help
