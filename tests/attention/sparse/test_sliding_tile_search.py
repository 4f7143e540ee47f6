"""Searching and tuning of sliding tile attention, call by call."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from sparse_oracle import masked_attention, random_qkv, valid_tokens
from tables import table

from diffusion_runtime.attention import (
    LayerInfo,
    RequestCache,
    StepInfo,
    TokenLayout,
    attention,
    plan_attention,
    register_role,
)
from diffusion_runtime.attention.sparse.sliding_tile_search import (
    SearchLog,
    SearchRecorder,
    SearchSetup,
    read_search_logs,
    tune,
)
from diffusion_runtime.attention.sparse.sliding_tile_strategy import load_strategy
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, OutputError

NAME = "sliding_tile_attn"
TILE = (2, 2, 2)
LAYOUT = TokenLayout((4, 4, 7), num_prefix_tokens=3, valid_lengths=(1, 3))
CANDIDATES = ((1, 1, 1), (1, 3, 3), (3, 1, 3))


def searching(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "sta_mode": "STA_searching",
        "tile_size": TILE,
        "search_log_folder": str(folder),
        "candidates": CANDIDATES,
        **more,
    }


def tuning(folder: Path, mode: str = "STA_tuning", **more: Any) -> dict[str, Any]:
    return {"sta_mode": mode, "tile_size": TILE, "search_log_folder": str(folder), **more}


def search_call(
    folder: Path,
    step: StepInfo,
    layer: LayerInfo,
    state: RequestCache,
    seed: int = 0,
    scale: float | None = None,
    layout: TokenLayout = LAYOUT,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of one call, and its output."""
    q, k, v = random_qkv(layout, batch=2, seed=seed)
    given = searching(folder, **options)
    out = attention(
        q, k, v, backend=NAME, options=given, layout=layout, step=step, layer=layer, state=state, scale=scale
    )
    return q, k, v, out


# --- searching --------------------------------------------------------------------------------------------------------


@table("scale", [None, 0.7])
def test_a_search_logs_how_far_each_window_is_from_full(scale: float | None, tmp_path: Path) -> None:
    q, k, v, out = search_call(tmp_path, StepInfo(), LayerInfo(), RequestCache(), scale=scale)
    dense = attention(q, k, v, layout=LAYOUT, scale=scale)
    for sample in range(2):
        valid = valid_tokens(LAYOUT, sample)
        assert torch.equal(out[sample, valid], dense[sample, valid])
        assert out[sample, ~valid].count_nonzero() == 0
    (log,) = read_search_logs(tmp_path)
    assert log.setup == SearchSetup(CANDIDATES, (4, 4, 7), TILE, 1, 1, 2, "self")
    assert (log.branch, log.num_samples) == ("cond", 2)
    full_plan = plan_attention(q, k, backend=NAME, options={"window": (9, 9, 9), "tile_size": TILE}, layout=LAYOUT)
    full, _ = masked_attention(q, k, v, full_plan.to_dense_mask(), scale)
    for index, window in enumerate(CANDIDATES):
        plan = plan_attention(q, k, backend=NAME, options={"window": window, "tile_size": TILE}, layout=LAYOUT)
        near, _ = masked_attention(q, k, v, plan.to_dense_mask(), scale)
        difference = (near - full)[:, 3:]
        for head in range(2):
            of_head = difference[:, :, head]
            assert float(log.l2[0, 0][index, head]) == pytest.approx(float((of_head**2).mean()), rel=1e-4)
            assert float(log.l1[0, 0][index, head]) == pytest.approx(float(of_head.abs().mean()), rel=1e-4)
    assert float(log.l2[0, 0].min()) > 0


def test_the_full_window_is_no_distance_away(tmp_path: Path) -> None:
    search_call(tmp_path, StepInfo(), LayerInfo(), RequestCache(), candidates=((1, 1, 1), (2, 2, 4)))
    (log,) = read_search_logs(tmp_path)
    assert log.l2[0, 0][1].tolist() == [0, 0]
    assert tune([log], skip_time_steps=0).windows == {(0, 0, 0): (2, 2, 4), (0, 0, 1): (2, 2, 4)}


