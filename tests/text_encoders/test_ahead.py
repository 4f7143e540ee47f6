"""Prompts that are encoded while the transformer is read: the same numbers, by one thread at a time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from warm_python import run_python

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import RequestError
from diffusion_runtime.loading import prepare
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.text_encoders.ahead import EncodingAhead, encoding_ahead
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder

PATIENCE = 60.0
SMALL: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 3.0}
FIRST = GenerationRequest("a red circle", **SMALL)
OTHER = GenerationRequest("a blue square", **SMALL)
CPU = torch.device("cpu")


def test_the_first_prompt_is_encoded_while_the_rest_is_loaded(
    tiny_wan_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_pipeline(str(tiny_wan_folder), device="cpu")
    assert isinstance(plain, Pipeline)
    expected = {request.prompt: plain(request).frames for request in (FIRST, OTHER)}
    decoder_is_next, asked = threading.Event(), []
    own = type(plain.text_encoder)
    encode = own.encode

    def wait_and_encode(self: TextEncoder, prompts: Sequence[str]) -> Conditions:
        asked.append(tuple(prompts))
        # Were it encoded before the transformer is loaded, this would be in vain.
        assert decoder_is_next.wait(PATIENCE)
        return encode(self, prompts)

    def on_stage(stage: str) -> None:
        if stage == "loading the decoder":
            assert asked == [(FIRST.prompt, "")]
            decoder_is_next.set()

    monkeypatch.setattr(own, "encode", wait_and_encode)
    prepared = prepare(RuntimeConfig(str(tiny_wan_folder), device="cpu", encoding_cache=False))
    requests = [prepared.rules.resolve(request) for request in (FIRST, OTHER)]
    pipeline = prepared.load(on_stage, requests)
    assert isinstance(pipeline, Pipeline)
    assert isinstance(pipeline.text_encoder, EncodingAhead)
    for request in (FIRST, OTHER, FIRST):
        assert numpy.array_equal(pipeline(request).frames, expected[request.prompt])
    # What was encoded ahead is given once.
    assert asked == [(FIRST.prompt, ""), (OTHER.prompt, ""), (FIRST.prompt, "")]

    # Another prompt than the one that was announced is encoded as ever.
    other = prepare(RuntimeConfig(str(tiny_wan_folder), device="cpu")).load(requests=requests)
    assert numpy.array_equal(other(OTHER).frames, expected[OTHER.prompt])


def test_an_error_of_the_encoder_is_that_of_the_generation(
    tiny_wan_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: TextEncoder, prompts: Sequence[str]) -> Conditions:
        raise RequestError(f"prompt: cannot be read: {prompts[0]}")

    plain = load_pipeline(str(tiny_wan_folder), device="cpu")
    assert isinstance(plain, Pipeline)
    own = type(plain.text_encoder)
    monkeypatch.setattr(own, "encode", refuse)
    prepared = prepare(RuntimeConfig(str(tiny_wan_folder), device="cpu"))
    pipeline = prepared.load(requests=[prepared.rules.resolve(FIRST)])
    with pytest.raises(RequestError, match="cannot be read: a red circle"):
        pipeline(FIRST)
    with pytest.raises(RequestError, match="cannot be read: a blue square"):
        pipeline(OTHER)


class _Layer(nn.Module):
    """entered: set when it is called, and then it waits until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.entered, self.goes_on = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.goes_on.wait(PATIENCE)
        return x * self.weight


class _LayeredEncoder(TextEncoder):
    max_tokens, library, implementation = 4, "torch", "sdpa"

    def __init__(self) -> None:
        self.layers = [_Layer(), _Layer()]
        self.model = nn.ModuleList(self.layers)

    def encode(self, prompts: Sequence[str]) -> Conditions:
        x = torch.ones(len(prompts), 1, 1)
        for layer in self.layers:
            x = layer(x)
        return Conditions.of(x)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RequestError])
def test_a_load_that_fails_ends_the_encoding_at_the_next_layer(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = _LayeredEncoder()
    first, second = encoder.layers
    stop = EncodingAhead.stop

    def let_go_and_stop(self: EncodingAhead) -> None:
        # From another thread: `stop` has said so by then, or the second layer would be entered.
        threading.Thread(target=lambda: (self._is_stopped.wait(PATIENCE), first.goes_on.set())).start()
        stop(self)

    monkeypatch.setattr(EncodingAhead, "stop", let_go_and_stop)

    def load() -> None:
        with encoding_ahead(encoder, ["a red circle"], CPU):
            assert first.entered.wait(PATIENCE)
            raise error("while the transformer was read")

    with pytest.raises(error):
        load()
    assert not second.entered.is_set()
    assert not any(thread.name == "encoding-ahead" for thread in threading.enumerate())
    # No hook stays on its layers.
    assert not any(layer._forward_pre_hooks for layer in encoder.layers)


def test_an_interruption_while_it_is_waited_for_ends_the_encoding_first() -> None:
    """By a signal, in which `Thread.join` would forget the thread, and the process abort as it ends."""
    encoder = _LayeredEncoder()
    first, second = encoder.layers
    with encoding_ahead(encoder, ["a red circle"], CPU) as ahead:
        assert isinstance(ahead, EncodingAhead)
        assert first.entered.wait(PATIENCE)

        def interrupt() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            assert ahead._is_stopped.wait(PATIENCE)
            first.goes_on.set()

        # As late as it is waited for: `encode` waits at once, and SIGINT is handled by its thread.
        threading.Timer(0.2, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            ahead.encode(["a red circle"])
    assert not any(thread.name == "encoding-ahead" for thread in threading.enumerate())
    assert not second.entered.is_set()
    # Asked for after all, they are encoded then.
    second.goes_on.set()
    assert ahead.encode(["a red circle"]).lengths == (1,)
    assert second.entered.is_set()


@pytest.mark.slow
def test_a_process_that_ends_before_the_prompt_is_asked_for_ends_the_encoding(tmp_path: Path) -> None:
    """At the next module, by itself: what fails between loading and the first generation knows nothing of it."""
    program = f"""
import atexit, sys, threading
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from text_encoders.test_ahead import CPU, EncodingAhead, _LayeredEncoder
encoder = _LayeredEncoder()
first, second = encoder.layers
# Called last: what is registered later is called before.
atexit.register(lambda: print(ahead._is_done.is_set(), second.entered.is_set()))
ahead = EncodingAhead(encoder, ["a red circle"], CPU)
assert first.entered.wait({PATIENCE})
threading.Thread(target=lambda: (ahead._is_stopped.wait({PATIENCE}), first.goes_on.set()), daemon=True).start()
raise SystemExit(7)
"""
    (tmp_path / "ends.py").write_text(program)
    done = run_python(tmp_path / "ends.py", cwd=Path(__file__).parents[2], timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (7, "True False\n", "")


def test_without_a_prompt_or_on_other_devices_the_encoder_is_itself() -> None:
    encoder = _LayeredEncoder()
    for texts, device in (([], CPU), (["a red circle"], torch.device("mps"))):
        with encoding_ahead(encoder, texts, device) as ahead:
            assert ahead is encoder
