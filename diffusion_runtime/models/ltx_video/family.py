"""The LTX-Video family, 0.9.0 to 0.9.8: its settings, and how the parts of such a folder are built and loaded.

Text to video and, by every folder's transformer, a video that starts from an image. A folder's pipeline decides the
schedule and the positions in time: that for conditions (0.9.7 and later) steps along a line and then a parabola. Not
here: images and videos at other frames than the first, and noise on the image (image_cond_noise_scale).
"""

from __future__ import annotations

import dataclasses

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.decoders.latent_upsampler import SecondStage
from diffusion_runtime.denoising.flow_schedule import LinearQuadraticSigmas, token_shift
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.declaration import Decoding, FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.first_frame_encoder import of_clips
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.ltx_video import codec
from diffusion_runtime.models.ltx_video.config import (
    CONDITION_PIPELINE,
    IMAGE_PIPELINE,
    TEXT_PIPELINE,
    LTXVideoConfig,
    LTXVideoGeometry,
    decodes_at_a_timestep,
    read_geometry,
    read_transformer_config,
    takes_conditions,
)
from diffusion_runtime.models.ltx_video.transformer import LTXVideoTransformer
from diffusion_runtime.models.ltx_video.weights import FLOAT32, LORA_NAMES, transformer_pieces
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.text_encoders.t5 import T5TextEncoder, load_t5

# Tokens of T5, as each pipeline of diffusers pads a prompt. The one for conditions hides the padding from T5 as well,
# which the others let it see.
_MAX_TOKENS, _MAX_TOKENS_WITH_CONDITIONS = 128, 256
_Model = Model[LTXVideoConfig, LTXVideoGeometry]
_DECODING = ("decode_timestep", "decode_noise_scale")


def _max_tokens(folder: AnyFolder) -> int:
    return _MAX_TOKENS_WITH_CONDITIONS if takes_conditions(folder) else _MAX_TOKENS


def _load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> T5TextEncoder:
    """Load T5, whose padding the transformer does not see. Raises ModelLoadError."""
    return load_t5(
        folder,
        device,
        dtype,
        max_tokens=_max_tokens(folder),
        encoder="text_encoder",
        tokenizer="tokenizer",
        padding="hidden" if takes_conditions(folder) else "seen_by_t5",
    )


def _adapt(model: _Model) -> _Model:
    """Return the model with a decoder that takes a noise level; the schedule of the folder's pipeline."""
    decodes_with_noise, schedule = decodes_at_a_timestep(model.folder), model.sampling.schedule
    scheduler = model.sampling.scheduler
    if takes_conditions(model.folder):
        if scheduler.shifts_by_size:
            raise ModelLoadError(
                f"{scheduler.path}: use_dynamic_shifting: expected False beside {CONDITION_PIPELINE}, whose "
                "noise levels do not follow the size; got True"
            )
        schedule = LinearQuadraticSigmas()
    defaults = {**model.defaults, **(_CONDITION_DEFAULTS if takes_conditions(model.folder) else {})}
    if not decodes_with_noise:
        defaults = {key: value for key, value in defaults.items() if key not in _DECODING}
    return dataclasses.replace(
        model,
        sampling=dataclasses.replace(
            model.sampling, schedule=schedule, decodes_with_noise=decodes_with_noise, continues_images=True
        ),
        defaults=defaults,
    )


_CONDITION_DEFAULTS = published_defaults(
    "ltx-video-0.9.7-dev", "num_inference_steps", "guidance_scale", "guidance_rescale"
)

FAMILY = ModelFamily(
    name="ltx_video",
    files=FolderFormat(
        transformer_classes=("LTXVideoTransformer3DModel",),
        # One transformer does all of it.
        pipeline_classes=(TEXT_PIPELINE, IMAGE_PIPELINE, CONDITION_PIPELINE),
        diffusers_components=(codec.AUTOENCODER,),
        check_parts=codec.check_decoding,
    ),
    roles=(("self", "self"), ("cross", "cross")),
    requests=Requests(
        defaults=published_defaults("ltx-video-0.9.1"),
        read_schedule=token_shift,
        in_comfyui_order=True,
        fields=("guidance_rescale",),
        # The last four of ten steps; for the distilled models, those of their authors' examples.
        second_stage=SecondStage(codec.UPSAMPLER, LinearQuadraticSigmas().sigmas(10)[6:], (0.909, 0.725, 0.421)),
    ),
    text=TextEncoding(
        shapes=lambda folder, config: TextShapes(((_max_tokens(folder), config.text_dim),)), load=_load_text_encoder
    ),
    decoding=Decoding(
        load=codec.load_decoder,
        load_encoder=of_clips(codec.load_image_conditioner),
        modes=("fast",),
        tiling=codec.tiling,
    ),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=LTXVideoTransformer,
    weights=Weights(pieces=transformer_pieces, lora_names=LORA_NAMES, float32=FLOAT32),
    load_image_conditioner=codec.load_image_conditioner,
    images=lambda *_: ImageInputs(images={"image_path": False}),
    adapt=_adapt,
)
