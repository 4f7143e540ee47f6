"""Latent upsampler (`--upsampler-path`): a network that doubles height and width of clean latents, which a second stage
of denoising then refines at full size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder, ConfigFile, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.errors import ConfigError, ModelLoadError, shown
from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.untrusted.files import user_path
from diffusion_runtime.weights.checkpoint import Checkpoint

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
    """Open the folder that RuntimeConfig.upsampler_path names: of the network itself, or one that has it in
    `latent_upsampler`. num_channels: of the model's latents.

    Raises ConfigError for a model without a second stage and a folder that is none, and ModelLoadError for one of
    another network; reads json alone.
    """
    if second_stage is None:
        raise ConfigError(f"upsampler_path: {family} models have no second stage; leave out --upsampler-path")
    place = upsampler_place(user_path(path, "upsampler_path"))
    if not (place / "config.json").is_file():
        raise ConfigError(
            f"upsampler_path: {place} has no config.json; expected the folder of a "
            f"{second_stage.upsampler.class_name}, or one with it in {_FOLDER}"
        )
    file = read_config(place.parent, place.name)
    _check(file, second_stage.upsampler.class_name, num_channels)
    opened = UpsamplerFolder(place.parent, dataclasses.replace(second_stage.upsampler, name=place.name))
    opened.component.tensors(opened.parent)
    return opened


def upsampler_place(path: Path) -> Path:
    """Return the folder of the network: `path`, or the subfolder in which a model's folder has it."""
    return path / _FOLDER if (path / _FOLDER).is_dir() else path


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
        for name in ("latents_mean", "latents_std"):
            shape = checkpoint.shapes.get(name)
            if shape is None or len(shape) != 1:
                raise ModelLoadError(f"{folder / COMPONENT}: {name}: expected a number per channel of the latents")
            tensor = torch.empty(shape)
            checkpoint.copy_into(name, tensor)
            found.append(tensor.to(device))
    return found[0], found[1]
