"""Config of a FLUX.1 folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.latent_geometry import ImageGeometry, read_image_factor, read_num_channels
from diffusion_runtime.core.model_folder import INDEX_FILE, AnyFolder, read_config, read_index
from diffusion_runtime.errors import ModelLoadError

# Pipelines of FLUX.1 Canny and Depth, and of Fill.
CONTROL, FILL = "FluxControlPipeline", "FluxFillPipeline"
# Four latents per token. The checkpoint's own patch_size is 1: its pipeline folds them before.
PATCH = (1, 2, 2)
_LATENTS_A_TOKEN = 4


@config_fields.config
class Flux1TransformerConfig:
    """Sizes of a FLUX.1 transformer.

    condition_channels: of conditions next to the latents, such as a masked image and its mask; 0 for none. text_dim: of
    T5's embeddings; pooled_dim: of CLIP's vector, None without one. embeds_guidance: whether the guidance scale is an
    input. axes: channels of a head that carry each axis of the rotary positions. num_waves: of the sinusoidal timestep.
    eps: of every norm.
    """

    num_double_layers: int = config_fields.layer_count("num_layers")
    num_single_layers: int = config_fields.layer_count("num_single_layers")
    num_heads: int = config_fields.whole_number("num_attention_heads")
    head_dim: int = config_fields.whole_number("attention_head_dim")
    num_channels: int
    text_dim: int = config_fields.whole_number("joint_attention_dim")
    pooled_dim: int | None = config_fields.whole_number("pooled_projection_dim")
    embeds_guidance: bool = config_fields.flag("guidance_embeds", False)
    axes: tuple[int, ...] = config_fields.rotary_axes("axes_dims_rope", (16, 56, 56))
    condition_channels: int = 0
    num_waves: int = 256
    eps: float = 1e-6

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def ffn_dim(self) -> int:
        return 4 * self.dim

    @property
    def patch_channels(self) -> int:
        """Numbers in a patch of latents."""
        return self.num_channels * _LATENTS_A_TOKEN

    @property
    def input_channels(self) -> int:
        """Numbers in a patch of latents and of the conditions next to them."""
        return (self.num_channels + self.condition_channels) * _LATENTS_A_TOKEN

    @property
    def num_layers(self) -> int:
        return self.num_double_layers + self.num_single_layers


def read_transformer_config(folder: AnyFolder) -> Flux1TransformerConfig:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    fixed, others = {"patch_size": 1}, ("in_channels", "out_channels")
    sizes = config_fields.read_fields(Flux1TransformerConfig, file, fixed=fixed, others=others)
    in_channels = file.whole_number("in_channels")
    out_channels = file.whole_number("out_channels", in_channels)
    for key, value in (("in_channels", in_channels), ("out_channels", out_channels)):
        if value % _LATENTS_A_TOKEN:
            raise file.error(key, f"a multiple of {_LATENTS_A_TOKEN}", value)
    if out_channels > in_channels:
        raise file.error("out_channels", f"{in_channels} (in_channels) or less", out_channels)
    return Flux1TransformerConfig(
        **sizes,
        num_channels=out_channels // _LATENTS_A_TOKEN,
        condition_channels=(in_channels - out_channels) // _LATENTS_A_TOKEN,
    )


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, "vae")
    source = "a quarter of the transformer's out_channels"
    num_channels = read_num_channels(file, "latent_channels", transformer.num_channels, source)
    spatial_factor = read_image_factor(file)
    _check_condition(folder, transformer, spatial_factor)
    return ImageGeometry(num_channels=num_channels, spatial_factor=spatial_factor, temporal_factor=1, patch=PATCH)


def _check_condition(folder: AnyFolder, config: Flux1TransformerConfig, spatial_factor: int) -> None:
    """Check that the transformer takes the condition that the pipeline adds. Raises ModelLoadError."""
    pipeline = str(read_index(folder).get("_class_name"))
    # Latents of an image; every pixel of a mask.
    channels = {CONTROL: config.num_channels, FILL: config.num_channels + spatial_factor**2}.get(pipeline, 0)
    if config.condition_channels == channels:
        return
    file, given = read_config(folder, "transformer"), config.input_channels
    expected = (config.num_channels + channels) * _LATENTS_A_TOKEN
    raise ModelLoadError(
        f"{file.path}: keys 'in_channels' ({given}) and 'out_channels' ({config.patch_channels}): expected "
        f"{expected} in_channels for {pipeline}, the class of {folder / INDEX_FILE}; FLUX.1 Fill is {FILL}, and Canny "
        f"and Depth are {CONTROL}; `--backend diffusers` runs other classes"
    )
