"""A text encoder's conditions on their way to other processes: nothing is lost."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest
import torch

from diffusion_runtime.parallel.process_info import ProcessInfo
from diffusion_runtime.parallel.world import World
from diffusion_runtime.text_encoders.interface import Conditions, EncoderCut, TextEncoder, TextStream
from diffusion_runtime.text_encoders.shared import SharedTextEncoder


class Lengths(TextEncoder):
    """Conditions of every kind, made of the lengths of prompts."""

    max_tokens = 7
    library = "none"
    implementation = "lengths"

    def encode(self, prompts: Sequence[str]) -> Conditions:
        numbers = torch.tensor([float(len(prompt)) for prompt in prompts])
        return Conditions(
            numbers[:, None, None].expand(-1, 4, 3).to(torch.bfloat16),
            tuple(range(len(prompts))),
            tuple((prompt,) for prompt in prompts),
            (0,) * len(prompts),
            numbers[:, None],
            (TextStream(numbers[:, None, None], (1,) * len(prompts)),),
            "the first",
            (EncoderCut("the second", tuple(range(len(prompts))), 5),),
        )


def test_conditions_arrive_as_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    world = World.join(ProcessInfo(0, 1, 0, 1, "localhost", port), announce=lambda failure: None)
    try:
        world.open_groups(torch.device("cpu"), timeout=600)
        made = Lengths().encode(["a", "bcd"])
        shared = SharedTextEncoder(Lengths(), world)
        assert (shared.max_tokens, shared.library, shared.implementation) == (7, "none", "lengths")
        received = shared.encode(["a", "bcd"])
    finally:
        world.leave()
    assert (received.lengths, received.unknown_words, received.num_cut_tokens) == ((0, 1), (("a",), ("bcd",)), (0, 0))
    assert (received.encoder, received.further_cuts) == (made.encoder, made.further_cuts)
    remark = "prompt 'bcd': too long for the second, the last 1 tokens past 5 are cut off there"
    assert received.remarks(1, "bcd")[-1] == remark
    assert received.take([1]).remarks(0, "bcd")[-1] == remark
    assert received.embeddings.dtype == torch.bfloat16
    assert torch.equal(received.embeddings, made.embeddings)
    assert made.pooled is not None
    assert received.pooled is not None
    assert torch.equal(received.pooled, made.pooled)
    assert received.further[0].lengths == (1, 1)
    assert torch.equal(received.further[0].embeddings, made.further[0].embeddings)
