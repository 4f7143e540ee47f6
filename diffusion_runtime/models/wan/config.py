"""Config of a Wan folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diffusion_runtime.attention.cache.history import CompressedHistory
from diffusion_runtime.core import config_fields
from diffusion_runtime.core.latent_geometry import LatentGeometry, read_num_channels
from diffusion_runtime.core.model_folder import (
    INDEX_FILE,
    AnyFolder,
    ConfigFile,
    component_class,
    read_config,
    read_index,
)
from diffusion_runtime.errors import ModelLoadError, shown
from diffusion_runtime.models.wan.causal import is_far, read_history
from diffusion_runtime.models.wan.flow_map import (
    AUTHORS_CLASS,
    AUTHORS_KEYS,
    FAR_KEYS,
    FAR_PIPELINES,
    FLOW_MAP_CLASSES,
    FLOW_MAP_KEYS,
    FLOW_MAP_PIPELINES,
    FlowMapConfig,
    read_flow_map,
)

_FIXED = {"qk_norm": "rms_norm_across_heads"}

# The linear map of a block, in checkpoints trained with Video Sparse Attention, that makes its gate.
GATE = "to_gate_compress"

_OTHER_KEYS = (
    *("patch_size", "in_channels", "out_channels"),
    # The length of diffusers' table of rotary positions; here they are computed for each size.
    "rope_max_seq_len",
    # Of image-to-video checkpoints with an image encoder.
    *("image_dim", "added_kv_proj_dim", "pos_embed_seq_len"),
)
# Keys of VACE alone: the blocks that have a control block, and the channels of the control blocks' input.
_CONTROL_KEYS = ("vace_layers", "vace_in_channels")
# Keys of causal checkpoints: see causal.py.
CAUSAL_KEYS = (
    "num_frames_per_block",
    "independent_first_frame",
    "sliding_window_num_frames",
    "local_attn_size",
    "sink_size",
    "rope_cache_policy",
)
CONTROL_CLASS = "WanVACETransformer3DModel"
# FastVideo's class of models that make a video chunk by chunk: the same weights, trained under a block-causal mask.
CAUSAL_CLASS = "CausalWanTransformer3DModel"
CAUSAL_PIPELINE = "WanCausalDMDPipeline"
TRANSFORMER_CLASSES = ("WanTransformer3DModel", CONTROL_CLASS, CAUSAL_CLASS, *FLOW_MAP_CLASSES)
_CLASS_KEYS = {
    CONTROL_CLASS: _CONTROL_KEYS,
    CAUSAL_CLASS: CAUSAL_KEYS,
    FLOW_MAP_CLASSES[0]: FLOW_MAP_KEYS,
    FLOW_MAP_CLASSES[1]: (*FLOW_MAP_KEYS, *FAR_KEYS),
    AUTHORS_CLASS: (*FLOW_MAP_KEYS, *AUTHORS_KEYS),
}
CONTROL_PIPELINE = "WanVACEPipeline"
# The pipelines of folders that make videos from text, and from an image; the second name of the former is FastVideo's
# where the sampler is dmd, which diffusers has no class for.
TEXT_PIPELINES = ("WanPipeline", "WanDMDPipeline", CAUSAL_PIPELINE, *FLOW_MAP_PIPELINES, *FAR_PIPELINES)
IMAGE_PIPELINE = "WanImageToVideoPipeline"


@config_fields.config
class WanTransformerConfig:
    """Sizes of a Wan transformer.

    patch: latents per token in (frames, height, width). num_waves: channels of the sinusoidal timestep. norm_cross:
    whether a layer norm with weights precedes the cross-attention. eps: of every norm. has_gate: whether blocks have
    the gate of Video Sparse Attention; only the names of the weights show it. condition_channels: of the mask and the
    encoded images next to the latents in image-to-video models. image_dim: width of an image encoder's tokens, None
    without one; num_placed_tokens: how many tokens of two images have a learned position, None where there is one
    image. control_layers: in VACE, the blocks that have a control block; control_channels: of the control blocks'
    input. is_causal: whether self-attention reads the keys of earlier frames. flow_map: of models that predict the mean
    velocity to the timestep that a step leads to, None for others. history: of causal ones whose older frames are in
    larger patches.
    """

    num_layers: int = config_fields.layer_count("num_layers")
    num_heads: int = config_fields.whole_number("num_attention_heads")
    head_dim: int = config_fields.even_number("attention_head_dim")
    ffn_dim: int = config_fields.whole_number("ffn_dim")
    num_channels: int
    text_dim: int = config_fields.whole_number("text_dim")
    num_waves: int = config_fields.even_number("freq_dim")
    patch: tuple[int, int, int]
    norm_cross: bool = config_fields.flag("cross_attn_norm", True)
    eps: float = config_fields.number("eps", 1e-6)
    has_gate: bool = False
    condition_channels: int = 0
    image_dim: int | None = None
    num_placed_tokens: int | None = None
    control_layers: tuple[int, ...] = ()
    control_channels: int = 0
    is_causal: bool = False
    flow_map: FlowMapConfig | None = None
    history: CompressedHistory | None = None

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def patch_channels(self) -> int:
        """Numbers in a patch of latents."""
        return self.num_channels * math.prod(self.patch)

    @property
    def in_channels(self) -> int:
        """Channels of the latents and the condition next to them."""
        return self.num_channels + self.condition_channels

    @property
    def images(self) -> dict[str, bool]:
        """Image fields of a request that the condition is made of, and whether it needs them."""
        if self.condition_channels == 0:
            return {}
        if self.image_dim is None:
            return {"image_path": True, "last_image_path": False}
        return {"image_path": True} if self.num_placed_tokens is None else {"image_path": True, "last_image_path": True}


@dataclass(frozen=True)
class WanPipelineConfig:
    """Settings of model_index.json. boundary: the timestep in [0, 1000] above which the first of two experts predicts,
    None for one transformer. keeps_first_frame: whether a video may start from an image as its first latent frame, at
    timestep 0."""

    boundary: float | None
    keeps_first_frame: bool


def read_pipeline_config(folder: AnyFolder) -> WanPipelineConfig:
    """Read model_index.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    path = folder / INDEX_FILE
    file = ConfigFile(path, read_index(folder))
    has_second = file.values.get("transformer_2") not in (None, [None, None])
    ratio = file.values.get("boundary_ratio")
    if has_second != (ratio is not None):
        raise ModelLoadError(
            f"{path}: keys 'transformer_2' and 'boundary_ratio' belong together: two experts and the noise level "
            f"between them; got {shown(file.values.get('transformer_2'))} and {shown(ratio)}"
        )
    keeps_first_frame = file.flag("expand_timesteps", False)
    if ratio is None:
        return WanPipelineConfig(None, keeps_first_frame)
    if keeps_first_frame:
        raise file.error("expand_timesteps", "false in a model of two experts", True)
    boundary = file.number("boundary_ratio")
    if not 0 < boundary < 1:
        raise file.error("boundary_ratio", "a number between 0 and 1", ratio)
    return WanPipelineConfig(1000 * boundary, keeps_first_frame)