def test_the_log_is_written_once_at_the_end_of_the_request(tmp_path: Path) -> None:
    state = RequestCache()
    for step, layer in itertools.product(range(3), range(2)):
        assert list(tmp_path.iterdir()) == []
        search_call(tmp_path, StepInfo(step, 3), LayerInfo(layer, 2), state, seed=2 * step + layer)
    (log,) = read_search_logs(tmp_path)
    assert sorted(log.l2) == list(itertools.product(range(3), range(2)))
    assert not torch.equal(log.l2[0, 0], log.l2[2, 1])


def test_a_second_call_of_a_step_is_averaged_into_the_same_file(tmp_path: Path) -> None:
    state = RequestCache()
    for seed in (1, 2):
        search_call(tmp_path, StepInfo(), LayerInfo(), state, seed=seed)
        search_call(tmp_path / str(seed), StepInfo(), LayerInfo(), RequestCache(), seed=seed)
    (both,), (one,), (two,) = (read_search_logs(tmp_path / name) for name in ("", "1", "2"))
    torch.testing.assert_close(both.l2[0, 0], (one.l2[0, 0] + two.l2[0, 0]) / 2)


def test_requests_branches_and_roles_have_logs_of_their_own(tmp_path: Path) -> None:
    register_role("test.sliding_tiles", "self")
    roles = ("self", "test.sliding_tiles")
    for seed in range(2):
        state = RequestCache()
        for branch, role in itertools.product(("cond", "uncond"), roles):
            search_call(tmp_path, StepInfo(branch=branch), LayerInfo(role=role), state, seed=seed)
    logs = read_search_logs(tmp_path)
    found = sorted((log.branch, log.setup.role) for log in logs)
    assert found == sorted(2 * list(itertools.product(("cond", "uncond"), roles)))
    tuned_call(tmp_path, skip_time_steps=0)
    with pytest.raises(ConfigError, match="search logs differ in role"):
        tune(logs)


def test_two_experts_share_the_steps_of_one_log(tmp_path: Path) -> None:
    state = RequestCache()
    for step in range(4):
        search_call(tmp_path, StepInfo(step, 4, expert=int(step >= 2)), LayerInfo(), state, seed=step)
    (log,) = read_search_logs(tmp_path)
    assert sorted(step for step, _ in log.l2) == [0, 1, 2, 3]


def test_grids_of_one_request_have_logs_of_their_own(tmp_path: Path) -> None:
    """With progressive resolution the first steps of a request have a smaller grid."""
    small, state = TokenLayout((4, 2, 4)), RequestCache()
    for step, layout in enumerate((small, small, LAYOUT, LAYOUT)):
        search_call(tmp_path, StepInfo(step, 4), LayerInfo(), state, seed=step, layout=layout)
    logs = {log.setup.grid: log for log in read_search_logs(tmp_path)}
    assert {grid: sorted(step for step, _ in log.l2) for grid, log in logs.items()} == {
        small.grid: [0, 1],
        LAYOUT.grid: [2, 3],
    }
    # A run of several grids is tuned by the logs of each.
    state = RequestCache()
    for step, layout in enumerate((small, small, LAYOUT, LAYOUT)):
        q, k, v = random_qkv(layout, batch=2, seed=step)
        options = tuning(tmp_path, skip_time_steps=0)
        attention(q, k, v, backend=NAME, options=options, layout=layout, step=StepInfo(step, 4), state=state)
        expected = tune([logs[layout.grid]], skip_time_steps=0).windows
        assert load_strategy(str(tmp_path / "mask_strategy.json")).windows == expected


def test_candidates_may_be_left_to_the_grid(tmp_path: Path) -> None:
    search_call(tmp_path, StepInfo(), LayerInfo(), RequestCache(), candidates=None)
    (log,) = read_search_logs(tmp_path)
    assert log.setup.candidates == ((1, 2, 4), (2, 1, 4), (2, 2, 1), (2, 1, 1), (1, 1, 2))


