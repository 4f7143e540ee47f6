"""Options and strategy files of sliding tile attention: what is read, when a step is full, and every bad input."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_oracle import random_qkv
from tables import table

from diffusion_runtime.attention import (
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    AttentionSpec,
    LayerInfo,
    LocalAttention,
    RequestCache,
    StepInfo,
    TokenLayout,
    attention,
    plan_attention,
)
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.attention.sparse.sliding_tile_options import SlidingTileOptions
from diffusion_runtime.attention.sparse.sliding_tile_strategy import load_strategy, parse_strategy
from diffusion_runtime.errors import ConfigError

NAME = "sliding_tile_attn"
LAYOUT = TokenLayout((4, 4, 6))
TILES = {"tile_size": (2, 2, 2)}


def run(options: dict[str, Any], *, step: StepInfo = StepInfo(), layer: LayerInfo = LayerInfo(), **more: Any) -> Any:  # noqa: B008
    q, k, v = random_qkv(LAYOUT)
    return attention(q, k, v, backend=NAME, options=TILES | options, layout=LAYOUT, step=step, layer=layer, **more)


def plan(options: dict[str, Any], index: int = 0, num_steps: int = 1, layer: LayerInfo = LayerInfo()) -> Any:  # noqa: B008
    q, k, _ = random_qkv(LAYOUT)
    step = StepInfo(index, num_steps)
    return plan_attention(q, k, backend=NAME, options=TILES | options, layout=LAYOUT, step=step, layer=layer)


def write(path: Path, steps: int = 1, layers: int = 1, heads: int = 2, window: Any = (1, 1, 1)) -> str:
    keys = (f"{s}_{layer}_{h}" for s in range(steps) for layer in range(layers) for h in range(heads))
    path.write_text(json.dumps({key: list(window) for key in keys}))
    return str(path)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_strategy_is_as_large_as_its_indexes() -> None:
    strategy = parse_strategy({"0_0_0": [5, 3, 3], "0_1_2": [1, 6, 10], "3_0_1": [3, 3, 5]}, "here")
    assert (strategy.num_steps, strategy.num_layers, strategy.num_heads) == (4, 2, 3)
    assert strategy.windows == {(0, 0, 0): (5, 3, 3), (0, 1, 2): (1, 6, 10), (3, 0, 1): (3, 3, 5)}


def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "s.json")
    first = load_strategy(path)
    assert load_strategy(path) is first
    Path(path).write_text('{"0_0_0": [3, 3, 3]}')
    assert load_strategy(path).windows == {(0, 0, 0): (3, 3, 3)}
    os.utime(path, ns=(1, 1))
    assert load_strategy(path).windows == {(0, 0, 0): (3, 3, 3)}


BAD_FILES = {
    "not JSON": ('{"0_0_0": [1,', "not valid JSON"),
    "nested without end": ("[" * 100_000, "not valid JSON"),
    "not text": (b"\xff\xfe\x00", "not valid JSON"),
    "a list": ("[[1, 1, 1]]", "holds list, expected"),
    "nothing": ("{}", "an empty object"),
    "a key of two": ('{"0_0": [1, 1, 1]}', "key '0_0': expected STEP_LAYER_HEAD"),
    "a negative key": ('{"-1_0_0": [1, 1, 1]}', "expected STEP_LAYER_HEAD"),
    "a key twice": ('{"0_0_0": [1, 1, 1], "0_0_00": [1, 1, 3]}', "expected STEP_LAYER_HEAD"),
    "a huge key": ('{"99999999999_0_0": [1, 1, 1]}', "expected STEP_LAYER_HEAD"),
    "two numbers": ('{"0_0_0": [1, 1]}', "key '0_0_0': expected three whole numbers"),
    "a zero": ('{"0_0_0": [1, 0, 1]}', "expected three whole numbers of 1 or more"),
    "a fraction": ('{"0_0_0": [1, 1.5, 1]}', "expected three whole numbers"),
    "a truth": ('{"0_0_0": [1, true, 1]}', "expected three whole numbers"),
    "no value": ('{"0_0_0": null}', "expected three whole numbers"),
}


@table("name", BAD_FILES)
def test_a_bad_file_fails_when_the_option_is_set(name: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[name]
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        AttentionSpec(NAME, {"mask_strategy_file_path": str(path)})
    assert "mask_strategy_file_path" in str(caught.value)
    assert str(path) in str(caught.value)


@table(("name", "said"), [("missing.json", "missing.json: no such file"), ("", "got an empty text"), ("a\0b", "NUL")])
def test_a_missing_file_fails_when_the_option_is_set(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"mask_strategy_file_path: .*{said}"):
        AttentionSpec(NAME, {"mask_strategy_file_path": name})


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mask_strategy_file_path: .* this is a folder"):
        AttentionSpec(NAME, {"mask_strategy_file_path": str(tmp_path)})


@table("skip", [0, 15])
def test_a_file_for_more_steps_layers_or_heads_fails_at_the_first_call(skip: int, tmp_path: Path) -> None:
    options = {"mask_strategy_file_path": write(tmp_path / "s.json", 3, 4, 2), "skip_time_steps": skip}
    fits, first = LayerInfo(0, 4), StepInfo(0, 3)
    with pytest.raises(ConfigError, match="is for 3 steps and this run has 2; generate with num_inference_steps 3"):
        run(options, layer=fits, step=StepInfo(0, 2))
    with pytest.raises(ConfigError, match=r"is for 4 layers .* this model has 2: it belongs to another model"):
        run(options, layer=LayerInfo(0, 2), step=first)
    q, k, v = random_qkv(LAYOUT, num_heads=1)
    with pytest.raises(ConfigError, match=r"is for 2 heads .* this model has 1: it belongs to another model"):
        attention(q, k, v, backend=NAME, options=TILES | options, layout=LAYOUT, step=first, layer=fits)
    with pytest.raises(ConfigError, match="is for 3 steps"):
        plan(options, 0, 2, fits)
    run(options, layer=fits, step=first)


def test_dense_steps_layers_and_heads_at_the_end_need_no_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"mask_strategy_file_path": write(tmp_path / "s.json", 2, 1, 1), "skip_time_steps": 0}
    sees = {}
    for step, layer in itertools.product(range(3), range(2)):
        made = plan(options, step, 3, LayerInfo(layer, 2))
        sees[step, layer] = [int(made.kv_count[group, 0]) for group in made.group_of[0].tolist()]
    # 2 x 2 x 3 tiles; the second head, the second layer and the third step are left out.
    dense = [12, 12]
    assert sees == {(0, 0): [1, 12], (1, 0): [1, 12], (2, 0): dense, (0, 1): dense, (1, 1): dense, (2, 1): dense}
    caplog.clear()
    cli = AttentionConfig.parse({"default": {"backend": NAME, "extra": TILES | options}})
    layer = LocalAttention(2, 16, layer=LayerInfo(0, 2), policy=AttentionPolicy(cli=cli))
    layer.decisions.check_request(3)
    context, (q, k, v) = AttentionContext(LAYOUT), random_qkv(LAYOUT)
    for step in range(3):
        layer(q, k, v, dataclasses.replace(context, step=StepInfo(step, 3)))
    rows = [(row.steps, row.implementation.split()[0]) for row in context.recorder.report().rows]
    assert rows == [("0-1", "block-sparse"), ("2", "dense")]
    (warning,) = [text for text in caplog.messages if "has no window for" in text]
    assert "has no window for steps 2, layers 1, heads 1, which attend to everything" in warning


def test_a_request_keeps_the_strategy_it_began_with(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    options = {"mask_strategy_file_path": write(path, 2), "skip_time_steps": 0}
    state = RequestCache()
    before = run(options, step=StepInfo(0, 2), state=state)
    write(path, 2, window=(3, 3, 3))
    assert torch.equal(run(options, step=StepInfo(1, 2), state=state), before)
    assert not torch.equal(run(options, step=StepInfo(1, 2)), before)


# --- when a step is full ----------------------------------------------------------------------------------------------


def test_a_file_keeps_fifteen_steps_full_and_a_window_none(tmp_path: Path) -> None:
    options = {"mask_strategy_file_path": write(tmp_path / "s.json", 20)}
    assert [plan(options, index, 20).is_dense for index in range(20)] == [True] * 15 + [False] * 5
    assert [plan(options | {"skip_time_steps": 2}, index, 20).is_dense for index in range(4)] == [True] * 2 + [
        False
    ] * 2
    assert not plan({"window": (1, 1, 1)}).is_dense
    assert plan({"window": (1, 1, 1), "skip_time_steps": 2}, 1, 3).is_dense
    assert not plan({"window": (1, 1, 1), "skip_time_steps": 2}, 2, 3).is_dense


def test_steps_and_layers_have_windows_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"0_0_0": [1, 1, 1], "0_1_1": [1, 3, 3], "1_0_0": [3, 1, 3], "1_0_1": [1, 1, 1]}))
    options = {"mask_strategy_file_path": str(path), "skip_time_steps": 0}
    counts = {}
    for step in range(2):
        for layer in range(2):
            made = plan(options, step, 2, LayerInfo(layer, 2))
            counts[step, layer] = [int(made.kv_count[group, 0]) for group in made.group_of[0].tolist()]
    # 2 x 2 x 3 tiles; a head without a window sees all twelve.
    assert counts == {(0, 0): [1, 12], (0, 1): [12, 6], (1, 0): [6, 1], (1, 1): [12, 12]}
    assert plan(options, 1, 2, LayerInfo(1, 2)).is_dense


def test_windows_by_head_are_each_head_s_window() -> None:
    q, k, v = random_qkv(LAYOUT, num_heads=4)
    windows = ((1, 1, 1), None, (1, 3, 3), (1, 1, 1))

    def computed(options: dict[str, Any]) -> torch.Tensor:
        return attention(q, k, v, backend=NAME, options=TILES | options, layout=LAYOUT)

    found = computed({"head_windows": windows})
    for head, window in enumerate(windows):
        alone = computed({"window": window}) if window else attention(q, k, v, layout=LAYOUT)
        torch.testing.assert_close(found[:, :, head], alone[:, :, head])
    made = plan_attention(q, k, backend=NAME, options=TILES | {"head_windows": windows}, layout=LAYOUT)
    # 2 x 2 x 3 tiles.
    assert [int(made.kv_count[group, 0]) for group in made.group_of[0].tolist()] == [1, 12, 6, 1]
    backend = find_backend(NAME)
    assert backend is not None
    options = SlidingTileOptions(head_windows=windows, tile_size=(2, 2, 2))
    assert backend.expected_density(options, LAYOUT, LayerInfo(), StepInfo()) == pytest.approx(20 / 48)
    with pytest.raises(ConfigError, match="head_windows has 4 windows and this layer 2 query heads; give 2 windows"):
        run({"head_windows": windows})


def test_full_steps_are_computed_by_the_dense_backend_and_said(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = random_qkv(LAYOUT)
    state = RequestCache()
    options = {"window": (1, 1, 1), "skip_time_steps": 2}
    with caplog.at_level(logging.INFO, logger="diffusion_runtime.attention"):
        for index in range(3):
            out = run(options, step=StepInfo(index, 3), state=state)
            assert torch.equal(out, attention(q, k, v, layout=LAYOUT)) == (index < 2)
    said = [line for line in caplog.messages if "runs dense" in line]
    assert said == ["sliding_tile_attn runs dense: steps 0-1 (skip_time_steps 2)"]


def test_a_skip_of_every_step_is_warned_of_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    options = {"mask_strategy_file_path": write(tmp_path / "s.json", 4)}
    state = RequestCache()
    for index in range(4):
        run(options, step=StepInfo(index, 4), state=state)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "sliding_tile_attn: skip_time_steps 15 keeps all 4 steps full; set a smaller one"
    ]


def test_no_mode_and_small_grids_are_dense() -> None:
    assert plan({"sta_mode": "none"}).is_dense
    assert plan({"sta_mode": None}).is_dense
    assert plan({"window": (1, 1, 1), "min_tokens": 97}).is_dense
    assert not plan({"window": (1, 1, 1), "min_tokens": 96}).is_dense


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_from_a_command_line() -> None:
    config = AttentionConfig.parse(
        {"default.backend": "sta", "default.extra": {"sta_mode": "sta_INFERENCE", "head_windows": [[1, 3, 3], None]}}
    )
    assert config.default is not None
    options = SlidingTileOptions(**config.default.options)
    assert options.sta_mode == "STA_inference"
    assert options.head_windows == ((1, 3, 3), None)
    parsed = AttentionConfig.parse("backend=sta")
    assert parsed.default is not None
    assert parsed.default.name == NAME
    # On a command line the word none is no text.
    overlay = AttentionConfig.parse("sta_mode=none,window=[1,2,3]").default
    assert overlay is not None
    assert SlidingTileOptions(**overlay.options).sta_mode == "none"


def test_every_mode_is_known_in_either_case() -> None:
    for mode in ("STA_inference", "none"):
        assert SlidingTileOptions(sta_mode=mode.lower()).sta_mode == mode


@table("mode", ["STA_searching", "sta_tuning", "STA_tuning_cfg"])
def test_modes_that_tune_replaces_are_refused_by_name(mode: str) -> None:
    expected = f"(?i)sta_mode={mode} is no mode any more: .*tune --methods sliding_tile_attn --head-ranges"
    for options in ({"sta_mode": mode}, {"search_log_folder": "logs", "sta_mode": mode, "candidates": [[1, 1, 1]]}):
        with pytest.raises(ConfigError, match=expected):
            AttentionConfig.parse({"default": {"backend": NAME, "extra": options}})
    for option in ("candidates", "search_log_folder", "tuned_file_path"):
        with pytest.raises(ConfigError, match=f"{option} is no option any more: windows are chosen by `tune`"):
            AttentionSpec(NAME, {option: "logs"})


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"window": (1, 1)}, r"window: expected"),
    ({"window": (0, 1, 1)}, r"window: expected three whole numbers of 1 or more"),
    ({"window": "1,1,1"}, r"window: expected"),
    ({"window": 3}, r"window: expected"),
    ({"head_windows": []}, r"head_windows: expected one window for each query head, got none"),
    ({"head_windows": [None, [1, 0, 1]]}, r"head_windows\[1\]: expected three whole numbers of 1 or more"),
    ({"tile_size": (6, 8, 0)}, r"tile_size: expected three whole numbers"),
    ({"tile_size": None}, r"tile_size: expected"),
    ({"skip_time_steps": -1}, r"skip_time_steps: expected 0 or more, got -1"),
    ({"min_tokens": -1}, r"min_tokens: expected 0 or more"),
    ({"sta_mode": "STA_inferrence"}, r"sta_mode: unknown value 'STA_inferrence'. Did you mean 'STA_inference'"),
    ({"STA_mode": "STA_inference"}, r"unknown option 'STA_mode'. Did you mean 'sta_mode'"),
]


@table(("options", "message"), BAD_OPTIONS, ids=[str(options) for options, _ in BAD_OPTIONS])
def test_a_bad_option_fails_when_it_is_set(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AttentionSpec(NAME, options)


BAD_TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({}, r"needs to know its windows. Give window=\[3,3,5\].* or mask_strategy_file_path=FILE.json"),
    ({"window": (1, 1, 1), "mask_strategy_file_path": "FILE"}, "give one of them"),
    ({"window": (1, 1, 1), "head_windows": [(1, 1, 1), None]}, "window and head_windows all say .*give one of them"),
]


@table(("options", "message"), BAD_TOGETHER, ids=[str(options) for options, _ in BAD_TOGETHER])
@table("ask", [run, plan])
def test_options_that_do_not_go_together_fail_at_the_first_call(
    options: dict[str, Any], message: str, ask: Any, tmp_path: Path
) -> None:
    path = write(tmp_path / "s.json")
    given = {key: path if value == "FILE" else value for key, value in options.items()}
    # A grid below min_tokens would be full, and hide the mistake until a longer video.
    with pytest.raises(ConfigError, match=message):
        ask(given | {"min_tokens": 10_000})


def test_a_call_without_a_grid_is_refused() -> None:
    q, k, v = random_qkv(LAYOUT)
    options = {"window": (1, 1, 1)}
    with pytest.raises(ConfigError, match="needs to know where tokens sit"):
        attention(q, k, v, backend=NAME, options=options)
    with pytest.raises(ConfigError, match="it serves self-attention"):
        attention(q[:, :5], k, v, backend=NAME, options=options, layout=LAYOUT)
