"""The Qwen-Image 2.1 family: images from text, or from images as well, which go through the transformer with the prompt
once per request."""

from __future__ import annotations

import dataclasses
from functools import partial

from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.denoising.flow_schedule import token_shift
from diffusion_runtime.models.declaration import Decoding, FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.qwen_image_21.codec import AUTOENCODER, check_autoencoder, load_decoder, tiling
from diffusion_runtime.models.qwen_image_21.config import (
    QwenImage21TransformerConfig,
    read_geometry,
    read_sample_sigmas,
    read_transformer_config,
)
from diffusion_runtime.models.qwen_image_21.editing import REFERENCES, load_conditioner, load_opaque_encoder
from diffusion_runtime.models.qwen_image_21.text import MAX_TOKENS, load_text_encoder
from diffusion_runtime.models.qwen_image_21.transformer import QwenImage21Transformer
from diffusion_runtime.models.qwen_image_21.weights import LORA_NAMES, transformer_pieces
from diffusion_runtime.models.reference_images import of_pictures
from diffusion_runtime.text_encoders.picture_language_model import (
    has_preparation_of_pictures,
    read_preparation_of_pictures,
)


def _check_parts(folder: AnyFolder) -> None:
    check_autoencoder(folder)
    if has_preparation_of_pictures(folder):
        read_preparation_of_pictures(folder)


_Model = Model[QwenImage21TransformerConfig, ImageGeometry]


def _adapt(model: _Model) -> _Model:
    """Return the model with the prefix of every model; noise levels of a model that was distilled to a few steps."""
    defaults = model.defaults
    sigmas = read_sample_sigmas(model.folder)
    if sigmas is not None:
        # The scheduler's file sets how far they are stretched; levels of a request are not, unless it asks for that.
        terminal = model.sampling.scheduler.values.get("shift_terminal")
        defaults = {
            **defaults,
            "num_inference_steps": len(sigmas),
            "sigmas_before_shift": sigmas,
            **({"shift_terminal": terminal} if terminal else {}),
        }
    sampling = dataclasses.replace(model.sampling, caches_prefix=True)
    model = dataclasses.replace(model, defaults=defaults, sampling=sampling)
    if not has_preparation_of_pictures(model.folder):
        return model
    return dataclasses.replace(
        model,
        inputs=ImageInputs(images={"image_path": False}, references=REFERENCES),
        load_image_conditioner=partial(load_conditioner, model.folder),
    )


FAMILY = ModelFamily(
    name="qwen_image_21",
    files=FolderFormat(
        transformer_classes=("QwenImage21Transformer2DModel",),
        pipeline_classes=("QwenImage21Pipeline",),
        index_keys=("sample_sigmas",),
        diffusers_components=(AUTOENCODER,),
        check_parts=_check_parts,
    ),
    roles=(("self", "self"),),
    requests=Requests(defaults=published_defaults("qwen-image-2.1"), read_schedule=token_shift),
    text=TextEncoding(
        shapes=lambda folder, config: TextShapes(
            ((MAX_TOKENS, config.text_dim),), sees=has_preparation_of_pictures(folder)
        ),
        load=load_text_encoder,
    ),
    decoding=Decoding(load=load_decoder, load_encoder=of_pictures(load_opaque_encoder), tiling=tiling),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=QwenImage21Transformer,
    weights=Weights(pieces=transformer_pieces, lora_names=LORA_NAMES),
    adapt=_adapt,
)
