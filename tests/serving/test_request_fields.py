"""Bodies and fields: three encodings of one request are one draft; what is unknown or ignored is an error by name."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from tables import table

from diffusion_runtime.serving.api_errors import ApiError
from diffusion_runtime.serving.bodies import nested, read_body
from diffusion_runtime.serving.body import Body
from diffusion_runtime.serving.request_fields import in_clients_words, may_be_of_any_kind, read_draft
from diffusion_runtime.serving.settings import Limits


def body_of(**sent: Any) -> Body:
    """The body of a request as a client encodes it."""
    request = httpx.Request("POST", "http://localhost/", **sent)
    content = request.read()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    headers = [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
    return asyncio.run(read_body(Request({"type": "http", "method": "POST", "headers": headers}, receive)))


ATTENTION = {"default": {"backend": "torch_sdpa"}, "schedule": [{"steps": "0-1", "backend": "reference"}]}
VALUES = {"prompt": "a ring", "num_inference_steps": 8, "seed": 3, "attention": ATTENTION, "lora": ["a", "b"]}


def multipart(fields: list[tuple[str, str]]) -> dict[str, Any]:
    boundary = "xyz"
    parts = [f'--{boundary}\r\ncontent-disposition: form-data; name="{n}"\r\n\r\n{v}\r\n' for n, v in fields]
    content = ("".join(parts) + f"--{boundary}--\r\n").encode()
    return {"content": content, "headers": {"content-type": f"multipart/form-data; boundary={boundary}"}}


ENCODINGS = {
    "json": {"json": VALUES},
    "brackets": multipart(
        [
            ("prompt", "a ring"),
            ("num_inference_steps", "8"),
            ("seed", "3"),
            ("attention_config[default][backend]", "torch_sdpa"),
            ("attention_config[schedule][0][steps]", "0-1"),
            ("attention_config[schedule][0][backend]", "reference"),
            ("lora[]", "a"),
            ("lora[]", "b"),
        ]
    ),
    "json in a form": multipart(
        [
            ("prompt", "a ring"),
            ("steps", "8"),
            ("seed", "3"),
            ("attention", json.dumps(ATTENTION)),
            ("lora", '["a", "b"]'),
        ]
    ),
    "urlencoded": {
        "data": {
            "prompt": "a ring",
            "steps": "8",
            "seed": "3",
            "attention": json.dumps(ATTENTION),
            "lora[]": ["a", "b"],
        }
    },
    "flattened": {"json": {"prompt": "a ring", "extra_body": {**VALUES, "prompt": "another"}}},
}


@table("name", ENCODINGS)
def test_every_encoding_of_a_request_is_the_same_draft(name: str) -> None:
    draft = read_draft("video", body_of(**ENCODINGS[name]), "shapes", Limits())
    assert draft.requests == [{"prompt": "a ring", "num_inference_steps": 8, "seed": 3}]
    assert draft.attention == ATTENTION
    assert draft.loras == [{"name": "a", "scale": 1.0}, {"name": "b", "scale": 1.0}]


REFUSED = [
    ({}, "prompt", "invalid_value"),
    ({"prompt": " "}, "prompt", "invalid_value"),
    ({"prompt": 3}, "prompt", "invalid_value"),
    ({"prompt": "x" * 32_001}, "prompt", "invalid_value"),
    ({"prompt": "a\x00b"}, "prompt", "invalid_value"),
    ({"prompt": "x", "negative_prompt": "a\x00b"}, "negative_prompt", "invalid_value"),
    ({"prompt": "x", "sampler": "a\x00b"}, "sampler", "invalid_value"),
    ({"prompt": "x", "return_previews": "yes"}, "return_previews", "invalid_value"),
    ({"promt": "x"}, "promt", "unknown_parameter"),
    ({"prompt": "x", "model": "gpt-image-1"}, "model", "model_not_found"),
    ({"prompt": "x", "size": "64"}, "size", "invalid_value"),
    ({"prompt": "x", "size": "64x9999999"}, "size", "invalid_value"),
    ({"prompt": "x", "size": "9000x9000"}, "size", "invalid_value"),
    ({"prompt": "x", "num_frames": 100000}, "num_frames", "invalid_value"),
    ({"prompt": "x", "steps": 201}, "num_inference_steps", "invalid_value"),
    ({"prompt": "x", "steps": 4, "num_inference_steps": 4}, "num_inference_steps", "invalid_value"),
    ({"prompt": "x", "seed": [1, 2]}, "seed", "invalid_value"),
    ({"prompt": "x", "seed": 2**70}, "seed", "invalid_value"),
    ({"prompt": "x", "guidance_scale": "high"}, "guidance_scale", "invalid_value"),
    ({"prompt": "x", "guidance_scale": True}, "guidance_scale", "invalid_value"),
    ({"prompt": "x", "quality": "hd"}, "quality", "unsupported_for_model"),
    ({"prompt": "x", "enable_teacache": True}, "enable_teacache", "unsupported_for_model"),
    ({"prompt": "x", "image_path": "/etc/passwd"}, "image_path", "forbidden_parameter"),
    ({"prompt": "x", "video_path": "/etc/passwd"}, "video_path", "forbidden_parameter"),
    ({"prompt": "x", "output_path": "/tmp/x"}, "output_path", "forbidden_parameter"),
    ({"prompt": "x", "perf_dump_path": "/tmp/x"}, "perf_dump_path", "forbidden_parameter"),
    ({"prompt": "x", "model_path": "/tmp"}, "model_path", "forbidden_parameter"),
    ({"prompt": "x", "step_cache": "magcache:file=/etc/passwd"}, "step_cache", "forbidden_parameter"),
    ({"prompt": "x", "lora": [{"name": "a", "path": "/x"}]}, "lora", "forbidden_parameter"),
    ({"prompt": "x", "lora": 3}, "lora", "invalid_value"),
    ({"prompt": "x", "n": 2}, "n", "invalid_value"),
    ({"prompt": "x", "input_reference": "/etc/passwd"}, "input_reference", "invalid_value"),
    ({"prompt": "x", "input_reference": "file:///etc/passwd"}, "input_reference", "invalid_value"),
    ({"prompt": "x", "input_reference": {"file_id": "f"}}, "input_reference", "unsupported_for_model"),
    ({"prompt": "x", "extra_body": 3}, "extra_body", "invalid_value"),
]


@table("values, param, code", REFUSED)
def test_what_is_wrong_unknown_or_would_be_ignored_is_named(values: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_draft("video", body_of(json=values), "shapes", Limits())
    assert (caught.value.param, caught.value.code) == (param, code), caught.value


def test_images_get_a_seed_each_and_their_options() -> None:
    draft = read_draft("image", body_of(json={"prompt": "x", "n": 3, "seed": 7, "user": "u"}), "shapes", Limits())
    assert [request["seed"] for request in draft.requests] == [7, 8, 9]
    assert draft.requests[0]["num_frames"] == 1
    drawn = read_draft("image", body_of(json={"prompt": "x", "seed": None}), "shapes", Limits())
    assert 0 <= drawn.requests[0]["seed"] < 2**31
    warned = read_draft("image", body_of(json={"prompt": "x", "generator_device": "cuda"}), "shapes", Limits())
    assert "CPU" in warned.warnings[0]


@table("kind, name", [("image", "init_image"), ("video", "init_video")])
def test_a_picture_to_start_from_is_a_file_and_no_path(kind: str, name: str) -> None:
    url = "data:image/png;base64,AAAA"
    draft = read_draft(
        kind, body_of(json={"prompt": "x", "strength": 0.5, name: {"image_url": url}}), "shapes", Limits()
    )
    assert draft.images == {"init_path": [url]}
    assert draft.requests[0]["strength"] == 0.5
    assert in_clients_words(kind, "init_path: is black") == f"{name}: is black"
    for refused in (
        {"init_path": "/etc/passwd"},
        {name: [url, url]},
        {"pipeline_arguments": {"eta": 1}},
        {name: "/a.png"},
    ):
        with pytest.raises(ApiError):
            read_draft(kind, body_of(json={"prompt": "x", **refused}), "shapes", Limits())


def test_files_of_a_video_are_sent_by_their_own_names() -> None:
    """A driving or control video, masks of either kind, a sound and an image to end with; none is a path, or two."""
    url = "data:image/png;base64,AAAA"
    fields = {
        "video": "video_path",
        "mask": "mask_path",
        "image_mask": "image_mask_path",
        "last_image": "last_image_path",
        "audio": "audio_path",
    }
    for name, field in fields.items():
        draft = read_draft("video", body_of(json={"prompt": "x", name: url}), "shapes", Limits())
        assert draft.images == {field: [url]}
        assert may_be_of_any_kind("video", name) == (name in ("video", "mask", "audio"))
        flag = f"--{field.replace('_', '-')}"
        assert (
            in_clients_words("video", f"{field}: give one: {flag} FILE, {flag}s")
            == f"{name}: give one: {name}, {flag}s"
        )
        for wrong in ({field: "/etc/passwd"}, {name: "/etc/passwd"}):
            with pytest.raises(ApiError):
                read_draft("video", body_of(json={"prompt": "x", **wrong}), "shapes", Limits())
        several = body_of(json={"prompt": "x", name: [url, url]})
        if name == "image_mask":
            assert read_draft("video", several, "shapes", Limits()).images == {field: [url, url]}
            continue
        with pytest.raises(ApiError, match=f"{name}: expected one file, got 2"):
            read_draft("video", several, "shapes", Limits())
    # The mask of an image is an image.
    assert not may_be_of_any_kind("image", "mask")


@table(
    "pairs",
    [[("a[b]", "1"), ("a", "2")], [("a", "1"), ("a", "2")], [("a[]", "1"), ("a[9]", "2")], [("a" + "[b]" * 20, "1")]],
)
def test_names_of_a_form_that_contradict_each_other_are_refused(pairs: list[tuple[str, str]]) -> None:
    with pytest.raises(ApiError):
        nested(pairs)
