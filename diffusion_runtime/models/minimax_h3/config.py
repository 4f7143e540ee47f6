"""Config of a MiniMax-H3 folder: its transformer and schedules, read from json and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

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
# Settings that the class has beside these, with the defaults that published files leave out.
_SIZES = {
    **{"num_attention_heads": ("num_heads", 56), "attention_head_dim": ("head_dim", 128), "hidden_size": ("dim", 5376)},
    **{"ffn_dim": ("ffn_dim", 14336), "in_channels": ("num_channels", 24), "text_dim": ("text_dim", 5120)},
    "audio_in_channels": ("num_audio_channels", 32),
    **{"time_embed_hidden_dim": ("time_hidden_dim", 5376), "time_embed_dim": ("time_dim", 2688)},
    **{"rope_freq_dim": ("num_paces", 16)},
}
_NUMBERS = {"rope_theta": 10000.0, "norm_eps": 1e-5, "qk_norm_eps": 1e-5, "final_norm_eps": 1e-5}


@dataclass(frozen=True)
class MiniMaxH3Config:
    """Sizes of a MiniMax-H3 transformer.

    inner_dim is wider than dim, that of a token. num_waves, time_hidden_dim, time_dim: of the sinusoidal timestep, and
    of its network's layers. num_paces: of the rotary positions along each axis; the other channels do not turn. shifts:
    flow shifts of the schedules of pictures and of sound that the model was trained with. has_gate: whether blocks have
    the gate of Video Sparse Attention. table_size: times of a table that stands for the timestep's network, in pruned
    files; 0 for the network.
    """

    num_layers: int
    num_refiner_layers: int
    num_heads: int
    head_dim: int
    dim: int
    ffn_dim: int
    num_channels: int
    num_audio_channels: int
    text_dim: int
    num_waves: int
    time_hidden_dim: int
    time_dim: int
    num_paces: int
    theta: float
    eps: float
    qk_eps: float
    out_eps: float
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
    file.refuse_unknown(("num_layers", "num_refiner_layers", "freq_dim", "patch_size", *_SIZES, *_NUMBERS))
    file.refuse_other_values({"patch_size": list(PATCH)}, "as in the published model")
    sizes = file.sizes(_SIZES)
    turned, head_dim = 2 * _AXES * sizes["num_paces"], sizes["head_dim"]
    if turned > head_dim or head_dim % 2:
        raise file.error("attention_head_dim", f"an even number of at least {turned}, 6 x rope_freq_dim", head_dim)
    theta, eps, qk_eps, out_eps = (file.number(key, default) for key, default in _NUMBERS.items())
    return MiniMaxH3Config(
        **sizes,
        theta=theta,
        eps=eps,
        qk_eps=qk_eps,
        out_eps=out_eps,
        num_waves=file.even_number("freq_dim", 256),
        num_layers=file.layer_count("num_layers", 50),
        num_refiner_layers=file.whole_number("num_refiner_layers", 2, minimum=0),
        shifts=(_read_shift(folder, "scheduler"), _read_shift(folder, "audio_scheduler")),
        has_gate=(folder / _INFERENCE_FILE).is_file()
        and read_json_in(folder, _INFERENCE_FILE).get("attention_backend") == _WITH_GATES,
    )


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
