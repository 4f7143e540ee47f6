"""What processes compute together, beside what one computes alone: the cases of test_exchanges.py and its worker.

`measure` runs in every process of a world: each computes the whole call alone, then its part of it with the others.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diffusion_runtime.attention import (
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    AttentionRecorder,
    AttentionSpec,
    LayerInfo,
    LocalAttention,
    RequestCache,
    StepInfo,
    TokenLayout,
    UlyssesAttention,
    USPAttention,
)
from diffusion_runtime.parallel.collectives import all_gather
from diffusion_runtime.parallel.groups import ProcessMesh

HEAD_DIM = 8
LAYER = LayerInfo(1, 8)
SMALL = TokenLayout((2, 3, 4))
ODD_GRID = (3, 5, 7)  # 105 tokens: no multiple of 2 or 4
PREFIX = TokenLayout(ODD_GRID, num_prefix_tokens=5, valid_lengths=(2, 5))
SUFFIX = TokenLayout(ODD_GRID, num_suffix_tokens=6, valid_lengths=(6, 0))
BOTH_SIDES = TokenLayout(ODD_GRID, num_prefix_tokens=2, num_suffix_tokens=3)
WHOLE_SLICES = TokenLayout((4, 6, 6), num_prefix_tokens=5, valid_lengths=(5, 2))
SPARSE_GRID = (5, 6, 7)


@dataclass(frozen=True)
class Case:
    """One call. steps: so many calls in a row with one state, the last of which is compared; mask: None, `boolean` (by
    head, with queries that see nothing) or `additive` (for all heads)."""

    num_heads: int = 4
    num_kv_heads: int | None = None
    layout: TokenLayout | None = SMALL
    ulysses: int = 1
    ring: int = 1
    ring_inside: bool = False
    ulysses_layer: bool = False
    num_head_groups: int = 1
    backend: str = "torch_sdpa"
    options: dict[str, Any] = field(default_factory=dict)
    layer: LayerInfo = LAYER
    steps: int = 1
    batch: int = 2
    gate: bool = False
    mask: str | None = None
    causal: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    strategy: bool = False


STA = {"backend": "sliding_tile_attn", "options": {"window": (1, 3, 3), "tile_size": (2, 2, 2)}}
STA_BY_HEAD = {
    "backend": "sliding_tile_attn",
    "options": {"tile_size": (2, 2, 2), "skip_time_steps": 0},
    "strategy": True,
}
VSA = {"backend": "video_sparse_attn", "options": {"sparsity": 0.6}, "gate": True}
VSA_DENSE = {"backend": "video_sparse_attn", "options": {"sparsity": 0.0}, "gate": True}
VMOBA = {
    "backend": "vmoba_attn",
    "options": {"spatial_chunk_size": (2, 3), "moba_threshold_type": "head_global", "first_full_step": 0},
}
SVG2 = {
    "backend": "sparse_video_gen_2_attn",
    "options": {
        "svg2_num_q_centroids": 6,
        "svg2_num_k_centroids": 15,
        "svg2_top_p_kmeans": 0.6,
        "svg2_kmeans_iter_init": 3,
        "svg2_first_times_fp": 0.0,
    },
    "steps": 3,
}
SPARSE = {"STA": STA, "STA by head": STA_BY_HEAD, "VSA": VSA, "VSA dense": VSA_DENSE, "V-MoBA": VMOBA, "SVG2": SVG2}
SPARSE_LAYOUT = TokenLayout(SPARSE_GRID, num_suffix_tokens=4, valid_lengths=(4, 1))

WORLDS: dict[int, dict[str, Case]] = {
    2: {
        "ulysses, nothing known of the tokens": Case(ulysses=2, layout=None),
        "ulysses, one sample": Case(ulysses=2, batch=1),
        "ulysses layer": Case(ulysses=2, ulysses_layer=True),
        "ulysses, 3 heads, text before": Case(ulysses=2, num_heads=3, layout=PREFIX),
        "ulysses, text after": Case(ulysses=2, layout=SUFFIX),
        "ulysses, text around, one sample": Case(ulysses=2, layout=BOTH_SIDES, batch=1),
        "ulysses, one key head": Case(ulysses=2, num_heads=6, num_kv_heads=1, layout=PREFIX),
        "ulysses, 3 key heads": Case(ulysses=2, num_heads=6, num_kv_heads=3, layout=PREFIX),
        "ulysses, causal": Case(ulysses=2, causal=True, scale=0.3, layout=TokenLayout(ODD_GRID)),
        "ulysses, text alone": Case(ulysses=2, layout=TokenLayout.text(5, (2, 5))),
        "ulysses, no token": Case(ulysses=2, layout=TokenLayout((0, 0, 0)), backend="reference"),
        "ulysses, one token": Case(ulysses=2, layout=TokenLayout((1, 1, 1), num_suffix_tokens=2)),
        "ulysses, boolean mask": Case(ulysses=2, layout=BOTH_SIDES, mask="boolean"),
        "ulysses, additive mask": Case(ulysses=2, layout=SUFFIX, mask="additive"),
        "ulysses, 2 head groups": Case(ulysses=2, num_heads=5, layout=PREFIX, num_head_groups=2),
        "ulysses, more head groups than heads": Case(ulysses=2, num_kv_heads=2, layout=SUFFIX, num_head_groups=9),
        "ulysses, bfloat16": Case(ulysses=2, layout=PREFIX, dtype=torch.bfloat16),
        "ring, nothing known of the tokens": Case(ring=2, layout=None, scale=0.3),
        "ring, text before": Case(ring=2, num_heads=3, layout=PREFIX),
        "ring, text after": Case(ring=2, layout=SUFFIX),
        "ring, text around": Case(ring=2, layout=BOTH_SIDES),
        "ring, one key head": Case(ring=2, num_kv_heads=1, layout=PREFIX),
        "ring, whole slices": Case(ring=2, layout=WHOLE_SLICES),
        "ring, text alone": Case(ring=2, layout=TokenLayout.text(5, (2, 0))),
        "ring, no token": Case(ring=2, layout=TokenLayout((0, 0, 0)), backend="reference"),
        "ring, text without keys": Case(ring=2, layout=TokenLayout.text(5, (0, 0))),
        "ring, one token": Case(ring=2, layout=TokenLayout((1, 1, 1))),
        "ring, boolean mask": Case(ring=2, layout=BOTH_SIDES, mask="boolean"),
        "ring, additive mask": Case(ring=2, layout=SUFFIX, mask="additive"),
        "ring, bfloat16": Case(ring=2, layout=PREFIX, dtype=torch.bfloat16),
        "ring, reference": Case(ring=2, layout=SUFFIX, backend="reference"),
        **{f"ulysses, {name}": Case(ulysses=2, layout=SPARSE_LAYOUT, **kind) for name, kind in SPARSE.items()},
        "ulysses, VSA, head groups": Case(ulysses=2, layout=SPARSE_LAYOUT, num_head_groups=2, **VSA),
        "ulysses, SVG2, head groups": Case(ulysses=2, layout=SPARSE_LAYOUT, num_head_groups=2, **SVG2),
    },
    3: {
        "ulysses, 4 heads": Case(ulysses=3, layout=SUFFIX),
        "ulysses, 2 key heads of 4": Case(ulysses=3, num_kv_heads=2, layout=PREFIX),
        "ulysses, 2 key heads of 6": Case(ulysses=3, num_heads=6, num_kv_heads=2, layout=PREFIX, num_head_groups=2),
        "ulysses, as few tokens": Case(ulysses=3, layout=TokenLayout((1, 2, 2))),
        "ring": Case(ring=3, layout=PREFIX),
        "ring, whole slices": Case(ring=3, layout=WHOLE_SLICES),
        "ring, an empty block": Case(ring=3, layout=TokenLayout((1, 2, 2), num_prefix_tokens=3, valid_lengths=(0, 3))),
        "ring, bfloat16": Case(ring=3, layout=SUFFIX, dtype=torch.bfloat16),
        **{f"ulysses, {name}": Case(ulysses=3, layout=SPARSE_LAYOUT, **kind) for name, kind in SPARSE.items()},
        "ulysses, SVG2, 2 key heads": Case(ulysses=3, num_heads=6, num_kv_heads=2, layout=SPARSE_LAYOUT, **SVG2),
    },
    4: {
        "ulysses": Case(ulysses=4, layout=PREFIX),
        "ulysses, 2 key heads": Case(ulysses=4, num_kv_heads=2, layout=SUFFIX),
        "ring": Case(ring=4, num_heads=2, layout=PREFIX),
        "ring, empty blocks": Case(ring=4, layout=TokenLayout((1, 1, 5))),
        **{
            f"usp{' with rings inside' if ring_inside else ''}, {name}": case
            for ring_inside in (False, True)
            for name, case in {
                "grid": Case(ulysses=2, ring=2, ring_inside=ring_inside, batch=1),
                "text before": Case(ulysses=2, ring=2, ring_inside=ring_inside, num_heads=3, layout=PREFIX),
                "text after": Case(ulysses=2, ring=2, ring_inside=ring_inside, num_kv_heads=1, layout=SUFFIX),
                "text around": Case(ulysses=2, ring=2, ring_inside=ring_inside, layout=BOTH_SIDES, num_head_groups=2),
                "few tokens": Case(ulysses=2, ring=2, ring_inside=ring_inside, layout=TokenLayout((1, 1, 3))),
                "mask": Case(ulysses=2, ring=2, ring_inside=ring_inside, layout=BOTH_SIDES, mask="boolean"),
                "bfloat16": Case(ulysses=2, ring=2, ring_inside=ring_inside, layout=SUFFIX, dtype=torch.bfloat16),
                "ulysses layer": Case(ulysses=2, ring=2, ring_inside=ring_inside, layout=SUFFIX, ulysses_layer=True),
                "VSA": Case(ulysses=2, ring=2, ring_inside=ring_inside, layout=SPARSE_LAYOUT, **VSA),
                "STA by head": Case(ulysses=2, ring=2, ring_inside=ring_inside, layout=SPARSE_LAYOUT, **STA_BY_HEAD),
            }.items()
        },
        "two branches, ulysses": Case(ulysses=2, layout=PREFIX),
        "two branches, ring": Case(ring=2, layout=SUFFIX),
    },
}


def write_strategy(folder: Path) -> Path:
    """Windows that differ from head to head, for 4 heads, 8 layers and 1 step."""
    windows = {f"0_{layer}_{head}": [1, 1 + head % 3, 1 + head // 2] for layer in range(8) for head in range(4)}
    path = folder / "strategy.json"
    path.write_text(json.dumps(windows))
    return path


def measure(case: Case, mesh: ProcessMesh, folder: Path, device: str) -> dict[str, Any]:
    """Of what all processes computed together: the largest difference to one process alone over the largest value.

    For half precision the error of both against float32, relative in the Frobenius norm. text_apart: the largest
    difference between two processes' rows of text. sent_bytes: in all steps. report: of attention.
    """
    tensors = {name: x.to(device) for name, x in _tensors(case).items()}
    alone = _run(case, tensors, None, folder)
    recorder = AttentionRecorder()
    with count_sent_bytes() as sent:
        together, text_apart = _run_shared(case, tensors, mesh, folder, recorder)
    measured = {"text_apart": text_apart, "sent_bytes": sum(sent), "report": str(recorder.report())}
    if case.dtype == torch.float32:
        largest = alone.abs().max() if alone.any() else torch.ones(())
        return measured | {"error": float((together - alone).abs().max() / largest) if alone.numel() else 0.0}
    exact = _run(case, {name: x.double() for name, x in tensors.items()}, None, folder)
    errors = [float((x.double() - exact).norm() / exact.norm()) for x in (together, alone)]
    return measured | {"error": errors[0], "error_alone": errors[1]}


@contextlib.contextmanager
def count_sent_bytes() -> Iterator[list[int]]:
    """Bytes that leave this process by all-to-alls and sends, as torch is asked for them."""
    sent: list[int] = []
    all_to_all, batch = dist.all_to_all_single, dist.batch_isend_irecv

    def counted_all_to_all(output: torch.Tensor, sent_buffer: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        own = dist.get_group_rank(more["group"], dist.get_rank())
        sent.append((sent_buffer.numel() - arguments[1][own]) * sent_buffer.element_size())
        return all_to_all(output, sent_buffer, *arguments, **more)

    def counted_batch(operations: list[dist.P2POp]) -> Any:
        sent.extend(item.tensor.numel() * item.tensor.element_size() for item in operations if item.op is dist.isend)
        return batch(operations)

    dist.all_to_all_single, dist.batch_isend_irecv = counted_all_to_all, counted_batch
    try:
        yield sent
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, batch


def _tensors(case: Case) -> dict[str, torch.Tensor]:
    """q, k, v and what else the call takes, for the whole sequence."""
    generator = torch.Generator().manual_seed(3)
    seq = 24 if case.layout is None else case.layout.num_tokens
    kv_heads = case.num_heads if case.num_kv_heads is None else case.num_kv_heads
    heads = {"q": case.num_heads, "k": kv_heads, "v": kv_heads} | ({"gate": case.num_heads} if case.gate else {})
    shapes = {name: (case.batch, seq, count, HEAD_DIM) for name, count in heads.items()}
    tensors = {name: torch.randn(shape, generator=generator).to(case.dtype) for name, shape in shapes.items()}
    if case.mask == "boolean":
        tensors["mask"] = torch.rand(case.batch, case.num_heads, seq, seq, generator=generator) < 0.4
        tensors["mask"][:, 1, 7] = False
    elif case.mask == "additive":
        tensors["mask"] = torch.randn(1, 1, seq, seq, generator=generator)
    return tensors


def _layer(case: Case, like: torch.Tensor, mesh: ProcessMesh | None, folder: Path) -> Any:
    options = dict(case.options)
    if case.strategy:
        options["mask_strategy_file_path"] = str(folder / "strategy.json")
    config = AttentionConfig(default=AttentionSpec(case.backend, options))
    place: dict[str, Any] = {"device": str(like.device), "dtype": like.dtype, "environment": None}
    if mesh is None:
        policy, made = AttentionPolicy(config=config, **place), LocalAttention
    else:
        policy = AttentionPolicy(config=config, mesh=mesh, num_head_groups=case.num_head_groups, **place)
        made = UlyssesAttention if case.ulysses_layer else USPAttention
    return made(
        case.num_heads,
        HEAD_DIM,
        case.num_kv_heads,
        layer=case.layer,
        policy=policy,
        causal=case.causal,
        scale=case.scale,
    )


def _run(
    case: Case,
    tensors: dict[str, torch.Tensor],
    mesh: ProcessMesh | None,
    folder: Path,
    recorder: AttentionRecorder | None = None,
) -> torch.Tensor:
    """The last of case.steps calls; the tokens of each are those of the first, a little turned."""
    layer = _layer(case, tensors["q"], mesh, folder)
    state, out = RequestCache(), tensors["q"]
    for index in range(case.steps):
        moved = {name: x + 0.1 * index if name in "qk" else x for name, x in tensors.items()}
        step, recorder = StepInfo(index, case.steps), recorder or AttentionRecorder()
        context = AttentionContext(layout=case.layout, step=step, state=state, recorder=recorder)
        out = layer(moved["q"], moved["k"], moved["v"], context, gate=moved.get("gate"), mask=moved.get("mask"))
    return out


def _run_shared(
    case: Case, tensors: dict[str, torch.Tensor], mesh: ProcessMesh, folder: Path, recorder: AttentionRecorder
) -> tuple[torch.Tensor, float]:
    """Each process its rows; the whole result, and how far apart the processes' rows of text are."""
    seq = tensors["q"].shape[1]
    layout = TokenLayout((1, 1, seq)) if case.layout is None else case.layout
    grid = slice(layout.num_prefix_tokens, seq - layout.num_suffix_tokens)
    local = {
        name: x
        if name == "mask"
        else torch.cat([x[:, : grid.start], mesh.sharding.shard(x[:, grid]), x[:, grid.stop :]], 1)
        for name, x in tensors.items()
    }
    out = _run(case, local, mesh, folder, recorder)
    stop = out.shape[1] - layout.num_suffix_tokens
    gathered = mesh.sharding.gather(out[:, grid.start : stop], layout.num_grid_tokens)
    prefix, suffix = out[:, : grid.start], out[:, stop:]
    texts = all_gather(mesh.sequence, torch.cat([prefix, suffix], dim=1))
    apart = max((float((text - texts[0]).abs().max()) for text in texts if text.numel()), default=0.0)
    return torch.cat([prefix, gathered, suffix], dim=1), apart