def read_transformer_config(folder: AnyFolder, component: str = "transformer") -> WanTransformerConfig:
    """Read a transformer's config.json in a folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, component)
    class_name = component_class(folder, component)[1]
    is_controlled, is_causal = class_name == CONTROL_CLASS, class_name == CAUSAL_CLASS
    others = (*_OTHER_KEYS, *_CLASS_KEYS.get(class_name, ()))
    sizes = config_fields.read_fields(WanTransformerConfig, file, fixed=_FIXED, others=others)
    in_channels = file.whole_number("in_channels")
    num_channels = file.whole_number("out_channels", in_channels)
    if num_channels > in_channels:
        raise file.error("out_channels", f"at most in_channels, {in_channels}", num_channels)
    patch = file.whole_numbers("patch_size", 3)
    dim = sizes["num_heads"] * sizes["head_dim"]
    image_dim, num_placed_tokens = _read_image_tokens(file, dim, in_channels - num_channels)
    history = read_history(file, (patch[0], patch[1], patch[2])) if is_far(file, class_name) else None
    is_causal = is_causal or history is not None
    if is_causal and (patch[0] != 1 or in_channels != num_channels):
        raise ModelLoadError(
            f"{file.path}: a {class_name} is supported with one latent frame per token (patch_size) and without "
            f"channels of an image (in_channels equal to out_channels), got {patch[0]}, {in_channels}, {num_channels}"
        )
    if is_controlled and in_channels != num_channels:
        raise file.error(
            "in_channels", f"{num_channels}, the out_channels, in a model with control blocks", in_channels
        )
    return WanTransformerConfig(
        **sizes,
        num_channels=num_channels,
        patch=(patch[0], patch[1], patch[2]),
        condition_channels=in_channels - num_channels,
        image_dim=image_dim,
        num_placed_tokens=num_placed_tokens,
        control_layers=_read_control_layers(file, sizes["num_layers"]) if is_controlled else (),
        control_channels=file.whole_number("vace_in_channels", 96) if is_controlled else 0,
        is_causal=is_causal,
        flow_map=read_flow_map(file) if class_name in FLOW_MAP_CLASSES else None,
        history=history,
    )


def _read_control_layers(file: ConfigFile, num_layers: int) -> tuple[int, ...]:
    """Read the blocks with a control block, in their order; the first block is one of them."""
    layers = file.values.get("vace_layers", [0, 5, 10, 15, 20, 25, 30, 35])
    rising = isinstance(layers, list) and all(type(layer) is int for layer in layers) and sorted(set(layers)) == layers
    if not rising or not layers or layers[0] != 0 or layers[-1] >= num_layers:
        raise file.error("vace_layers", f"a list of rising block numbers from 0, below {num_layers}", layers)
    return tuple(layers)


def _read_image_tokens(file: ConfigFile, dim: int, condition_channels: int) -> tuple[int | None, int | None]:
    """Read image_dim and num_placed_tokens. dim: of the transformer."""
    keys = ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len")
    image_dim, added_dim, num_placed = (
        None if file.values.get(key) is None else file.whole_number(key) for key in keys
    )
    if added_dim not in (None, dim):
        raise file.error("added_kv_proj_dim", f"{dim}, the transformer's width", added_dim)
    if (image_dim is None) != (added_dim is None):
        raise ModelLoadError(
            f"{file.path}: keys 'image_dim' and 'added_kv_proj_dim' belong together: the tokens of an image, and the "
            f"attention to them; got {shown(image_dim)} and {shown(added_dim)}"
        )
    if num_placed is not None and (image_dim is None or num_placed % 2):
        raise file.error("pos_embed_seq_len", "an even number, the tokens of two images, beside image_dim", num_placed)
    if image_dim is not None and condition_channels == 0:
        raise file.error("image_dim", "null where in_channels are those of the latents alone", image_dim)
    return image_dim, num_placed


def read_geometry(folder: AnyFolder) -> LatentGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, "vae")
    num_channels = read_num_channels(file, "z_dim", transformer.num_channels, "the transformer's out_channels", 16)
    temporal_factor = file.whole_number("scale_factor_temporal", 4)
    path = folder / "transformer" / "config.json"
    if transformer.condition_channels not in (0, temporal_factor + num_channels):
        raise ModelLoadError(
            f"{path}: keys 'in_channels' ({transformer.in_channels}) and 'out_channels' ({num_channels}): expected "
            f"equal numbers (text to video), or {temporal_factor} of a mask and {num_channels} of encoded images more "
            "(image to video); `--backend diffusers` runs what diffusers has a pipeline for"
        )
    spatial_factor = file.whole_number("scale_factor_spatial", 8)
    of_control = 2 * num_channels + spatial_factor**2
    if transformer.control_layers and transformer.control_channels != of_control:
        raise ModelLoadError(
            f"{path}: key 'vace_in_channels': expected {of_control}: {num_channels} of what is kept, {num_channels} of "
            f"what is made anew and {spatial_factor**2} of the mask; got {transformer.control_channels}"
        )
    if read_pipeline_config(folder).keeps_first_frame and transformer.patch[0] != 1:
        raise ModelLoadError(
            f"{path}: key 'patch_size': expected 1 latent frame a token in a model that starts from an image, got "
            f"{transformer.patch[0]}"
        )
    return LatentGeometry(
        num_channels=num_channels,
        spatial_factor=spatial_factor,
        temporal_factor=temporal_factor,
        patch=transformer.patch,
    )


def check_pipeline(folder: AnyFolder) -> None:
    """Check that the folder's pipeline is one for its transformer. Raises ModelLoadError that names the file and the
    key."""
    read_geometry(folder)
    path = folder / INDEX_FILE
    name, pipeline = read_index(folder).get("_class_name"), read_pipeline_config(folder)
    config = read_transformer_config(folder)
    if pipeline.keeps_first_frame and config.condition_channels:
        raise ModelLoadError(
            f"{path}: key 'expand_timesteps': expected false in a model with {config.in_channels} in_channels, which "
            "takes its image beside the latents"
        )
    starts_from_image = config.condition_channels > 0 or pipeline.keeps_first_frame
    if (name == CONTROL_PIPELINE) != bool(config.control_layers):
        expected = CONTROL_PIPELINE if config.control_layers else f"{TEXT_PIPELINES[0]} or {IMAGE_PIPELINE}"
        raise ModelLoadError(
            f"{path}: key '_class_name': expected {expected}, got {shown(name)}: the transformer is a "
            f"{component_class(folder, 'transformer')[1]}"
        )
    if name == CONTROL_PIPELINE and (pipeline.keeps_first_frame or config.image_dim is not None):
        raise ModelLoadError(f"{path}: key '_class_name': {name} takes no first frame and no image encoder")
    has_more = starts_from_image or pipeline.boundary is not None
    kind = int(config.history is not None)
    of_kind, is_flow_map = (FLOW_MAP_PIPELINES, FAR_PIPELINES)[kind], config.flow_map is not None
    if (name in (*FLOW_MAP_PIPELINES, *FAR_PIPELINES)) != is_flow_map or (
        is_flow_map and (has_more or name not in of_kind)
    ):
        raise ModelLoadError(
            f"{path}: key '_class_name': {of_kind[0]} belongs to one {FLOW_MAP_CLASSES[kind]} that makes "
            f"videos from text alone, got {shown(name)} and {component_class(folder, 'transformer')[1]} with "
            f"{config.in_channels} in_channels, expand_timesteps {pipeline.keeps_first_frame}, boundary_ratio "
            f"{pipeline.boundary}"
        )
    if name == IMAGE_PIPELINE and not starts_from_image:
        raise ModelLoadError(
            f"{path}: key '_class_name': expected {TEXT_PIPELINES[0]}, got {shown(name)}: a transformer with "
            f"{config.in_channels} in_channels has no room for an image"
        )
    if name in TEXT_PIPELINES and config.condition_channels > 0:
        raise ModelLoadError(
            f"{path}: key '_class_name': expected {IMAGE_PIPELINE}, got {shown(name)}: a transformer with "
            f"{config.in_channels} in_channels makes videos from an image"
        )
