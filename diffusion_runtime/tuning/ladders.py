"""Ladders: the options of a sparse method from dense to sparse, and the density of each on a grid of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diffusion_runtime.attention.backends.registry import canonical_name, find_backend
from diffusion_runtime.attention.config import AttentionSpec
from diffusion_runtime.attention.sparse.sliding_tile_windows import attended_tiles, default_candidates
from diffusion_runtime.attention.sparse.tiles import tile_counts
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import Extent, TokenLayout
from diffusion_runtime.errors import ConfigError

# Shares of the pairs that a ladder of so many levels aims at.
DEFAULT_LEVELS = 4
_SPARSEST = 0.1

# Tiles of STA, the paper's first: taken is the first that cuts every axis into three or more, else the last.
_STA_TILES: tuple[Extent, ...] = ((6, 8, 8), (4, 8, 8), (4, 4, 4), (2, 4, 4), (2, 2, 2), (1, 2, 2))


def method_names(given: Sequence[str]) -> tuple[str, ...]:
    """Canonical names, each once. Raises ConfigError for a backend without a ladder: one whose tokens' content decides
    what it keeps, or that is dense."""
    names = tuple(dict.fromkeys(canonical_name(name.strip()) for name in given))
    for name in names:
        if name not in _LADDERS:
            raise ConfigError(
                f"--methods: {name} has no ladder of densities: what it keeps depends on the tokens, or is everything; "
                f"methods: {', '.join(_LADDERS)}"
            )
    return names


def ladder(method: str, grid: Extent, levels: int = DEFAULT_LEVELS, *, is_by_head: bool = False) -> list[AttentionSpec]:
    """Up to `levels` settings of a method from dense to sparse, none of them dense. grid: of tokens. is_by_head: for
    cells of some heads; adds the shapes of window that heads are known to differ by (Zhang et al., arXiv:2502.04507).

    Raises what `method_names` does, and ConfigError for a method without windows by head."""
    [name] = method_names([method])
    if is_by_head and name not in BY_HEAD:
        raise ConfigError(
            f"--head-ranges: {name} chooses what each head keeps by itself; leave it out, or tune "
            f"{', '.join(BY_HEAD)} alone"
        )
    targets = [1 - (1 - _SPARSEST) * (level + 1) / levels for level in range(levels)]
    found = [AttentionSpec(name, options) for options in _LADDERS[name](grid, targets)]
    if is_by_head:
        tile = _sta_tile(grid)
        shapes = default_candidates(tile_counts(grid, tile))
        found += [AttentionSpec(name, {"tile_size": list(tile), "window": list(window)}) for window in shapes]
    return list(dict.fromkeys(found))


def density_of(spec: AttentionSpec, layout: TokenLayout, layer: LayerInfo, num_steps: int) -> float | None:
    """The share of pairs of grid tokens that a layer computes; None where the content decides."""
    backend = find_backend(spec.name)
    assert backend is not None
    options = backend.options_type(**spec.options_for(spec.name))
    # In the middle: a method's own dense first steps are none of a ladder's.
    return backend.expected_density(options, layout, layer, StepInfo(index=num_steps - 1, num_steps=num_steps))


def _video_sparse(grid: Extent, targets: Sequence[float]) -> list[dict[str, Any]]:
    num_tiles = math.prod(tile_counts(grid, (4, 4, 4)))
    counts = dict.fromkeys(max(1, round(share * num_tiles)) for share in targets)
    # A whole number of tiles, and the sparsity that keeps it.
    return [{"sparsity": round(1 - count / num_tiles, 4)} for count in counts if count < num_tiles]


def _sliding_tile(grid: Extent, targets: Sequence[float]) -> list[dict[str, Any]]:
    """For each target the window that comes nearest to it and is most like a cube; a window is odd, or a whole axis."""
    tile = _sta_tile(grid)
    counts = tile_counts(grid, tile)
    total = math.prod(counts)
    sides = [sorted({*range(1, count, 2), count}) for count in counts]
    windows = {attended_tiles(counts, (t, h, w)): (t, h, w) for t in sides[0] for h in sides[1] for w in sides[2]}
    windows.pop(counts, None)

    def rank(seen: Extent, target: float) -> tuple[float, float]:
        shares = [side / count for side, count in zip(seen, counts, strict=True)]
        return round(abs(math.prod(seen) / total - target), 2), max(shares) - min(shares)

    chosen = dict.fromkeys(min(windows, key=lambda seen: rank(seen, target)) for target in targets) if windows else {}
    return [{"tile_size": list(tile), "window": list(windows[seen])} for seen in chosen]


def _sta_tile(grid: Extent) -> Extent:
    return next((tile for tile in _STA_TILES if _cuts(grid, tile)), _STA_TILES[-1])


def _cuts(grid: Extent, tile: Extent) -> bool:
    """Return whether every axis of three tokens or more is cut into three tiles or more."""
    return all(count >= min(3, extent) for count, extent in zip(tile_counts(grid, tile), grid, strict=True))


def _vmoba(grid: Extent, targets: Sequence[float]) -> list[dict[str, Any]]:
    """Chunks as published for Wan 2.1 where the grid is as large; eight in time and four along each side below."""
    frames, height, width = grid
    if frames >= 16 and height >= 24 and width >= 24:
        temporal, spatial, both = 2, (3, 4), (4, 6, 4)
    else:
        temporal = math.ceil(frames / 8)
        spatial = (math.ceil(height / 4), math.ceil(width / 4))
        both = (math.ceil(frames / 4), *spatial)
    counts = (
        math.ceil(frames / temporal),
        math.ceil(height / spatial[0]) * math.ceil(width / spatial[1]),
        math.prod(math.ceil(size / chunk) for size, chunk in zip(grid, both, strict=True)),
    )
    shared = {
        "moba_select_mode": "topk",
        "first_full_step": 0,
        "temporal_chunk_size": temporal,
        "spatial_chunk_size": list(spatial),
        "st_chunk_size": list(both),
    }
    found = []
    for share in targets:
        tops = [min(max(1, round(share * count)), max(1, count - 1)) for count in counts]
        found.append({**shared, **dict(zip(("temporal_topk", "spatial_topk", "st_topk"), tops, strict=True))})
    return found


_LADDERS: Mapping[str, Callable[[Extent, Sequence[float]], list[dict[str, Any]]]] = {
    "video_sparse_attn": _video_sparse,
    "sliding_tile_attn": _sliding_tile,
    "vmoba_attn": _vmoba,
}
METHODS = tuple(_LADDERS)
# Those whose options say what each head keeps.
BY_HEAD = ("sliding_tile_attn",)
