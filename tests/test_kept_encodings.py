"""Encodings of texts and images are kept for later requests: equal bytes, said in the report, within a bound."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_models import TINY_SIZES, write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.core.kept_results import KeptResults
from diffusion_runtime.generation.prompt_encoding import KEPT, encode_prompts
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.text_encoders.offloaded import OffloadedTextEncoder
from diffusion_runtime.text_encoders.t5 import UMT5TextEncoder

REQUEST = GenerationRequest("a ring", height=64, width=64, num_frames=5, num_inference_steps=2, seed=1)


def kept_parts(media: Any) -> list[str]:
    return [each.component for each in media.attention_report.libraries if each.implementation == KEPT]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What text encoders were asked for."""
    asked: list[Any] = []
    encode = UMT5TextEncoder.encode

    def counted(self: UMT5TextEncoder, prompts: Any) -> Any:
        asked.append(tuple(prompts))
        return encode(self, prompts)

    monkeypatch.setattr(UMT5TextEncoder, "encode", counted)
    return asked


def test_a_prompt_is_encoded_once_and_later_requests_have_the_bytes_of_first_ones(
    tmp_path: Path, calls: list[Any]
) -> None:
    with_cache, without = (load_pipeline("shapes", device="cpu", encoding_cache=keeps) for keeps in (True, False))
    other = dataclasses.replace(REQUEST, seed=2)
    expected = [without(each).frames.tolist() for each in (REQUEST, other)]
    assert len(calls) == 2
    media = [with_cache(each) for each in (other, REQUEST, other)]
    assert len(calls) == 3
    assert [kept_parts(each) for each in media] == [[], ["text_encoder"], ["text_encoder"]]
    assert [each.frames.tolist() for each in media] == [expected[1], expected[0], expected[1]]
    # The report says it, and the file is the same.
    first, _, again = (each.save(tmp_path / "a.mp4").read_bytes() for each in media)
    assert first == again
    # Beside another text, the same one is rounded otherwise.
    with_cache.generate([REQUEST, dataclasses.replace(REQUEST, prompt="two blue stars")])
    assert len(calls) == 4
    with_cache.set_loras([])
    assert kept_parts(with_cache(REQUEST)) == []


def test_a_text_without_pictures_is_kept_for_other_sizes_and_steps_in_an_offloaded_encoder_too() -> None:
    pipeline = load_pipeline("shapes", device="cpu")
    assert isinstance(pipeline, Pipeline)
    waiting, kept = OffloadedTextEncoder(pipeline.text_encoder, lambda: None), KeptResults(2**20)
    libraries = []
    for num_steps in (2, 3):
        recorder = AttentionRecorder()
        batch = [pipeline.resolve(dataclasses.replace(REQUEST, num_inference_steps=num_steps))]
        encode_prompts(waiting, batch, recorder, pipeline.device, pipeline.dtype, kept, reads_negative=True)
        libraries += [each.implementation for each in recorder.report().libraries]
    # What is said of an encoder in 8 bits comes after the attention.
    assert (libraries[0].partition(",")[0], libraries[1:]) == ("sdpa", [KEPT])


def test_images_are_known_by_their_content(tmp_path: Path) -> None:
    pipeline = load_pipeline(str(write_tiny_wan(tmp_path / "model", condition="clip and tokens")), device="cpu")
    assert isinstance(pipeline, Pipeline)
    path = tmp_path / "a.png"
    Image.new("RGB", (64, 64), "red").save(path)
    request = dataclasses.replace(REQUEST, **TINY_SIZES, image_path=str(path), guidance_scale=1.0)
    first, again = pipeline(request), pipeline(dataclasses.replace(request, prompt="a star"))
    assert pipeline(dataclasses.replace(request, prompt="a ring")).frames.tolist() == first.frames.tolist()
    assert (kept_parts(first), kept_parts(again)) == ([], ["vae encoder", "image_encoder"])
    Image.new("RGB", (64, 64), "blue").save(path)
    changed = pipeline(request)
    assert kept_parts(changed) == ["text_encoder"]
    assert changed.frames.tolist() != first.frames.tolist()


def test_what_was_not_used_for_longest_goes_first() -> None:
    kept = KeptResults(100)

    def get(key: str, num_bytes: int = 40) -> bool:
        value, was_kept = kept.get(key, lambda: torch.full((num_bytes,), ord(key), dtype=torch.uint8))
        assert value.tolist() == [ord(key)] * num_bytes
        return was_kept

    assert [get(key) for key in "ababcab"] == [False, False, True, True, False, False, False]
    # More than the bound is not kept, and drops nothing.
    assert [get("x", 101), get("x", 101), get("b")] == [False, False, True]
    kept.clear()
    assert not get("b")
