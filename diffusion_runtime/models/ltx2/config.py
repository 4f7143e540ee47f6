"""Config of an LTX-2 folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.model_folder import AnyFolder, ConfigFile, read_config
from diffusion_runtime.errors import ModelLoadError, shown
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry
from diffusion_runtime.models.ltx2.positions import AUDIO_FACTOR, PositionRules
from diffusion_runtime.weights.head_widths import HeadWidths

AUDIO_VAE = "audio_vae"

# Settings of later versions of the architecture, and the values that are built here.
_FIXED: dict[str, object] = {
    "patch_size": 1,
    "patch_size_t": 1,
    "audio_patch_size": 1,
    "audio_patch_size_t": 1,
    "qk_norm": "rms_norm_across_heads",
    "activation_fn": "gelu-approximate",
    "norm_elementwise_affine": False,
    "attention_bias": True,
    "attention_out_bias": True,
}

_READ_HERE = (
    *("vae_scale_factors", "pos_embed_max_pos", "base_height", "base_width", "caption_channels", "rope_type"),
    *("timestep_scale_multiplier", "cross_attn_timestep_scale_multiplier"),
)


@config_fields.config
class StreamConfig(HeadWidths):
    """Sizes of one stream, the video's or the sound's. num_channels: of a token of latents. text_dim: of its text
    embeddings. has_gates: whether its attention layers have a gate for each head, as since LTX-2.3. has_ffn_bias:
    whether its feed-forward networks add a bias, as the video's do up to LTX-2.3."""

    num_channels: int = config_fields.equal_channels()
    text_dim: int
    has_gates: bool = config_fields.flag("gated_attn", False)
    has_ffn_bias: bool = config_fields.flag("ff_bias", True)


@config_fields.config
class LTX2Config:
    """Sizes of an LTX-2 transformer.

    eps: of the norms before attention and feed-forward. gate_factor: factor of the timestep for the gates between the
    streams. turns_halves: whether a channel turns with the one half a head further on, and not with its neighbour.
    projects_text: whether the text goes through a network of the transformer's own, as in LTX-2.0. modulates_text:
    whether the text is shifted and scaled before each block, and the timestep does so to its queries, as since LTX-2.3.
    text_follows_time: whether the timestep also shifts and scales the text, as in LTX-2.3 alone. can_skip_attention:
    whether diffusers' model takes spatio-temporal guidance. marks_keyframes: whether it can make keyframes beside a
    video, whose tokens a learned vector marks, as since LTX-2.5.
    """

    video: StreamConfig
    audio: StreamConfig
    num_layers: int = config_fields.layer_count("num_layers")
    eps: float = config_fields.number("norm_eps", 1e-6)
    gate_factor: float
    turns_halves: bool
    positions: PositionRules
    projects_text: bool = config_fields.flag("use_prompt_embeddings", True)
    modulates_text: bool = config_fields.flag("cross_attn_mod", False)
    text_follows_time: bool = config_fields.flag("use_prompt_adaln_single", True)
    can_skip_attention: bool = config_fields.flag("perturbed_attn", False)
    marks_keyframes: bool = config_fields.flag("use_keyframes_abs_pos_embedding", False)

    @property
    def num_rows(self) -> int:
        """Number of shifts, scales and gates of a block within a stream."""
        return 9 if self.modulates_text else 6


