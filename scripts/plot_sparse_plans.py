"""Draw which pairs of queries and keys each sparse method computes: docs/images/plan_*.png, from plans of a generation.

    python scripts/plot_sparse_plans.py    # needs: pip install 'diffusion-runtime[plot]'

The embedded model generates one clip per method at its default size, a grid of 8 x 16 x 16 tokens, in 4 steps. The
plan is that of one layer and head in the last step. On the left all queries and keys in raster order; on the right the
grid's frames, with the keys that one query attends to.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy
import torch
from PIL import Image

from diffusion_runtime import AttentionConfig, AttentionSpec, GenerationRequest, load_pipeline
from diffusion_runtime.attention import AttentionCall, SparsePlan
from diffusion_runtime.attention.sparse.interface import SparseBackend
from diffusion_runtime.attention.sparse.tiles import tile_order
from diffusion_runtime.core.token_layout import Extent

FOLDER = Path(__file__).parents[1] / "docs" / "images"
PROMPT = "a red circle moving left and a blue star standing still on stripes"
GRID = (8, 16, 16)
# Frame, row and column of the query of the right half: on the moving circle's way.
QUERY = (4, 7, 6)
NUM_STEPS, HEAD = 4, 0
# Title, layer, options. V-MoBA's layers take turns: the sixth has chunks in time and space.
METHODS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sliding_tile_attn": (
        "STA, window 3 x 3 x 3 of tiles 2 x 4 x 4",
        3,
        {"tile_size": [2, 4, 4], "window": [3, 3, 3], "skip_time_steps": 0},
    ),
    "video_sparse_attn": ("VSA, sparsity 0.6, tiles 4 x 4 x 4", 3, {"sparsity": 0.6}),
    "vmoba_attn": (
        "V-MoBA, the best 32 of 128 chunks of 1 x 4 x 4",
        5,
        {
            "moba_select_mode": "topk",
            "first_full_step": 0,
            "temporal_chunk_size": 1,
            "spatial_chunk_size": [4, 4],
            "st_chunk_size": [1, 4, 4],
            "temporal_topk": 3,
            "spatial_topk": 5,
            "st_topk": 32,
        },
    ),
    "sparse_video_gen_2_attn": (
        "SVG2, 32 and 64 clusters, top-p 0.9",
        3,
        {
            "svg2_num_q_centroids": 32,
            "svg2_num_k_centroids": 64,
            "svg2_min_kc_ratio": 0.0,
            "svg2_first_times_fp": 0.0,
            "svg2_first_layers_fp": 0.0,
        },
    ),
}


@contextmanager
def recorded(owner: Any, name: str, keep: Callable[..., object]) -> Iterator[None]:
    """Call `keep(result, *arguments)` after each call of a function, which stays what it is."""
    original = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        keep(result, *arguments)
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def mask_of(method: str, layer: int, options: dict[str, Any]) -> torch.Tensor:
    """bool [query, key], in raster order: the pairs that a layer's HEAD computes in the last step of a generation."""
    plans: list[tuple[SparsePlan, Extent]] = []

    def keep_plan(_result: object, _backend: object, call: AttentionCall, plan: SparsePlan, *_: object) -> None:
        plans.append((plan, call.grid_layout.tile))

    config = AttentionConfig(per_role={"self": AttentionSpec(method, options)})
    pipeline = load_pipeline("shapes", device="cpu", attention=config)
    with recorded(SparseBackend, "run_sparse", keep_plan):
        pipeline(GenerationRequest(PROMPT, seed=0, num_inference_steps=NUM_STEPS))
    # Both guidance branches are one batch: a step calls each layer once.
    plan, tile = plans[len(plans) - len(plans) // NUM_STEPS + layer]
    mask = plan.to_dense_mask()[-1, HEAD]
    # The model's tokens may stand tile by tile: back to raster order.
    order = tile_order(GRID, tile)[0].argsort()
    return mask[order][:, order]


def draw(title: str, mask: torch.Tensor, path: Path) -> None:
    """mask: bool [query, key], of GRID in raster order."""
    query = (QUERY[0] * GRID[1] + QUERY[1]) * GRID[2] + QUERY[2]
    seen = mask[query].reshape(GRID).numpy()
    coarse = torch.nn.functional.avg_pool2d(mask[None].float(), 16)[0].numpy()
    figure, (whole, frames) = plt.subplots(1, 2, figsize=(8.4, 3.6), width_ratios=(1, 2), layout="constrained")
    whole.imshow(coarse, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    whole.set(xlabel="keys", ylabel="queries", xticks=[], yticks=[])
    whole.set_title(f"all pairs: {mask.float().mean():.2f} computed", fontsize=9)
    columns = GRID[0] // 2
    canvas = numpy.full((2 * (GRID[1] + 1) - 1, columns * (GRID[2] + 1) - 1, 3), 1.0)
    for frame in range(GRID[0]):
        top, left = frame // columns * (GRID[1] + 1), frame % columns * (GRID[2] + 1)
        shades = numpy.where(seen[frame][..., None], (0.13, 0.44, 0.71), (0.87, 0.90, 0.94))
        canvas[top : top + GRID[1], left : left + GRID[2]] = shades
        if frame == QUERY[0]:
            canvas[top + QUERY[1], left + QUERY[2]] = (1.0, 0.35, 0.0)
    frames.imshow(canvas, interpolation="nearest")
    frames.set(xticks=[], yticks=[])
    frames.set_title("the keys of one query (orange), frame by frame", fontsize=9)
    for side in frames.spines.values():
        side.set_visible(False)
    figure.suptitle(title, fontsize=11)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=100)
    plt.close(figure)
    # Few colours: a third of the size.
    Image.open(picture).convert("RGB").quantize(256).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--output", type=Path, default=FOLDER, help="the folder of the pictures")
    arguments = parser.parse_args()
    for method in arguments.methods:
        title, layer, options = METHODS[method]
        path = arguments.output / f"plan_{method}.png"
        draw(f"{title}: layer {layer}, head {HEAD}", mask_of(method, layer, options), path)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
