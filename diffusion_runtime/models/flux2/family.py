"""The FLUX.2 family: images from text and from reference images, by [dev], which takes the guidance scale as an input,
and [klein], which has two branches of guidance, or none where it is distilled to four steps; one of these computes
reference images once. Prompts are read by a language model: the hidden states of three of its layers."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial

import torch

from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.decoders.image_decoder import image_tiling
from diffusion_runtime.denoising.flow_schedule import FlowSchedule, LinearSigmas, ShiftByTokens, token_shift
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.declaration import Decoding, FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.flux2 import codec, editing
from diffusion_runtime.models.flux2.config import (
    DEV,
    KLEIN,
    KLEIN_KV,
    Flux2TransformerConfig,
    read_geometry,
    read_pipeline_config,
    read_transformer_config,
)
from diffusion_runtime.models.flux2.transformer import Flux2Transformer
from diffusion_runtime.models.flux2.weights import LORA_NAMES, transformer_pieces
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.reference_images import of_pictures
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.language_model import PromptTemplate
from diffusion_runtime.text_encoders.language_model_loading import load_mistral3, load_stacked_qwen3, mistral3_template

MAX_TOKENS = 512
# It contains the line break, as in training.
SYSTEM_MESSAGE = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation."
)
DEV_TEMPLATE, DEV_LAYERS = mistral3_template(SYSTEM_MESSAGE), (10, 20, 30)
# Qwen3's chat format, for an answer without thinking first.
KLEIN_TEMPLATE = PromptTemplate(
    "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", num_cropped=0
)
KLEIN_LAYERS = (9, 18, 27)


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> TextEncoder:
    """Load Mistral Small 3 for [dev], Qwen3 for [klein].

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights, and when the encoder does
    not fit the transformer's size.
    """
    if read_pipeline_config(folder).is_klein:
        encoder = load_stacked_qwen3(folder, device, dtype, KLEIN_TEMPLATE, max_tokens=MAX_TOKENS, layers=KLEIN_LAYERS)
    else:
        encoder = load_mistral3(folder, device, dtype, DEV_TEMPLATE, max_tokens=MAX_TOKENS, layers=DEV_LAYERS)
    text_dim = read_transformer_config(folder).text_dim
    if encoder.dim != text_dim:
        raise ModelLoadError(
            f"{folder / 'text_encoder'}: three layers of it make {encoder.dim} numbers per token, and the transformer "
            f"takes joint_attention_dim, {text_dim}; the two are not of the same model"
        )
    return encoder


# Slope and intercept of the shift's logarithm over the number of tokens, for 10 steps and for 200.
_AT_10_STEPS = 8.73809524e-05, 1.89833333
_AT_200_STEPS = 0.00016927, 0.45666666
# With more tokens than this the steps play no part.
_MAX_TOKENS_BY_STEPS = 4300


@dataclass(frozen=True)
class EmpiricalShift(LinearSigmas):
    """Schedule with a shift whose logarithm is linear in the number of tokens, and between 10 and 200 steps on the line
    through both.

    is_exponential: False takes the line itself for the shift and not its logarithm.
    """

    is_exponential: bool = True

    def flow_shift(self, num_tokens: int, num_steps: int) -> float:
        at_200 = _AT_200_STEPS[0] * num_tokens + _AT_200_STEPS[1]
        at_10 = _AT_10_STEPS[0] * num_tokens + _AT_10_STEPS[1]
        value = at_200
        if num_tokens <= _MAX_TOKENS_BY_STEPS:
            value += (at_200 - at_10) / 190 * (num_steps - 200)
        return math.exp(value) if self.is_exponential else value


def read_schedule(scheduler: SchedulerConfig) -> FlowSchedule:
    """Read the schedule of a folder, whose file has a line of its own in the shift's place; a fixed shift where the
    file sets none that follows the size. Raises ModelLoadError."""
    line = token_shift(scheduler)
    return EmpiricalShift(line.is_exponential) if isinstance(line, ShiftByTokens) else line


# For a model that was distilled to run without guidance.
_FEW_STEPS = published_defaults("flux.2-klein-4b", "num_inference_steps", "guidance_scale")

_Model = Model[Flux2TransformerConfig, ImageGeometry]


def _adapt(model: _Model) -> _Model:
    """Return the model with reference images; distilled: four steps and no guidance."""
    pipeline = read_pipeline_config(model.folder)
    images = editing.references(
        editing.MOST_KLEIN if pipeline.is_klein else editing.MOST_DEV, model.geometry.spatial_factor
    )
    images = dataclasses.replace(images, are_cached=pipeline.caches_references)
    model = dataclasses.replace(
        model,
        sampling=dataclasses.replace(
            model.sampling,
            embeds_guidance=model.config.embeds_guidance,
            takes_guidance=not pipeline.is_distilled,
            caches_prefix=pipeline.caches_references,
        ),
        inputs=ImageInputs(images={"image_path": False}, references=images),
        load_image_conditioner=partial(editing.load_conditioner, images, model.folder),
    )
    if not pipeline.is_distilled:
        return model
    return dataclasses.replace(model, defaults={**model.defaults, **_FEW_STEPS})


def _text_shapes(folder: AnyFolder, config: Flux2TransformerConfig) -> TextShapes:
    layers = KLEIN_LAYERS if read_pipeline_config(folder).is_klein else DEV_LAYERS
    return TextShapes(((MAX_TOKENS, config.text_dim),), num_layers=max(layers))


FAMILY = ModelFamily(
    name="flux2",
    files=FolderFormat(
        transformer_classes=("Flux2Transformer2DModel",),
        pipeline_classes=(DEV, KLEIN, KLEIN_KV),
        index_keys=("is_distilled",),
        diffusers_components=(codec.AUTOENCODER,),
    ),
    roles=(("self", "self"),),
    requests=Requests(
        # For [klein] before distillation, too.
        defaults=published_defaults("flux.2-dev"),
        read_schedule=read_schedule,
        in_comfyui_order=True,
    ),
    text=TextEncoding(shapes=_text_shapes, load=load_text_encoder),
    decoding=Decoding(
        load=codec.load_decoder, load_encoder=of_pictures(codec.load_encoder), tiling=image_tiling, has_exact_tiles=True
    ),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=Flux2Transformer,
    weights=Weights(pieces=transformer_pieces, lora_names=LORA_NAMES),
    adapt=_adapt,
)
