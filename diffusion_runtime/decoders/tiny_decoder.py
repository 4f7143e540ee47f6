"""Tiny video decoders for previews, in the file format of TAEHV (https://github.com/madebyollin/taehv).

A TAEHV decoder is a chain of 2D convolutions over single frames; a frame depends on earlier ones through memory blocks,
which also read their own input of the frame before. Three levels each double the height and width, and some of them the
frames. It takes latents as the transformer works on them, without mean and deviation, and gives frames in [0, 1].
Widths, factors and channels are read off the shapes of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.core.empty_modules import empty_modules
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.decoders.sample_decoder import DecodeNext
from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.layers.weight_range import unusable_numbers
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.untrusted.files import user_path
from diffusion_runtime.weights.tensor_files import read_tensors
from diffusion_runtime.weights.weight_files import DAMAGED, listed

KEY = "vae_decoder"
TINY = "tiny"
SOURCE = "https://github.com/madebyollin/taehv/tree/main/safetensors"
_PICKLES = (".pth", ".pt", ".ckpt", ".bin")
_PREFIX = "decoder."
# Indices in the published chain: the first convolution, the memory blocks of each level, the layer that makes frames of
# channels, the convolution after it, and the last convolution.
_FIRST, _LAST = 1, 22
_LEVELS = ((3, 4, 5), (9, 10, 11), (15, 16, 17))
_GROW = (7, 13, 19)
_NARROW = (8, 14, 20)


@dataclass(frozen=True)
class TinyLatents:
    """The latents that a file decodes. patch: pixels that the last convolution makes of each of its own, a side."""

    num_channels: int
    frames_factors: tuple[int, ...]
    patch: int

    @property
    def spatial_factor(self) -> int:
        return self.patch << len(_LEVELS)

    @property
    def temporal_factor(self) -> int:
        return math.prod(self.frames_factors)


class _MemoryBlock(nn.Module):
    """Three convolutions over a frame and the frame before, added to the frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Apply the block. x: [frames, channels, height, width]; before: the frame before each."""
        return F.relu(self.conv(torch.cat([x, before], dim=1)) + x)


class _Grow(nn.Module):
    """Each frame as `factor` frames, by a map of its channels."""

    def __init__(self, width: int, factor: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, factor * width, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown: torch.Tensor = self.conv(x)
        return grown.reshape(-1, *x.shape[1:])


class _SoftLimit(nn.Module):
    """Latents within 3 of zero, by a hyperbolic tangent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / 3) * 3


