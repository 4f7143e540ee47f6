"""What `explain` says: operations counted by hand, densities as plans have them, and the same numbers in every form."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from headless_browser import browser_page, find_browser
from tables import table
from torch.utils.flop_counter import FlopCounterMode

from diffusion_runtime import AttentionConfig, GenerationRequest, load_pipeline
from diffusion_runtime.attention import RequestCache, TokenLayout
from diffusion_runtime.attention.backends.interface import AttentionCall
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.cli.app import run
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.options import build_options
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.explanation.counted_operations import CountedOperations
from diffusion_runtime.explanation.explanation import NOT_RUN, Explanation, explain, implementation_rows
from diffusion_runtime.explanation.page import render, write_page
from diffusion_runtime.explanation.text_map import in_tera, schedule_map
from diffusion_runtime.generation.denoising_stages import stages_of
from diffusion_runtime.loading import prepare
from diffusion_runtime.models.published_folders import packaged_folder
from diffusion_runtime.parallel.interface import AttentionInputs
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.profiling.instruments import attention_choices
from diffusion_runtime.rules.batch_settings import BatchSettings

GRID = (4, 8, 8)
SPARSE = {"per_role": {"self": {"backend": "video_sparse_attn", "extra": {"sparsity": 0.9}}}}


def explained(attention: object = None, device: str = "cpu", **values: object) -> Explanation:
    prepared = prepare(RuntimeConfig("shapes", device=device, attention_override=attention))
    size = {"height": 64, "width": 64, "num_frames": 13, "num_inference_steps": 4}
    request = GenerationRequest("a red circle", **{**size, **values})
    return explain(prepared, prepared.rules.resolve(request, None))


def test_operations_are_those_of_the_layers() -> None:
    """Of the embedded model: 6 layers, 4 heads of 64; a batch of both guidance branches."""
    found = explained()
    tokens = 4 * 4 * 4
    assert found.grid == (4, 4, 4)
    by_name = {part.name: part for part in found.parts}
    assert by_name["attention, self"].operations == 4 * 6 * 2 * 4.0 * tokens * tokens * 4 * 64
    assert by_name["attention, self"].kept == by_name["attention, self"].operations
    # Query, key, value and output of both attentions, and the feed-forward layers, of every token.
    dim, hidden = 256, 1024
    per_token = 2 * (4 * dim * dim + 2 * dim * dim + 2 * dim * hidden)
    products = 4 * 2 * 6 * tokens * per_token
    assert by_name["linear layers"].operations == pytest.approx(products, rel=0.12)
    # Keys and values of the text, at least, for both branches, at the first of the 4 steps alone.
    assert by_name["text, once per request"].operations >= 2 * 6 * 2 * 2 * dim * dim
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)
    assert repr(found).startswith("<Explanation: shapes, passes 4 in 4 steps, each of both guidance branches; expected")
    assert len(repr(found)) < 300


@table(
    ("backend", "options"),
    [
        ("torch_sdpa", {}),
        ("video_sparse_attn", {"sparsity": 0.6, "tile_size": (4, 4, 4)}),
        ("video_sparse_attn", {"sparsity": 0.6, "dense_first_steps": 2}),
        ("sliding_tile_attn", {"window": (1, 3, 3), "tile_size": (2, 2, 2)}),
        (
            "vmoba_attn",
            {"moba_select_mode": "topk", "first_full_step": 0, "temporal_topk": 2, "temporal_chunk_size": 1},
        ),
        ("sol_attn", {"top_k": 0.5}),
        ("sol_attn", {"tau": 1.0}),
    ],
)
def test_expected_density_is_that_of_the_plan(backend: str, options: dict[str, object]) -> None:
    found = find_backend(backend)
    assert found is not None
    built = build_options(found.options_type, options, "options")
    layout, layer, step = TokenLayout(GRID), LayerInfo(role="self", index=0, num_layers=6), StepInfo(1, 4)
    expected = found.expected_density(built, layout, layer, step)
    if backend == "torch_sdpa":
        assert expected == 1.0
        return
    q, k, v = torch.randn(3, 1, layout.num_tokens, 2, 16)
    call = AttentionCall(AttentionInputs(q, k, v, layout), built, layer, step, RequestCache())
    plan = found.plan(call)
    if expected is None:
        assert options == {"tau": 1.0}
        return
    if plan.row_mask is None:
        pairs = float(plan.block_mask.float().mean())
    else:
        assert plan.row_counts is not None
        pairs = float(plan.row_counts.of_rows.float().mean()) / plan.kv.num_blocks
    assert expected == pytest.approx(1.0 if plan.is_dense else pairs)


def self_attention(backend: str, **extra: object) -> dict[str, object]:
    return {"per_role": {"self": {"backend": backend, "extra": extra}}}


def check_what_is_said(device: str, choices: list[dict[str, object]], **values: object) -> None:
    """The rows of the report, by role, backend, implementation, layers and steps; without a remark on lengths, which
    depends on the prompts."""
    pipeline = load_pipeline("shapes", device=device)
    assert isinstance(pipeline, Pipeline)
    for choice in choices:
        found = explained(choice, device=device, num_inference_steps=3, **values)
        with attention_choices(pipeline, AttentionConfig.parse(choice)):
            report = pipeline(found.request).attention_report
        ran = {
            (row.role, row.backend, row.implementation.removesuffix(" by length"), row.layers, row.steps)
            for row in report.rows
        }
        rows = found.to_dict()["implementations"]
        said = {(row["role"], row["backend"], row["implementation"], row["layers"], row["steps"]) for row in rows}
        assert said == ran, choice


@pytest.mark.gpu
def test_what_is_said_is_what_runs_on_a_gpu() -> None:
    """Of the block-sparse kernel the implementation for each form of plan."""
    sparse = [
        self_attention("video_sparse_attn", sparsity=0.5, tile_size=[4, 4, 8]),
        self_attention("video_sparse_attn", sparsity=0.5, tile_size=[4, 4, 4]),
        self_attention("sliding_tile_attn", window=[1, 1, 1], tile_size=[2, 4, 4], skip_time_steps=1),
        self_attention("vmoba_attn", first_full_step=1, temporal_topk=1, temporal_chunk_size=1),
        self_attention("sparse_video_gen_2_attn", svg2_top_p_kmeans=0.5),
        self_attention("video_sparse_attn", sparsity=0.5, tile_size=[4, 4, 8], tail="pooled"),
        self_attention("vmoba_attn", first_full_step=1, temporal_topk=1, temporal_chunk_size=1, tail="pooled"),
    ]
    check_what_is_said("cuda", [{}, {"default": {"backend": "torch_sdpa"}}, *sparse], height=128, width=128)


def test_what_is_said_is_what_runs() -> None:
    rules = [{"steps": "0", "layers": "0-2", "backend": "reference"}]
    choices: list[dict[str, object]] = [
        {},
        {"default": {"backend": "reference"}},
        {"default": {"backend": "fp8_attn"}, "schedule": rules},
        self_attention("video_sparse_attn", sparsity=0.75, tile_size=[4, 4, 4], dense_first_steps=1),
        self_attention("video_sparse_attn", sparsity=0.5, tile_size=[4, 4, 4], min_tokens=10**6),
        self_attention("sliding_tile_attn", window=[1, 1, 1], tile_size=[2, 2, 2], skip_time_steps=1),
        self_attention("vmoba_attn", first_full_step=1, first_full_layer=1, temporal_topk=1, temporal_chunk_size=1),
        self_attention("sparse_video_gen_2_attn", svg2_top_p_kmeans=0.5),
        self_attention("sol_attn", top_k=0.5, dense_first_steps=1),
    ]
    check_what_is_said("cpu", choices)


def test_steps_at_half_the_size_cost_what_they_compute() -> None:
    """Of progressive resolution; a second stage is counted by the same sizes."""
    found = explained(progressive_resolution="dct:A=100,beta=2")
    settings = BatchSettings.of([found.request], prepare(RuntimeConfig("shapes", device="cpu")).rules.sampling)
    steps = [(stage.size, len(stage.steps(torch.device("cpu")))) for stage in stages_of(settings)]
    assert [size.height for size, _ in steps] == [32, 64]
    assert sum(count for _, count in steps) == found.num_steps == len(found.schedule[0].backends) == 4
    pairs = sum(count * (4 * (size.height // 16) ** 2) ** 2 for size, count in steps)
    by_name = {part.name: part for part in found.parts}
    assert by_name["attention, self"].operations == 6 * 2 * 4.0 * pairs * 4 * 64
    assert found.grid == (4, 4, 4)


def test_a_first_chunk_costs_its_own_steps_and_guidance() -> None:
    prepared = prepare(RuntimeConfig("shapes-causal", device="cpu"))
    # 12 steps of both branches, 4 of each of 11 further chunks, and 11 commits.
    request = GenerationRequest("a red circle", num_frames=93)
    found = {}
    for name, values in {"own": {}, "all": {"guided_chunks": 12}, "none": {"guidance_scale": 1.0}}.items():
        resolved = prepared.rules.resolve(dataclasses.replace(request, **values))
        found[name] = explain(prepared, resolved)
    assert {name: each.num_forwards for name, each in found.items()} == {
        "own": 2 * 12 + 4 * 11 + 11,
        "all": 2 * (12 + 4 * 11 + 11),
        "none": 12 + 4 * 11 + 11,
    }
    linear = {name: next(part for part in each.parts if "linear" in part.name) for name, each in found.items()}
    assert linear["all"].operations == pytest.approx(2 * linear["none"].operations)
    denoise = (linear["own"].operations - linear["none"].operations) / 12
    commit = (linear["none"].operations - 56 * denoise) / 11
    # Of 14 squares of the width a layer, q, k and v of the last of six are all that a commit takes.
    assert commit / denoise == pytest.approx((6 * 14 - 11) / (6 * 14), rel=0.01)


def test_steps_of_a_first_chunk_are_drawn_beside_those_of_the_others() -> None:
    rules = {"schedule": [{"steps": "4-11", "role": "self", "backend": "reference"}]}
    config = RuntimeConfig("shapes-causal", device="cpu", attention=rules)
    prepared = prepare(config)
    found = explain(prepared, prepared.rules.resolve(GenerationRequest("a red circle", num_frames=29)))
    assert (found.num_first_steps, found.num_steps, found.num_forwards) == (12, 4, 2 * 12 + 4 * 3 + 3)
    (row,) = [row for row in implementation_rows(found) if row.backend == "reference"]
    assert (row.layers, row.steps) == ("0-5", "4-11 of the first chunk")
    drawn = {(row.role, row.layers): row for row in schedule_map(found.schedule).rows}
    assert drawn["self", "0-4"].letters == drawn["self", "5"].letters == "AAAABBBBBBBBAAAA"
    # The last layer of a commit computes q, k and v alone.
    assert (drawn["self", "0-4"].commit, drawn["self", "5"].commit) == ("A", "C")
    assert found.passes_text == "39: 4 for a chunk, 12 for the first by dmd, and commits"


def test_schedules_are_drawn_by_layer_and_step() -> None:
    rules = [{"steps": "0-1", "layers": "0-2", "backend": "torch_sdpa"}]
    sparse = {"backend": "video_sparse_attn", "extra": {"sparsity": 0.5, "tile_size": [4, 4, 4]}}
    found = explained({"per_role": {"self": sparse}, "schedule": rules}, guidance_mode="two_pass")
    assert found.num_forwards == 8
    drawn = schedule_map(found.schedule)
    own = {row.layers: row.letters for row in drawn.rows if row.role == "self"}
    assert own == {"0-2": "AABB", "3-5": "BBBB"}
    assert drawn.legend["A"] == "torch_sdpa"


def test_what_leaves_out_passes_that_are_counted_is_said() -> None:
    found = explained("video_sparse_attn", step_cache="easycache:force=true", cfg_gate=0.5)
    assert "step_cache easycache" in found.remarks[-1]
    assert "cfg_gate 0.5 may leave some out" in found.remarks[-1]
    assert found.passes_text == "4 in 4 steps, each of both guidance branches"
    assert not any("counted as if" in remark for remark in explained().remarks)
    assert explained(guidance_mode="two_pass").passes_text == "8 in 4 steps"


def test_passes_of_steps_without_guidance_are_not_counted() -> None:
    """The first step changes nothing, the second has both branches, and the others one."""
    values: dict[str, Any] = {"zero_init_steps": 1, "guidance_stop": 0.5}
    found = explained(**values)
    assert found.passes_text == "3 in 4 steps, 1 of both guidance branches"
    assert explained(guidance_mode="two_pass", **values).passes_text == "4 in 4 steps"
    assert {row.backends[0] for row in found.schedule} == {NOT_RUN}
    assert NOT_RUN not in {name for row in found.schedule for name in row.backends[1:]}
    # A pass of one branch is half of one with both.
    of_step = explained().step_seconds
    assert 0.4 * of_step < found.step_seconds < 0.6 * of_step


def test_the_command_in_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "plan.html"
    size = ["--height", "64", "--width", "64", "--num-frames", "5", "--device", "cpu", "--num-inference-steps", "3"]
    assert run(["explain", *size, "--json", "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    values = json.loads(out)
    assert values["num_steps"] == 3
    assert values["parts"][0]["name"] == "linear layers"
    assert str(page) in err
    assert "emoji: what would run" in page.read_text()
    assert run(["explain", *size]) == 0
    shown = capsys.readouterr().out
    assert "Attention by layer and step" in shown
    assert "What would compute it" in shown
    assert max(map(len, shown.splitlines())) <= 100
    # A config needs no prompt either; one that it has is taken.
    config = tmp_path / "config.yaml"
    for text, prompt in (("", "a star"), (", prompt: a cat", "a cat")):
        config.write_text(f"request: {{num_inference_steps: 2{text}}}")
        assert run(["explain", *size[:-2], "--config", str(config), "--json"]) == 0
        values = json.loads(capsys.readouterr().out)
        assert (values["num_steps"], values["request"]["prompt"]) == (2, prompt)
    for place, problem in ((str(tmp_path), "it is a folder"), (f"{tmp_path}/other/", "it is a folder")):
        assert run(["explain", *size, "--html", place]) == 1
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_large_numbers_are_written_out() -> None:
    assert [in_tera(value * 1e12) for value in (78_334.6, 1374.2, 275.44, 0.053891, 0)] == [
        *("78,330", "1,374", "275.4", "0.05389", "-"),
    ]


def test_the_page_draws_schedules_by_layer_and_step_and_fits_a_small_screen(tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("no chromium was found on PATH")
    rules = [{"steps": "0-1", "layers": "0-2", "backend": "torch_sdpa"}]
    sparse = {"backend": "video_sparse_attn", "extra": {"sparsity": 0.5, "tile_size": [4, 4, 4]}}
    found = explained({"per_role": {"self": sparse}, "schedule": rules}, guidance_mode="two_pass", cfg_gate=0.5)
    (tmp_path / "profile").mkdir()
    with browser_page(browser, tmp_path / "profile") as page:
        write_page(found, tmp_path / "page.html")
        page.open(tmp_path / "page.html", 360, 800)
        assert page.read("document.documentElement.scrollWidth") <= 360
        assert page.read("Math.min(...[...document.querySelectorAll('.why')].map(each => each.offsetWidth))") >= 240
        # Two runs of steps in each of the first three layers of self-attention, one in any other.
        assert page.read("document.querySelectorAll('.map rect:not(.chosen)').length") == 3 + len(found.schedule)
        texts = page.read("[...document.querySelectorAll('.map title, .legend li')].map(each => each.textContent)")
        assert any(text.startswith("layer 2, steps 2-3: video_sparse_attn") for text in texts)
        assert set(schedule_map(found.schedule).legend.values()) <= set(texts)
        shown = page.read("document.body.innerText")
        assert "cfg_gate 0.5" in shown
        assert "dense calls: torch_sdpa" in shown
        causal = prepare(
            RuntimeConfig(
                "shapes-causal",
                device="cpu",
                attention={"schedule": [{"steps": "4-11", "role": "self", "backend": "reference"}]},
            )
        )
        write_page(
            explain(causal, causal.rules.resolve(GenerationRequest("a red circle", num_frames=29))),
            tmp_path / "causal.html",
        )
        page.open(tmp_path / "causal.html", 1000, 800)
        texts = page.read("[...document.querySelectorAll('.map title')].map(each => each.textContent)")
        assert any(text.startswith("layer 0, steps 4-11 of the first chunk: reference") for text in texts)
        assert "12 steps of the first chunk and 4 of the others" in page.read("document.body.innerText")
        assert page.errors == []
        assert all(url.startswith(("data:", "file:")) for url in page.urls)


def test_expected_times_are_those_of_recorded_runs() -> None:
    """One step of Wan 2.1 1.3B and its decoding, dense and with VSA at sparsity 0.9, as they took on one H200."""

    def recorded(name: str) -> Any:
        return json.loads((Path(__file__).parents[1] / "benchmarks" / "results" / f"{name}.json").read_text())

    def of_wan(attention: object) -> dict[str, float]:
        folder = packaged_folder("Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
        prepared = prepare(RuntimeConfig(str(folder), device="cpu", attention_override=attention))
        size = {"height": 480, "width": 832, "num_frames": 81}
        request = GenerationRequest("a circle", seed=0, num_inference_steps=1, guidance_scale=1.0, **size)
        parts = explain(prepared, prepared.rules.resolve(request, None)).parts
        linear = next(part.share for part in parts if part.name == "linear layers")
        return {part.name: part.share / linear for part in parts}

    step = next(run for run in recorded("bench_step")["runs"] if run["model"].startswith("wan2.1-1.3b"))["rows"][0]
    decoding = next(row for row in recorded("few_steps_gpu")["rows"] if row["self_attention"] == "fa")
    linear = step["linear_ms"]
    dense = of_wan(None)
    attention = dense["attention, self"] + dense["attention, cross"]
    assert attention == pytest.approx(step["attention_ms"] / linear, rel=0.02)
    assert dense["norms, modulation, rotations"] == pytest.approx(step["rest_ms"] / linear, rel=0.05)
    assert dense["decode"] == pytest.approx(1000 * decoding["decode_seconds"]["exact"] / linear, rel=0.02)
    rows = {row["name"]: row for row in recorded("static_order_gpu")["rows"]}
    in_tiles = rows["VSA 0.9, 4x4x4, in tiles"]["parts_ms"]["self_attention"]
    sparse = of_wan(AttentionConfig.parse(SPARSE))
    assert sparse["attention, self"] == pytest.approx(in_tiles / linear, rel=0.05)


def test_names_of_strangers_are_text_on_the_page() -> None:
    import dataclasses

    found = explained()
    config = dataclasses.replace(found.description.config, model_path="<script>alert(1)</script>")
    description = dataclasses.replace(found.description, config=config)
    page = render(dataclasses.replace(found, description=description))
    assert "<script>alert" not in page
    assert "\\u003cscript>alert" in page


def test_operations_are_counted_as_torch_counts_them() -> None:
    """Of every product that a model's layers are made of, on the meta device."""

    def make(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    def run() -> None:
        make(3, 5) @ make(5, 7)
        torch.bmm(make(2, 3, 5), make(2, 5, 7))
        torch.addmm(make(7), make(3, 5), make(5, 7))
        torch.baddbmm(make(2, 3, 7), make(2, 3, 5), make(2, 5, 7))
        torch.nn.functional.linear(make(2, 4, 5), make(7, 5), make(7))
        torch.nn.functional.conv2d(make(2, 6, 9, 8), make(4, 3, 3, 3), groups=2, stride=2)
        torch.nn.functional.conv3d(make(1, 6, 5, 9, 8), make(4, 6, 3, 3, 3), padding=1)
        torch.nn.functional.conv_transpose2d(make(2, 6, 9, 8), make(6, 4, 3, 3), stride=2)

    with FlopCounterMode(display=False) as expected:
        run()
    with CountedOperations() as counted:
        run()
    theirs = expected.get_flop_counts()["Global"]
    assert counted.counts == {str(packet).rpartition(".")[2]: number for packet, number in theirs.items()}
    # torch has no formula for this one.
    with CountedOperations() as fused:
        torch._addmm_activation(make(7), make(3, 5), make(5, 7))
    assert fused.counts == {"_addmm_activation": 2 * 3 * 5 * 7}
