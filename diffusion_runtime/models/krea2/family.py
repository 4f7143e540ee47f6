"""The Krea 2 family: text to image, Raw and the distilled Turbo. Qwen-Image's decoder and template of prompts."""

from __future__ import annotations

import dataclasses

from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.decoders.video_decoder import read_statistics
from diffusion_runtime.denoising.flow_schedule import ShiftByTokens, token_shift
from diffusion_runtime.models.declaration import FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.krea2 import config as folder_config
from diffusion_runtime.models.krea2.config import Krea2TransformerConfig
from diffusion_runtime.models.krea2.text import load_text_encoder
from diffusion_runtime.models.krea2.transformer import LAYERS_ROLE, REFINER_ROLE, Krea2Transformer
from diffusion_runtime.models.krea2.weights import FLOAT32, LORA_NAMES, add_one, transformer_pieces
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.qwen_image.family import AUTOENCODER, MAX_TOKENS
from diffusion_runtime.models.qwen_image.family import FAMILY as ORIGINAL

# Logarithm of the flow shift of a distilled model, at every size.
_DISTILLED_LOG_SHIFT = 1.15
_DISTILLED = published_defaults("krea-2-turbo", "num_inference_steps", "guidance_scale")

_Model = Model[Krea2TransformerConfig, ImageGeometry]


def _adapt(model: _Model) -> _Model:
    """Return the model; a distilled one with eight steps, no guidance and one shift for every size."""
    if not folder_config.read_is_distilled(model.folder):
        return model
    schedule = model.sampling.schedule
    if isinstance(schedule, ShiftByTokens):
        level = _DISTILLED_LOG_SHIFT
        schedule = dataclasses.replace(schedule, base_log_shift=level, max_log_shift=level)
    sampling = dataclasses.replace(model.sampling, schedule=schedule)
    return dataclasses.replace(model, sampling=sampling, defaults={**model.defaults, **_DISTILLED})


def _check_parts(folder: AnyFolder) -> None:
    read_statistics(folder)
    folder_config.read_text_layers(folder)


def _text_shapes(folder: AnyFolder, config: Krea2TransformerConfig) -> TextShapes:
    return TextShapes(((MAX_TOKENS, config.text_dim),), num_layers=max(folder_config.read_text_layers(folder)))


FAMILY = ModelFamily(
    name="krea2",
    files=FolderFormat(
        transformer_classes=("Krea2Transformer2DModel",),
        pipeline_classes=("Krea2Pipeline",),
        index_keys=folder_config.INDEX_KEYS,
        diffusers_components=(AUTOENCODER,),
        check_parts=_check_parts,
    ),
    # The blocks of the text have no grid: backends that need one skip them, like any cross-attention.
    roles=(("self", "self"), (LAYERS_ROLE, "cross"), (REFINER_ROLE, "cross")),
    requests=Requests(
        # cond + scale * (cond - uncond): 0 turns guidance off, where other models use 1.
        guidance_offset=1.0,
        defaults=published_defaults("krea-2-raw"),
        read_schedule=token_shift,
        in_comfyui_order=True,
    ),
    text=TextEncoding(shapes=_text_shapes, load=load_text_encoder),
    decoding=ORIGINAL.decoding,
    read_config=folder_config.read_transformer_config,
    read_geometry=folder_config.read_geometry,
    transformer=Krea2Transformer,
    weights=Weights(pieces=transformer_pieces, lora_names=LORA_NAMES, float32=FLOAT32, arrange=add_one),
    adapt=_adapt,
)
