"""Latent upsampler (`--upsampler-path`): a network that doubles height and width of clean latents, which a second stage
of denoising then refines at full size."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.core.model_folder import LINKS, AnyFolder, ConfigFile, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.errors import ConfigError, ModelLoadError, shown
from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.untrusted.files import user_path
from diffusion_runtime.weights.checkpoint import Checkpoint
from diffusion_runtime.weights.level_list_names import STATISTICS
from diffusion_runtime.weights.tensor_files import SafetensorsFile
from diffusion_runtime.weights.weight_files import listed

_FOLDER = "latent_upsampler"


@dataclass(frozen=True)
class SecondStage:
    """A family's second stage. upsampler: diffusers' class, whose folder a user names. sigmas: noise levels of its
    steps, the first of which the upsampled latents are noised to; distilled_sigmas: of models distilled to few
    steps."""

    upsampler: DiffusersComponent
    sigmas: tuple[float, ...]
    distilled_sigmas: tuple[float, ...]


@dataclass(frozen=True)
class UpsamplerFolder:
    """An upsampler's folder, of which the json is read. component: named as that folder is, next to `parent`."""

    parent: Path
    component: DiffusersComponent

    def load(self, model_folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> LatentUpsampler:
        """Load the network for a model's latents. Raises ModelLoadError for missing weights or a misfit."""
        network = self.component.load(self.parent, device, dtype)
        mean, std = _statistics(model_folder, device)
        return LatentUpsampler(network, mean, std, read_config(model_folder, COMPONENT).number("scaling_factor", 1.0))

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of its weights in this dtype; reads json alone."""
        return sum(each.num_numbers for each in self.component.tensors(self.parent)) * dtype.itemsize


class LatentUpsampler:
    """Upsampler of normalised latents. network: of raw latents. mean, std: of every channel, [channels], float32;
    scaling_factor: of normalised ones, (raw - mean) / std * scaling_factor."""

    def __init__(
        self,
        network: Callable[[torch.Tensor], torch.Tensor],
        mean: torch.Tensor,
        std: torch.Tensor,
        scaling_factor: float,
    ) -> None:
        self._network: Any = network
        self._mean, self._std = (statistic.view(1, -1, 1, 1, 1) for statistic in (mean, std))
        self._scaling_factor = scaling_factor

    def __call__(
        self, latents: torch.Tensor, *, adain_factor: float = 0.0, tone_map_compression: float = 0.0
    ) -> torch.Tensor:
        """Return normalised latents [batch, channels, frames, height, width] at twice the height and width, float32.
        One sample after the other: at full size the activations need the most memory. adain_factor: see
        with_statistics_of; tone_map_compression: see tone_mapped; 0 for none."""
        weight = next(self._network.parameters())
        samples = []
        for sample in torch.split(latents.to(weight.device, torch.float32), 1):
            raw = sample * self._std / self._scaling_factor + self._mean
            with torch.inference_mode(), OneDnnConvolutions():
                larger: torch.Tensor = self._network(raw.to(weight.dtype)).float()
            if adain_factor > 0:
                larger = with_statistics_of(raw, larger, adain_factor)
            if tone_map_compression > 0:
                larger = tone_mapped(larger, tone_map_compression)
            samples.append((larger - self._mean) / self._std * self._scaling_factor)
        return torch.cat(samples)


def with_statistics_of(reference: torch.Tensor, latents: torch.Tensor, factor: float) -> torch.Tensor:
    """Move raw latents [batch, channels, frames, height, width], by `factor` of 0 to 1, towards the mean and deviation
    of each sample's channels in `reference` (adaptive instance normalisation, arXiv:1703.06868)."""
    axes = (2, 3, 4)
    own_deviation, own_mean = torch.std_mean(latents, axes, keepdim=True)
    deviation, mean = torch.std_mean(reference, axes, keepdim=True)
    return torch.lerp(latents, (latents - own_mean) / own_deviation * deviation + mean, factor)


def tone_mapped(latents: torch.Tensor, compression: float) -> torch.Tensor:
    """Scale down values of raw latents beyond about 1, at `compression` 1 by up to 0.6 and by less the smaller they
    are, as LTX-Video's authors do before a second stage."""
    strength = 0.75 * compression
    scales: torch.Tensor = 1.0 - 0.8 * strength * torch.sigmoid(4.0 * strength * (latents.abs() - 1.0))
    return latents * scales


def open_upsampler(path: str, second_stage: SecondStage | None, family: str, num_channels: int) -> UpsamplerFolder:
    """Open what RuntimeConfig.upsampler_path names: the folder of the network, one that has it in `latent_upsampler`,
    or its file, whose tensors say its settings. num_channels: of the model's latents.

    Raises ConfigError for a model without a second stage and a folder that is none, and ModelLoadError for one of
    another network; reads json and the heads of files alone.
    """
    if second_stage is None:
        raise ConfigError(f"upsampler_path: {family} models have no second stage; leave out --upsampler-path")
    named = upsampler_place(user_path(path, "upsampler_path"))
    place = _folder_of(named, second_stage.upsampler.class_name) if named.is_file() else named
    if not (place / "config.json").is_file():
        raise ConfigError(
            f"upsampler_path: {place} has no config.json; expected the folder of a "
            f"{second_stage.upsampler.class_name}, one with it in {_FOLDER}, or its file"
        )
    file = read_config(place.parent, place.name)
    if place != named:
        file = ConfigFile(named, file.values)
    _check(file, second_stage.upsampler.class_name, num_channels)
    opened = UpsamplerFolder(place.parent, dataclasses.replace(second_stage.upsampler, name=place.name))
    opened.component.tensors(opened.parent)
    return opened


def upsampler_place(path: Path) -> Path:
    """Return the folder of the network: `path`, or the subfolder in which a model's folder has it."""
    return path / _FOLDER if (path / _FOLDER).is_dir() else path


def _folder_of(path: Path, class_name: str) -> Path:
    """Make the folder of an upsampler's file, with its settings and a link; it is deleted when the process ends. Raises
    ModelLoadError for a file of another network."""
    with contextlib.closing(SafetensorsFile(path)) as file:
        shapes = {name: head.shape for name, head in file.heads.items()}
    first = shapes.get("initial_conv.weight", ())
    larger = shapes.get("upsampler.conv.weight", shapes.get("upsampler.0.weight", ()))
    if len(first) < 4 or not larger:
        raise ModelLoadError(
            f"{path}: expected the tensors of a latent upsampler (initial_conv.weight, upsampler.0.weight or "
            f"upsampler.conv.weight), got {listed(shapes)}"
        )
    # Channels that become places: height and width twice, the frames twice, or all three.
    more = larger[0] // first[0]
    settings = {
        "_class_name": class_name,
        "in_channels": first[1],
        "mid_channels": first[0],
        "num_blocks_per_stage": len({name.split(".")[1] for name in shapes if name.startswith("res_blocks.")}),
        "dims": len(first) - 2,
        "spatial_upsample": more != 2,
        "temporal_upsample": more in (2, 8),
    }
    if "upsampler.conv.weight" in shapes:
        # Any other factor than 2 is refused, whatever it is divided by afterwards.
        settings |= {"temporal_upsample": False, "rational_spatial_scale": float(math.isqrt(more))}
    elif class_name.startswith("LTX2"):
        settings["use_rational_resampler"] = False
    place = Path(_temporary().name) / f"{len(os.listdir(_temporary().name))}{LINKS}" / _FOLDER
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    (place / "diffusion_pytorch_model.safetensors").symlink_to(path.absolute())
    return place


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="diffusion_runtime_upsampler_")


def _check(file: ConfigFile, class_name: str, num_channels: int) -> None:
    found = file.values.get("_class_name")
    if found != class_name:
        raise ModelLoadError(f"{file.path}: key '_class_name': expected {class_name}, got {shown(found)}")
    for key, default, expected in (
        ("in_channels", 128, num_channels),
        ("spatial_upsample", True, True),
        ("temporal_upsample", False, False),
        ("rational_spatial_scale", 2.0, 2.0),
    ):
        value = file.values.get(key, default)
        if value != expected:
            raise file.error(key, f"{shown(expected)}: the second stage has twice the height and width", value)


def _statistics(folder: AnyFolder, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the mean and deviation of the latents from the autoencoder's weights. Raises ModelLoadError."""
    found = []
    with Checkpoint(folder / COMPONENT) as checkpoint:
        for name, of_authors in STATISTICS.items():
            stored = name if name in checkpoint.shapes else of_authors
            shape = checkpoint.shapes.get(stored)
            if shape is None or len(shape) != 1:
                raise ModelLoadError(f"{folder / COMPONENT}: {name}: expected a number per channel of the latents")
            tensor = torch.empty(shape)
            checkpoint.copy_into(stored, tensor)
            found.append(tensor.to(device))
    return found[0], found[1]
