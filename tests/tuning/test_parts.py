"""Parts of a tuning: the knapsack beside brute force, budgets, the rules of cells, ladders, the search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from tables import table

from diffusion_runtime.attention.config import AttentionConfig, AttentionSpec
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.tuning.budget import Budget, all_met, least_slack, parse_budgets
from diffusion_runtime.tuning.cells import even_ranges, make_cells, schedule_rules
from diffusion_runtime.tuning.knapsack import Option, pareto_frontier
from diffusion_runtime.tuning.ladders import METHODS, density_of, ladder, method_names
from diffusion_runtime.tuning.measurement import Figures
from diffusion_runtime.tuning.search import Outcome, Point, best_of, search, thinned


def test_the_frontier_is_that_of_brute_force() -> None:
    draw = random.Random(1)
    for _ in range(40):
        # Tenths and hundredths: whole units, so that costs are exact.
        cells = [
            [Option(1.0, 0.0)]
            + [Option(draw.randrange(1, 10) / 10, draw.randrange(1, 100) / 100) for _ in range(draw.randrange(1, 4))]
            for _ in range(draw.randrange(1, 6))
        ]
        found = [(round(each.cost, 6), round(each.loss, 6)) for each in pareto_frontier(cells)]
        every = {
            (round(sum(each.cost for each in picked), 6), round(sum(each.loss for each in picked), 6))
            for picked in itertools.product(*cells)
        }
        best = {
            mine for mine in every if not any(its != mine and its[0] <= mine[0] and its[1] <= mine[1] for its in every)
        }
        assert found == sorted(best, reverse=True)
        for each in pareto_frontier(cells):
            assert sum(cells[index][pick].cost for index, pick in enumerate(each.picks)) == pytest.approx(each.cost)


@table(
    ("text", "expected"),
    [
        ("accuracy>=dense-0.02", Budget("accuracy", -0.02, True)),
        ("Accuracy >= dense", Budget("accuracy", 0.0, True)),
        ("clip>=dense - 1", Budget("clip", -1.0, True)),
        ("psnr>=30", Budget("psnr", 30.0)),
        ("latent<=1e-1", Budget("latent", 0.1)),
    ],
)
def test_budgets_are_parsed(text: str, expected: Budget) -> None:
    assert Budget.parse(text) == expected
    assert Budget.parse(str(expected)) == expected


@table(
    ("texts", "message"),
    [
        ((), "expected what quality may cost"),
        (("psnr",), "expected METRIC>=VALUE"),
        (("psnr>30",), "expected METRIC>=VALUE"),
        (("pnsr>=30",), "Did you mean 'psnr'"),
        (("psnr<=30",), "write psnr>=VALUE"),
        (("latent>=0.1",), "write latent<=VALUE"),
        (("psnr>=dense-1",), "give a number"),
        (("psnr>=3.0.1",), "expected a number"),
        (("psnr>=30", "psnr>=20"), "psnr is given twice"),
    ],
)
def test_other_budgets_are_refused(texts: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError, match="--budget") as error:
        parse_budgets(texts)
    assert message in str(error.value)


def test_a_budget_is_met_on_its_bound() -> None:
    dense = {"accuracy": 15 / 16, "latent": 0.0}
    budgets = parse_budgets(["accuracy>=dense-0.0625", "latent<=0.1"])
    assert all_met(budgets, {"accuracy": 14 / 16, "latent": 0.1}, dense)
    assert not all_met(budgets, {"accuracy": 13 / 16, "latent": 0.1}, dense)
    assert not all_met(budgets, {"accuracy": 1.0, "latent": 0.11}, dense)
    assert budgets[1].slack({"latent": 0.04}, dense) == pytest.approx(0.06)
    # Of several, the one that is missed by most of its bound: half of 0.1, and 0.125 of 0.875.
    assert least_slack(budgets, {"accuracy": 12 / 16, "latent": 0.15}, dense) == pytest.approx(-0.5)
    assert least_slack(budgets, {"accuracy": 12 / 16, "latent": 0.1}, dense) == pytest.approx(-0.125 / 0.875)


def test_rules_hold_exactly_where_their_cells_are() -> None:
    assert [list(each) for each in even_ranges(5, 3)] == [[0], [1, 2], [3, 4]]
    assert even_ranges(2, 4) == [range(1), range(1, 2)]
    cells = make_cells({"self": 5}, 7, 3, 4)
    specs = [
        None,
        AttentionSpec("video_sparse_attn", {"sparsity": 0.5}),
        AttentionSpec("sliding_tile_attn", {"window": [3, 3, 3]}),
    ]
    draw = random.Random(0)
    chosen = [(cell, draw.choice(specs)) for cell in cells]
    rules = schedule_rules(chosen)
    assert len(rules) < sum(spec is not None for _, spec in chosen)
    config = AttentionConfig(schedule=tuple(rules))  # type: ignore[arg-type]
    for layer, step in itertools.product(range(5), range(7)):
        [expected] = [spec for cell, spec in chosen if layer in cell.layers and step in cell.steps]
        held = [
            rule.spec
            for rule in config.schedule
            if rule.window.holds(LayerInfo(layer, 5, "self"), StepInfo(step, 7)) and rule.applies_to("self")
        ]
        assert held == ([] if expected is None else [expected])


def test_cells_of_heads_are_windows_by_head() -> None:
    num_heads, windows = 5, ((1, 1, 3), (3, 3, 3))
    cells = make_cells({"self": 2}, 3, 2, 3, num_heads, 3)
    assert [cell.weight for cell in cells[:3]] == [1 / 5, 2 / 5, 2 / 5]
    specs = [None, *(AttentionSpec("sliding_tile_attn", {"window": window}) for window in windows)]
    draw = random.Random(3)
    chosen = [(cell, draw.choice(specs)) for cell in cells]
    config = AttentionConfig(schedule=tuple(schedule_rules(chosen)))  # type: ignore[arg-type]
    for layer, step in itertools.product(range(2), range(3)):
        held = [
            rule.spec for rule in config.schedule if rule.window.holds(LayerInfo(layer, 2, "self"), StepInfo(step, 3))
        ]
        here = [(cell, spec) for cell, spec in chosen if layer in cell.layers and step in cell.steps]
        expected = [
            next(None if spec is None else spec.options["window"] for cell, spec in here if head in (cell.heads or ()))
            for head in range(num_heads)
        ]
        if not any(expected):
            assert held == []
            continue
        [spec] = held
        found = spec.options.get("head_windows") or (spec.options["window"],) * num_heads
        assert list(found) == expected
    # One cell measured by itself leaves the other heads dense.
    [rule] = schedule_rules([(cells[0], specs[1])])
    assert rule["extra"]["head_windows"] == ((1, 1, 3), None, None, None, None)
    with pytest.raises(ConfigError, match="--head-ranges: video_sparse_attn chooses what each head keeps by itself"):
        ladder("vsa", (8, 8, 8), is_by_head=True)
    shapes = {spec.options["window"] for spec in ladder("sta", (30, 48, 80), is_by_head=True)}
    assert shapes >= {(5, 3, 3), (3, 3, 5), (1, 6, 10), (5, 6, 1), (5, 1, 10)}


def test_a_ladder_goes_from_dense_to_sparse() -> None:
    for grid, method in itertools.product(((8, 8, 8), (21, 30, 52), (8, 16, 16)), METHODS):
        layout = TokenLayout(grid=grid)
        found = [density_of(spec, layout, LayerInfo(0, 6, "self"), 8) for spec in ladder(method, grid, 4)]
        assert len(found) == 4
        assert all(share is not None and 0.05 <= share <= 0.85 for share in found), (method, grid, found)
        assert found == sorted(found, reverse=True)  # type: ignore[type-var]
        # A run of few steps is not all dense first steps.
        assert density_of(ladder(method, grid, 4)[0], layout, LayerInfo(0, 6, "self"), 1) != 1.0
    assert method_names(["vsa", "video_sparse_attn", "STA"]) == ("video_sparse_attn", "sliding_tile_attn")
    for name in ("sparse_video_gen_2_attn", "fa"):
        with pytest.raises(ConfigError, match="no ladder of densities"):
            method_names([name])


def line(count: int) -> list[Point]:
    return [Point([], 1 - index / count) for index in range(count)]


def figures(quality: Callable[[float], float]) -> Callable[[Point], Figures]:
    return lambda point: Figures({"psnr": quality(point.kept)}, (), 1.0, 2)


@table(
    ("bound", "lost", "kept", "is_met", "stepped_back"),
    [
        # Quality is 100 x kept on the measured prompts; `lost` is what it is below that on the others.
        (55.0, 0.0, 0.6, True, 0),
        (55.0, 15.0, 0.7, True, 1),
        (55.0, 30.0, 0.9, True, 3),
        # Only dense is within: the densest sparse point, with its figures.
        (55.0, 60.0, 0.9, False, 4),
        (95.0, 0.0, 0.9, False, 0),
        (5.0, 0.0, 0.1, True, 0),
    ],
)
def test_the_search_bisects_and_steps_back(
    bound: float, lost: float, kept: float, is_met: bool, stepped_back: int
) -> None:
    measured: list[float] = []

    def measure(point: Point) -> Figures:
        measured.append(point.kept)
        return figures(lambda share: 100 * share)(point)

    def within(found: Figures) -> bool:
        return found.values["psnr"] >= bound

    def slack(found: Figures) -> float:
        return found.values["psnr"] - bound

    outcome = search(line(10), measure, within, figures(lambda share: 100 * share - lost), within, slack)
    assert outcome.point.kept == pytest.approx(kept)
    assert (outcome.is_met, outcome.stepped_back) == (is_met, stepped_back)
    assert outcome.verified is not None
    assert outcome.verified.values["psnr"] == pytest.approx(100 * kept - lost)
    assert len(measured) <= 4


def test_where_none_is_within_the_nearest_is_found() -> None:
    """Quality need not fall from point to point: a sparser one may be nearer on the prompts for verification."""

    def slack(found: Figures) -> float:
        return found.values["psnr"] - 55

    verify = figures(lambda share: 50.0 if share == pytest.approx(0.8) else 40.0)
    outcome = search(
        line(10), figures(lambda share: 100 * share), lambda found: slack(found) >= 0, verify, lambda _: False, slack
    )
    assert outcome.point.kept == pytest.approx(0.8)
    assert (outcome.is_met, outcome.stepped_back) == (False, 4)
    assert outcome.verified is not None
    assert outcome.verified.values["psnr"] == 50.0


@table(
    ("tuned", "uniform", "expected"),
    [
        # kept, is_met, PSNR of either.
        ((0.6, True, 30.0), (0.7, True, 35.0), "tuned"),
        ((0.7, True, 35.0), (0.6, True, 30.0), "uniform vsa"),
        ((0.9, False, 29.0), (0.7, True, 30.0), "uniform vsa"),
        ((0.7, True, 30.0), (0.7, True, 30.0), "tuned"),
        ((0.9, False, 20.0), (0.7, False, 25.0), "uniform vsa"),
        ((0.9, False, 20.0), (0.7, False, None), "tuned"),
    ],
)
def test_the_best_setting_is_the_sparsest_within_the_budget(
    tuned: tuple[float, bool, float], uniform: tuple[float, bool, float | None], expected: str
) -> None:
    outcomes = {
        name: Outcome(Point([], kept), None, None if psnr is None else Figures({"psnr": psnr}, (), 1.0, 2), is_met)
        for name, (kept, is_met, psnr) in (("tuned", tuned), ("uniform vsa", uniform))
    }
    assert best_of(outcomes, lambda found: found.values["psnr"]) == expected


def test_a_long_line_is_thinned_evenly() -> None:
    points = thinned(line(200), 16)
    assert len(points) == 16
    assert (points[0].kept, points[-1].kept) == (1.0, line(200)[-1].kept)
    assert max(one.kept - other.kept for one, other in itertools.pairwise(points)) < 0.08
    assert thinned(points, 16) == points
