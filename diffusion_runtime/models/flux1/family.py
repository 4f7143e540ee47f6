"""The FLUX.1 family: text to image by [dev], which takes the guidance scale as an input, and [schnell], which runs
without; editing by Kontext; repainting a part of an image by Fill; edges and depth by Canny and Depth.

Prompts are read by T5, for the tokens, and CLIP, for one vector per prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch

from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.decoders.image_decoder import AUTOENCODER, image_tiling, load_image_decoder, read_normalisation
from diffusion_runtime.denoising.flow_schedule import token_shift
from diffusion_runtime.models.declaration import Decoding, FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.flux1 import editing
from diffusion_runtime.models.flux1.config import Flux1TransformerConfig, read_geometry, read_transformer_config
from diffusion_runtime.models.flux1.control import PIPELINES, control_of, size_made
from diffusion_runtime.models.flux1.transformer import Flux1Transformer
from diffusion_runtime.models.flux1.weights import LORA_NAMES, transformer_pieces
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.reference_images import load_image_encoder, of_pictures
from diffusion_runtime.text_encoders.clip import CLIPPooledEncoder, load_clip
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.t5 import T5TextEncoder, load_t5

# Tokens of T5: models distilled to few steps, which take no guidance scale, were trained on shorter prompts.
MAX_TOKENS, MAX_TOKENS_FEW_STEPS = 512, 256


class Flux1TextEncoder(TextEncoder):
    """T5 and CLIP as one encoder. The pooled vector is of the tokens that CLIP takes; T5 takes more. Tokens that either
    cuts are counted."""

    library = "transformers"

    def __init__(self, t5: T5TextEncoder, clip: CLIPPooledEncoder) -> None:
        self.t5 = t5
        self.clip = clip
        self.max_tokens = t5.max_tokens
        self.implementation = " and ".join(dict.fromkeys([t5.implementation, clip.implementation]))

    def encode(self, prompts: Sequence[str]) -> Conditions:
        pooled, cut = self.clip.encode(prompts)
        return dataclasses.replace(self.t5.encode(prompts), pooled=pooled, encoder="T5", further_cuts=(cut,))


def load_text_encoder(
    folder: AnyFolder, device: torch.device, dtype: torch.dtype, max_tokens: int = MAX_TOKENS
) -> Flux1TextEncoder:
    """Load both encoders of a diffusers folder. Raises ModelLoadError."""
    clip = load_clip(folder, device, dtype, encoder="text_encoder", tokenizer="tokenizer")
    t5 = load_t5(folder, device, dtype, max_tokens=max_tokens, encoder="text_encoder_2", tokenizer="tokenizer_2")
    return Flux1TextEncoder(t5, clip)


# For a model that was distilled to run without guidance.
_FEW_STEPS = published_defaults("flux.1-schnell", "num_inference_steps", "guidance_scale")

_Model = Model[Flux1TransformerConfig, ImageGeometry]


def _adapt(model: _Model) -> _Model:
    """Return the model with its folder's pipeline: an image to edit, or one of the output's size."""
    control = control_of(model.folder)
    if control is not None:
        return dataclasses.replace(
            _with_guidance(model),
            inputs=ImageInputs(images=control.images, size_of_image=size_made),
            defaults={**model.defaults, **published_defaults(control.published)},
            load_image_conditioner=partial(control.load_conditioner, model.folder),
        )
    if not editing.edits(model.folder):
        return _with_guidance(model)
    return dataclasses.replace(
        _with_guidance(model),
        inputs=ImageInputs(images={"image_path": False}, references=editing.REFERENCES),
        defaults={**model.defaults, **published_defaults("flux.1-kontext-dev")},
        load_image_conditioner=partial(editing.load_conditioner, model.folder),
    )


def _with_guidance(model: _Model) -> _Model:
    """Return the model with its guidance. Without an embedded scale: the four steps of FLUX.1 [schnell], no guidance,
    and its shorter texts."""
    if model.config.embeds_guidance:
        return dataclasses.replace(model, sampling=dataclasses.replace(model.sampling, embeds_guidance=True))
    return dataclasses.replace(
        model,
        defaults={**model.defaults, **_FEW_STEPS},
        load_text_encoder=partial(load_text_encoder, model.folder, max_tokens=MAX_TOKENS_FEW_STEPS),
    )


FAMILY = ModelFamily(
    name="flux1",
    files=FolderFormat(
        transformer_classes=("FluxTransformer2DModel",),
        pipeline_classes=("FluxPipeline", editing.PIPELINE, *PIPELINES),
        diffusers_components=(AUTOENCODER,),
        check_parts=read_normalisation,
    ),
    roles=(("self", "self"),),
    requests=Requests(defaults=published_defaults("flux.1-dev"), read_schedule=token_shift, in_comfyui_order=True),
    text=TextEncoding(
        shapes=lambda _, config: TextShapes(
            ((MAX_TOKENS, config.text_dim),), config.pooled_dim, condition_channels=config.condition_channels
        ),
        load=load_text_encoder,
    ),
    decoding=Decoding(
        load=load_image_decoder, load_encoder=of_pictures(load_image_encoder), tiling=image_tiling, has_exact_tiles=True
    ),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=Flux1Transformer,
    weights=Weights(pieces=transformer_pieces, lora_names=LORA_NAMES),
    adapt=_adapt,
)
