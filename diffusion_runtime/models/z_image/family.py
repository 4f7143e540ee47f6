"""The Z-Image family: text to image."""

from __future__ import annotations

import dataclasses

import torch

from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.decoders.image_decoder import AUTOENCODER, image_tiling, load_image_decoder, read_normalisation
from diffusion_runtime.denoising.flow_schedule import token_shift
from diffusion_runtime.models.declaration import Decoding, FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.reference_images import load_image_encoder, of_pictures
from diffusion_runtime.models.z_image.config import ZImageTransformerConfig, read_geometry, read_transformer_config
from diffusion_runtime.models.z_image.transformer import TEXT_ROLE, ZImageTransformer
from diffusion_runtime.models.z_image.weights import LORA_NAMES, transformer_pieces
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.language_model import PromptTemplate
from diffusion_runtime.text_encoders.language_model_loading import load_language_model

MAX_TOKENS = 512
# Qwen3's chat format; nothing of it is cut off.
TEMPLATE = PromptTemplate("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", num_cropped=0)


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Load the text encoder. Raises ModelLoadError for missing, damaged or other files, and missing weights."""
    return load_language_model("qwen3", folder, device, dtype, TEMPLATE, max_tokens=MAX_TOKENS, num_layers_left_out=1)


# Flow shift of Z-Image. Z-Image-Turbo has 3.
_BASE_FLOW_SHIFT = 6.0
# Defaults of Z-Image, which is not distilled.
_BASE_DEFAULTS = published_defaults("z-image", "num_inference_steps", "guidance_scale")

_Model = Model[ZImageTransformerConfig, ImageGeometry]


def _adapt(model: _Model) -> _Model:
    """Return the model with the defaults of the one before distillation where the scheduler has its flow shift:
    published folders of the two differ in nothing else that can be read."""
    if model.sampling.scheduler.defaults.get("flow_shift") != _BASE_FLOW_SHIFT:
        return model
    return dataclasses.replace(model, defaults={**model.defaults, **_BASE_DEFAULTS})


FAMILY = ModelFamily(
    name="z_image",
    files=FolderFormat(
        transformer_classes=("ZImageTransformer2DModel",),
        pipeline_classes=("ZImagePipeline",),
        diffusers_components=(AUTOENCODER,),
        check_parts=read_normalisation,
    ),
    # The refiner of the text has no grid: backends that need one skip it, like any cross-attention.
    roles=(("self", "self"), (TEXT_ROLE, "cross")),
    requests=Requests(
        # cond + scale * (cond - uncond): 0 turns guidance off, where other models use 1.
        guidance_offset=1.0,
        defaults=published_defaults("z-image-turbo"),
        read_schedule=token_shift,
        in_comfyui_order=True,
    ),
    text=TextEncoding(shapes=lambda _, config: TextShapes(((MAX_TOKENS, config.text_dim),)), load=load_text_encoder),
    decoding=Decoding(
        load=load_image_decoder, load_encoder=of_pictures(load_image_encoder), tiling=image_tiling, has_exact_tiles=True
    ),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=ZImageTransformer,
    weights=Weights(
        pieces=transformer_pieces,
        lora_names=LORA_NAMES,
        # A norm of the authors' own files, which their model does not use.
        is_ignored=lambda name: name == "norm_final.weight",
    ),
    adapt=_adapt,
)
