"""Keywords of `load_pipeline`, which editors show. Written by scripts/write_load_options.py from
RuntimeConfig, whose docstring explains each."""

from __future__ import annotations

from typing import Any, TypedDict


class LoadOptions(TypedDict, total=False):
    """Options of RuntimeConfig by name; in comments, the defaults."""

    like: str | None  # None
    models_dir: Any  # ()
    download: bool  # False
    backend: str  # 'auto'
    device: str  # 'auto'
    dtype: str  # 'auto'
    attention: Any  # None
    attention_override: Any  # None
    transformer_path: str | None  # None
    transformer_2_path: str | None  # None
    controlnet_path: str | None  # None
    vae_path: str | None  # None
    audio_vae_path: str | None  # None
    vocoder_path: str | None  # None
    text_encoder_path: str | None  # None
    text_encoder_2_path: str | None  # None
    connectors_path: str | None  # None
    image_encoder_path: str | None  # None
    mmproj_path: str | None  # None
    variant: str | None  # None
    workflow: str | None  # None
    upsampler_path: str | None  # None
    interpolation_path: str | None  # None
    lora: Any  # ()
    self_check: bool  # True
    vae_decode: str  # 'exact'
    vae_tiling: str  # 'auto'
    vae_decoder: str | None  # None
    quantization: str  # 'none'
    quantization_ignored_layers: Any  # ()
    compile: str  # 'off'
    cuda_graphs: str  # 'auto'
    offload: str  # 'auto'
    memory_limit: str | None  # None
    encoding_cache: bool  # True
    pipeline_arguments: Any  # None
    revision: str | None  # None
    offline: bool  # False
