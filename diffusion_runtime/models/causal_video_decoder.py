"""The decoder of AutoencoderKLWan and AutoencoderKLQwenImage: diffusers' module, or fused kernels on its weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_runtime.kernels.importing import import_failure, raised_line
from diffusion_runtime.layers.causal_decoder import (
    CausalDecoder,
    ChannelsFirstDecoder,
    ChannelsLastDecoder,
    ModuleDecoder,
)
from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.models.interface import FrameStream, LatentDecoder
from diffusion_runtime.models.video_decoder import Restore, VideoDecoder, to_unit_range
from diffusion_runtime.parallel.collectives import RankGroup, all_gather

logger = logging.getLogger("diffusion_runtime")

# The fast mode lies 52 dB and more from diffusers' frames in bfloat16, as far as bfloat16 itself from float32 (random
# weights); a wrong kernel lies below 20.
MIN_DECIBELS = 40.0
# Latent frames that the first decode of a size is compared on: one without a history, one with.
NUM_COMPARED = 2


@dataclass(frozen=True)
class FusedDecoder:
    """A decoder on the module's weights. min_decibels: what its frames must reach beside the module's, infinity for the
    same bits. description: for the report."""

    decoder: CausalDecoder[Any]
    min_decibels: float
    description: str


class CausalVideoDecoder(VideoDecoder):
    """The first of the fused decoders that agrees with diffusers' module decodes; the module itself where none does.

    The beginning of the first video of every size is decoded by both; a fused decoder that fails there is not used
    again. `implementation` says which one runs.

    fused: by preference; empty leaves everything to the module.
    """

    splits_rows = True

    def __init__(self, autoencoder: Any, restore: Restore, fused: Sequence[FusedDecoder] = ()) -> None:
        super().__init__(autoencoder, restore)
        self._module = ModuleDecoder(autoencoder)
        self._fused = list(fused)
        self._compared: set[tuple[int, ...]] = set()
        self._describe()

    def fast(self) -> LatentDecoder:
        """See LatentDecoder.fast."""
        fast = FusedDecoder(ChannelsLastDecoder(self._autoencoder), MIN_DECIBELS, "fused kernels, fast")
        return CausalVideoDecoder(self._autoencoder, self._restore, [fast])

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """See LatentDecoder.decode."""
        return torch.cat([_whole(self.stream(sample)) for sample in torch.split(latents, 1)])

    def decode_band(self, latents: torch.Tensor, bands: RankGroup) -> torch.Tensor:
        """See LatentDecoder.decode_band."""
        return torch.cat([_whole(self.stream(sample, bands)) for sample in torch.split(latents, 1)])

    def stream(self, latents: torch.Tensor, bands: RankGroup | None = None) -> FrameStream:
        """See LatentDecoder.stream: the frames of one latent frame after the other."""
        with torch.inference_mode(), OneDnnConvolutions():
            raw = self._raw(latents)
            if self._fused and tuple(raw.shape[-2:]) not in self._compared:
                self._compare(raw[:, :, :NUM_COMPARED], bands)
        decoder = self._fused[0].decoder if self._fused else self._module
        num_frames = 1 + decoder.frames_factor * (raw.shape[2] - 1)
        return FrameStream(num_frames, _in_inference_mode(decoder.decode(raw, bands)))

    def _compare(self, raw: torch.Tensor, bands: RankGroup | None) -> None:
        """Leave out fused decoders up to the first whose frames are what they should be, on all processes alike."""
        # Frames that are not numbers in diffusers' module as well are no error of a kernel.
        expected = torch.cat(list(self._module.decode(raw, bands)), dim=2).nan_to_num()
        while self._fused:
            refused = self._fused[0]
            reason = _refusal(refused, raw, expected, bands)
            if bands is not None:
                differs = all_gather(bands, torch.tensor([reason is not None], device=raw.device))
                reason = reason or ("another process's are wrong" if any(bool(each) for each in differs) else None)
            if reason is None:
                break
            del self._fused[0]
            self._compared.clear()
            self._describe()
            logger.warning("decoding: %s is left out on this machine: %s", refused.description, reason)
        self._compared.add(tuple(raw.shape[-2:]))

    def _describe(self) -> None:
        name = type(self._autoencoder).__name__
        self.implementation = f"{name}, {self._fused[0].description}" if self._fused else name


def exact_decoder(autoencoder: Any, restore: Restore) -> CausalVideoDecoder:
    """With fused kernels where the weights are on a CUDA GPU and Triton can be imported."""
    if not next(autoencoder.parameters()).is_cuda or import_failure("triton") is not None:
        return CausalVideoDecoder(autoencoder, restore)
    last = ChannelsLastDecoder(autoencoder, is_exact=True)
    first = ChannelsFirstDecoder(autoencoder)
    bits = "fused kernels, bit-identical, channels"
    fused = [FusedDecoder(last, math.inf, f"{bits} last"), FusedDecoder(first, math.inf, f"{bits} first")]
    return CausalVideoDecoder(autoencoder, restore, fused)


def _refusal(fused: FusedDecoder, raw: torch.Tensor, expected: torch.Tensor, bands: RankGroup | None) -> str | None:
    """Why a decoder is not to be used, by what it makes of a beginning; None where it may be."""
    try:
        found = torch.cat(list(fused.decoder.decode(raw, bands)), dim=2).nan_to_num()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any exception: a compiler of kernels may raise anything on a machine it does not know
        return raised_line(error)
    if torch.equal(found, expected) or _decibels(expected, found) >= fused.min_decibels:
        return None
    return f"its frames are not those of diffusers' module ({_decibels(expected, found):.1f} dB)"


def _in_inference_mode(chunks: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Frames as LatentDecoder.decode gives them. The modes hold while a chunk is decoded, and not for its reader."""
    while True:
        with torch.inference_mode(), OneDnnConvolutions():
            chunk = next(chunks, None)
            frames = None if chunk is None else to_unit_range(chunk)
        if frames is None:
            return
        yield frames


def _whole(stream: FrameStream) -> torch.Tensor:
    """All chunks in one tensor; each is written where it belongs."""
    out, position = torch.empty(0), 0
    for frames in stream.chunks:
        if position == 0:
            out = frames.new_empty(1, stream.num_frames, *frames.shape[2:])
        out[:, position : position + frames.shape[1]] = frames
        position += frames.shape[1]
    return out


def _decibels(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Peak signal-to-noise ratio of different frames in [-1, 1]; at most 300."""
    error = float(((expected.float() - found.float()) / 2).square().mean())
    return -10.0 * math.log10(max(error, 1e-30))
