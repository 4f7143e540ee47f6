"""The decoder of a video autoencoder, or fused kernels on its weights; at once or in tiles.

Models differ in the normalisation of latents, in the kernels and in the size of tiles.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT
from diffusion_runtime.decoders.causal_decoder_network import CausalVideoAutoencoder
from diffusion_runtime.decoders.decoder_graphs import DecoderGraphs, GraphedDecoder
from diffusion_runtime.decoders.decoder_memory import memory_advice
from diffusion_runtime.decoders.fused_norms import fuse_norms, with_shared_weights
from diffusion_runtime.decoders.interface import FrameStream, LatentDecoder
from diffusion_runtime.decoders.sample_decoder import DecodeNext, SampleDecoder, TiledDecoder, Tiling, WholeDecoder
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.memory.device_memory import explain_memory_shortage
from diffusion_runtime.parallel.collectives import RankGroup, all_gather
from diffusion_runtime.startup.importing import import_failure, raised_line

logger = logging.getLogger("diffusion_runtime")

# Normalised latents, float32, [batch, channels, frames, height, width] -> those that the autoencoder decodes.
Restore = Callable[[torch.Tensor], torch.Tensor]
# The fast mode is within 52 dB or better of diffusers' frames in bfloat16, as far as bfloat16 itself is from float32
# (random weights); a wrong kernel is below 20.
MIN_DECIBELS = 40.0
# Latent frames on which the first decode of a size is compared: one without a history, one with one.
NUM_COMPARED = 2


@dataclass(frozen=True)
class FusedDecoder:
    """A decoder on the same weights. min_decibels: what its frames must reach against those without fused kernels,
    infinity for the same bits. description: for the report. min_latents: places of a whole clip, frames x height x
    width, from which it is used: compiling and comparing it costs more than a smaller clip wins."""

    decoder: SampleDecoder
    min_decibels: float
    description: str
    min_latents: int = 0


@dataclass(frozen=True)
class Decoders:
    """Decoders of one autoencoder. module: diffusers' module, or an eager decoder with its bits. fused: by preference;
    empty leaves everything to the module. make_fast: what the `fast` mode uses instead, built on first use; None where
    there is no such mode."""

    module: SampleDecoder
    fused: Sequence[FusedDecoder]
    make_fast: Callable[[], FusedDecoder] | None = None


class VideoDecoder(LatentDecoder):
    """Decoder that uses the first fused decoder that agrees with `Decoders.module`, or the module where none does.

    The beginning of the first video of every size is decoded by both; a fused decoder that fails there is not used
    again. `implementation` names the one that runs, or ran last. Computes in its weights' dtype.

    tiling: its tiles, in which it decodes where they are its default. takes_bands: whether its decoders go from latent
    frame to latent frame, and can be given a band of rows.
    """

    library = "diffusers"

    def __init__(
        self,
        autoencoder: Any,
        restore: Restore,
        decoders: Decoders,
        tiling: Tiling,
        *,
        takes_bands: bool = False,
    ) -> None:
        weight = next(autoencoder.parameters())
        self._autoencoder = autoencoder
        self._restore = restore
        self._device = weight.device
        self._dtype = weight.dtype
        self._module = decoders.module
        self._fused = list(decoders.fused)
        self._make_fast = decoders.make_fast
        self._tiling = tiling
        self._tiles: Tiling | None = None
        self._takes_bands = takes_bands
        self._compared: set[tuple[int, ...]] = set()
        self._graphs: DecoderGraphs | None = None
        self._set_tiling(tiling.chosen("auto"))

    def fast(self) -> LatentDecoder:
        if self._make_fast is None:
            return self
        other = self._copy()
        other._fused = [self._make_fast()]
        other._describe(other._fused[0])
        return other

    def in_tiles(self, choice: str) -> LatentDecoder:
        other = self._copy()
        other._set_tiling(self._tiling.chosen(choice))
        return other

    def with_graphs(self, graphs: DecoderGraphs) -> LatentDecoder:
        other = self._copy()
        other._graphs = graphs
        return other

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return torch.cat([_whole(self.stream(sample)) for sample in torch.split(latents, 1)])

    def decode_band(self, latents: torch.Tensor, bands: RankGroup) -> torch.Tensor:
        return torch.cat([_whole(self.stream(sample, bands)) for sample in torch.split(latents, 1)])

    def stream(self, latents: torch.Tensor, bands: RankGroup | None = None) -> FrameStream:
        """Stream; the normalisation is undone in float32, whatever dtype the decoder computes in."""
        raw, decoder = self._chosen(latents, bands)
        num_frames = 1 + decoder.frames_factor * (raw.shape[2] - 1)
        return FrameStream(num_frames, self._chunks(decoder.decode(raw, bands), latents))

    @contextlib.contextmanager
    def clip(self, bands: RankGroup | None = None) -> Iterator[DecodeNext]:
        if self._tiles is not None:
            raise ConfigError(
                "stream: a decoder in tiles keeps nothing between two pieces of a clip; leave out --vae-tiling on"
            )
        if not self._module.keeps_history:
            raise ConfigError(f"stream: {self.implementation} needs all latents of a clip at once; leave out --stream")
        with contextlib.ExitStack() as stack:

            def begin(latents: torch.Tensor) -> tuple[torch.Tensor, DecodeNext]:
                # With the first piece: the choice of decoder depends on the size.
                raw, decoder = self._chosen(latents, bands, is_whole=False)
                return raw, stack.enter_context(decoder.clip(bands))

            yield self._clip(begin)

    def _clip(
        self, begin: Callable[[torch.Tensor], tuple[torch.Tensor, DecodeNext]], next_raw: DecodeNext | None = None
    ) -> DecodeNext:
        """Return the function that decodes the next latents. begin: first latents -> those as the autoencoder takes
        them, and what decodes them. next_raw: of a clip that has begun."""

        def decode_next(latents: torch.Tensor) -> Iterator[torch.Tensor]:
            nonlocal next_raw
            if next_raw is None:
                raw, next_raw = begin(latents)
            else:
                with self._decoding(latents):
                    raw = self._raw(latents)
            return self._chunks(next_raw(raw), latents)

        def fork() -> DecodeNext:
            assert next_raw is not None, "a fork comes behind the first piece"
            return self._clip(begin, next_raw.fork())

        return DecodeNext(decode_next, fork)

    def _chosen(
        self, latents: torch.Tensor, bands: RankGroup | None, *, is_whole: bool = True
    ) -> tuple[torch.Tensor, SampleDecoder]:
        """Return the latents as the autoencoder takes them, and the decoder for this size. is_whole: whether they are
        all of a clip."""
        with self._decoding(latents):
            raw = self._raw(latents)
            num_latents = math.prod(raw.shape[2:]) if is_whole else math.inf
            is_fused = bool(self._fused) and num_latents >= self._fused[0].min_latents
            if is_fused and tuple(raw.shape[-2:]) not in self._compared:
                self._compare(raw[:, :, :NUM_COMPARED], bands)
        fused = self._fused[0] if is_fused and self._fused else None
        self._describe(fused)
        chosen = self._module if fused is None else fused.decoder
        return raw, self._as_tiled(chosen if self._graphs is None else GraphedDecoder(chosen, self._graphs))

    def _chunks(self, chunks: Iterator[torch.Tensor], latents: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield frames as LatentDecoder.decode gives them. Torch's modes are set only while a chunk is decoded, not for
        its reader."""
        while True:
            with self._decoding(latents):
                chunk = next(chunks, None)
                frames = None if chunk is None else to_unit_range(chunk)
            if frames is None:
                return
            yield frames

    @contextlib.contextmanager
    def _decoding(self, latents: torch.Tensor) -> Iterator[None]:
        with (
            explain_memory_shortage("decoding", lambda: self._advice(latents)),
            torch.inference_mode(),
            # Elsewhere it would cost a few microseconds a call and change nothing.
            OneDnnConvolutions() if self._device.type == "cpu" else contextlib.nullcontext(),
        ):
            yield

    def _raw(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the latents as the autoencoder takes them."""
        return self._restore(latents.to(self._device, torch.float32)).to(self._dtype)

    def _advice(self, latents: torch.Tensor) -> str:
        """Return advice on what needs less memory."""
        # As the autoencoder takes them: some fold them.
        frames, height, width = self._raw(latents).shape[2:]
        # One latent frame after the other.
        frames = 1 if self._takes_bands else frames
        return memory_advice(self._autoencoder, (frames, height, width), self._dtype, self._tiling)

    def _as_tiled(self, decoder: SampleDecoder) -> SampleDecoder:
        return decoder if self._tiles is None else TiledDecoder(decoder, self._tiles)

    def _compare(self, raw: torch.Tensor, bands: RankGroup | None) -> None:
        """Drop fused decoders up to the first whose frames are as expected, on all processes alike."""
        # Frames that are not finite without fused kernels either are no fault of a kernel. Tiles are decoded by every
        # process for itself: one whose kernel fails would leave the others waiting.
        ranks = None if self._tiles is not None else bands
        expected = torch.cat(list(self._as_tiled(self._module).decode(raw, ranks)), dim=2).nan_to_num()
        while self._fused:
            refused = self._fused[0]
            reason, level = self._refusal(refused, raw, expected, ranks) or (None, logging.INFO)
            if bands is not None:
                differs = all_gather(bands, torch.tensor([reason is not None], device=raw.device))
                reason = reason or ("another process's are wrong" if any(bool(each) for each in differs) else None)
            if reason is None:
                break
            del self._fused[0]
            self._compared.clear()
            logger.log(level, "decoding: %s is left out on this machine: %s", refused.description, reason)
        self._compared.add(tuple(raw.shape[-2:]))

    def _refusal(
        self, fused: FusedDecoder, raw: torch.Tensor, expected: torch.Tensor, ranks: RankGroup | None
    ) -> tuple[str, int] | None:
        """Return why a decoder must not be used, from its frames of a beginning, and the level that this is logged at;
        None where it may be used. Which convolutions give the same bits differs from size to size (95.9 dB apart on an
        H200 at 256 x 256): that does not deserve a warning."""
        if raw.is_cuda and (failure := import_failure("triton")) is not None:
            return failure, logging.WARNING
        try:
            found = torch.cat(list(self._as_tiled(fused.decoder).decode(raw, ranks)), dim=2).nan_to_num()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any exception: a kernel compiler may raise anything on a machine it does not know
            return raised_line(error), logging.WARNING
        reason = differs_by(expected, found, fused.min_decibels)
        if reason is None:
            return None
        is_close = differs_by(expected, found, MIN_DECIBELS) is None
        return reason, logging.INFO if is_close else logging.WARNING

    def _copy(self) -> VideoDecoder:
        other = copy.copy(self)
        other._fused, other._compared = list(self._fused), set()
        return other

    def _set_tiling(self, tiles: Tiling | None) -> None:
        self._tiles = tiles
        self.splits_rows = self._takes_bands and tiles is None
        self.splits_tiles = tiles is not None and not tiles.is_exact
        self._describe(self._fused[0] if self._fused else None)

    def _describe(self, fused: FusedDecoder | None) -> None:
        is_ours = isinstance(self._autoencoder, CausalVideoAutoencoder)
        parts = [self._autoencoder.class_name if is_ours else type(self._autoencoder).__name__]
        parts += [] if fused is None else [fused.description]
        if self._tiles is not None:
            parts.append(f"in {self._tiles.text}")
        self.implementation = ", ".join(parts)


def norm_fused(autoencoder: Any, network: Callable[[Any, torch.Tensor], torch.Tensor], frames_factor: int) -> Decoders:
    """Return diffusers' module, with norm and SiLU in one pass where the weights are on a CUDA GPU and Triton can be
    imported, as far as that gives the same bits.

    network: an autoencoder's decoder without tiles: (autoencoder, raw latents) -> frames. frames_factor: see
    SampleDecoder.
    """

    def on(module: Any) -> WholeDecoder:
        return WholeDecoder(lambda raw: network(module, raw), frames_factor)

    def fused(*, is_exact: bool) -> Iterator[FusedDecoder]:
        module = with_shared_weights(autoencoder)
        if fuse_norms(module.decoder, is_exact=is_exact):
            description = f"norm and SiLU fused, {'bit-identical' if is_exact else 'fast'}"
            yield FusedDecoder(on(module), math.inf if is_exact else MIN_DECIBELS, description)

    exact = fused(is_exact=True) if has_kernels(autoencoder) else ()
    return Decoders(on(autoencoder), list(exact), lambda: next(fused(is_exact=False)))


def has_kernels(autoencoder: Any) -> bool:
    """Return whether its weights are on a CUDA GPU and Triton is installed. Triton is imported, which takes 0.3 to 0.8
    s, when a fused decoder is compared: clips that are too small for it need none."""
    return next(autoencoder.parameters()).is_cuda and importlib.util.find_spec("triton") is not None


def differs_by(expected: torch.Tensor, found: torch.Tensor, min_decibels: float, what: str = "frames") -> str | None:
    """Return why numbers, about in [-1, 1], are too far from the expected ones; None where they are not."""
    if torch.equal(found, expected):
        return None
    error = float(((expected.float() - found.float()) / 2).square().mean())
    decibels = -10.0 * math.log10(max(error, 1e-30))
    return None if decibels >= min_decibels else f"its {what} are not those without fused kernels ({decibels:.1f} dB)"


def _whole(stream: FrameStream) -> torch.Tensor:
    """Return all chunks in one tensor; each is written to its place."""
    out, position = torch.empty(0), 0
    for frames in stream.chunks:
        if frames.shape[1] == stream.num_frames:
            return frames
        if position == 0:
            out = frames.new_empty(1, stream.num_frames, *frames.shape[2:])
        out[:, position : position + frames.shape[1]] = frames
        position += frames.shape[1]
    return out


def to_unit_range(frames: torch.Tensor) -> torch.Tensor:
    """Convert [batch, 3, frames, height, width] in [-1, 1] to [batch, frames, height, width, 3], float32 in [0, 1]."""
    return frames.float().mul_(0.5).add_(0.5).clamp_(0.0, 1.0).permute(0, 2, 3, 4, 1).contiguous()


def by_factor(scaling_factor: float) -> Restore:
    """Return the map to raw latents from latents that are raw ones times `scaling_factor`."""
    return lambda latents: latents / scaling_factor


def by_statistics(mean: torch.Tensor, std: torch.Tensor, scaling_factor: float = 1.0) -> Restore:
    """Return the map to raw latents from (raw - mean) / std * scaling_factor. mean, std: [channels], on the decoder's
    device."""
    mean, std = (statistic.view(1, -1, 1, 1, 1) for statistic in (mean, std))
    return lambda latents: latents * std / scaling_factor + mean


def read_statistics(folder: AnyFolder) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Read every channel's latent mean and deviation. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, COMPONENT)
    num_channels = file.whole_number("z_dim", 16)
    return file.numbers("latents_mean", num_channels), file.numbers("latents_std", num_channels)


def restore_by_config(folder: AnyFolder, device: torch.device) -> Restore:
    """Read `by_statistics` from vae/config.json. Raises ModelLoadError that names the file and the key."""
    mean, std = (torch.tensor(statistic, device=device) for statistic in read_statistics(folder))
    return by_statistics(mean, std)
