"""Wrong sparse choices: refused as early as they can be known, by name, range and value. And NaN."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_oracle import random_qkv
from tables import table

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.attention import AttentionConfig, LayerInfo, RequestCache, StepInfo, TokenLayout
from diffusion_runtime.attention import attention as attend
from diffusion_runtime.attention.functional import plan_attention
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import BackendUnavailableError, ConfigError, ModelLoadError
from diffusion_runtime.loading import inspect_pipeline

STA, VSA, VMOBA, SVG2 = "sliding_tile_attn", "video_sparse_attn", "vmoba_attn", "sparse_video_gen_2_attn"
SOL = "sol_attn"
# The tiny model.
NUM_LAYERS, NUM_HEADS = 2, 4
# Sparse in every layer from the first step on.
SPARSE: dict[str, dict[str, Any]] = {
    STA: {"window": [1, 1, 1], "tile_size": [2, 2, 2]},
    VSA: {"sparsity": 0.5},
    VMOBA: {"first_full_step": 0, "temporal_chunk_size": 1},
    SVG2: {"svg2_num_q_centroids": 4, "svg2_num_k_centroids": 8, "svg2_first_times_fp": 0.0},
    SOL: {"top_k": 0.5},
}

# What one option says alone: refused where it is parsed.
ALONE = [
    (VSA, {"sparsity": 1.5}, r"video_sparse_attn: sparsity must lie in \[0, 1\], got 1.5"),
    (VSA, {"VSA_sparsity": -0.1}, r"VSA_sparsity must lie in \[0, 1\], got -0.1"),
    (VSA, {"sparsity": float("nan")}, r"sparsity: expected float, got nan"),
    (VSA, {"sparsity": 10**400}, r"video_sparse_attn\.sparsity: expected float, got a whole number of 1329 bits"),
    (VSA, {"sparsity": "lots"}, r"video_sparse_attn\.sparsity: expected float, got 'lots'"),
    (VSA, {"tile_size": [6, 8, 8]}, r"tile_size must be one of \[4, 4, 4\], .*got \[6, 8, 8\]"),
    (VSA, {"dense_layers": "first"}, "dense_layers: expected ranges such as .*got 'first'"),
    (VSA, {"min_tokens": -5}, "min_tokens: expected 0 or more, got -5"),
    (STA, {"skip_threshold": 0.1}, "skip_threshold is no option any more: skip-softmax was slower"),
    (SOL, {"top_k": 0.0}, r"top_k: expected a share of the key tiles in \(0, 1\], got 0.0"),
    (SOL, {"tile_size": [4, 0, 4]}, r"tile_size: expected three whole numbers of 1 or more, got \[4, 0, 4\]"),
    (SOL, {"dense_first_steps": -1}, "dense_first_steps must be 0 or more, got -1"),
    (STA, {"tail": "pool"}, r"sliding_tile_attn\.tail: expected one of 'none', 'pooled', got 'pool'"),
    (VSA, {"sparsty": 0.5}, "unknown option 'sparsty'. Did you mean 'sparsity'"),
    (VSA, {1: 0.5}, "unknown option 1|expected text keys, got 1"),
    (STA, {"window": [3, 0, 5]}, r"window: expected three whole numbers of 1 or more .*got \(3, 0, 5\)"),
    (STA, {"window": [3, 3]}, r"sliding_tile_attn\.window: expected tuple.*got \[3, 3\]"),
    (STA, {"tile_size": [0, 8, 8]}, r"tile_size: expected three whole numbers of 1 or more .*got \(0, 8, 8\)"),
    (STA, {"sta_mode": "STA_inferense"}, "sta_mode: unknown value 'STA_inferense'. Did you mean 'STA_inference'"),
    (
        STA,
        {"sta_mode": "STA_searching"},
        "sta_mode=STA_searching is no mode any more: .*runtime tune --methods",
    ),
    (STA, {"search_log_folder": "logs"}, "search_log_folder is no option any more: .*diffusion-runtime tune --methods"),
    (STA, {"skip_time_steps": -1}, "skip_time_steps: expected 0 or more, got -1"),
    (STA, {"mask_strategy_file_path": "missing.json"}, "mask_strategy_file_path: missing.json: no such file"),
    (VMOBA, {"moba_threshold": -1}, "moba_threshold must be 0 or more .*got -1"),
    (VMOBA, {"temporal_chunk_size": 0}, "temporal_chunk_size must be a number of frames above 0, got 0"),
    (VMOBA, {"spatial_chunk_size": [3, 0]}, r"spatial_chunk_size must be 1 or more along every axis, got \[3, 0\]"),
    (VMOBA, {"st_topk": 0}, "st_topk must be 1 or more, .*got 0"),
    (VMOBA, {"moba_select_mode": "best"}, "moba_select_mode: expected one of 'threshold', 'topk', got 'best'"),
    (SVG2, {"svg2_top_p_kmeans": 1.5}, "svg2_top_p_kmeans: expected a share from 0 to 1, got 1.5"),
    (SVG2, {"svg2_num_q_centroids": 2.5}, r"svg2_num_q_centroids: expected int, got 2\.5"),
]

# What several options say together: refused where a layer knows its whole set.
TOGETHER = [
    (STA, {}, "needs to know its windows"),
    (STA, {"window": [3, 3, 3], "mask_strategy_file_path": "fits.json"}, "give one of them"),
    (STA, {"head_windows": [[1, 1, 1]] * 3}, "head_windows has 3 windows and this layer 4 query heads"),
    (STA, {"mask_strategy_file_path": "layers.json"}, "is for 3 layers .*this model has 2"),
    (STA, {"mask_strategy_file_path": "heads.json"}, "is for 5 heads .*this model has 4"),
    (VSA, {"sparsity": 0.5, "VSA_sparsity": 0.7}, "sparsity 0.5 and VSA_sparsity 0.7 are two spellings"),
    (VMOBA, {"moba_select_mode": "topk", "moba_threshold_type": "block"}, "topk has no moba_threshold_type block"),
    (VMOBA, {"temporal_layer": 0, "spatial_layer": 0, "st_layer": 0}, "must be 1 or more, all are 0"),
]


def strategy(path: str, *, steps: int = 2, layers: int = NUM_LAYERS, heads: int = NUM_HEADS) -> None:
    windows = {f"{s}_{layer}_{h}": [1, 1, 1] for s in range(steps) for layer in range(layers) for h in range(heads)}
    Path(path).write_text(json.dumps(windows))


@pytest.fixture
def weightless(tiny_wan_copy: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model folder from which no weight can be read, and strategy files for this and for other models."""
    folder = tiny_wan_copy()
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(b"not weights")
    shutil.rmtree(folder / "tokenizer")
    monkeypatch.chdir(tmp_path)
    strategy("fits.json")
    strategy("layers.json", layers=NUM_LAYERS + 1)
    strategy("heads.json", heads=NUM_HEADS + 1)
    Path("malformed.json").write_text('{"0_0_0": [1, 1, 1], "0_0": [1, 1, 1]}')
    return str(folder)


