"""Mask strategy files: which window each denoising step, layer and head uses.

One flat JSON object, `{"STEP_LAYER_HEAD": [frames, height, width], ...}`, indexes from 0, windows in tiles: the format
that the authors of sliding tile attention publish tuned windows in.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from diffusion_runtime.attention.sparse.sliding_tile_windows import attended_tiles, checked_extent
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import Extent
from diffusion_runtime.errors import ConfigError, shown
from diffusion_runtime.report.attention_report import index_ranges
from diffusion_runtime.untrusted.files import check_file, shown_path
from diffusion_runtime.untrusted.json_text import read_json_file

_KEY_NAME = "mask_strategy_file_path"
_KEY = re.compile(r"(0|[1-9]\d{0,5})_(0|[1-9]\d{0,5})_(0|[1-9]\d{0,5})")


class RunSize(NamedTuple):
    """The size of a run: denoising steps, and the layers and query heads of its model."""

    num_steps: int
    num_layers: int
    num_heads: int

    def __str__(self) -> str:
        return f"{self.num_steps} steps, {self.num_layers} layers and {self.num_heads} heads"


@dataclass(frozen=True, eq=False)
class MaskStrategy:
    """Windows in tiles by (step, layer, head). A head without one attends to everything.

    num_steps, num_layers, num_heads: one more than the largest index of each kind. What it was made for may have more:
    steps, layers and heads at the end that attend to everything need no key.
    source: where it came from, for messages.
    """

    windows: Mapping[tuple[int, int, int], Extent]
    num_steps: int
    num_layers: int
    num_heads: int
    source: str

    def check_fits(self, layer: LayerInfo, num_heads: int, num_steps: int | None) -> None:
        """Raises ConfigError unless the run has every step, layer and head that the windows name.

        num_steps: None while they are not known.
        """
        if num_steps is not None and self.num_steps > num_steps:
            raise ConfigError(
                f"mask_strategy_file_path: {self.source} is for {self.num_steps} steps and this run has "
                f"{num_steps}; generate with num_inference_steps {self.num_steps}, or tune a strategy for "
                f"{num_steps} (outside a pipeline: pass step=StepInfo(index, num_steps))"
            )
        for what, here, there in (
            ("layers", self.num_layers, layer.num_layers),
            ("heads", self.num_heads, num_heads),
        ):
            if here > there:
                raise ConfigError(
                    f"mask_strategy_file_path: {self.source} is for {here} {what} (its largest index and one more) and "
                    f"this model has {there}: it belongs to another model; use a strategy that was tuned for this one"
                )

    def unnamed(self, run: RunSize) -> str:
        """`steps 30-49, heads 39`: those after the last that it has a window for; empty when there are none."""
        pairs = (
            ("steps", self.num_steps, run.num_steps),
            ("layers", self.num_layers, run.num_layers),
            ("heads", self.num_heads, run.num_heads),
        )
        return ", ".join(f"{what} {index_ranges(range(named, there))}" for what, named, there in pairs if named < there)


@dataclass(frozen=True)
class HeadGroups:
    """Which heads share a window, on one grid.

    attended: for each (step, layer) its distinct windows, as `attended_tiles` gives them; group_of: int32 [steps,
    layers, heads], which of them a head uses.
    """

    attended: Mapping[tuple[int, int], tuple[Extent, ...]]
    group_of: torch.Tensor


def head_groups(strategy: MaskStrategy, num_tiles: Extent, run: RunSize, device: torch.device) -> HeadGroups:
    """The whole table at once, so that the steps of a request copy nothing to the device.

    run: each count as many as the strategy names or more.
    """
    attended: dict[tuple[int, int], tuple[Extent, ...]] = {}
    group_of = torch.zeros(run, dtype=torch.int32, device="cpu")
    for step in range(run.num_steps):
        for layer in range(run.num_layers):
            windows = [strategy.windows.get((step, layer, head)) for head in range(run.num_heads)]
            of_heads = [num_tiles if window is None else attended_tiles(num_tiles, window) for window in windows]
            distinct = sorted(set(of_heads))
            attended[step, layer] = tuple(distinct)
            group_of[step, layer] = torch.tensor(
                [distinct.index(window) for window in of_heads], dtype=torch.int32, device="cpu"
            )
    return HeadGroups(attended, group_of.to(device))


def load_strategy(path: str) -> MaskStrategy:
    """The strategy of a file, read again only when the file has changed.

    Raises ConfigError for a file that cannot be read, is not JSON, or holds keys or values of another kind.
    """
    try:
        state = os.stat(check_file(path, _KEY_NAME))
    except OSError as error:
        raise ConfigError(f"{_KEY_NAME}: {shown_path(path)}: cannot be read: {error.strerror}") from error
    return _load(path, state.st_mtime_ns, state.st_size, state.st_ino)


@functools.lru_cache(maxsize=8)
def _load(path: str, mtime_ns: int, num_bytes: int, inode: int) -> MaskStrategy:
    """mtime_ns, num_bytes, inode: which change with the content of the file."""
    del mtime_ns, num_bytes, inode
    return parse_strategy(read_json_file(path, _KEY_NAME), path)


def parse_strategy(content: Any, source: str) -> MaskStrategy:
    """The strategy of a decoded JSON object. Raises ConfigError that names `source` and the key."""
    where = f"mask_strategy_file_path: {source}"
    if not isinstance(content, dict) or not content:
        found = "an empty object" if content == {} else type(content).__name__
        raise ConfigError(f'{where} holds {found}, expected {{"STEP_LAYER_HEAD": [frames, height, width], ...}}')
    windows = {}
    for key, value in content.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise ConfigError(
                f"{where}: key {shown(key)}: expected STEP_LAYER_HEAD, three numbers from 0, such as 15_0_3"
            )
        try:
            windows[int(match[1]), int(match[2]), int(match[3])] = checked_extent(value, f"key {shown(key)}")
        except ValueError as error:
            raise ConfigError(f"{where}: {error}, a window in tiles") from error
    num_steps, num_layers, num_heads = (1 + max(key[axis] for key in windows) for axis in range(3))
    return MaskStrategy(windows, num_steps, num_layers, num_heads, source)
