"""The Anima family: text to image. Qwen-Image's autoencoder."""

from __future__ import annotations

from diffusion_runtime.decoders.video_decoder import read_statistics
from diffusion_runtime.denoising.flow_schedule import LinearSigmas
from diffusion_runtime.models.anima.conditioner import CONDITIONER, SELF_ROLE, STATES_ROLE
from diffusion_runtime.models.anima.config import read_geometry, read_transformer_config
from diffusion_runtime.models.anima.text import MAX_TOKENS, load_text_encoder
from diffusion_runtime.models.anima.transformer import AnimaTransformer
from diffusion_runtime.models.anima.weights import LORA_NAMES, is_unread, transformer_pieces, turning_head
from diffusion_runtime.models.declaration import FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import ModelFamily
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.qwen_image.family import AUTOENCODER
from diffusion_runtime.models.qwen_image.family import FAMILY as ORIGINAL
from diffusion_runtime.text_encoders.token_ids import NUM_DIGITS
from diffusion_runtime.weights.pieces import paired_heads

FAMILY = ModelFamily(
    name="anima",
    files=FolderFormat(
        transformer_classes=("CosmosTransformer3DModel",),
        pipeline_classes=("AnimaPipeline",),
        diffusers_components=(AUTOENCODER,),
        check_parts=read_statistics,
    ),
    # The text has no grid: backends that need one skip its self-attention, like any cross-attention.
    roles=(("self", "self"), ("cross", "cross"), (SELF_ROLE, "cross"), (STATES_ROLE, "cross")),
    requests=Requests(defaults=published_defaults("anima-base"), schedule=LinearSigmas(), in_comfyui_order=True),
    text=TextEncoding(
        shapes=lambda _, config: TextShapes(((MAX_TOKENS, config.conditioner.source_dim), (MAX_TOKENS, NUM_DIGITS))),
        load=load_text_encoder,
    ),
    decoding=ORIGINAL.decoding,
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=AnimaTransformer,
    weights=Weights(
        pieces=transformer_pieces,
        lora_names=LORA_NAMES,
        # The text conditioner is a part of the transformer.
        joined_components=(CONDITIONER,),
        shares_joined=True,
        arrange=paired_heads(turning_head),
        is_ignored=is_unread,
    ),
)
