"""The options of sliding tile attention."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from diffusion_runtime.attention.schedule import DenseRule, dense_first_steps
from diffusion_runtime.attention.sparse.interface import SparseOptions
from diffusion_runtime.attention.sparse.sliding_tile_strategy import load_strategy
from diffusion_runtime.attention.sparse.sliding_tile_windows import checked_extent
from diffusion_runtime.core.token_layout import Extent
from diffusion_runtime.errors import ConfigError, nearest, shown

INFERENCE, NONE = MODES = ("STA_inference", "none")
_USE_TUNE = (
    "windows are chosen by `tune`: diffusion-runtime tune --methods sliding_tile_attn --head-ranges NUM_HEADS --budget "
    "'latent<=0.1' -o sta.yaml, then generate --config sta.yaml"
)
_REMOVED_MODES = ("STA_searching", "STA_tuning", "STA_tuning_cfg")
DEFAULT_SKIP_TIME_STEPS = 15
# Options that choose which tiles are attended to.
_WINDOWS = ("window", "head_windows", "mask_strategy_file_path")


@dataclass(frozen=True)
class SlidingTileOptions(SparseOptions):
    """Windows in tiles of tile_size tokens; sizes are (frames, height, width).

    sta_mode: one of these, upper or lower case.
        STA_inference: attend within the windows of `window`, `head_windows` or `mask_strategy_file_path`, exactly one
            of the three.
        none: full attention.
    mask_strategy_file_path: `{"STEP_LAYER_HEAD": [frames, height, width], ...}`; heads that it leaves out are full.
    skip_time_steps: how many of the first steps are full. None is 15 with a strategy file, as the paper has it, and 0
        with windows of the config, which would otherwise do nothing in a run of few steps.
    window: one window for every step, layer and head.
    head_windows: one window for each query head, None for a head that attends to everything; with schedule rules the
        windows of layers and steps differ, which is what `tune --head-ranges` writes.
    """

    mask_strategy_file_path: str | None = None
    # Not a Literal: case does not matter, and `none` on a command line arrives as None.
    sta_mode: str | None = INFERENCE
    skip_time_steps: int | None = None
    window: Extent | None = None
    head_windows: tuple[Extent | None, ...] | None = None
    tile_size: Extent = (6, 8, 8)
    # Names of upstream's and of earlier versions' options, which are refused with what to type instead.
    REMOVED = MappingProxyType(
        {**SparseOptions.REMOVED, **dict.fromkeys(("candidates", "search_log_folder", "tuned_file_path"), _USE_TUNE)}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # What several options mean together is for check_mode: they are also checked one by one, as they are parsed.
        given = str(self.sta_mode).lower()
        removed = {known.lower(): known for known in _REMOVED_MODES}.get(given)
        if removed is not None:
            raise ValueError(f"sta_mode={removed} is no mode any more: {_USE_TUNE}")
        mode = {known.lower(): known for known in MODES}.get(given)
        if mode is None:
            raise ValueError(f"sta_mode: unknown value {shown(self.sta_mode)}.{nearest(self.sta_mode, MODES)}")
        object.__setattr__(self, "sta_mode", mode)
        object.__setattr__(self, "tile_size", checked_extent(self.tile_size, "tile_size"))
        if self.window is not None:
            object.__setattr__(self, "window", checked_extent(self.window, "window"))
        if self.head_windows is not None:
            if not self.head_windows:
                raise ValueError("head_windows: expected one window for each query head, got none")
            of_heads = tuple(
                None if item is None else checked_extent(item, f"head_windows[{index}]")
                for index, item in enumerate(self.head_windows)
            )
            object.__setattr__(self, "head_windows", of_heads)
        if self.skip_time_steps is not None and self.skip_time_steps < 0:
            raise ValueError(f"skip_time_steps: expected 0 or more, got {self.skip_time_steps}")
        if self.mask_strategy_file_path is not None:
            load_strategy(self.mask_strategy_file_path)

    @property
    def num_full_steps(self) -> int:
        """`skip_time_steps`, or its default."""
        if self.skip_time_steps is not None:
            return self.skip_time_steps
        return DEFAULT_SKIP_TIME_STEPS if self.mask_strategy_file_path is not None else 0

    def dense_schedule(self, num_layers: int, num_steps: int) -> tuple[DenseRule, ...]:  # noqa: ARG002
        if self.sta_mode == NONE:
            return ()
        return dense_first_steps(self.num_full_steps, f"skip_time_steps {self.num_full_steps}")

    def check_heads(self, num_heads: int) -> None:
        """num_heads: query heads of the whole layer. Raises ConfigError where head_windows are for another number."""
        if self.head_windows is not None and len(self.head_windows) != num_heads:
            raise ConfigError(
                f"sliding_tile_attn: head_windows has {len(self.head_windows)} windows and this layer "
                f"{num_heads} query heads; give {num_heads} windows, null for heads that attend to everything"
            )

    def check_mode(self) -> None:
        """Raises ConfigError unless exactly one option chooses which tiles are attended to."""
        if self.sta_mode == NONE:
            return
        chosen = [name for name in _WINDOWS if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ConfigError(
                f"sliding_tile_attn: {' and '.join(chosen)} all say which tiles are attended to; give one of them"
            )
        if not chosen:
            raise ConfigError(
                "sliding_tile_attn: needs to know its windows. Give window=[3,3,5], in tiles, for all steps, layers "
                "and heads, head_windows=[[3,3,5],...] with one for each head, or mask_strategy_file_path=FILE.json "
                "with one for each step, layer and head"
            )
