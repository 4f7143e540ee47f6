"""The MiniMax-H3 family: a video and its sound from text, and from an image to start from or to end with; with its
other transformer, from references.

Distilled to run without guidance. Video and sound have schedules of their own (denoising/part_schedules.py).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from diffusion_runtime.core.model_folder import AnyFolder, workflow_of
from diffusion_runtime.denoising.part_schedules import ScheduleOfParts
from diffusion_runtime.models.declaration import Decoding, FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import ModelFamily
from diffusion_runtime.models.image_inputs import ImageInputs
from diffusion_runtime.models.interface import ImageConditioner
from diffusion_runtime.models.minimax_h3 import codec
from diffusion_runtime.models.minimax_h3.config import GATE, MiniMaxH3Config, config_of_file, read_transformer_config
from diffusion_runtime.models.minimax_h3.geometry import MiniMaxH3Geometry, read_geometry
from diffusion_runtime.models.minimax_h3.keyframes import KeyframeConditioner
from diffusion_runtime.models.minimax_h3.references import MediaConditioner, read_preparations, reference_media
from diffusion_runtime.models.minimax_h3.text import MAX_TOKENS, NUM_LAYERS, load_text_encoder
from diffusion_runtime.models.minimax_h3.transformer import TEXT_ROLE, MiniMaxH3Transformer
from diffusion_runtime.models.minimax_h3.weights import FLOAT32, LORA_NAMES, arrange, transformer_pieces
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.reference_media import FIELD

# The mode of requests with references, whose transformer is another one.
REFERENCES = "ref2va"


def _check_parts(folder: AnyFolder) -> None:
    codec.check_decoding(folder)
    read_preparations(folder)


def _load_conditioner(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> ImageConditioner:
    geometry = read_geometry(folder)
    if workflow_of(folder) == REFERENCES:
        rate = codec.sample_rate(folder)
        return MediaConditioner(geometry, rate, lambda: codec.MiniMaxH3Encoder(folder, device))
    return KeyframeConditioner(geometry, lambda: codec.load_image_encoder(folder, device, dtype))


def _add_gates(module: nn.Module, names: Collection[str]) -> None:
    """Add gates to a module whose weights have them, of a checkpoint or of a LoRA file, as only `names` show."""
    assert isinstance(module, MiniMaxH3Transformer)
    if any(f".{GATE}." in name for name in names):
        module.add_gates()


def _images(folder: AnyFolder, _: MiniMaxH3Config, geometry: MiniMaxH3Geometry) -> ImageInputs:
    if workflow_of(folder) == REFERENCES:
        return ImageInputs(images={FIELD: True}, media=reference_media(geometry, folder))
    images = dict.fromkeys(("image_path", "last_image_path"), False)
    return ImageInputs(images=images, size_of_image=geometry.size_of_image)


FAMILY = ModelFamily(
    name="minimax_h3",
    files=FolderFormat(
        transformer_classes=("MiniMaxH3Transformer3DModel",),
        # diffusers has a modular pipeline alone.
        pipeline_classes=("MiniMaxH3Pipeline",),
        index_keys=("canvas_short_edge", "canvas_max_pixels", "reference_image_short_edge"),
        diffusers_components=(codec.VIDEO_AUTOENCODER, codec.AUDIO_AUTOENCODER),
        # Both transformers again under the authors' names.
        unread=("FL2VA", "Ref2VA"),
        workflows={REFERENCES: {"transformer": "transformer_ref"}},
        check_parts=_check_parts,
    ),
    # The refiner of the text has no grid: backends that need one skip it, like any cross-attention.
    roles=(("self", "self"), (TEXT_ROLE, "cross"), (codec.DECODER_ROLE, "cross")),
    # One branch: it was distilled to run without guidance.
    requests=Requests(
        defaults=published_defaults("minimax-h3"),
        takes_guidance=False,
        read_schedule=lambda _: ScheduleOfParts(),
    ),
    text=TextEncoding(
        shapes=lambda _, config: TextShapes(((MAX_TOKENS, config.text_dim),), num_layers=NUM_LAYERS, sees=True),
        load=load_text_encoder,
    ),
    # It decodes in tiles without being asked, which processes share.
    decoding=Decoding(
        load=codec.load_decoder,
        load_encoder=codec.load_clip_encoder,
        is_shared=True,
        modes=("fp8",),
        tiling=codec.tiling,
        attention=codec.decoder_attention,
    ),
    read_config=read_transformer_config,
    config_of_file=config_of_file,
    read_geometry=read_geometry,
    transformer=MiniMaxH3Transformer,
    weights=Weights(
        pieces=transformer_pieces,
        lora_names=LORA_NAMES,
        float32=FLOAT32,
        arrange=arrange,
        # The paces of the rotary positions, which are computed.
        is_ignored=lambda name: name == "rope.inv_freq",
        prepare=_add_gates,
    ),
    load_image_conditioner=_load_conditioner,
    images=_images,
)
