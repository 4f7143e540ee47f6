"""Frames from a decoder to the CPU: in order, whole, and while the next ones are made where copies run beside
kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from diffusion_runtime.decoders.interface import FrameStream
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.generation import frame_decoding
from diffusion_runtime.media import ClipHeader
from diffusion_runtime.memory.transfers import CopyToHost, begin_copy_to_host, pinned_if_possible

CHUNKS = [torch.rand(1, count, 4, 6, 3, generator=torch.Generator().manual_seed(count)) for count in (3, 4, 2)]


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def beside_kernels(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Copies as of a CUDA device: begun when they are asked for, over once they are waited for."""

    def begin(*tensors: torch.Tensor) -> CopyToHost:
        copied = tuple(torch.zeros_like(tensor) for tensor in tensors)

        def wait() -> None:
            for target, tensor in zip(copied, tensors, strict=True):
                target.copy_(tensor)
            events.append("waited")

        return CopyToHost(copied, wait)

    monkeypatch.setattr(frame_decoding, "begin_copy_to_host", begin)


def stream_of(chunks: list[torch.Tensor], events: list[str]) -> FrameStream:
    def made() -> Iterator[torch.Tensor]:
        for chunk in chunks:
            events.append("made")
            yield chunk

    return FrameStream(sum(chunk.shape[1] for chunk in chunks), made())


def decoded(chunks: list[torch.Tensor], events: list[str]) -> torch.Tensor:
    def open_sink(_: ClipHeader) -> frame_decoding.FrameSink:
        return lambda _: events.append("taken")

    return frame_decoding.decode_frames(stream_of(chunks, events), 24.0, {}, open_sink)


@pytest.mark.usefixtures("beside_kernels")
def test_a_chunk_is_handed_over_once_the_next_one_is_on_its_way(events: list[str]) -> None:
    frames = decoded(CHUNKS, events)
    assert events == ["made", "made", "waited", "taken", "made", "waited", "taken", "waited", "taken"]
    assert torch.equal(frames, (torch.cat(CHUNKS, dim=1)[0] * 255).round().to(torch.uint8))


def test_a_chunk_of_a_cpu_is_handed_over_at_once(events: list[str]) -> None:
    frames = decoded(CHUNKS, events)
    assert events == ["made", "taken"] * 3
    assert torch.equal(frames, (torch.cat(CHUNKS, dim=1)[0] * 255).round().to(torch.uint8))


@pytest.mark.usefixtures("beside_kernels")
def test_frames_that_are_no_numbers_are_refused_by_their_place(events: list[str]) -> None:
    damaged = [CHUNKS[0], torch.full_like(CHUNKS[1], torch.nan), CHUNKS[2]]
    with pytest.raises(DiffusionRuntimeError, match=r"frames from 3 on are not numbers"):
        decoded(damaged, events)
    assert events.count("taken") == 1


def test_a_clip_is_copied_where_no_memory_can_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made by then."""
    made = torch.empty

    def empty(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return made(*arguments, **named)

    monkeypatch.setattr(torch, "empty", empty)
    room = pinned_if_possible((2, 3), torch.uint8)
    assert (room.shape, room.dtype, room.is_pinned()) == ((2, 3), torch.uint8, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_copy_beside_kernels_holds_what_was_computed() -> None:
    values = torch.rand(64, 1024, device="cuda")
    copy = begin_copy_to_host(values.clone(), values.isnan().any())
    # Behind the copy on the stream: it must not be seen.
    values.zero_()
    assert copy.wait is not None
    copy.wait()
    assert bool(copy.values[0].any())
    assert not bool(copy.values[1])
