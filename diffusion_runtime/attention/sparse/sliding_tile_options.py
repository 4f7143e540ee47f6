"""The options of sliding tile attention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diffusion_runtime.attention.schedule import DenseRule, dense_first_steps
from diffusion_runtime.attention.sparse.interface import SparseOptions
from diffusion_runtime.attention.sparse.sliding_tile_strategy import load_strategy
from diffusion_runtime.attention.sparse.sliding_tile_windows import checked_extent
from diffusion_runtime.errors import ConfigError, nearest, shown
from diffusion_runtime.token_layout import Extent
from diffusion_runtime.untrusted.files import check_place

INFERENCE, SEARCHING, TUNING, TUNING_CFG, NONE = MODES = (
    "STA_inference",
    "STA_searching",
    "STA_tuning",
    "STA_tuning_cfg",
    "none",
)
DEFAULT_SKIP_TIME_STEPS = 15
# Options that say which tiles are attended to.
_WINDOWS = ("window", "head_windows", "mask_strategy_file_path")


@dataclass(frozen=True)
class SlidingTileOptions(SparseOptions):
    """Windows in tiles of tile_size tokens; sizes are (frames, height, width).

    sta_mode: one of these, upper or lower case.
        STA_inference: attend within the windows of `window` or of `mask_strategy_file_path`, exactly one of the two.
        STA_searching: run full attention, and beside it every candidate window, and log to `search_log_folder` how far
            each is from full. It costs as much as all of them together and ignores min_tokens. The last layer writes
            the log at the last step, so a schedule must leave that call to this backend.
        STA_tuning: choose the best windows from the logs of `search_log_folder`, write them to `tuned_file_path` at the
            first call, and use them from there on. Reads the logs of the conditional branch; a batch that holds both
            branches was logged as one and counts as well.
        STA_tuning_cfg: the same from the logs of the conditional and the unconditional branch together.
        none: full attention.
    mask_strategy_file_path: `{"STEP_LAYER_HEAD": [frames, height, width], ...}`; heads that it leaves out are full.
    skip_time_steps: how many of the first steps are full. None is 15 with a strategy file and while tuning, as the
        paper has it, and 0 with a plain window, which would otherwise do nothing in a run of few steps.
    window: one window for every step, layer and head.
    head_windows: one window for each query head, None for a head that attends to everything; with schedule rules the
        windows of layers and steps differ, which is what `tune --head-ranges` writes.
    candidates: the windows that a search tries; None takes five shapes like the paper's. Leave the full window out:
        tuning takes what is closest to full whatever it costs, so of windows that contain each other the largest wins.
    search_log_folder: one file per request and guidance branch; searching adds to it, tuning reads all of it.
    tuned_file_path: None is mask_strategy.json in search_log_folder; what is there is replaced.
    """

    mask_strategy_file_path: str | None = None
    # Not a Literal: case does not matter, and `none` on a command line arrives as None.
    sta_mode: str | None = INFERENCE
    skip_time_steps: int | None = None
    window: Extent | None = None
    head_windows: tuple[Extent | None, ...] | None = None
    tile_size: Extent = (6, 8, 8)
    candidates: tuple[Extent, ...] | None = None
    search_log_folder: str | None = None
    tuned_file_path: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # What several options mean together is for check_mode: they are also checked one by one, as they are parsed.
        mode = {known.lower(): known for known in MODES}.get(str(self.sta_mode).lower())
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
        if self.candidates is not None:
            if not self.candidates:
                raise ValueError("candidates: expected one window or more, got none")
            extents = tuple(checked_extent(item, f"candidates[{i}]") for i, item in enumerate(self.candidates))
            object.__setattr__(self, "candidates", extents)
        if self.skip_time_steps is not None and self.skip_time_steps < 0:
            raise ValueError(f"skip_time_steps: expected 0 or more, got {self.skip_time_steps}")
        for name in ("search_log_folder", "tuned_file_path"):
            if getattr(self, name) is not None:
                check_place(getattr(self, name), name)
        if self.search_log_folder is not None and Path(self.search_log_folder).is_file():
            raise ValueError(f"search_log_folder: {self.search_log_folder} is a file, expected a folder")
        if self.tuned_file_path is not None and Path(self.tuned_file_path).is_dir():
            raise ValueError(f"tuned_file_path: {self.tuned_file_path} is a folder, expected a file")
        if self.mask_strategy_file_path is not None:
            load_strategy(self.mask_strategy_file_path)

    @property
    def is_tuning(self) -> bool:
        return self.sta_mode in (TUNING, TUNING_CFG)

    @property
    def num_full_steps(self) -> int:
        """`skip_time_steps`, or its default for the mode."""
        if self.skip_time_steps is not None:
            return self.skip_time_steps
        return DEFAULT_SKIP_TIME_STEPS if self.is_tuning or self.mask_strategy_file_path is not None else 0

    def dense_schedule(self, num_layers: int, num_steps: int) -> tuple[DenseRule, ...]:  # noqa: ARG002
        if self.sta_mode in (NONE, SEARCHING):
            return ()
        return dense_first_steps(self.num_full_steps, f"skip_time_steps {self.num_full_steps}")

    @property
    def tuned_file(self) -> Path:
        if self.tuned_file_path is not None:
            return Path(self.tuned_file_path)
        assert self.search_log_folder is not None, "check_mode asks for it"
        return Path(self.search_log_folder) / "mask_strategy.json"

    def check_heads(self, num_heads: int) -> None:
        """num_heads: query heads of the whole layer. Raises ConfigError where head_windows are for another number."""
        if self.head_windows is not None and len(self.head_windows) != num_heads:
            raise ConfigError(
                f"sliding_tile_attn: head_windows has {len(self.head_windows)} windows and this layer "
                f"{num_heads} query heads; give {num_heads} windows, null for heads that attend to everything"
            )

    def check_mode(self) -> None:
        """Raises ConfigError when the mode lacks an option, or is given one that it would not read."""
        if self.sta_mode == NONE:
            return
        chosen = [name for name in _WINDOWS if getattr(self, name) is not None]
        if self.sta_mode == INFERENCE:
            if len(chosen) > 1:
                raise ConfigError(
                    f"sliding_tile_attn: {' and '.join(chosen)} all say which tiles are attended to; give one of them"
                )
            if not chosen:
                raise ConfigError(
                    "sliding_tile_attn: needs to know its windows. Give window=[3,3,5], in tiles, for all steps, "
                    "layers and heads, head_windows=[[3,3,5],...] with one for each head, or "
                    "mask_strategy_file_path=FILE.json with one for each step, layer and head"
                )
            return
        if chosen:
            instead = "candidates=[[3,3,5],...]" if self.sta_mode == SEARCHING else "tuned_file_path for its result"
            raise ConfigError(
                f"sliding_tile_attn: {chosen[0]} is for sta_mode={INFERENCE}; sta_mode={self.sta_mode} takes {instead}"
            )
        if self.search_log_folder is None:
            does = "writes its logs to" if self.sta_mode == SEARCHING else "reads the logs of"
            raise ConfigError(f"sliding_tile_attn: sta_mode={self.sta_mode} {does} a folder: give search_log_folder")