def load(folder: str, attention: Any) -> None:
    load_pipeline(folder, device="cpu", attention=attention)


# --- where it is parsed -----------------------------------------------------------------------------------------------


@table(("backend", "options", "message"), ALONE)
@table("form", ["default", "per_role", "schedule"])
def test_what_an_option_says_alone_is_refused_by_the_parser(
    backend: str, options: dict[Any, Any], message: str, form: str
) -> None:
    spec = {"backend": backend, "extra": options}
    stated: Any = {"default": spec}
    if form != "default":
        stated = {"per_role": {"self": spec}} if form == "per_role" else {"schedule": [{"steps": "3", **spec}]}
    with pytest.raises(ConfigError, match=message):
        AttentionConfig.parse(stated)


@table(("backend", "options", "message"), TOGETHER)
def test_what_options_say_together_is_not_for_the_parser(
    backend: str, options: dict[str, Any], message: str, weightless: str
) -> None:
    """Another level may put it right; see test_a_set_may_be_spread_over_levels."""
    AttentionConfig.parse({"backend": backend, "extra": options})


# --- where a layer knows its whole set --------------------------------------------------------------------------------


@table(
    ("backend", "options", "message"),
    [
        *ALONE,
        *TOGETHER,
        (STA, {"mask_strategy_file_path": "malformed.json"}, "malformed.json: key '0_0': expected STEP"),
    ],
)
@table("form", ["default", "schedule", "overlay"])
def test_loading_refuses_it_before_any_weight(
    backend: str, options: dict[Any, Any], message: str, form: str, weightless: str
) -> None:
    spec = {"backend": backend, "extra": options}
    stated: Any = {"default": spec, "schedule": [{"steps": "7", **spec}], "overlay": {"default": backend}}
    attention = {"schedule": stated["schedule"]} if form == "schedule" else stated[form]
    override = {"default": {"extra": options}} if form == "overlay" else None
    with pytest.raises(ConfigError, match=message):
        load_pipeline(weightless, device="cpu", attention=attention, attention_override=override)


@table("backend", SPARSE)
def test_what_is_right_gets_as_far_as_the_weights(backend: str, weightless: str) -> None:
    with pytest.raises(ModelLoadError):
        load(weightless, {"backend": backend, "extra": SPARSE[backend]})


