"""Window search of sliding tile attention: how far each candidate window is from full attention, head by head, and the
strategy that is tuned from such logs."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.attention.sparse.sliding_tile_options import DEFAULT_SKIP_TIME_STEPS
from diffusion_runtime.attention.sparse.sliding_tile_strategy import MaskStrategy, write_json
from diffusion_runtime.attention.sparse.sliding_tile_windows import checked_extent
from diffusion_runtime.attention.sparse.tiles import tile_counts
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, OutputError, shown
from diffusion_runtime.media.publish import temporary_file
from diffusion_runtime.step_info import LayerInfo, StepInfo
from diffusion_runtime.token_layout import Extent
from diffusion_runtime.untrusted.json_text import read_json_file

FORMAT = "sliding_tile_attn.search/1"
_FILE_PATTERN = "sta_search-*.json"

_MAX_VALUES = 10_000_000

_logger = logging.getLogger("diffusion_runtime.attention")


@dataclass(frozen=True)
class SearchSetup:
    """What logs must share to be averaged. candidates: windows in tiles of tile_size tokens over `grid` tokens."""

    candidates: tuple[Extent, ...]
    grid: Extent
    tile_size: Extent
    num_steps: int
    num_layers: int
    num_heads: int
    role: str = "self"


@dataclass(frozen=True)
class SearchLog:
    """One request and guidance branch. num_samples: the batch that its means are over; source: for messages.

    l2, l1: by (step, layer), float64 [candidates, heads]: the mean of (candidate - full) squared, and absolute, over
    samples, grid tokens and channels of the attention's output.
    """

    setup: SearchSetup
    branch: str
    num_samples: int
    l2: Mapping[tuple[int, int], torch.Tensor]
    l1: Mapping[tuple[int, int], torch.Tensor]
    source: str


class SearchRecorder:
    """Collects the log of one request, branch and grid, on the device until it is written.

    Raises OutputError at once when the folder cannot be written: a search is long.
    """

    def __init__(self, setup: SearchSetup, branch: str, num_samples: int, folder: Path) -> None:
        self.setup = setup
        self._branch = branch
        self._num_samples = num_samples
        # A random name: requests of other processes may write to the same folder.
        self._path = folder / _FILE_PATTERN.replace("*", f"{branch}-{secrets.token_hex(6)}")
        self._sums: dict[tuple[int, int], torch.Tensor] = {}
        self._num_calls: dict[tuple[int, int], int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with temporary_file(folder):
                pass
        except OSError as error:
            raise OutputError(f"search_log_folder: cannot write to {folder}: {error}") from error

    def add(self, layer: LayerInfo, step: StepInfo, losses: torch.Tensor) -> None:
        """losses: [2, candidates, heads], L2 and L1 of one call."""
        key = (step.index, layer.index)
        self._sums[key] = self._sums[key] + losses if key in self._sums else losses
        self._num_calls[key] = self._num_calls.get(key, 0) + 1

    def write(self) -> None:
        """Write the log, over the file of an earlier call: a sampler may ask twice for its last step."""
        losses = {}
        for (step, layer), total in self._sums.items():
            l2, l1 = (total.double().cpu() / self._num_calls[step, layer]).tolist()
            losses[f"{step}_{layer}"] = {"l2": l2, "l1": l1}
            if not bool(total.isfinite().all()):
                raise DiffusionRuntimeError(
                    f"STA_searching: attention of step {step}, layer {layer} is not finite, so windows cannot be "
                    "compared; use dtype float32, or check the weights"
                )
        head = {"format": FORMAT, "branch": self._branch, "num_samples": self._num_samples}
        write_json(self._path, {**head, **dataclasses.asdict(self.setup), "losses": losses})
        _logger.info("STA_searching: wrote %s", self._path)


def ends_request(layer: LayerInfo, step: StepInfo) -> bool:
    """Whether a call is the last of its request and branch, so that the logs are to be written."""
    return step.index == step.num_steps - 1 and layer.index == layer.num_layers - 1


def find_search_logs(folder: str | Path) -> list[Path]:
    """Every log in a folder, by name. Raises ConfigError when there is none."""
    paths = sorted(Path(folder).glob(_FILE_PATTERN))
    if not paths:
        raise ConfigError(
            f"search_log_folder: {folder} holds no {_FILE_PATTERN}; write some with sta_mode=STA_searching and the "
            "same search_log_folder"
        )
    return paths


def read_search_logs(folder: str | Path) -> list[SearchLog]:
    """Every log in a folder, by name. Raises ConfigError when there is none, or one cannot be understood."""
    return [_read_log(path) for path in find_search_logs(folder)]


def _read_log(path: Path) -> SearchLog:
    # Steps x layers x heads x candidates numbers, twice.
    content = read_json_file(path, "search_log_folder", max_values=_MAX_VALUES)
    try:
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {shown(content['format'])}, expected {FORMAT!r}")
        return _parse_log(content, str(path))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise ConfigError(f"search_log_folder: {path} is not a search log that can be read: {shown(error)}") from error


def _parse_log(content: Any, source: str) -> SearchLog:
    """Raises ValueError, KeyError or TypeError for anything that a search does not write."""
    setup = SearchSetup(
        candidates=tuple(checked_extent(item, "candidates") for item in content["candidates"]),
        grid=checked_extent(content["grid"], "grid"),
        tile_size=checked_extent(content["tile_size"], "tile_size"),
        num_steps=int(content["num_steps"]),
        num_layers=int(content["num_layers"]),
        num_heads=int(content["num_heads"]),
        role=str(content["role"]),
    )
    l2: dict[tuple[int, int], torch.Tensor] = {}
    l1: dict[tuple[int, int], torch.Tensor] = {}
    for key, losses in content["losses"].items():
        step, layer = map(int, key.split("_"))
        for measured, name in ((l2, "l2"), (l1, "l1")):
            values = torch.tensor(losses[name], dtype=torch.float64, device="cpu")
            if values.shape != (len(setup.candidates), setup.num_heads) or not bool(values.isfinite().all()):
                raise ValueError(f"losses {key} {name}: expected candidates x heads numbers")
            measured[step, layer] = values
    return SearchLog(setup, str(content["branch"]), int(content["num_samples"]), l2, l1, source)


def tune(
    logs: Sequence[SearchLog], *, skip_time_steps: int = DEFAULT_SKIP_TIME_STEPS, merge_branches: bool = False
) -> MaskStrategy:
    """For every (step, layer, head) the candidate with the smallest L2 loss, averaged over the samples of the logs.

    The first of equal candidates wins. The first `skip_time_steps` steps, and what no log has measured, get the full
    window. Nothing weighs what a window costs: of candidates that contain each other the largest wins.

    merge_branches: average the conditional and the unconditional logs; without it the unconditional ones are left out.

    Raises ConfigError when the logs differ in what was searched, or none is of a branch that was asked for.
    """
    setup = check_same_setup(logs)
    chosen = _logs_of_branches(logs, merge_branches)
    full = tile_counts(setup.grid, setup.tile_size)
    windows: dict[tuple[int, int, int], Extent] = {}
    for step in range(setup.num_steps):
        for layer in range(setup.num_layers):
            best = None if step < skip_time_steps else _closest_candidates(chosen, step, layer)
            for head in range(setup.num_heads):
                windows[step, layer, head] = full if best is None else setup.candidates[best[head]]
    source = f"the strategy tuned from {len(chosen)} logs"
    return MaskStrategy(windows, setup.num_steps, setup.num_layers, setup.num_heads, source)


def check_same_setup(logs: Sequence[SearchLog]) -> SearchSetup:
    """What all the logs share. Raises ConfigError that names the first difference."""
    if not logs:
        raise ConfigError("tune: expected one search log or more, got none")
    first = logs[0]
    for log in logs[1:]:
        for field in dataclasses.fields(SearchSetup):
            here, there = getattr(first.setup, field.name), getattr(log.setup, field.name)
            if here != there:
                raise ConfigError(
                    f"search logs differ in {field.name}: {first.source} has {here}, {log.source} has {there}; keep "
                    "the logs of one search in a folder of their own"
                )
    return first.setup


def _logs_of_branches(logs: Sequence[SearchLog], merge_branches: bool) -> list[SearchLog]:
    seen = {log.branch for log in logs}
    if merge_branches and not ("both" in seen or {"cond", "uncond"} <= seen):
        raise ConfigError(
            f"sta_mode=STA_tuning_cfg merges both guidance branches, the logs are of {', '.join(sorted(seen))} alone; "
            "search with guidance_scale above 1, or use sta_mode=STA_tuning"
        )
    chosen = [log for log in logs if merge_branches or log.branch != "uncond"]
    if not chosen:
        raise ConfigError(
            "sta_mode=STA_tuning reads the conditional branch, the logs are of uncond alone; search again, or add the "
            "logs of the conditional branch"
        )
    return chosen


def _closest_candidates(logs: Sequence[SearchLog], step: int, layer: int) -> list[int] | None:
    """The index of the best candidate of each head; None when no log has measured this layer at this step."""
    key = (step, layer)
    measured = [(log.num_samples, log.l2[key]) for log in logs if key in log.l2]
    if not measured:
        return None
    mean = torch.stack([weight * l2 for weight, l2 in measured]).sum(0) / sum(weight for weight, _ in measured)
    # min over an axis promises no order among equals; the first one is wanted.
    return [int((column == column.min()).nonzero()[0, 0]) for column in mean.unbind(1)]
