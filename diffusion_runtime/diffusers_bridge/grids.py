"""Token grids and text positions of diffusers models, read from the arguments of their forward.

Keys are class names of diffusers. A model that is not listed runs too; only choices that need a grid are refused for
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from diffusion_runtime.core.token_layout import TokenLayout

Grid: TypeAlias = tuple[int, int, int]
# (arguments of the model's forward by name, the model's config) -> (frames, height, width) in tokens.
ReadGrid: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], Grid | None]


@dataclass(frozen=True)
class TokenOrder:
    """Positions of a model's tokens. read_grid: reads the grid from the arguments of one call of the model. text:
    position of text, or other tokens in addition to the grid, in its self-attention, if it has any."""

    read_grid: ReadGrid
    text: Literal["none", "before", "after"]

    def layout(self, grid: Grid | None, num_queries: int, num_keys: int) -> TokenLayout | None:
        """Return the layout of a self-attention; None when it does not fit the grid."""
        if grid is None or num_queries != num_keys:
            return None
        num_text_tokens = num_keys - TokenLayout(grid).num_tokens
        if num_text_tokens < 0 or (num_text_tokens > 0 and self.text == "none"):
            return None
        before = num_text_tokens if self.text == "before" else 0
        return TokenLayout(grid, num_prefix_tokens=before, num_suffix_tokens=num_text_tokens - before)


def _latents_with_frames_third(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> Grid | None:
    """Read the grid of hidden_states: [batch, channels, frames, height, width]."""
    return _patched(arguments, config, axis=2)


def _latents_with_frames_second(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> Grid | None:
    """Read the grid of hidden_states: [batch, frames, channels, height, width]."""
    return _patched(arguments, config, axis=1)


def _patched(arguments: Mapping[str, Any], config: Mapping[str, Any], axis: int) -> Grid | None:
    latents = arguments.get("hidden_states")
    if not isinstance(latents, torch.Tensor) or latents.dim() != 5:
        return None
    patch = config["patch_size"]
    if isinstance(patch, int):
        patch = (config.get("patch_size_t") or 1, patch, patch)
    sizes = (latents.shape[axis], latents.shape[3], latents.shape[4])
    frames, height, width = (size // step for size, step in zip(sizes, patch, strict=True))
    return frames, height, width


def _named_sizes(arguments: Mapping[str, Any], _config: Mapping[str, Any]) -> Grid | None:
    """Read the grid from num_frames, height, width: of the tokens."""
    sizes = (arguments.get("num_frames"), arguments.get("height"), arguments.get("width"))
    frames, height, width = sizes
    if isinstance(frames, int) and isinstance(height, int) and isinstance(width, int):
        return frames, height, width
    return None


def _named_sizes_or_coordinates(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> Grid | None:
    """Read the grid from the sizes, or from video_coords where they are not given: [batch, 3, tokens], time, height and
    width of every token. Tokens of conditions come before the grid, which begins at the first frame again."""
    named = _named_sizes(arguments, config)
    coordinates = arguments.get("video_coords")
    if named is not None or not isinstance(coordinates, torch.Tensor) or coordinates.dim() != 3:
        return named
    if coordinates not in _GRIDS_OF_COORDINATES:
        _GRIDS_OF_COORDINATES[coordinates] = _grid_at_the_end(coordinates[0])
    grid: Grid | None = _GRIDS_OF_COORDINATES[coordinates]
    return grid


# A pipeline passes the same tensor at every step; reading it synchronises with the device once per request.
_GRIDS_OF_COORDINATES: MutableMapping[torch.Tensor, Grid | None] = WeakTensorKeyDictionary()


def _grid_at_the_end(coordinates: torch.Tensor) -> Grid | None:
    """Return the grid in raster order that ends with the last token. coordinates: [3, tokens]."""
    time, height, _ = coordinates.cpu()
    num_tokens = time.numel()
    per_frame = _run_length(time)
    width = min(per_frame, _run_length(height))
    if per_frame % width:
        return None
    frames = 1
    # Frame by frame towards the front, as long as each is earlier than the one after it.
    while (frames + 1) * per_frame <= num_tokens:
        earlier = time[num_tokens - (frames + 1) * per_frame : num_tokens - frames * per_frame]
        if not bool((earlier < time[num_tokens - frames * per_frame]).all()) or earlier.min() != earlier.max():
            break
        frames += 1
    return frames, per_frame // width, width


def _run_length(values: torch.Tensor) -> int:
    """Return how many values at the end are equal."""
    others = (values != values[-1]).nonzero()
    return values.numel() if others.numel() == 0 else values.numel() - 1 - int(others[-1])


def _image_shapes(arguments: Mapping[str, Any], _config: Mapping[str, Any]) -> Grid | None:
    """Read the grid from img_shapes, each sample's grids: known for one image that is equal in all samples."""
    shapes = arguments.get("img_shapes")
    if not isinstance(shapes, list) or not shapes:
        return None
    samples = [shape if isinstance(shape, list) else [shape] for shape in shapes]
    if any(len(sample) != 1 or tuple(sample[0]) != tuple(samples[0][0]) for sample in samples):
        return None
    frames, height, width = samples[0][0]
    return frames, height, width


TOKEN_ORDERS: Mapping[str, TokenOrder] = {
    "AllegroTransformer3DModel": TokenOrder(_latents_with_frames_third, "none"),
    "AnyFlowTransformer3DModel": TokenOrder(_latents_with_frames_second, "none"),
    "ChronoEditTransformer3DModel": TokenOrder(_latents_with_frames_third, "none"),
    "CogVideoXTransformer3DModel": TokenOrder(_latents_with_frames_second, "before"),
    "CosmosTransformer3DModel": TokenOrder(_latents_with_frames_third, "none"),
    "EasyAnimateTransformer3DModel": TokenOrder(_latents_with_frames_third, "before"),
    "HunyuanVideo15Transformer3DModel": TokenOrder(_latents_with_frames_third, "after"),
    "HunyuanVideoTransformer3DModel": TokenOrder(_latents_with_frames_third, "after"),
    "LTX2VideoTransformer3DModel": TokenOrder(_named_sizes, "none"),
    "LTXVideoTransformer3DModel": TokenOrder(_named_sizes_or_coordinates, "before"),
    "MochiTransformer3DModel": TokenOrder(_latents_with_frames_third, "after"),
    "MotifVideoTransformer3DModel": TokenOrder(_latents_with_frames_third, "after"),
    "QwenImageTransformer2DModel": TokenOrder(_image_shapes, "before"),
    "SkyReelsV2Transformer3DModel": TokenOrder(_latents_with_frames_third, "none"),
    "WanTransformer3DModel": TokenOrder(_latents_with_frames_third, "none"),
    "WanVACETransformer3DModel": TokenOrder(_latents_with_frames_third, "none"),
}


def token_order(model: nn.Module) -> TokenOrder | None:
    """Return the token order of a model; None when it is unknown."""
    return TOKEN_ORDERS.get(type(model).__name__)
