"""The Wan-Animate 2 family: the character of an image, moving as in a driving video. Wan's blocks, autoencoder, text
encoder and image encoder."""

from __future__ import annotations

import dataclasses
from functools import partial

from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.model_folder import MODULAR_INDEX_FILE, AnyFolder, read_index, read_json_in
from diffusion_runtime.models.declaration import FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.driving_video import FILES, DrivingVideo
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.wan import codec
from diffusion_runtime.models.wan.cross_attention import IMAGE_ROLE
from diffusion_runtime.models.wan.family import FAMILY as WAN
from diffusion_runtime.models.wan.weights import FLOAT32
from diffusion_runtime.models.wan_animate_2.condition import WanAnimate2Conditioner, size_of_image
from diffusion_runtime.models.wan_animate_2.config import WanAnimate2Config, read_geometry, read_transformer_config
from diffusion_runtime.models.wan_animate_2.text import load_text_encoder
from diffusion_runtime.models.wan_animate_2.transformer import REFERENCE_ROLE, WanAnimate2Transformer
from diffusion_runtime.models.wan_animate_2.weights import LORA_NAMES, transformer_pieces
from diffusion_runtime.text_encoders.clip import check_clip_image_encoder
from diffusion_runtime.text_encoders.t5 import umt5_library

# The ordinary names of diffusers' modular pipelines: before and after distillation.
_PIPELINES = ("WanAnimate2Pipeline", "WanAnimate2DistilledPipeline")
_DISTILLED_MODULAR = "WanAnimate2DistilledModularPipeline"
# CLIP ViT-H/14 at 224 x 224, of the reference image and of the driving video's first frame.
_NUM_IMAGE_TOKENS = 2 * 257
_FEW_STEPS = published_defaults("wan2.2-animate-2-14b-distilled", "num_inference_steps", "guidance_scale", "sampler")

_Model = Model[WanAnimate2Config, LatentGeometry]


def _check_parts(folder: AnyFolder) -> None:
    config = read_transformer_config(folder)
    read_geometry(folder)
    if config.image_dim is not None:
        check_clip_image_encoder(folder, config.image_dim, None, prepares=False)


def _is_distilled(folder: AnyFolder) -> bool:
    """Return whether a folder is of the distilled model: its index says so, or a modular index next to it, as both
    published folders have the same ordinary one."""
    names = [read_index(folder).get("_class_name")]
    if (folder / MODULAR_INDEX_FILE).is_file():
        names.append(read_json_in(folder, MODULAR_INDEX_FILE).get("_class_name"))
    return not {_PIPELINES[1], _DISTILLED_MODULAR}.isdisjoint(name for name in names if isinstance(name, str))


def _adapt(model: _Model) -> _Model:
    """Return the model with its inputs; the distilled one with its steps."""
    factor, has_tokens = model.geometry.temporal_factor, model.config.image_dim is not None
    return dataclasses.replace(
        model,
        inputs=ImageInputs(images=FILES, size_of_image=size_of_image),
        sampling=dataclasses.replace(
            model.sampling, control=DrivingVideo(model.geometry), caches_prefix=True, segments="continued"
        ),
        defaults={**model.defaults, **(_FEW_STEPS if _is_distilled(model.folder) else {})},
        load_image_conditioner=partial(
            WanAnimate2Conditioner.load, model.folder, temporal_factor=factor, has_tokens=has_tokens
        ),
    )


def _text_shapes(_: AnyFolder, config: WanAnimate2Config) -> TextShapes:
    text = (config.max_tokens, config.text_dim)
    return TextShapes(
        (text, text),
        image=None if config.image_dim is None else (_NUM_IMAGE_TOKENS, config.image_dim),
        condition_channels=config.condition_channels + config.num_channels,
    )


FAMILY: ModelFamily[WanAnimate2Config, LatentGeometry] = ModelFamily(
    name="wan_animate_2",
    files=FolderFormat(
        transformer_classes=("WanAnimate2Transformer3DModel",),
        pipeline_classes=_PIPELINES,
        diffusers_components=(codec.AUTOENCODER,),
        # Made from their own defaults, which the runtime knows.
        unread=("image_processor", "video_processor"),
        check_parts=_check_parts,
    ),
    roles=(("self", "self"), ("cross", "cross"), (IMAGE_ROLE, "cross"), (REFERENCE_ROLE, "cross")),
    requests=Requests(defaults=published_defaults("wan2.2-animate-2-14b")),
    text=TextEncoding(shapes=_text_shapes, load=load_text_encoder, library=umt5_library),
    # A clip follows a driving video, from noise alone.
    decoding=dataclasses.replace(WAN.decoding, load_encoder=None),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=WanAnimate2Transformer,
    weights=Weights(pieces=transformer_pieces, lora_names=LORA_NAMES, float32=FLOAT32),
    adapt=_adapt,
)
