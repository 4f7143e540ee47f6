"""The LTX-2 family: its settings, and how the parts of an LTX-2 folder are built and loaded.

It runs LTX-2.0; LTX-2.3, whose attention has gates and whose timestep modulates the text as well; and LTX-2.5, which
has Gemma 4 and fewer biases: a video and its sound, from text, from an image as well, or for a given sound; with an
upsampler a second stage at full size. Guidance is that of diffusers' LTX2Pipeline (denoising/guidance_terms.py), of
which each term is off unless the request sets it, and the sound is guided like the pictures. Images at any frame, of
any strength, and keyframes that LTX-2.5 makes beside the video (condition.py). Not here: conditions of several frames;
its rounds that double the frame rate between keyframes.
"""

from __future__ import annotations

import dataclasses

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.decoders.latent_upsampler import SecondStage
from diffusion_runtime.denoising.flow_schedule import token_shift
from diffusion_runtime.models.declaration import (
    Decoding,
    FolderFormat,
    NamedDecoder,
    Requests,
    TextEncoding,
    TextShapes,
    Weights,
)
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.ltx2 import codec, diffusion_decoder, text
from diffusion_runtime.models.ltx2.block import (
    AUDIO_CROSS_ROLE,
    AUDIO_SELF_ROLE,
    AUDIO_TO_VIDEO_ROLE,
    VIDEO_TO_AUDIO_ROLE,
)
from diffusion_runtime.models.ltx2.config import LTX2Config, read_geometry, read_transformer_config
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry
from diffusion_runtime.models.ltx2.sound_decoder import AUDIO_AUTOENCODER, VOCODER_NETWORK
from diffusion_runtime.models.ltx2.transformer import LTX2Transformer
from diffusion_runtime.models.ltx2.weights import (
    FLOAT32,
    KEYFRAME_MARKER,
    LORA_NAMES,
    pair_channels,
    transformer_pieces,
)
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.request.layers import layered

# Noise levels that the authors use with a distilled transformer (ltx_pipelines/utils/constants.py).
_SECOND_STAGE = (0.909375, 0.725, 0.421875)
# Files of the authors also hold the connectors from the text to the transformer, which are a component of a folder.
_CONNECTORS = ("video_embeddings_connector.", "audio_embeddings_connector.")
_STG_FIELDS = ("stg_scale", "stg_blocks", "audio_stg_scale")
_Model = Model[LTX2Config, LTX2Geometry]


def _check_parts(folder: AnyFolder) -> None:
    codec.check_decoding(folder)
    text.check_connectors(folder)


IMAGES = ("image_path", "last_image_path", "frame_conditions")


def _adapt(model: _Model) -> _Model:
    """Return the model with the guidance that is documented for LTX-2.3. Rotary positions that turn the halves of a
    head against each other: our layers turn neighbouring channels."""
    model = dataclasses.replace(model, sampling=dataclasses.replace(model.sampling, continues_images=True))
    if model.config.can_skip_attention:
        defaults = {**model.defaults, **_LTX23_DEFAULTS}
        tiny_decoders = {128: "taeltx2_3"}
        if not model.config.video.has_ffn_bias:
            defaults |= _LTX25_DEFAULTS
            # None is published for LTX-2.5.
            tiny_decoders = {}
        model = dataclasses.replace(model, defaults=defaults, request_fields=_STG_FIELDS, tiny_decoders=tiny_decoders)
    if text.has_duration_head(model.folder):
        model = dataclasses.replace(
            model,
            defaults=layered(model.defaults, _LENGTHS),
            request_fields=(*model.request_fields, *_LENGTHS),
        )
    if model.config.marks_keyframes:
        model = dataclasses.replace(model, request_fields=(*model.request_fields, "keyframe_interval"))
    ignored = _CONNECTORS if model.config.marks_keyframes else (KEYFRAME_MARKER, *_CONNECTORS)
    weights = dataclasses.replace(model.weights, is_ignored=lambda name: name.startswith(ignored))
    if model.config.turns_halves:
        weights = dataclasses.replace(weights, arrange=pair_channels)
    return dataclasses.replace(model, weights=weights)


_LTX23_DEFAULTS = published_defaults(
    "ltx-2.3",
    "num_inference_steps",
    "guidance_scale",
    "stg_scale",
    "stg_blocks",
    "modality_scale",
    "guidance_rescale",
    "audio_guidance_scale",
)
# Bounds of a length that the duration head predicts.
_LENGTHS = published_defaults("ltx-2.5", "min_seconds", "max_seconds")
_LTX25_DEFAULTS = published_defaults("ltx-2.5", "image_crf")

FAMILY = ModelFamily(
    name="ltx2",
    files=FolderFormat(
        transformer_classes=("LTX2VideoTransformer3DModel",),
        # One transformer does both.
        pipeline_classes=("LTX2Pipeline", "LTX2ImageToVideoPipeline", "LTX2ConditionPipeline"),
        diffusers_components=(codec.VIDEO_AUTOENCODER, AUDIO_AUTOENCODER, VOCODER_NETWORK, text.CONNECTORS),
        check_parts=_check_parts,
        # A longer prompt from the text; the transformer of LTX-2.5 before distillation.
        unread=("prompt_enhancer", "transformer_full"),
        optional=(text.DURATION_HEAD.name,),
    ),
    # All but the video's self-attention counts as `cross`: it has no grid of queries and keys, so sparse choices skip
    # it.
    roles=(
        ("self", "self"),
        ("cross", "cross"),
        (AUDIO_SELF_ROLE, "cross"),
        (AUDIO_CROSS_ROLE, "cross"),
        (AUDIO_TO_VIDEO_ROLE, "cross"),
        (VIDEO_TO_AUDIO_ROLE, "cross"),
    ),
    requests=Requests(
        defaults=published_defaults("ltx-2"),
        read_schedule=token_shift,
        in_comfyui_order=True,
        fields=(
            "guidance_rescale",
            "modality_scale",
            "audio_guidance_scale",
            "audio_modality_scale",
            "audio_guidance_rescale",
            "audio_path",
            "image_crf",
        ),
        second_stage=SecondStage(codec.UPSAMPLER, _SECOND_STAGE, _SECOND_STAGE),
    ),
    text=TextEncoding(
        shapes=lambda _, config: TextShapes(
            tuple((text.MAX_TOKENS, stream.text_dim) for stream in (config.video, config.audio))
        ),
        load=text.load_text_encoder,
    ),
    decoding=Decoding(
        load=codec.load_decoder,
        load_encoder=codec.load_clip_encoder,
        tiny_decoders={128: "taeltx_2"},
        modes=("fast",),
        tiling=codec.tiling,
        named={
            diffusion_decoder.NAME: NamedDecoder(
                diffusion_decoder.NETWORK,
                diffusion_decoder.load_diffusion_decoder,
                diffusion_decoder.with_whole_windows,
                diffusion_decoder.decoding_bytes,
            )
        },
    ),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=LTX2Transformer,
    shared_heads=lambda config: config.video.num_heads,
    weights=Weights(pieces=transformer_pieces, lora_names=LORA_NAMES, float32=FLOAT32),
    load_image_conditioner=codec.load_image_conditioner,
    images=lambda *_: ImageInputs(images=dict.fromkeys(IMAGES, False)),
    adapt=_adapt,
)
