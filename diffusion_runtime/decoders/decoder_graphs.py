"""CUDA graphs of a causal video decoder: the decoding of one latent frame is captured once for each size and replayed.

The decoder of a small model launches some 300 kernels for every latent frame and computes each in a few microseconds. A
graph launches them at once, with the numbers of an eager run, as they are the same kernels on the same sizes. Several
latent frames in one call would need fewer launches too, but sum convolutions in another order (in float32 on a CPU).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from diffusion_runtime.decoders.causal_decoder import CausalDecoder, LatentFrame
from diffusion_runtime.decoders.sample_decoder import DecodeNext, SampleDecoder
from diffusion_runtime.denoising.cuda_graphs.capture import Capture, ForwardTime
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import (
    CAPTURED,
    FIRST,
    TIMED,
    kernel_switches,
    refusal_after,
)
from diffusion_runtime.errors import ConfigError, first_line
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.report.attention_report import GraphReplays

# Sizes of latents whose graphs are kept; the least recently used is dropped for a new one.
MAX_SIZES = 4
# Replayed frames are passed on together up to this many bytes: the code that follows costs some 15 launches per chunk.
MERGED_BYTES = 16 << 20
UNIT = "forward passes of the decoder"

LIBRARY = "by a library's module"
AT_ONCE = "by a decoder that does not go from latent frame to latent frame"
SHARED = "shared by several processes"
BUSY = "while another clip is decoded"


class DecoderGraphs:
    """The CUDA graphs of one pipeline's decoder, and the count of replays since `start`."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._sizes: OrderedDict[Hashable, _FixedFrames] = OrderedDict()
        self._num_replayed = 0
        self._eager: Counter[str] = Counter()

    def start(self) -> None:
        """Reset the counts."""
        self._num_replayed = 0
        self._eager.clear()

    def count(self, reason: str | None) -> None:
        """Count one forward pass. reason: why it ran eagerly, None for a replay."""
        if reason is None:
            self._num_replayed += 1
        else:
            self._eager[reason] += 1

    def report(self) -> GraphReplays:
        """Return the counts; a decoder that counts nothing does not use graphs."""
        eager = dict(self._eager)
        if not eager and not self._num_replayed:
            eager = {AT_ONCE: 1}
        num_graphs = sum(size.num_graphs for size in self._sizes.values())
        num_bytes = sum(size.num_bytes for size in self._sizes.values())
        return GraphReplays(
            num_forwards=self._num_replayed + sum(eager.values()),
            num_replayed=self._num_replayed,
            num_graphs=num_graphs,
            pool_bytes=num_bytes + self.capture.pool_bytes() if num_graphs else 0,
            eager=eager,
            unit=UNIT,
        )

    @contextmanager
    def of_clip(self, decoder: CausalDecoder[Any], latents: torch.Tensor) -> Iterator[_FixedFrames | None]:
        """Context manager: the frames of this clip size, for one clip at a time; None while one is decoded."""
        weights = tuple(weight.data_ptr() for weight in decoder.parameters())
        key = (
            decoder,
            latents.shape[-2:],
            latents.dtype,
            latents.device,
            weights,
            kernel_switches(latents.device.type),
        )
        size = self._sizes.setdefault(key, _FixedFrames(decoder, self.capture))
        self._sizes.move_to_end(key)
        if len(self._sizes) > MAX_SIZES:
            self._sizes.popitem(last=False)
        if size.is_busy:
            yield None
            return
        size.begin()
        try:
            yield size
        finally:
            size.end()


class GraphedDecoder(SampleDecoder):
    """Decoder whose latent frames are replayed from CUDA graphs, where it goes from one to the next and is bound by
    launches."""

    def __init__(self, decoder: SampleDecoder, graphs: DecoderGraphs) -> None:
        self._decoder = decoder
        self._graphs = graphs
        self.frames_factor = decoder.frames_factor
        self.keeps_history = decoder.keeps_history

    def decode(self, raw: torch.Tensor, ranks: RankGroup | None = None) -> Iterator[torch.Tensor]:
        """Decode to the same bits as the decoder; replayed frames come in larger chunks."""
        if not self.keeps_history:
            yield from self._counted(self._decoder.decode(raw, ranks), LIBRARY)
            return
        with self.clip(ranks) as decode_next:
            yield from decode_next(raw)

    @contextmanager
    def clip(self, ranks: RankGroup | None = None) -> Iterator[DecodeNext]:
        """Decode a clip in pieces; replayed frames of one piece come in larger chunks."""
        with ExitStack() as stack:
            replayed: DecodeNext | None = None

            def begin(raw: torch.Tensor) -> DecodeNext:
                if not isinstance(self._decoder, CausalDecoder):
                    return self._eager(stack.enter_context(self._decoder.clip(ranks)), LIBRARY)
                if ranks is not None:
                    return self._eager(stack.enter_context(self._decoder.clip(ranks)), SHARED)
                size = stack.enter_context(self._graphs.of_clip(self._decoder, raw))
                if size is None:
                    return self._eager(stack.enter_context(self._decoder.clip()), BUSY)
                return self._replayed(self._decoder, size)

            def decode_next(raw: torch.Tensor) -> Iterator[torch.Tensor]:
                # The size of the first latents decides which graphs there are.
                nonlocal replayed
                replayed = replayed or begin(raw)
                return replayed(raw)

            yield DecodeNext(decode_next, _refuse_fork)

    def _eager(self, decode_next: DecodeNext, reason: str) -> DecodeNext:
        return DecodeNext(lambda raw: self._counted(decode_next(raw), reason), _refuse_fork)

    def _counted(self, chunks: Iterator[torch.Tensor], reason: str) -> Iterator[torch.Tensor]:
        """Yield chunks that run eagerly, and count them."""
        for chunk in chunks:
            self._graphs.count(reason)
            yield chunk

    def _replayed(self, decoder: CausalDecoder[Any], size: _FixedFrames) -> DecodeNext:
        is_first = True

        def frames(raw: torch.Tensor) -> Iterator[tuple[torch.Tensor, bool]]:
            """Yield the frames of each latent frame, and whether they were replayed."""
            nonlocal is_first
            latents = decoder.prepare(raw)
            for index in range(latents.shape[2]):
                chunk, reason = size.decode(latents[:, :, index : index + 1], is_first=is_first)
                is_first = False
                self._graphs.count(reason)
                yield chunk, reason is None

        return DecodeNext(lambda raw: _merged(frames(raw)), _refuse_fork)


