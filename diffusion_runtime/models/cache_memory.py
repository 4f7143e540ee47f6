"""Bytes of a causal model's key-value cache, from the sizes of its layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from diffusion_runtime.attention.cache.slots import FrameSlots
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.denoising.chunks import window_of
from diffusion_runtime.request import GenerationRequest


def cache_bytes(
    transformers: Iterable[nn.Module],
    request: GenerationRequest,
    num_frames: int,
    tokens_per_frame: int,
    num_samples: int,
    dtype: torch.dtype,
) -> int:
    """Keys and values of all cached layers of all experts on one process, before a sequence is shared.

    request: resolved. num_frames: latent frames of the video. num_samples: of all guidance branches together.
    """
    num_slots = FrameSlots.of(window_of(request), num_frames).num_slots
    num_bytes = 1 if request.kv_cache_dtype == "fp8_e4m3" else dtype.itemsize
    layers = [each for module in transformers for each in module.modules() if isinstance(each, AttentionLayer)]
    numbers = sum(layer.num_kv_heads * layer.head_dim for layer in layers if layer.cached_keys)
    return 2 * num_samples * num_slots * tokens_per_frame * numbers * num_bytes
