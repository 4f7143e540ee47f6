"""Bytes of a causal model's key-value cache, from the sizes of its layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.request.generation_request import GenerationRequest


def cache_bytes(
    transformers: Iterable[nn.Module],
    request: GenerationRequest,
    num_tokens: int,
    num_samples: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of the keys and values of all cached layers of all experts on one process, before a sequence is
    shared.

    Where they are stored in 8 bits or in pages, those of one layer as it reads them are added. request: resolved.
    num_tokens: of a sample that there is room for, in the stores of all guidance branches together (cached_tokens).
    """
    layers = [each for module in transformers for each in module.modules() if isinstance(each, AttentionLayer)]
    numbers = [layer.num_kv_heads * layer.head_dim for layer in layers if layer.cached_keys]
    stored = 1 if request.kv_cache_dtype == "fp8_e4m3" else dtype.itemsize
    read_per_number = 0 if request.page_size is None else stored
    if request.kv_cache_dtype == "fp8_e4m3":
        read_per_number += dtype.itemsize
    num_bytes = sum(numbers) * stored + max(numbers, default=0) * read_per_number
    return 2 * num_samples * num_tokens * num_bytes