def _refuse_fork() -> DecodeNext:
    raise ConfigError(
        "fork: CUDA graphs of the decoder hold what the convolutions of one clip have read; expected "
        "cuda_graphs='off', got graphs; load the model with cuda_graphs='off' (--cuda-graphs off)"
    )


def _merged(chunks: Iterator[tuple[torch.Tensor, bool]]) -> Iterator[torch.Tensor]:
    """Merge consecutive replayed chunks."""
    held: list[torch.Tensor] = []
    for chunk, is_replayed in chunks:
        held.append(chunk)
        if not is_replayed or sum(each.nbytes for each in held) >= MERGED_BYTES:
            yield torch.cat(held, dim=2) if len(held) > 1 else chunk
            held = []
    if held:
        yield torch.cat(held, dim=2)


class _Form:
    """One of the two forms of a clip's latent frames: the first, or the later ones."""

    def __init__(self) -> None:
        self.num_passes = 0
        self.time: ForwardTime | None = None
        self.replay: Callable[[], torch.Tensor] | None = None
        self.refusal: str | None = None


class _FixedFrames:
    """Buffers that decode latent frames of one size at fixed addresses. histories: as of LatentFrame, kept from clip to
    clip while a graph reads them."""

    def __init__(self, decoder: CausalDecoder[Any], capture: Capture) -> None:
        self._decoder = decoder
        self._capture = capture
        self._histories: dict[nn.Module, torch.Tensor] = {}
        self._latents = torch.empty(0)
        self._first, self._later = _Form(), _Form()
        self.is_busy = False

    @property
    def num_graphs(self) -> int:
        return sum(form.replay is not None for form in (self._first, self._later))

    @property
    def num_bytes(self) -> int:
        """Bytes that graphs read."""
        return self._latents.nbytes + sum(history.nbytes for history in self._histories.values())

    def begin(self) -> None:
        """Begin a clip: clear the histories."""
        self.is_busy = True
        if self._histories:
            torch._foreach_zero_(list(self._histories.values()))

    def end(self) -> None:
        """End a clip. Histories of a large decoder take a gigabyte: without a graph they are freed with their clip."""
        self.is_busy = False
        if not self.num_graphs:
            self._histories.clear()

    def decode(self, latents: torch.Tensor, *, is_first: bool) -> tuple[torch.Tensor, str | None]:
        """Decode a latent frame [1, channels, 1, height, width]; return the frames as a tensor of their own, and why
        they were computed eagerly, None for a replay."""
        form = self._first if is_first else self._later
        frame = LatentFrame(is_first, self._histories, None)
        form.num_passes += 1
        if form.replay is not None:
            self._latents.copy_(latents)
            return form.replay().clone(), None
        if form.num_passes == 1:
            return self._decoder.decode_frame(latents, frame), FIRST
        if form.time is None:
            chunk, form.time = self._capture.timed(lambda: self._decoder.decode_frame(latents, frame))
            return chunk, TIMED
        # The first frame needs the least: its graph alone is not worth the histories that it would keep.
        form.refusal = form.refusal or self._later.refusal or refusal_after(form.time)
        if form.refusal is None:
            return self._capture_frame(form, latents, frame)
        return self._decoder.decode_frame(latents, frame), form.refusal

    def _capture_frame(self, form: _Form, latents: torch.Tensor, frame: LatentFrame) -> tuple[torch.Tensor, str | None]:
        if not self.num_graphs:
            self._latents = latents.clone(memory_format=torch.contiguous_format)
        fixed = self._latents.copy_(latents)
        chunk = self._capture.warm_up(lambda: self._decoder.decode_frame(fixed, frame))
        # A capture may compute, and a frame must enter the histories only once.
        histories = list(self._histories.values())
        kept = [history.clone() for history in histories]
        try:
            form.replay = self._capture.capture(lambda: self._decoder.decode_frame(fixed, frame))
        except RuntimeError as error:
            form.refusal = f"the capture failed: {first_line(error)}"
        torch._foreach_copy_(histories, kept)
        return chunk, form.refusal or CAPTURED
