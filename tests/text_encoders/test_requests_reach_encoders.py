"""Encoders around others, which wait in memory, encode ahead or are shared by processes: requests and pictures reach
the one inside, and what it says of pictures comes back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import pytest
import torch
from tables import table

from diffusion_runtime import GenerationRequest
from diffusion_runtime.text_encoders.ahead import encoding_ahead
from diffusion_runtime.text_encoders.interface import Conditions, EncoderCut, TextEncoder, TextStream
from diffusion_runtime.text_encoders.offloaded import OffloadedTextEncoder
from diffusion_runtime.text_encoders.shared import _conditions, _describe, _tensors_of


class Encoder(TextEncoder):
    """Its embeddings are the number of references of the request that it is for."""

    max_tokens, library, implementation = 4, "torch", "none"

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def of_request(self, request: GenerationRequest) -> TextEncoder:
        return Encoder(len(request.references or ()))

    def encode(self, prompts: Sequence[str]) -> Conditions:
        return Conditions.of(torch.full((len(prompts), 1, 1), float(self.number)))


@table("kind", ["offloaded", "ahead"])
def test_a_request_reaches_the_encoder(kind: str) -> None:
    request = GenerationRequest("a star", references=("a.png", "b.wav"))
    if kind == "offloaded":
        encoder: TextEncoder = OffloadedTextEncoder(Encoder(), lambda: None)
        assert float(encoder.of_request(request).encode(["a star"]).embeddings) == 2
        return
    with encoding_ahead(Encoder(), ["a star"], torch.device("cpu")) as encoder:
        assert float(encoder.of_request(request).encode(["a star"]).embeddings) == 2


def test_all_that_conditions_hold_goes_to_other_processes() -> None:
    cut = EncoderCut("clip", (3, 0), 77)
    stream = TextStream(torch.ones(2, 3, 4), (3, 1))
    sent = Conditions(
        torch.zeros(2, 5, 4),
        (5, 2),
        (("qx",), ()),
        (1, 0),
        torch.ones(2, 3),
        (stream,),
        "t5",
        (cut,),
        (1, 4),
        ((0, 3),),
        (2.5, 3.0),
        ("circle", "red"),
    )
    for item in dataclasses.fields(Conditions):
        assert item.default is dataclasses.MISSING or getattr(sent, item.name) != item.default, item.name
    # As they are in JSON.
    found = _conditions(json.loads(json.dumps(_describe(sent))), _tensors_of(sent))
    for item in dataclasses.fields(Conditions):
        if item.name not in ("embeddings", "pooled", "further"):
            assert getattr(found, item.name) == getattr(sent, item.name), item.name


@pytest.fixture(autouse=True)
def _startup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_runtime.text_encoders.ahead.startup_is_on", lambda *_: True)
