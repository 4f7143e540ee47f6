"""The SeedVR2 family: videos and images restored and upscaled in one step (arXiv:2506.05301), without a prompt."""

from __future__ import annotations

import dataclasses

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.models.declaration import Decoding, FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.seedvr2 import codec
from diffusion_runtime.models.seedvr2.config import SeedVR2Config, read_transformer_config
from diffusion_runtime.models.seedvr2.geometry import SeedVR2Geometry, read_geometry
from diffusion_runtime.models.seedvr2.text import NUM_TOKENS, load_text
from diffusion_runtime.models.seedvr2.transformer import ROLE, SeedVR2Transformer
from diffusion_runtime.models.seedvr2.weights import FLOAT32, LORA_NAMES, transformer_pieces, unread_tensors
from diffusion_runtime.models.video_restoration import FIELDS, FILES, VideoRestoration

_Model = Model[SeedVR2Config, SeedVR2Geometry]


def _adapt(model: _Model) -> _Model:
    """Return the model with its video, and without what its blocks lack."""
    return dataclasses.replace(
        model,
        sampling=dataclasses.replace(model.sampling, control=VideoRestoration(), segments="blended"),
        weights=dataclasses.replace(model.weights, is_ignored=unread_tensors(model.config)),
    )


def _text_shapes(_: AnyFolder, config: SeedVR2Config) -> TextShapes:
    return TextShapes(((NUM_TOKENS, config.text_dim),), condition_channels=config.num_channels + 1)


FAMILY = ModelFamily(
    name="seedvr2",
    files=FolderFormat(
        transformer_classes=("SeedVR2Transformer3DModel",),
        # diffusers has none: the name is ours.
        pipeline_classes=("SeedVR2Pipeline",),
        diffusers_components=(codec.AUTOENCODER,),
        check_parts=codec.check_decoding,
    ),
    # Windows are no grid: backends that need one skip the role, like any cross-attention.
    roles=((ROLE, "cross"),),
    requests=Requests(defaults=published_defaults("seedvr2-3b"), fields=FIELDS, takes_guidance=False),
    text=TextEncoding(load=load_text, shapes=_text_shapes, library=lambda *_: "torch"),
    decoding=Decoding(load=codec.load_decoder, tiling=codec.tiling),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=SeedVR2Transformer,
    # A process that holds a part of the tokens would hold parts of windows.
    shared_heads=lambda _: None,
    weights=Weights(pieces=transformer_pieces, lora_names=LORA_NAMES, float32=FLOAT32),
    load_image_conditioner=codec.load_conditioner,
    images=lambda *_: ImageInputs(images=FILES),
    adapt=_adapt,
)
