"""The LTX-2 family: its settings, and how the parts of an LTX-2 folder are built and loaded.

What it runs is LTX-2.0: a video and its sound, from text or from an image as well, by classifier-free guidance of one
scale for both; behind an upsampler a second stage at full size. Not here: other conditions than a first frame; the
further terms of guidance that diffusers' LTX2Pipeline has had since LTX-2.3 (perturbed attention, isolated modalities,
a scale of the sound's own, rescaling), which take more forward passes per step or numbers that a request does not have.
What a request can say gives what that pipeline gives with stg_scale 0, modality_scale 1 and guidance_rescale 0, and the
sound's own three the same, audio_guidance_scale that of the video.
"""

from __future__ import annotations

import dataclasses

from diffusion_runtime.denoising.flow_schedule import token_shift
from diffusion_runtime.model_folder import AnyFolder
from diffusion_runtime.models.family import Model, ModelFamily, TextShapes
from diffusion_runtime.models.latent_upsampler import SecondStage
from diffusion_runtime.models.ltx2 import codec, text
from diffusion_runtime.models.ltx2.block import (
    AUDIO_CROSS_ROLE,
    AUDIO_SELF_ROLE,
    AUDIO_TO_VIDEO_ROLE,
    VIDEO_TO_AUDIO_ROLE,
)
from diffusion_runtime.models.ltx2.config import LTX2Config, read_geometry, read_transformer_config
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry
from diffusion_runtime.models.ltx2.lora_names import LORA_NAMES
from diffusion_runtime.models.ltx2.transformer import LTX2Transformer
from diffusion_runtime.models.ltx2.weights import pair_channels, stays_float32, transformer_pieces
from diffusion_runtime.models.published import published_defaults

# Those that the authors run with a distilled transformer (ltx_pipelines/utils/constants.py).
_SECOND_STAGE = (0.909375, 0.725, 0.421875)
_CONNECTORS = ("video_embeddings_connector.", "audio_embeddings_connector.")
_Model = Model[LTX2Config, LTX2Geometry]


def _check_parts(folder: AnyFolder) -> None:
    codec.check_decoding(folder)
    text.check_connectors(folder)


def _adapt(model: _Model) -> _Model:
    """An image to start from. Rotary positions that turn the halves of a head against each other: our layers turn
    neighbouring channels."""
    model = dataclasses.replace(model, images={"image_path": False})
    if not model.config.turns_halves:
        return model
    # Files of the authors hold the way of the text into the transformer as well, which is a component of a folder.
    return dataclasses.replace(model, arrange=pair_channels, is_ignored=lambda name: name.startswith(_CONNECTORS))


FAMILY = ModelFamily(
    name="ltx2",
    transformer_classes=("LTX2VideoTransformer3DModel",),
    # One transformer does both.
    pipeline_classes=("LTX2Pipeline", "LTX2ImageToVideoPipeline"),
    diffusers_components=(codec.VIDEO_AUTOENCODER, codec.AUDIO_AUTOENCODER, codec.VOCODER_NETWORK, text.CONNECTORS),
    # All but the video's self-attention counts as `cross`: it has no grid of queries and keys, so sparse choices pass
    # over it.
    roles=(
        ("self", "self"),
        ("cross", "cross"),
        (AUDIO_SELF_ROLE, "cross"),
        (AUDIO_CROSS_ROLE, "cross"),
        (AUDIO_TO_VIDEO_ROLE, "cross"),
        (VIDEO_TO_AUDIO_ROLE, "cross"),
    ),
    defaults=published_defaults("ltx-2"),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    read_schedule=token_shift,
    transformer=LTX2Transformer,
    pieces=transformer_pieces,
    lora_names=LORA_NAMES,
    stays_float32=stays_float32,
    shared_heads=lambda config: config.video.num_heads,
    text_shapes=lambda _, config: TextShapes(((text.MAX_TOKENS, config.text_dim),) * 2),
    load_text_encoder=text.load_text_encoder,
    load_decoder=codec.load_decoder,
    load_image_conditioner=codec.load_image_conditioner,
    tiny_decoders={128: "taeltx_2"},
    decodes_fast=True,
    has_tiles=True,
    second_stage=SecondStage(codec.UPSAMPLER, _SECOND_STAGE, _SECOND_STAGE),
    check_parts=_check_parts,
    adapt=_adapt,
)