@table(
    ("config", "override"),
    [
        # Neither level is complete alone.
        ({"default": STA}, "window=[1,3,3]"),
        # The higher level puts the lower one right.
        (
            {"default": {"backend": VMOBA, "extra": {"moba_select_mode": "topk", "moba_threshold_type": "block"}}},
            "moba_threshold_type=overall",
        ),
        # The rules complete the default, one for each part of a request.
        (
            {
                "default": STA,
                "schedule": [
                    {"steps": "0-3", "extra": {"window": [3, 3, 3]}},
                    {"steps": "4--1", "extra": {"window": [1, 3, 3]}},
                ],
            },
            None,
        ),
        # The two rules never hold together.
        (
            {
                "schedule": [
                    {"steps": "0-3", "extra": {"moba_select_mode": "topk"}},
                    {"steps": "4--1", "backend": VMOBA, "extra": {"moba_threshold_type": "block"}},
                ],
                "default": VMOBA,
            },
            None,
        ),
    ],
)
def test_a_set_may_be_spread_over_levels(config: Any, override: Any, weightless: str) -> None:
    with pytest.raises(ModelLoadError):
        load_pipeline(weightless, device="cpu", attention=config, attention_override=override)


@table(
    ("config", "message"),
    [
        # At step 3 both rules hold.
        (
            {
                "schedule": [
                    {"steps": "0-3", "extra": {"moba_select_mode": "topk"}},
                    {"steps": "3--1", "backend": VMOBA, "extra": {"moba_threshold_type": "block"}},
                ],
                "default": VMOBA,
            },
            "topk has no moba_threshold_type block",
        ),
        # A request of 9 steps has one that no rule speaks for.
        (
            {
                "default": STA,
                "schedule": [{"steps": "0-3,-4--1", "extra": {"window": [3, 3, 3]}}],
            },
            "needs to know its windows",
        ),
        ({"default": "torch_sdpa", "schedule": [{"layers": "1", "backend": STA}]}, "needs to know its windows"),
    ],
)
def test_every_combination_of_rules_that_can_hold_is_checked(config: Any, message: str, weightless: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(weightless, config)


def test_a_rule_for_a_layer_that_is_not_there_is_refused(weightless: str) -> None:
    with pytest.raises(
        ConfigError, match=r"schedule\[0\]\.layers: expected layers from 0 to 1, which this model has, got 2"
    ):
        load(weightless, {"schedule": [{"layers": "2", "backend": STA}]})


# --- where the steps are known ----------------------------------------------------------------------------------------


def request(num_steps: int) -> GenerationRequest:
    return GenerationRequest("a star", height=32, width=32, num_frames=5, num_inference_steps=num_steps, seed=0)


@table(
    ("spec", "message"),
    [
        (
            {"backend": STA, "extra": {"mask_strategy_file_path": "fits.json"}},
            r"fits.json is for 2 steps and this run has 1; generate with num_inference_steps 2",
        ),
    ],
)
def test_a_request_is_refused_before_its_model_is_loaded(spec: dict[str, Any], message: str, weightless: str) -> None:
    rules = inspect_pipeline(RuntimeConfig(weightless, device="cpu", attention=spec)).rules
    with pytest.raises(ConfigError, match=message):
        rules.resolve(request(1))


def test_a_strategy_counts_where_it_can_hold(weightless: str) -> None:
    spec = {"backend": STA, "extra": {"mask_strategy_file_path": "fits.json"}}
    for steps, refused in (("0", True), ("1", False)):
        config = RuntimeConfig(weightless, device="cpu", attention={"schedule": [{"steps": steps, **spec}]})
        rules = inspect_pipeline(config).rules
        rules.resolve(request(2))
        if refused:
            with pytest.raises(ConfigError, match="is for 2 steps"):
                rules.resolve(request(1))
        else:
            rules.resolve(request(1))


def test_a_strategy_that_changes_between_requests_is_seen(weightless: str) -> None:
    spec = {"backend": STA, "extra": {"mask_strategy_file_path": "fits.json"}}
    rules = inspect_pipeline(RuntimeConfig(weightless, device="cpu", attention=spec)).rules
    rules.resolve(request(2))
    strategy("fits.json", steps=3)
    rules.resolve(request(3))
    with pytest.raises(ConfigError, match="is for 3 steps"):
        rules.resolve(request(2))


# --- cross-attention --------------------------------------------------------------------------------------------------


@table("backend", SPARSE)
def test_cross_attention_refuses_it_by_name_and_is_passed_over_in_general(
    backend: str, weightless: str, tiny_wan_folder: Path
) -> None:
    spec = {"backend": backend, "extra": SPARSE[backend]}
    with pytest.raises(BackendUnavailableError, match=f"{backend}: serves self attention, not role 'cross'"):
        load(weightless, {"per_role": {"cross": spec}})
    report = load_pipeline(str(tiny_wan_folder), device="cpu", attention=spec)(request(1)).attention_report
    assert {(row.role, row.backend) for row in report.rows} == {("self", backend), ("cross", "torch_sdpa")}
    note = f"cross: {backend} not used: default: not made for role 'cross', the next choice decides"
    # Of the method itself it may say that its options drop nothing of a grid as small as this.
    assert [each for each in report.notes if not each.startswith(f"self: {backend} computes every pair")] == [note]


# --- calls of `attention` ---------------------------------------------------------------------------------------------


@table(("backend", "options", "message"), [*ALONE, *TOGETHER])
def test_a_grid_below_min_tokens_hides_no_mistake(
    backend: str, options: dict[Any, Any], message: str, weightless: str
) -> None:
    layout = TokenLayout((1, 2, 2))
    q, k, v = random_qkv(layout, num_heads=NUM_HEADS)
    place = {"layer": LayerInfo(0, NUM_LAYERS), "step": StepInfo(0, 2)}
    given = {"min_tokens": 1000, **options}
    with pytest.raises(ConfigError, match=message):
        attend(q, k, v, backend=backend, options=given, layout=layout, **place)
    with pytest.raises(ConfigError, match=message):
        plan_attention(q, k, backend=backend, options=given, layout=layout, **place)


@table("backend", SPARSE)
def test_a_layout_that_is_no_grid_or_another_one(backend: str) -> None:
    q, k, v = random_qkv(TokenLayout((2, 2, 3)))
    for layout, message in (
        (None, "pass layout=TokenLayout"),
        (TokenLayout.text(12), "pass layout=TokenLayout"),
        (TokenLayout((2, 2, 2)), "describes 8 tokens.*12"),
    ):
        with pytest.raises(ConfigError, match=message):
            attend(q, k, v, backend=backend, options=SPARSE[backend], layout=layout)
    with pytest.raises(ConfigError, match=rf"{backend}: the layout \(2, 2, 3\).*q has 4 and k has 12"):
        attend(q[:, :4], k, v, backend=backend, options=SPARSE[backend], layout=TokenLayout((2, 2, 3)))


# --- numbers that are none --------------------------------------------------------------------------------------------

MODES = [
    *[(backend, {}) for backend in (STA, VSA, VMOBA)],
    *[
        (VMOBA, {"moba_select_mode": mode, "moba_threshold_type": group, "temporal_topk": 2, "st_topk": 2})
        for mode, group in [
            ("threshold", "head_global"),
            ("threshold", "overall"),
            ("threshold", "block"),
            ("topk", "query_head"),
            ("topk", "head_global"),
            ("topk", "overall"),
        ]
    ],
]


@table(("backend", "options"), MODES)
@table("value", [float("nan"), float("inf"), float("-inf")])
@table("everywhere", [False, True])
def test_numbers_that_are_none_neither_hang_nor_leave_the_range(
    backend: str, options: dict[str, Any], value: float, everywhere: bool
) -> None:
    layout = TokenLayout((4, 8, 8), num_suffix_tokens=3)
    q, k, v = random_qkv(layout, num_heads=2)
    clean = attend(q, k, v, backend=backend, options={**SPARSE[backend], **options}, layout=layout)
    assert clean.isfinite().all()
    if everywhere:
        q[:], k[:] = value, value
    else:
        q[0, 3, 0], k[0, 100, 0, 2] = value, value
    arguments: dict[str, Any] = {"options": {**SPARSE[backend], **options}, "layout": layout}
    plan = plan_attention(q, k, backend=backend, **arguments)
    assert not plan.is_dense
    assert ((plan.kv_count >= 1) & (plan.kv_count <= plan.kv.num_blocks)).all()
    # What follows the count is unspecified in a plan, and yet must not lead a kernel astray.
    assert ((plan.kv_index >= 0) & (plan.kv_index < plan.kv.num_blocks)).all()
    out = attend(q, k, v, backend=backend, **arguments)
    assert out.shape == q.shape
    if everywhere:
        return
    # The head that has none of them is what it was, unless the method compares heads with each other.
    if options.get("moba_threshold_type") not in ("overall", "block"):
        assert torch.equal(out[0, :, 1], clean[0, :, 1])
    if math.isnan(value):
        assert out[0, 3, 0].isnan().all()


def test_sparse_video_gen_2_says_so_at_its_first_clustering() -> None:
    layout = TokenLayout((2, 4, 4))
    q, k, v = random_qkv(layout)
    k[0, 5, 1, 2] = float("nan")
    with pytest.raises(ConfigError, match=r"k of layer 3 \(blocks\.3\) holds NaN"):
        attend(
            q,
            k,
            v,
            backend=SVG2,
            options=SPARSE[SVG2],
            layout=layout,
            layer=LayerInfo(3, 8, name="blocks.3"),
            state=RequestCache(),
        )
