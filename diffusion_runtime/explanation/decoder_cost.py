"""Floating-point operations of decoding a clip, counted on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diffusion_runtime.decoders.autoencoder import COMPONENT
from diffusion_runtime.decoders.causal_decoder import ChannelsFirstDecoder
from diffusion_runtime.decoders.causal_decoder_network import CausalVideoAutoencoder
from diffusion_runtime.decoders.decoder_memory import decode_latents, has_frames, pixels_per_latent
from diffusion_runtime.decoders.vit_decoder_network import VitVideoAutoencoder
from diffusion_runtime.decoders.vit_video_decoder import decoding_operations
from diffusion_runtime.explanation.counted_operations import CountedOperations
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.memory_demand import PlannedRequest

# Latent frames after which every further one costs as much as the last.
_FRAMES_UNTIL_STEADY = 3


def count_decoding(model: Model[Any, Any], planned: PlannedRequest, device: torch.device) -> float:
    """Count the operations of decoding one sample. device: meta."""
    size = planned.size
    channels, frames, height, width = model.geometry.latent_shape(size.height, size.width, size.num_frames)
    component = model.family.files.components_called(COMPONENT)[0]
    module = component.build_decoding_half(model.folder)
    if isinstance(module, CausalVideoAutoencoder):
        counted = min(frames, _FRAMES_UNTIL_STEADY)
        counts = [
            _count(_streaming(module, torch.empty(1, channels, number, height, width, device=device)))
            for number in range(1, counted + 1)
        ]
        further = counts[-1] - counts[-2] if counted > 1 else 0.0
        num_further: int = frames - counted
        return counts[-1] + num_further * further
    if isinstance(module, VitVideoAutoencoder):
        # By formula: the tiles in which it decodes by default are part of its frames.
        of_family = model.family.decoding.tiling
        tiling = None if of_family is None else of_family(module).chosen("auto")
        side = module.spatial_compression_ratio
        return decoding_operations(module, (frames, size.height // side, size.width // side), tiling)
    module = component.build(model.folder)
    module.use_tiling = False
    convolutions = [each for each in module.decoder.modules() if isinstance(each, nn.Conv2d | nn.Conv3d)]
    factor = pixels_per_latent(module)
    shape = [
        1,
        convolutions[0].in_channels,
        *([frames] if has_frames(module) else []),
        size.height // factor,
        size.width // factor,
    ]
    latents = torch.empty(shape, device=device)
    return _count(lambda: decode_latents(module, latents))


def _streaming(module: CausalVideoAutoencoder, latents: torch.Tensor) -> Any:
    def run() -> None:
        for _ in ChannelsFirstDecoder(module, is_eager=True).decode(latents):
            pass

    return run


def _count(run: Any) -> float:
    with torch.no_grad(), CountedOperations() as counted:
        run()
    return float(counted.counts.total())