def read_transformer_config(folder: AnyFolder) -> LTX2Config:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    own = *config_fields.keys_of(LTX2Config), *config_fields.keys_of(PositionRules), *_READ_HERE
    file.refuse_unknown((*_FIXED, *own, *_keys_of_stream(""), *_keys_of_stream("audio_")))
    file.refuse_other_values(_FIXED, "as in LTX-2.0, 2.3 and 2.5, which this family runs natively")
    sizes = config_fields.read_declared(LTX2Config, file)
    text_dim = file.whole_number("caption_channels") if sizes["projects_text"] else None
    video, audio = _read_stream(file, "", text_dim), _read_stream(file, "audio_", text_dim)
    if audio.num_heads != video.num_heads:
        raise file.error("audio_num_attention_heads", f"{video.num_heads}, num_attention_heads", audio.num_heads)
    modulates = sizes["modulates_text"]
    if file.flag("audio_cross_attn_mod", False) != modulates:
        raise file.error("audio_cross_attn_mod", f"{shown(modulates)}, as cross_attn_mod", not modulates)
    time, between = (
        file.whole_number(key, 1000) for key in ("timestep_scale_multiplier", "cross_attn_timestep_scale_multiplier")
    )
    sizes["text_follows_time"] &= modulates
    return LTX2Config(
        **sizes,
        video=video,
        audio=audio,
        gate_factor=between / time,
        turns_halves=file.one_of("rope_type", ("interleaved", "split")) == "split",
        positions=_read_positions(file),
    )


def _keys_of_stream(prefix: str) -> tuple[str, ...]:
    others = f"{prefix}cross_attention_dim", f"{prefix}cross_attn_mod"
    return *config_fields.keys_of(StreamConfig, prefix), *others


def _read_stream(file: ConfigFile, prefix: str, text_dim: int | None) -> StreamConfig:
    """Read the sizes of a stream. prefix: of its keys. text_dim: None for a text as wide as the stream."""
    sizes = config_fields.read_declared(StreamConfig, file, prefix)
    width = sizes["num_heads"] * sizes["head_dim"]
    stream = StreamConfig(**sizes, text_dim=width if text_dim is None else text_dim)
    source_dim = file.whole_number(f"{prefix}cross_attention_dim")
    if source_dim != stream.dim:
        raise file.error(f"{prefix}cross_attention_dim", f"{stream.dim}, the width of that stream", source_dim)
    return stream


def _read_positions(file: ConfigFile) -> PositionRules:
    factors = file.whole_numbers("vae_scale_factors", 3)
    keys = {"pos_embed_max_pos": 20, "base_height": 2048, "base_width": 2048}
    seconds, height, width = (file.whole_number(key, default) for key, default in keys.items())
    return PositionRules(
        **config_fields.read_declared(PositionRules, file),
        factors=(factors[0], factors[1], factors[2]),
        extents=(seconds, height, width),
    )


def read_geometry(folder: AnyFolder) -> LTX2Geometry:
    """Read the configs of the transformer and both autoencoders. Raises ModelLoadError that names file and key."""
    transformer, video, audio = (
        read_transformer_config(folder),
        read_config(folder, "vae"),
        read_config(folder, AUDIO_VAE),
    )
    num_channels = video.whole_number("latent_channels", 128)
    if num_channels != transformer.video.num_channels:
        raise video.error(
            "latent_channels", f"{transformer.video.num_channels}, the transformer's in_channels", num_channels
        )
    num_audio_channels, num_bins = audio.whole_number("latent_channels", 8), audio.whole_number("mel_bins", 64)
    if num_audio_channels * (num_bins // AUDIO_FACTOR) != transformer.audio.num_channels:
        raise ModelLoadError(
            f"{audio.path}: keys 'latent_channels' ({num_audio_channels}) and 'mel_bins' ({num_bins}): expected "
            f"channels x bins / {AUDIO_FACTOR} to be {transformer.audio.num_channels}, the transformer's "
            "audio_in_channels"
        )
    sample_rate, hop_length = audio.whole_number("sample_rate", 16000), audio.whole_number("mel_hop_length", 160)
    return LTX2Geometry(
        num_channels=num_channels,
        spatial_factor=video.whole_number("spatial_compression_ratio", 32),
        temporal_factor=video.whole_number("temporal_compression_ratio", 8),
        patch=(1, 1, 1),
        num_audio_channels=num_audio_channels,
        num_audio_bins=num_bins // AUDIO_FACTOR,
        audio_rate=sample_rate / hop_length / AUDIO_FACTOR,
        # Mirroring one latent beyond the edge takes a second one.
        min_latents=2 if video.values.get("decoder_spatial_padding_mode", "reflect") == "reflect" else 1,
    )
