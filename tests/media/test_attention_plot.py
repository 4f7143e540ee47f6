"""--attention-plot: what is counted, what is drawn of it, and where it cannot be written; HTML for notebooks."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from diffusion_runtime import GeneratedMedia, GenerationRequest, load_pipeline
from diffusion_runtime.attention import LayerInfo, StepInfo, TokenLayout, plan_attention
from diffusion_runtime.cli.attention_plot_flag import check_plot_place
from diffusion_runtime.errors import ConfigError, OutputError
from diffusion_runtime.media import notebook
from diffusion_runtime.media.attention_plot import draw_attention_plot, save_attention_plot
from diffusion_runtime.profiling.instruments import counted_density
from diffusion_runtime.report.attention_density import MAX_CELLS, DensityCounter, Kept
from diffusion_runtime.report.attention_report import AttentionReport

REQUEST = GenerationRequest("a red circle", height=64, width=64, num_frames=5, num_inference_steps=2, guidance_scale=2)
# V-MoBA keeps one chunk of several.
ONE_CHUNK = {
    **{"moba_select_mode": "topk", "temporal_topk": 1, "spatial_topk": 1, "st_topk": 1, "temporal_chunk_size": 1},
    **{"spatial_chunk_size": [2, 2], "st_chunk_size": [1, 2, 2]},
}
SPARSE_AFTER = {**ONE_CHUNK, "first_full_step": 1, "first_full_layer": 1}
SPARSE = {"per_role": {"self": {"backend": "vmoba_attn", "extra": SPARSE_AFTER}}}


@pytest.fixture(scope="module")
def made() -> GeneratedMedia:
    """By the embedded model at its smallest size: layer 0 and step 0 dense, the others sparse."""
    torch.set_num_threads(1)
    pipeline = load_pipeline("shapes", attention=SPARSE)
    before = pipeline(dataclasses.replace(REQUEST, num_inference_steps=1))
    assert (before.attention_report.density, before.attention_report.plan) == ((), None)
    with counted_density(pipeline):
        return pipeline(REQUEST)


def test_density_is_that_of_the_plans(made: GeneratedMedia) -> None:
    report = made.attention_report
    layers = {(row.role, row.layer): row.steps for row in report.density}
    assert set(layers) == {(role, layer) for role in ("self", "cross") for layer in range(6)}
    assert {steps for (role, _), steps in layers.items() if role == "cross"} == {(1.0, 1.0)}
    assert layers["self", 0] == (1.0, 1.0)
    for layer in range(1, 6):
        first, second = layers["self", layer]
        assert first == 1.0
        assert second is not None
        assert 0.0 < second < 1.0
    assert report.plan is not None
    assert (report.plan.role, report.plan.step, report.plan.method) == ("self", 1, "vmoba_attn")
    assert report.to_dict() == json.loads(json.dumps(report.to_dict()))


@pytest.mark.parametrize("backend", ["sliding_tile_attn", "vmoba_attn", "sparse_video_gen_2_attn"])
def test_cells_are_the_pairs_of_the_dense_mask(backend: str) -> None:
    options = {
        "sliding_tile_attn": {"tile_size": [2, 2, 2], "window": [1, 3, 1]},
        "vmoba_attn": {**ONE_CHUNK, "first_full_step": 0, "temporal_topk": 2},
        "sparse_video_gen_2_attn": {"svg2_num_q_centroids": 4, "svg2_num_k_centroids": 6, "svg2_first_times_fp": 0.0},
    }
    torch.manual_seed(0)
    layout = TokenLayout(grid=(4, 6, 6), num_suffix_tokens=3)
    q, k = torch.randn(2, 1, layout.num_tokens, 2, 16)
    layer, step = LayerInfo(3, 6), StepInfo(3, 6)
    plan = plan_attention(q, k, backend=backend, options=options[backend], layout=layout, layer=layer, step=step)
    assert not plan.is_dense
    counter = DensityCounter()
    counter.add(layer, step, [Kept(plan)])
    counter.add(layer, step, [Kept(), Kept(plan)])
    mask = plan.to_dense_mask()
    density = float(mask.double().mean())
    assert counter.layers()[0].steps[:4] == (None, None, None, pytest.approx((density + (1 + density) / 2) / 2))
    picture = counter.picture
    assert picture is not None
    # Pairs of head 0 within the grid, by the blocks that its plan names.
    kept = plan.kept_blocks(0, 0)
    pairs = plan.q.sizes[0].double() @ kept.double() @ plan.kv.sizes[0].double()
    grid = layout.num_grid_tokens
    assert float(pairs) == pytest.approx(float(mask[0, 0, :grid, :grid].sum()))
    assert (len(picture.cells), len(picture.cells[0])) == tuple(kept.shape)
    digits = torch.tensor([[int(digit) for digit in row] for row in picture.cells])
    assert torch.equal(digits > 0, kept > 0)
    assert torch.equal(digits == 9, kept * 9 > 8)


def test_a_large_plan_is_averaged() -> None:
    class Large:
        method, density = "any", 0.5

        def kept_blocks(self, sample: int, head: int) -> torch.Tensor:
            return (torch.arange(1000)[:, None] < torch.arange(700)).float()

    counter = DensityCounter()
    counter.add(LayerInfo(0, 1), StepInfo(0, 1), [Kept(Large())])
    assert counter.picture is not None
    cells = counter.picture.cells
    assert (len(cells), len(cells[0])) == (MAX_CELLS, MAX_CELLS)
    assert (counter.picture.num_query_blocks, counter.picture.num_key_blocks) == (1000, 700)
    assert cells[0].endswith("9" * 180)
    assert set(cells[-1]) == {"0"}


def report_of(num_layers: int, num_steps: int, share: float | None, cells: int = 0) -> dict[str, Any]:
    rows = [{"role": role, "layer": layer, "steps": [1.0] * num_steps} for role in "ab" for layer in range(num_layers)]
    rows[0]["steps"] = [1.0] * (num_steps - 1) + [share]
    plan = {"role": "a", "layer": 0, "step": 1, "head": 0, "method": "m", "density": 0.5, "num_query_blocks": 9 * cells,
            "num_key_blocks": 9 * cells, "cells": ["09" * (cells // 2)] * cells}  # fmt: skip
    return {"density": rows, "plan": plan if cells else None, "rows": [{"role": "a", "backend": "any"}]}


def test_pictures_have_room_for_every_cell_and_its_colour() -> None:
    for num_layers, num_steps, cells in [(1, 1, 2), (6, 4, 0), (60, 100, 192), (2, 50, 32)]:
        picture = draw_attention_plot(report_of(num_layers, num_steps, 0.25, cells), "a subtitle " * 30)
        colours = {colour: count for count, colour in picture.getcolors(1 << 24) or ()}
        assert picture.width <= 1200
        # A quarter, and dense.
        assert colours[198, 219, 239] >= 40
        assert (colours[8, 48, 107] >= 40 * num_layers * (num_steps - 1)) or cells
        # Nothing reaches the edge, where it would be cut off.
        edges = [picture.crop(box) for box in ((0, 0, 8, picture.height), (picture.width - 8, 0, *picture.size))]
        assert [edge.getcolors() for edge in edges] == [[(8 * picture.height, (255, 255, 255))]] * 2
    assert draw_attention_plot({"density": [], "plan": None, "rows": []}).size


def test_a_picture_is_written_whole_or_not_at_all(made: GeneratedMedia, tmp_path: Path) -> None:
    report = made.attention_report.to_dict()
    path = save_attention_plot(report, tmp_path / "plot.png", "5 frames")
    with Image.open(path) as picture:
        assert picture.size[0] > 600
    with pytest.raises(OutputError, match="cannot write"):
        save_attention_plot(report, path / "below a file.png")
    report["plan"]["cells"] = ["x"]
    with pytest.raises(ValueError, match="x"):
        save_attention_plot(report, tmp_path / "half.png")
    assert [each.name for each in tmp_path.iterdir()] == ["plot.png"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    check_plot_place(None, None, dry_run=True)
    check_plot_place(str(tmp_path / "a.PNG"), tmp_path / "b.png", dry_run=False)
    cases = {
        ("a.jpg", False): (ConfigError, "ends in .png"),
        ("b.png", False): (ConfigError, "both name"),
        ("c.png", True): (ConfigError, "explain --html"),
        ("none/c.png", False): (OutputError, "no folder"),
        ("folder.png", False): (OutputError, "cannot be written"),
    }
    (tmp_path / "folder.png").mkdir()
    for (name, dry_run), (kind, said) in cases.items():
        with pytest.raises(kind, match=said):
            check_plot_place(str(tmp_path / name), tmp_path / "b.png", dry_run=dry_run)


class Tags(html.parser.HTMLParser):
    """Start tags with their attributes, and that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_self_contained_and_escaped(made: GeneratedMedia, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = '"><script>alert(1)</script><img src="http://x.y/z" onerror="">'
    recipe = {**made.recipe, "request": {**made.recipe["request"], "prompt": prompt}}
    row = dataclasses.replace(made.attention_report.rows[0], implementation=prompt, reason=prompt)
    report = dataclasses.replace(made.attention_report, rows=(row,), notes=(prompt,))
    clip = dataclasses.replace(made, recipe=recipe, attention_report=report)
    image = dataclasses.replace(clip, frames=clip.frames[:1])
    monkeypatch.setattr(notebook, "MAX_INLINE_BYTES", 10_000_000)
    shown = clip._repr_html_(), image._repr_html_()
    monkeypatch.setattr(notebook, "MAX_INLINE_BYTES", 10)
    for text, kind in zip((*shown, clip._repr_html_()), ("video", "img", "img"), strict=True):
        tags = Tags(text).found
        media = [attributes for tag, attributes in tags if tag in ("video", "img")]
        assert [tag for tag, _ in tags if tag in ("video", "img")] == [kind]
        assert (media[0].get("alt") or media[0].get("aria-label")) == prompt
        assert str(media[0]["src"]).startswith("data:")
        assert "script" not in {tag for tag, _ in tags}
        links = re.findall(r"https?://[^\s\"<&]+", re.sub(r'src="data:[^"]*"', "", text))
        assert set(links) <= {"http://www.w3.org/2000/svg", "http://x.y/z"}
    # The density map: a rectangle per run of equal steps, with its share.
    assert "<title>layer 0, steps 0-1: 1</title>" in shown[0]
    assert "vmoba_attn" in made.attention_report._repr_html_()
    assert "script" not in {tag for tag, _ in Tags(report._repr_html_()).found}
    assert "<svg" not in AttentionReport()._repr_html_()
    assert numpy.array_equal(clip.frames, made.frames)


def test_what_is_shown_without_html_is_short(made: GeneratedMedia) -> None:
    """In a terminal or an assertion: no pixels, no whole recipe; the report as it is printed."""
    frames, height, width = made.frames.shape[:3]
    request = made.recipe["request"]
    size = f"{frames} frames at {made.fps} per second, {width} x {height}"
    assert repr(made) == f"<GeneratedMedia: {size}, prompt {request['prompt']!r}, seed {request['seed']}>"
    image = dataclasses.replace(made, frames=made.frames[:1], recipe={})
    assert repr(image) == f"<GeneratedMedia: {width} x {height}>"
    report = made.attention_report
    assert repr(report) == f"<AttentionReport: {report.num_calls} calls>\n{report}"
    assert repr(AttentionReport()) == "<AttentionReport: 0 calls>"