class TinyNetwork(nn.Module):
    """The chain, with the names of the files. widths: of the first convolution and of those after each level."""

    def __init__(self, latents: TinyLatents, widths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = [_SoftLimit(), nn.Conv2d(latents.num_channels, widths[0], 3, padding=1), nn.ReLU()]
        for factor, width, narrowed in zip(latents.frames_factors, widths, widths[1:], strict=False):
            layers += [_MemoryBlock(width) for _ in range(3)]
            layers += [nn.Upsample(scale_factor=2), _Grow(width, factor)]
            layers.append(nn.Conv2d(width, narrowed, 3, padding=1, bias=False))
        layers += [nn.ReLU(), nn.Conv2d(widths[-1], 3 * latents.patch**2, 3, padding=1)]
        self.decoder = nn.ModuleList(layers)
        self.latents = latents

    def frames(
        self, latents: torch.Tensor, memories: dict[nn.Module, torch.Tensor] | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield the frames of one latent frame after the other, [frames, 3, height, width] in [0, 1].

        latents: [frames, channels, height, width]. memories: what the memory blocks keep of the clip's latents before
        these; none before the first latent frame, which gives the last of its frames alone.
        """
        memories = {} if memories is None else memories
        for index in range(latents.shape[0]):
            is_first = not memories
            x = latents[index : index + 1]
            for layer in self.decoder:
                if isinstance(layer, _MemoryBlock):
                    last = memories.get(layer, torch.zeros_like(x[:1]))
                    memories[layer] = x[-1:]
                    x = layer(x, torch.cat([last, x[:-1]]))
                else:
                    x = layer(x)
            x = F.pixel_shuffle(x, self.latents.patch).clamp(0.0, 1.0)
            yield x[-1:] if is_first else x


class TinyDecoder(LatentDecoder):
    """A TAEHV decoder: for previews, in its weights' dtype. name: of its file, for the report."""

    library = "taehv"

    def __init__(self, network: TinyNetwork, name: str) -> None:
        weight = next(network.parameters())
        self._network = network
        self._device, self._dtype = weight.device, weight.dtype
        self.implementation = f"tiny decoder {name}: a preview"

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            samples = [
                torch.cat([part.float() for part in self._network.frames(sample.transpose(0, 1))])
                for sample in latents.to(self._device, self._dtype)
            ]
            return torch.stack(samples).permute(0, 1, 3, 4, 2).contiguous()

    @contextmanager
    def clip(self, bands: RankGroup | None = None) -> Iterator[DecodeNext]:
        assert bands is None, "it knows no bands"
        yield self._clip({})

    def _clip(self, memories: dict[nn.Module, torch.Tensor]) -> DecodeNext:
        """Return the function that decodes the next latents. memories: as of TinyNetwork.frames, which replaces them
        and writes to none."""

        def decode_next(latents: torch.Tensor) -> Iterator[torch.Tensor]:
            with torch.inference_mode():
                piece = latents[0].transpose(0, 1).to(self._device, self._dtype)
                for part in self._network.frames(piece, memories):
                    yield part.float().permute(0, 2, 3, 1)[None].contiguous()

        return DecodeNext(decode_next, lambda: self._clip(dict(memories)))


@dataclass(frozen=True)
class TinyFile:
    """A TAEHV file, read and found to fit a model."""

    path: Path
    network: TinyNetwork

    def load(self, device: torch.device, dtype: torch.dtype) -> TinyDecoder:
        """Load the decoder on a device."""
        return TinyDecoder(self.network.to(device, dtype), self.path.name)


def is_published_choice(choice: str) -> bool:
    """Return whether a choice is `tiny`, or a file with the name of one that TAEHV publishes."""
    return choice == TINY or Path(choice).stem in PUBLISHED


def read_tiny_decoder(
    choice: str, folder: AnyFolder, family: str, geometry: LatentGeometry, published: Mapping[int, str]
) -> TinyFile:
    """Read the file of a choice: a path, or `tiny`, the published one for the model's latents, in the model's folder.

    family: the name of the model's, for messages. published: number of latent channels -> the name of the published
    file, without its suffix. Raises ConfigError for a model without one, and for a file of other latents;
    ModelLoadError for a file that is missing, damaged or of another kind.
    """
    expected = published.get(geometry.num_channels)
    if expected is None:
        raise ConfigError(
            f"{KEY}: no tiny decoder is published for latents of {family} models; leave out --vae-decoder"
        )
    path = folder / f"{expected}.safetensors" if choice == TINY else user_path(choice, KEY)
    where = f"{expected}.safetensors from {SOURCE}"
    if choice == TINY and not path.is_file():
        raise ConfigError(f"{KEY}: {TINY}: {path} is missing; download {where}, put it there, or name it instead")
    if path.suffix in _PICKLES:
        raise ModelLoadError(f"{path}: a pickle can run code when it is opened, and is never read; download {where}")
    tensors, _ = read_tensors(path, KEY)
    network = _network_of(path, tensors)
    _check_latents(path, network.latents, family, geometry, expected)
    return TinyFile(path, network)


def _network_of(path: Path, tensors: Mapping[str, torch.Tensor]) -> TinyNetwork:
    """Build the network that fits the tensors. Raises ModelLoadError for tensors of no TAEHV decoder."""
    wanted = {name: tensor for name, tensor in tensors.items() if name.startswith(_PREFIX)}

    def shape(place: int, part: str = "weight") -> torch.Size:
        name = f"{_PREFIX}{place}.{part}"
        if name not in wanted or wanted[name].dim() != 4 or 0 in wanted[name].shape:
            raise ModelLoadError(f"{path}: tensor {name!r} of a TAEHV decoder is missing; this is another kind of file")
        return wanted[name].shape

    grown = [shape(place, "conv.weight") for place in _GROW]
    patch = math.isqrt(shape(_LAST)[0] // 3)
    widths = (shape(_FIRST)[0], *(shape(place)[0] for place in _NARROW))
    if max(*widths, patch, shape(_FIRST)[1]) > 4096:
        raise ModelLoadError(f"{path}: no TAEHV decoder is that wide: {max(widths)} channels")
    latents = TinyLatents(shape(_FIRST)[1], tuple(max(1, size[0] // size[1]) for size in grown), patch)
    with empty_modules():
        network = TinyNetwork(latents, widths)
    state = network.state_dict()
    differing = [
        *(f"{name} is missing" for name in state if name not in wanted),
        *(f"{name} is unknown" for name in wanted if name not in state),
        *(
            f"{name} has shape {tuple(wanted[name].shape)}, expected {tuple(tensor.shape)}"
            for name, tensor in state.items()
            if name in wanted and wanted[name].shape != tensor.shape
        ),
    ]
    if differing:
        raise ModelLoadError(f"{path}: not the tensors of a TAEHV decoder: {listed(differing)}")
    for name, tensor in wanted.items():
        unusable = unusable_numbers(tensor)
        if unusable is not None:
            raise ModelLoadError(f"{path}: tensor {name!r} {unusable}. {DAMAGED}")
    network.load_state_dict(wanted, assign=True)
    return network.requires_grad_(False).eval()


def _check_latents(path: Path, found: TinyLatents, family: str, geometry: LatentGeometry, expected: str) -> None:
    """Check that the decoder is for the model's latents. The published files for latents of one shape differ by name
    alone, so a published name for another model is refused as well. Raises ConfigError."""
    # An image has one frame, whatever the decoder would make of the next.
    temporal = found.temporal_factor if geometry.temporal_factor > 1 else 1
    wanted = (geometry.num_channels, geometry.spatial_factor, geometry.temporal_factor)
    if (found.num_channels, found.spatial_factor, temporal) != wanted:
        raise ConfigError(
            f"{KEY}: {path.name} decodes latents of {found.num_channels} channels, {found.spatial_factor} x "
            f"{found.spatial_factor} pixels and {found.temporal_factor} frames; {family} models have {wanted[0]} "
            f"channels, {wanted[1]} x {wanted[1]} pixels and {wanted[2]} frames. use {expected}.safetensors"
        )
    if path.stem in PUBLISHED and not path.stem.startswith(expected):
        raise ConfigError(
            f"{KEY}: {path.name} decodes other latents of the same shape; {family} models need {expected}.safetensors"
        )


# Every published name; files with other names are judged by their shapes.
PUBLISHED = frozenset(
    "taehv taehv1_5 taehv1_5_super taew2_1 taew2_2 taew2_2_super taecvx taeos1_3 taeltx_2 taeltx2_3".split()
)
