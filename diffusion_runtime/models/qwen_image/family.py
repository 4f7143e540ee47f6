"""The Qwen-Image family: text to image."""

from __future__ import annotations

from diffusion_runtime.denoising.token_shift import token_shift
from diffusion_runtime.models.family import ModelFamily
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.qwen_image import codec
from diffusion_runtime.models.qwen_image.config import read_geometry, read_transformer_config
from diffusion_runtime.models.qwen_image.text import load_text_encoder
from diffusion_runtime.models.qwen_image.transformer import QwenImageTransformer
from diffusion_runtime.models.qwen_image.weights import transformer_pieces
from diffusion_runtime.models.video_decoder import read_statistics

FAMILY = ModelFamily(
    name="qwen_image",
    transformer_classes=("QwenImageTransformer2DModel",),
    pipeline_classes=("QwenImagePipeline",),
    diffusers_components=(codec.AUTOENCODER,),
    roles=(("self", "self"),),
    defaults=published_defaults("qwen-image"),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    read_schedule=token_shift,
    transformer=QwenImageTransformer,
    pieces=transformer_pieces,
    shared_heads=lambda config: config.num_heads,
    load_text_encoder=load_text_encoder,
    load_decoder=codec.load_decoder,
    check_parts=read_statistics,
)
