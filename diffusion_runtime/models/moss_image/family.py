"""The MOSS-Image family: text to image. FLUX.2's autoencoder; Qwen3.5 for the text.

The folder's own pipeline is code that comes with it, and does not run: its json and its weights are read.
"""

from __future__ import annotations

import dataclasses

from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.decoders.image_decoder import image_tiling
from diffusion_runtime.denoising.flow_schedule import FlowSchedule, TrainedLevels
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig
from diffusion_runtime.errors import ModelLoadError, shown
from diffusion_runtime.models.declaration import Decoding, FolderFormat, Requests, TextEncoding, TextShapes, Weights
from diffusion_runtime.models.family import Model, ModelFamily
from diffusion_runtime.models.flux2 import codec
from diffusion_runtime.models.moss_image.config import MossImageConfig, read_geometry, read_transformer_config
from diffusion_runtime.models.moss_image.text import MAX_TOKENS, load_text_encoder
from diffusion_runtime.models.moss_image.transformer import TEXT_ROLE, MossImageTransformer
from diffusion_runtime.models.moss_image.weights import LORA_NAMES, transformer_pieces
from diffusion_runtime.models.published import published_defaults
from diffusion_runtime.models.reference_images import of_pictures
from diffusion_runtime.untrusted.known_settings import is_positive
from diffusion_runtime.weights.pieces import paired_heads

_Model = Model[MossImageConfig, ImageGeometry]


def _adapt(model: _Model) -> _Model:
    """Return the model, without skip-layer guidance where it lacks the blocks."""
    skipped = model.defaults.get("skip_layers") or ()
    fits = all(block < model.config.num_layers for block in skipped)
    kept = {key: each for key, each in model.defaults.items() if fits or not key.startswith("skip_layer")}
    return dataclasses.replace(model, defaults=kept)


def _schedule(scheduler: SchedulerConfig) -> FlowSchedule:
    """Return the noise levels of the folder's training. Raises ModelLoadError for a shift of it that is none."""
    shift = scheduler.values.get("training_shift", 1.0)
    if not is_positive(shift):
        raise ModelLoadError(f"{scheduler.path}: training_shift: expected a number above 0, got {shown(shift)}")
    return TrainedLevels(int(scheduler.values.get("num_train_timesteps", 1000)), float(shift))


FAMILY = ModelFamily(
    name="moss_image",
    files=FolderFormat(
        transformer_classes=("MOSSImageTransformer",),
        pipeline_classes=("MOSSImagePipeline",),
        diffusers_components=(codec.AUTOENCODER,),
    ),
    # The blocks of the text have no grid: backends that need one skip them, like any cross-attention.
    roles=(("self", "self"), (TEXT_ROLE, "cross")),
    requests=Requests(defaults=published_defaults("moss-image-sft"), read_schedule=_schedule),
    text=TextEncoding(shapes=lambda _, config: TextShapes(((MAX_TOKENS, config.text_dim),)), load=load_text_encoder),
    decoding=Decoding(
        load=codec.load_decoder, load_encoder=of_pictures(codec.load_encoder), tiling=image_tiling, has_exact_tiles=True
    ),
    read_config=read_transformer_config,
    read_geometry=read_geometry,
    transformer=MossImageTransformer,
    weights=Weights(
        pieces=transformer_pieces,
        lora_names=LORA_NAMES,
        arrange=paired_heads(lambda config, _: config.head_dim),
        is_ignored=lambda name: name == "rope.bands",
    ),
    adapt=_adapt,
)
