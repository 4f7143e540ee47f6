"""Config of a MiniMax-H3 folder: its transformer and schedules, read from json and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.model_folder import AnyFolder, ConfigFile, read_config, read_json_in

# A tensor of pruned files, [times, rank]. The whole model has a network of two layers in place of it.
TIME_TABLE = "adaln_t_table"
# Its name in FastH3's files, whole models and LoRA files (there with `.set_weight`): fastvideo 0.2.1,
# models/dits/minimax_h3.py.
GATE = "attn.to_gate_compress"
# In FastH3's folders: how the model was trained to attend.
_INFERENCE_FILE, _WITH_GATES = "fastvideo_inference.json", "VIDEO_SPARSE_ATTN_H3"
AUDIO_VAE, _SCHEDULE = "audio_vae", "scheduler_config.json"
# Axes of the rotary positions: time, row, column.
_AXES = 3
PATCH = (1, 2, 2)


@config_fields.config
class MiniMaxH3Config:
    """Sizes of a MiniMax-H3 transformer.

    inner_dim is wider than dim, that of a token. num_waves, time_hidden_dim, time_dim: of the sinusoidal timestep, and
    of its network's layers. num_paces: of the rotary positions along each axis; the other channels do not turn. shifts:
    flow shifts of the schedules of pictures and of sound that the model was trained with. has_gate: whether blocks have
    the gate of Video Sparse Attention. table_size: times of a table that stands for the timestep's network, in pruned
    files; 0 for the network.
    """

    num_layers: int = config_fields.layer_count("num_layers", 50)
    num_refiner_layers: int = config_fields.whole_number("num_refiner_layers", 2, minimum=0)
    num_heads: int = config_fields.whole_number("num_attention_heads", 56)
    head_dim: int = config_fields.even_number("attention_head_dim", 128)
    dim: int = config_fields.whole_number("hidden_size", 5376)
    ffn_dim: int = config_fields.whole_number("ffn_dim", 14336)
    num_channels: int = config_fields.whole_number("in_channels", 24)
    num_audio_channels: int = config_fields.whole_number("audio_in_channels", 32)
    text_dim: int = config_fields.whole_number("text_dim", 5120)
    num_waves: int = config_fields.even_number("freq_dim", 256)
    time_hidden_dim: int = config_fields.whole_number("time_embed_hidden_dim", 5376)
    time_dim: int = config_fields.whole_number("time_embed_dim", 2688)
    num_paces: int = config_fields.whole_number("rope_freq_dim", 16)
    theta: float = config_fields.number("rope_theta", 10000.0)
    eps: float = config_fields.number("norm_eps", 1e-5)
    qk_eps: float = config_fields.number("qk_norm_eps", 1e-5)
    out_eps: float = config_fields.number("final_norm_eps", 1e-5)
    shifts: tuple[float, float] = (12.0, 3.0)
    has_gate: bool = False
    table_size: int = 0

    @property
    def inner_dim(self) -> int:
        """Width of q, of k and of v."""
        return self.num_heads * self.head_dim

    @property
    def patch_channels(self) -> int:
        """Numbers of a token of the video."""
        return self.num_channels * PATCH[0] * PATCH[1] * PATCH[2]

    @property
    def num_turned(self) -> int:
        """Channels of a head that turn."""
        return 2 * _AXES * self.num_paces


def read_transformer_config(folder: AnyFolder) -> MiniMaxH3Config:
    """Read transformer/config.json and the schedules' files of a diffusers folder. Raises ModelLoadError that names the
    file and the key."""
    file = read_config(folder, "transformer")
    config = MiniMaxH3Config(
        **config_fields.read_fields(
            MiniMaxH3Config, file, fixed={"patch_size": list(PATCH)}, why="as in the published model"
        ),
        shifts=(_read_shift(folder, "scheduler"), _read_shift(folder, "audio_scheduler")),
        has_gate=(folder / _INFERENCE_FILE).is_file()
        and read_json_in(folder, _INFERENCE_FILE).get("attention_backend") == _WITH_GATES,
    )
    if config.num_turned > config.head_dim:
        expected = f"{config.num_turned}, 6 x rope_freq_dim, or more"
        raise file.error("attention_head_dim", expected, config.head_dim)
    return config


def config_of_file(config: MiniMaxH3Config, shapes: Mapping[str, tuple[int, ...]]) -> MiniMaxH3Config:
    """Return the config of a transformer in one file. shapes: of its tensors by their names there. Pruned weights have
    a table of a few numbers by time, which the modulations are projections of."""
    table = shapes.get(TIME_TABLE, ())
    if len(table) != 2 or table[0] < 2 or table[1] < 1:
        return config
    return dataclasses.replace(config, table_size=table[0], time_dim=table[1])


def _read_shift(folder: AnyFolder, component: str) -> float:
    """Read the flow shift of one of the two schedules. Raises ModelLoadError that names the file and the key."""
    values = read_json_in(folder, component, _SCHEDULE)
    file = ConfigFile(folder / component / _SCHEDULE, values)
    file.refuse_unknown(("shift",))
    shift = file.number("shift")
    if shift <= 0:
        raise file.error("shift", "a number above 0", shift)
    return shift