def test_a_grid_of_one_tile_has_nothing_to_search(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every window holds the whole grid"):
        search_call(tmp_path, StepInfo(), LayerInfo(), RequestCache(), candidates=None, tile_size=(6, 8, 8))


@table("name", ["file/logs", "/proc"])
def test_a_folder_that_cannot_be_written_fails_at_the_first_call(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="search_log_folder: cannot write to"):
        search_call(tmp_path / name, StepInfo(0, 50), LayerInfo(), RequestCache())


def test_numbers_that_overflow_are_an_error(tmp_path: Path) -> None:
    setup = SearchSetup(CANDIDATES, (4, 4, 7), TILE, 1, 1, 2)
    recorder = SearchRecorder(setup, "cond", 1, tmp_path)
    recorder.add(LayerInfo(), StepInfo(), torch.full((2, 3, 2), float("inf")))
    with pytest.raises(DiffusionRuntimeError, match="step 0, layer 0 is not finite"):
        recorder.write()
    assert list(tmp_path.iterdir()) == []


# --- tuning -----------------------------------------------------------------------------------------------------------

SETUP = SearchSetup(CANDIDATES, (4, 4, 7), TILE, num_steps=2, num_layers=1, num_heads=2)
FULL = (2, 2, 4)


def log_of(losses: dict[int, list[list[float]]], branch: str = "cond", num_samples: int = 1) -> SearchLog:
    """losses: by step, L2 for each candidate and head; L1 says the opposite, for nothing may read it."""
    l2 = {(step, 0): torch.tensor(values, dtype=torch.float64) for step, values in losses.items()}
    return SearchLog(SETUP, branch, num_samples, l2, {key: -value for key, value in l2.items()}, f"log of {branch}")


def test_the_closest_window_of_each_head_wins() -> None:
    strategy = tune([log_of({0: [[1, 9], [2, 8], [3, 7]], 1: [[5, 1], [4, 2], [6, 3]]})], skip_time_steps=0)
    assert strategy.windows == {
        (0, 0, 0): CANDIDATES[0],
        (0, 0, 1): CANDIDATES[2],
        (1, 0, 0): CANDIDATES[1],
        (1, 0, 1): CANDIDATES[0],
    }
    assert (strategy.num_steps, strategy.num_layers, strategy.num_heads) == (2, 1, 2)


def test_losses_are_averaged_over_prompts() -> None:
    first = log_of({1: [[1, 1], [4, 2], [9, 9]]})
    second = log_of({1: [[6, 1], [2, 2], [9, 9]]})
    assert tune([first], skip_time_steps=0).windows[1, 0, 0] == CANDIDATES[0]
    assert tune([first, second], skip_time_steps=0).windows[1, 0, 0] == CANDIDATES[1]
    # Five prompts in a batch count five times.
    heavy = dataclasses.replace(first, num_samples=5)
    assert tune([heavy, second], skip_time_steps=0).windows[1, 0, 0] == CANDIDATES[0]


def test_the_first_of_equals_wins() -> None:
    strategy = tune([log_of({1: [[3, 3], [1, 3], [1, 3]]})], skip_time_steps=0)
    assert [strategy.windows[1, 0, head] for head in range(2)] == [CANDIDATES[1], CANDIDATES[0]]


def test_first_steps_and_what_was_not_measured_are_full() -> None:
    losses = [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    skipped = tune([log_of({0: losses, 1: losses})], skip_time_steps=1)
    assert [skipped.windows[step, 0, 0] for step in range(2)] == [FULL, CANDIDATES[0]]
    unmeasured = tune([log_of({0: losses})], skip_time_steps=0)
    assert [unmeasured.windows[step, 0, 0] for step in range(2)] == [CANDIDATES[0], FULL]
    assert set(tune([log_of({0: losses, 1: losses})]).windows.values()) == {FULL}


def test_branches_are_merged_when_asked() -> None:
    cond = log_of({1: [[1, 1], [4, 4], [9, 9]]})
    uncond = log_of({1: [[9, 9], [4, 4], [1, 1]]}, "uncond")
    both = log_of({1: [[9, 9], [1, 1], [9, 9]]}, "both")
    assert tune([cond, uncond], skip_time_steps=0).windows[1, 0, 0] == CANDIDATES[0]
    assert tune([cond, uncond], skip_time_steps=0, merge_branches=True).windows[1, 0, 0] == CANDIDATES[1]
    for merge in (False, True):
        assert tune([both], skip_time_steps=0, merge_branches=merge).windows[1, 0, 0] == CANDIDATES[1]
    with pytest.raises(ConfigError, match="the logs are of uncond alone"):
        tune([uncond])
    for alone in (cond, uncond):
        with pytest.raises(ConfigError, match=f"the logs are of {alone.branch} alone"):
            tune([alone], merge_branches=True)


@table(
    "change",
    [{"num_steps": 3}, {"num_layers": 2}, {"num_heads": 4}, {"grid": (4, 4, 8)}, {"candidates": CANDIDATES[:2]}],
)
def test_logs_of_different_searches_do_not_mix(change: dict[str, Any]) -> None:
    log = log_of({})
    other = dataclasses.replace(log, setup=dataclasses.replace(SETUP, **change), source="the other log")
    with pytest.raises(ConfigError, match=f"search logs differ in {next(iter(change))}: log of cond .* the other log"):
        tune([log, other])
    with pytest.raises(ConfigError, match="got none"):
        tune([])


def tuned_call(folder: Path, layout: TokenLayout = LAYOUT, mode: str = "STA_tuning", **more: Any) -> torch.Tensor:
    q, k, v = random_qkv(layout, batch=2)
    return attention(q, k, v, backend=NAME, options=tuning(folder, mode, **more), layout=layout)


def test_tuning_refuses_logs_of_another_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no sta_search-"):
        tuned_call(tmp_path)
    search_call(tmp_path, StepInfo(0, 1), LayerInfo(), RequestCache())
    with pytest.raises(ConfigError, match=r"the logs are of a grid \(4, 4, 7\) in tiles \(2, 2, 2\), this run has"):
        tuned_call(tmp_path, TokenLayout((4, 4, 8)))
    with pytest.raises(ConfigError, match="in tiles"):
        tuned_call(tmp_path, tile_size=(1, 2, 2))
    with pytest.raises(ConfigError, match="STA_tuning_cfg merges both guidance branches"):
        tuned_call(tmp_path, mode="STA_tuning_cfg")
    q, k, v = random_qkv(LAYOUT, batch=2)
    with pytest.raises(ConfigError, match="the logs are of 1 steps, 1 layers and 2 heads, this run has 7 steps"):
        attention(q, k, v, backend=NAME, options=tuning(tmp_path), layout=LAYOUT, step=StepInfo(0, 7))


NOT_NUMBERS = {name: [[1, float("nan")]] * 3 for name in ("l2", "l1")}
BROKEN_LOGS = {
    "cut off": lambda text: text[:-20],
    "another format": lambda text: text.replace("search/1", "search/9"),
    "a strategy": lambda _: '{"0_0_0": [1, 1, 1]}',
    "a list": lambda _: "[]",
    "a head missing": lambda text: text.replace('"num_heads": 2', '"num_heads": 3'),
    "not a number": lambda text: json.dumps(json.loads(text) | {"losses": {"0_0": NOT_NUMBERS}}),
    "a loss missing": lambda text: json.dumps(json.loads(text) | {"losses": {"0_0": {"l2": [[1, 1]] * 3}}}),
    "a bad key": lambda text: text.replace('"0_0"', '"0"'),
}


@table("name", BROKEN_LOGS)
def test_a_broken_log_is_named(name: str, tmp_path: Path) -> None:
    search_call(tmp_path, StepInfo(), LayerInfo(), RequestCache())
    assert tuned_call(tmp_path).isfinite().all()
    (path,) = tmp_path.glob("sta_search-*.json")
    path.write_text(BROKEN_LOGS[name](path.read_text()))
    with pytest.raises(ConfigError, match=r"is not a search log that can be read|is not valid JSON") as caught:
        tuned_call(tmp_path)
    assert str(path) in str(caught.value)


def test_the_tuned_file_goes_where_it_is_asked_to(tmp_path: Path) -> None:
    search_call(tmp_path, StepInfo(), LayerInfo(), RequestCache())
    target = tmp_path / "elsewhere" / "best.json"
    tuned_call(tmp_path, tuned_file_path=str(target), skip_time_steps=0)
    assert load_strategy(str(target)).num_heads == 2
    assert not (tmp_path / "mask_strategy.json").exists()


def test_what_a_mode_writes_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="diffusion_runtime.attention"):
        search_call(tmp_path, StepInfo(), LayerInfo(), RequestCache())
        tuned_call(tmp_path)
    (log,) = tmp_path.glob("sta_search-*.json")
    assert f"STA_searching: wrote {log}" in caplog.messages
    assert any(line.startswith(f"STA_tuning: wrote {tmp_path / 'mask_strategy.json'}") for line in caplog.messages)
