"""The SCAIL-2 family: characters of images that move as in a driving video, or take the place of those in it. Wan 2.1's
blocks, autoencoder, text encoder and image encoder."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.models.character_masks import FILES, MISSING, MaskedDrivingVideo
from diffusion_runtime.models.declaration import FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.scail_2.condition import Scail2Conditioner, size_of_image
from diffusion_runtime.models.scail_2.config import Scail2Config, read_geometry, read_transformer_config
from diffusion_runtime.models.scail_2.transformer import Scail2Transformer
from diffusion_runtime.models.scail_2.weights import LORA_NAMES, transformer_pieces
from diffusion_runtime.models.text_encoder_weights import fill_text_encoder
from diffusion_runtime.models.wan import codec
from diffusion_runtime.models.wan.cross_attention import IMAGE_ROLE
from diffusion_runtime.models.wan.family import FAMILY as WAN
from diffusion_runtime.models.wan.original_format import IMAGE_DIM
from diffusion_runtime.models.wan.weights import FLOAT32
from diffusion_runtime.text_encoders.clip import check_clip_image_encoder
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.t5 import load_umt5, umt5_library

# CLIP ViT-H/14 at 224 x 224.
_NUM_IMAGE_TOKENS = 257

_Model = Model[Scail2Config, LatentGeometry]


def _check_parts(folder: AnyFolder) -> None:
    read_geometry(folder)
    check_clip_image_encoder(folder, IMAGE_DIM, None, prepares=False)


def _load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    max_tokens = read_transformer_config(folder).max_tokens
    return load_umt5(folder, device, dtype, max_tokens=max_tokens, fill=fill_text_encoder)


def _adapt(model: _Model) -> _Model:
    """Return the model with its inputs."""
    geometry = model.geometry
    control = MaskedDrivingVideo(geometry, model.config.mask_channels)
    load = partial(Scail2Conditioner.load, model.folder, temporal_factor=geometry.temporal_factor)
    return dataclasses.replace(
        model,
        inputs=ImageInputs(images=FILES, size_of_image=size_of_image, missing=MISSING),
        sampling=dataclasses.replace(model.sampling, control=control, segments="continued"),
        load_image_conditioner=load,
    )


FAMILY: ModelFamily[Scail2Config, LatentGeometry] = ModelFamily(
    name="scail_2",
    files=FolderFormat(
        transformer_classes=("SCAIL2Model",),
        pipeline_classes=("SCAIL2Pipeline",),
        diffusers_components=(codec.AUTOENCODER,),
        # Pictures are prepared by what the authors' code does.
        unread=("image_processor",),
        check_parts=_check_parts,
    ),
    roles=(("self", "self"), ("cross", "cross"), (IMAGE_ROLE, "cross")),
    requests=Requests(defaults=published_defaults("scail-2-14b"), fields=("character_mode",), in_comfyui_order=True),
    text=TextEncoding(
        shapes=lambda _, config: TextShapes(
            ((config.max_tokens, config.text_dim),),
            image=(_NUM_IMAGE_TOKENS, IMAGE_DIM),
            condition_channels=config.in_channels,
        ),
        load=_load_text_encoder,
        library=umt5_library,
    ),
    # A clip follows a driving video, from noise alone.
    decoding=dataclasses.replace(WAN.decoding, load_encoder=None),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=Scail2Transformer,
    weights=Weights(pieces=transformer_pieces, lora_names=LORA_NAMES, float32=FLOAT32),
    adapt=_adapt,
)
