"""The Qwen-Image family: text to image, editing, ControlNets. Its prompt template, decoder, control image and
declaration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import MAX_SIZE, AnyFolder
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.causal_video_decoder import (
    KNOWN,
    CausalVideoDecoder,
    causal_tiling,
    decoding_half,
    exact_decoder,
)
from diffusion_runtime.decoders.video_decoder import read_statistics, restore_by_config
from diffusion_runtime.denoising.flow_schedule import token_shift
from diffusion_runtime.models.control_conditioner import ControlConditioner
from diffusion_runtime.models.controlnet_folder import COMPONENT as COMPONENT_OF_CONTROL
from diffusion_runtime.models.controlnet_folder import has_controlnet
from diffusion_runtime.models.declaration import Decoding, FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.image_control import FIELDS as CONTROL_FIELDS
from diffusion_runtime.models.image_control import ImageControl
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.qwen_image import editing as edits
from diffusion_runtime.models.qwen_image.config import (
    QwenImageTransformerConfig,
    read_geometry,
    read_transformer_config,
)
from diffusion_runtime.models.qwen_image.controlnet import (
    CLASS,
    PIPELINE,
    ROLE,
    QwenImageControlledTransformer,
    controlled_pieces,
    read_controlnet_config,
)
from diffusion_runtime.models.qwen_image.editing import PIPELINES, editing_of
from diffusion_runtime.models.qwen_image.transformer import QwenImageTransformer
from diffusion_runtime.models.qwen_image.weights import LORA_NAMES, transformer_pieces
from diffusion_runtime.models.reference_images import load_encoder, of_pictures, scaled_to
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.language_model import PromptTemplate
from diffusion_runtime.text_encoders.language_model_loading import load_qwen2_5_vl
from diffusion_runtime.text_encoders.picture_language_model import read_preparation_of_pictures
from diffusion_runtime.untrusted.known_settings import whole

_KNOWN = {**KNOWN, "input_channels": whole(1, MAX_SIZE)}


def _decoding_half(settings: Mapping[str, Any]) -> nn.Module | None:
    # The class calls the channels of its frames those of its input.
    out_channels = settings.get("input_channels", 3)
    return decoding_half("AutoencoderKLQwenImage", settings, _KNOWN, out_channels=out_channels)


AUTOENCODER = DiffusersComponent(
    COMPONENT,
    "diffusers.models.autoencoders.autoencoder_kl_qwenimage",
    "AutoencoderKLQwenImage",
    encoder_parts=("encoder", "quant_conv"),
    decoding_half=_decoding_half,
)


def load_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> CausalVideoDecoder:
    """Load the decoder of a diffusers folder's `vae`.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    restore = restore_by_config(folder, device)
    return exact_decoder(AUTOENCODER.load_decoder(folder, device, dtype), restore)


# The template that the model was trained with (arXiv:2508.02324, figure 7); the 34 tokens before the prompt are
# dropped.
TEMPLATE = PromptTemplate(
    before=(
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
        "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
    ),
    after="<|im_end|>\n<|im_start|>assistant\n",
    num_cropped=34,
)
# Tokens of the prompt and the five after it.
MAX_TOKENS = 512


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Load the encoder of the last hidden states of the folder's Qwen2.5-VL. Raises ModelLoadError."""
    return load_qwen2_5_vl(folder, device, dtype, TEMPLATE, max_tokens=MAX_TOKENS, num_layers_left_out=0)


def _check_parts(folder: AnyFolder) -> None:
    read_statistics(folder)
    if editing_of(folder) is not None:
        read_preparation_of_pictures(folder)


_Model = Model[QwenImageTransformerConfig, ImageGeometry]


def _adapt(model: _Model) -> _Model:
    """Return the model with its folder's pipeline: images to edit, or a control image."""
    editing = editing_of(model.folder)
    if editing is None:
        return _with_controlnet(model)
    if has_controlnet(model.folder, PIPELINE):
        read_controlnet_config(model.folder, model.config)
    sizes = ("height", "width")
    others = {name: value for name, value in model.defaults.items() if name not in sizes}
    return dataclasses.replace(
        model,
        inputs=ImageInputs(images={"image_path": True}, references=editing.references),
        defaults={**others, **published_defaults(editing.published)},
        load_text_encoder=partial(editing.load_text_encoder, model.folder),
        load_image_conditioner=partial(editing.load_conditioner, AUTOENCODER, model.folder),
    )


def _with_controlnet(model: _Model) -> _Model:
    config, own = model.config, read_controlnet_config(model.folder, model.config)
    if own is None:
        return model
    return dataclasses.replace(
        model,
        inputs=ImageInputs(images={"image_path": True}, size_of_image=partial(scaled_to, edits.AREA)),
        sampling=dataclasses.replace(model.sampling, control=ImageControl(own.num_layers)),
        request_fields=CONTROL_FIELDS,
        make_transformer=lambda policy: QwenImageControlledTransformer(config, own, model.geometry, policy),
        weights=dataclasses.replace(
            model.weights,
            pieces=lambda _: dict(controlled_pieces(config, own)),
            joined_components=(COMPONENT_OF_CONTROL,),
        ),
        load_image_conditioner=lambda *where: ControlConditioner(*load_encoder(AUTOENCODER, model.folder, *where)),
    )


def _text_shapes(folder: AnyFolder, config: QwenImageTransformerConfig) -> TextShapes:
    editing = editing_of(folder)
    if editing is None:
        return TextShapes(((MAX_TOKENS, config.text_dim),))
    return TextShapes(((edits.MAX_TOKENS, config.text_dim),), tokens_per_image=editing.seen_tokens, sees=True)


FAMILY = ModelFamily(
    name="qwen_image",
    files=FolderFormat(
        transformer_classes=("QwenImageTransformer2DModel",),
        pipeline_classes=("QwenImagePipeline", PIPELINE, *PIPELINES),
        diffusers_components=(AUTOENCODER,),
        controlnet_class=CLASS,
        check_parts=_check_parts,
    ),
    roles=(("self", "self"), (ROLE, "self")),
    requests=Requests(defaults=published_defaults("qwen-image"), read_schedule=token_shift, in_comfyui_order=True),
    text=TextEncoding(shapes=_text_shapes, load=load_text_encoder),
    decoding=Decoding(
        load=load_decoder,
        load_encoder=of_pictures(partial(load_encoder, AUTOENCODER)),
        tiny_decoders={16: "taew2_1"},
        is_shared=True,
        tiling=causal_tiling,
        modes=("fast",),
    ),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=QwenImageTransformer,
    weights=Weights(pieces=transformer_pieces, lora_names=LORA_NAMES),
    adapt=_adapt,
)
