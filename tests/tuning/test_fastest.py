"""The search for the fastest setting beside brute force, its budget of minutes, and what a combination sets."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffusion_runtime import GenerationRequest, RuntimeConfig
from diffusion_runtime.attention.config import AttentionConfig, AttentionSpec
from diffusion_runtime.core.hardware import Hardware, detect_hardware
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, RequestError
from diffusion_runtime.tuning.axes import AXES, Axis, Choice, Situation, chosen_axes
from diffusion_runtime.tuning.budget import parse_budgets
from diffusion_runtime.tuning.cells import Cell
from diffusion_runtime.tuning.clip_metrics import ClipMetrics, TunedPrompt
from diffusion_runtime.tuning.combination import Combination, Trial, expected, stretched
from diffusion_runtime.tuning.fastest import LESS_LOSS, SAVES_FROM, FastestSearch
from diffusion_runtime.tuning.found import Found
from diffusion_runtime.tuning.journal import Journal
from diffusion_runtime.tuning.time_limit import TimeLimit
from diffusion_runtime.tuning.trials import Trials

PROMPTS = [TunedPrompt(GenerationRequest(text, seed=0, num_inference_steps=12)) for text in ("a", "b", "c", "d")]
# By choice: the share of the time that it takes, and the squared distance that it adds.
WORLD = {
    "one": {"1a": (0.9, 0.001), "1b": (0.7, 0.004), "1c": (0.5, 0.03)},
    "two": {"2a": (0.8, 0.002), "2b": (0.6, 0.02)},
    "three": {"3a": (1.4, 0.0)},
    "four": {"4a": (0.95, 0.0005)},
}


class Silent:
    """A reporter that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str, /) -> None:
        self.lines.append(text)

    def error(self, text: str, trace: str = "", /) -> None:
        raise AssertionError(text + trace)

    @contextlib.contextmanager
    def progress(self, title: str, /) -> Iterator[Silent]:
        del title
        yield self

    def update(self, progress: object, /) -> None:
        del progress


class World:
    """Trials of a machine on which shares of time multiply and losses add up. refused: choices that cannot run;
    failing: those that fail once they run. unseen: what the other prompts add to the loss of each setting. crossed:
    how many times the sum of their losses a combination of several loses."""

    def __init__(
        self, refused: Sequence[str] = (), failing: Sequence[str] = (), unseen: float = 0.0, crossed: float = 1.0
    ) -> None:
        self.refused, self.failing, self.unseen, self.crossed = refused, failing, unseen, crossed
        self.made: list[tuple[str, int]] = []
        self.seconds_per_clip: float | None = 1.0

    def trial(self, combination: Combination, prompts: Sequence[TunedPrompt], done: Callable[[], None]) -> Trial:
        names = [choice.name for _, choice in combination.choices]
        if set(names) & set(self.failing):
            raise RequestError("it cannot be made")
        self.made.append((str(combination), len(prompts)))
        seconds, loss, steps = self.figures(combination)
        if combination.choices and prompts[0] is not PROMPTS[0]:
            loss += self.unseen
        if len(combination.choices) > 1:
            loss *= self.crossed
        for _ in prompts:
            done()
        return Trial({"latent": math.sqrt(loss)}, (), {"text": 0.0, "denoise": seconds, "decode": 0.0}, steps)

    def figures(self, combination: Combination) -> tuple[float, float, int]:
        seconds, loss, steps = 10.0, 0.0, 12
        for axis, choice in combination.choices:
            if axis == "steps":
                steps = choice.request["num_inference_steps"]
                share, added = steps / 12, (1 - steps / 12) ** 2
            else:
                share, added = WORLD[axis][choice.name]
            seconds, loss = seconds * share, loss + added
        return seconds, loss, steps

    def refusal_of(self, combination: Combination, num_steps: int) -> ConfigError | None:
        assert num_steps == 12
        names = [choice.name for _, choice in combination.choices]
        return ConfigError("it cannot run here\nfor a reason") if set(names) & set(self.refused) else None

    def is_measured(self, *_: object) -> bool:
        return True


def axes() -> list[Axis]:
    def lines(names: Sequence[str]) -> Callable[[Situation], list[list[Choice]]]:
        return lambda _: [[Choice(name) for name in names]]

    return [Axis(name, lines(list(choices))) for name, choices in WORLD.items()]


def searched(
    world: World, bound: float, minutes: float = 1.0, budget: str = "", limit: TimeLimit | None = None
) -> tuple[Found, Silent]:
    reporter = Silent()
    search = FastestSearch(
        trials=world,  # type: ignore[arg-type]
        axes=axes(),
        situation=Situation(PROMPTS[0].request, detect_hardware("cpu")),
        budgets=parse_budgets([budget or f"latent<={bound}"]),
        measured=PROMPTS[:2],
        verified=PROMPTS[2:],
        minutes=minutes,
        reporter=reporter,
        limit=TimeLimit() if limit is None else limit,
    )
    return search.found(), reporter


def best(bound: float, world: World) -> float:
    """Seconds of the fastest combination within the bound, by brute force."""
    lines = [[None, *((axis, Choice(name)) for name in choices)] for axis, choices in WORLD.items()]
    every = [Combination(tuple(part for part in parts if part is not None)) for parts in itertools.product(*lines)]
    return min(world.figures(each)[0] for each in every if world.figures(each)[1] <= bound**2 + 1e-12)


def test_a_bound_that_every_setting_meets_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for right, is_empty in ((0.0, True), (0.02, True), (0.5, False)):
        world, trial = World(), World.trial

        def with_accuracy(self: World, *given: Any, right: float = right, trial: Any = trial) -> Trial:
            made = trial(self, *given)
            return dataclasses.replace(made, values={**made.values, "accuracy": right})

        with monkeypatch.context() as patch:
            patch.setattr(World, "trial", with_accuracy)
            found, reporter = searched(world, 0.0, budget="accuracy>=dense-0.02")
        assert bool(found.remarks) == is_empty
        said = [text for text in reporter.lines if "so that any setting is within it" in text]
        assert said == list(found.remarks)


@pytest.mark.parametrize("bound", [0.03, 0.05, 0.075, 0.12, 0.16, 0.3, 1.0])
def test_the_fastest_is_that_of_brute_force(bound: float) -> None:
    world = World()
    found, _ = searched(world, bound)
    assert found.is_met
    # Bisection measures one choice of a line below and above the bound; the search is within a step of the best.
    assert found.verified.total <= 1.2 * best(bound, world)
    assert found.verified.values["latent"] <= bound
    if bound >= 0.3:
        assert found.verified.total == pytest.approx(best(bound, world))
    # As many plain steps as take its time.
    assert found.plain is not None
    assert found.plain.num_steps == max(1, round(found.verified.total / (10 / 12)))
    assert len(world.made) < 40


def test_a_miss_rules_out_what_is_expected_to_lose_nearly_as_much() -> None:
    world = World(crossed=4.0)
    found, _ = searched(world, 0.18)
    combined = [(world.figures(each)[1], is_met) for each, _, is_met in found.tried if len(each.choices) > 1]
    missed = list(itertools.takewhile(lambda each: not each[1], combined))
    assert len(missed) > 1
    for (before, _), (after, _) in itertools.pairwise(missed):
        assert after <= LESS_LOSS * before
    assert found.is_met


def test_what_saves_nothing_or_cannot_run_is_left_out_with_its_reason() -> None:
    world = World(refused=["1c"], failing=["2b"])
    found, reporter = searched(world, 1.0)
    reasons = {each.name: each.reason for each in found.left_out}
    assert reasons["1c"] == "it cannot run here"
    assert reasons["2b"] == "it cannot be made"
    assert reasons["3a"] == "0.71x as fast as given"
    assert str(found.chosen) == "1b + 4a"
    assert all(f"left out: {name}: {reason}" in reporter.lines for name, reason in reasons.items())
    # One clip tells that an axis saves nothing.
    assert [count for name, count in world.made if name == "3a"] == [1]
    assert SAVES_FROM < 1.0


def test_nothing_within_the_bound_keeps_what_was_given() -> None:
    found, _ = searched(World(), 0.001)
    assert (found.is_met, str(found.chosen), found.plain) == (False, "as given", None)
    assert found.verified is found.reference
    # On the other prompts every setting misses: three are verified, none is taken.
    found, _ = searched(World(unseen=0.5), 0.5)
    assert (found.is_met, len(found.missed)) == (False, 3)


def test_the_minutes_end_a_search_and_what_was_found_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("diffusion_runtime.tuning.fastest.time.monotonic", lambda: now[0])
    world = World()
    made = world.trial

    def slow(*given: Any) -> Trial:
        now[0] += 4.0
        return made(*given)

    monkeypatch.setattr(world, "trial", slow)
    found, reporter = searched(world, 1.0, minutes=0.5)
    # 22.5 of 30 s are for the search: the clips as given, four probes and one choice.
    assert found.ended_by in reporter.lines
    assert found.ended_by.startswith("0.5 minutes ended before ")
    assert found.is_met
    # The first line has the time by the clock on the wall.
    assert reporter.lines[0].startswith("a clip as given takes 1.0 s: at most ")
    # Clips so long that verifying takes all of it: nothing is searched.
    now[0], world.seconds_per_clip = 0.0, 10.0
    found, _ = searched(world, 1.0, minutes=0.5)
    assert (found.is_met, found.alone) == (False, [])
    # Everything at once: nothing was measured, nothing is chosen.
    now[0] = 0.0
    found, _ = searched(world, 1.0, minutes=0.01)
    assert (found.is_met, found.alone) == (False, [])


def test_a_clip_under_way_ends_with_the_search_and_a_compiler_that_fails_leaves_its_setting_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, world = [0.0], World()
    monkeypatch.setattr("diffusion_runtime.tuning.fastest.time.monotonic", lambda: now[0])
    limit, made = TimeLimit(lambda: now[0]), world.trial

    def slow(combination: Combination, *rest: Any) -> Trial:
        if str(combination) == "4a":
            raise ZeroDivisionError("ptxas fell over")
        if str(combination) == "2b" and rest[0] == PROMPTS[:2]:
            # A clip of many steps, each with a sign.
            for _ in range(100):
                now[0] += 1.0
                limit.sign()
        return made(combination, *rest)

    world.trial = slow  # type: ignore[method-assign]
    found, _ = searched(world, 1.0, minutes=1.0, limit=limit)
    assert [each.reason for each in found.left_out if each.name == "4a"] == ["ZeroDivisionError: ptxas fell over"]
    # 45 of 60 s are for the search.
    assert now[0] == 46.0
    assert (found.is_met, str(found.chosen), found.ended_by) == (True, "1c", "1 minutes ended before 2b was measured")


def test_a_process_without_a_sign_is_ended_after_the_minutes_alone() -> None:
    now, ended = [0.0], threading.Event()
    limit = TimeLimit(lambda: now[0])
    with limit.ending_what_hangs(10.0, lambda _: ended.set(), interval=0.001, quiet=5.0):
        # Compiling before the end may take as long as it likes.
        now[0] = 14.0
        assert not ended.wait(0.1)
        limit.sign()
        # Steps of 14 s each are slow, and do not hang.
        now[0] = 14.0 + 27.9
        assert not ended.wait(0.1)
        now[0] = 14.0 + 28.1
        assert ended.wait(10.0)


def test_quick_steps_are_missed_soon() -> None:
    now, ended = [0.0], threading.Event()
    limit = TimeLimit(lambda: now[0])
    with limit.ending_what_hangs(1.0, lambda _: ended.set(), interval=0.001, quiet=5.0):
        for each in (1.0, 2.0):
            now[0] = each
            limit.sign()
        now[0] = 6.9
        assert not ended.wait(0.1)
        now[0] = 7.1
        assert ended.wait(10.0)


def test_times_multiply_by_stage_and_losses_add_up() -> None:
    reference = Trial({"latent": 0.0}, (), {"text": 1.0, "denoise": 10.0, "decode": 4.0}, 12)
    parts = [
        (("a", Choice("a")), Trial({"latent": 0.3}, (), {"text": 1.0, "denoise": 5.0, "decode": 4.0}, 12)),
        (("b", Choice("b")), Trial({"latent": 0.4}, (), {"text": 1.0, "denoise": 8.0, "decode": 2.0}, 12)),
    ]
    found = expected(parts, reference)
    assert found.seconds == pytest.approx(1 + 10 * 0.5 * 0.8 + 4 * 0.5)
    assert found.loss == pytest.approx(0.09 + 0.16)
    assert str(found.combination) == "a + b"


def test_a_combination_sets_what_its_choices_say() -> None:
    cells = tuple(
        (Cell("self", range(0, 2), steps), spec)
        for steps, spec in ((range(0, 3), None), (range(3, 12), AttentionSpec("vsa", {"sparsity": 0.5})))
    )
    combination = Combination(
        (
            ("attention", Choice("fp8_attn", backend="fp8_attn")),
            ("sparse", Choice("vsa", cells=cells, num_steps=12)),
            ("steps", Choice("8 steps", request={"num_inference_steps": 8})),
            ("quantization", Choice("fp8", runtime={"quantization": "fp8"})),
        )
    )
    rule = {"role": "cross", "backend": "reference"}
    given = AttentionConfig.parse({"default": "torch_sdpa", "schedule": [rule]})
    attention = combination.attention(given, 8).to_dict()
    # A schedule is stretched over the steps that there are, and what was given stays below it.
    assert attention["schedule"][0]["steps"] == "2-7"
    assert attention["schedule"][1]["backend"] == "reference"
    assert attention["per_role"] == {"self": {"backend": "fp8_attn"}}
    assert combination.request(GenerationRequest("a")).num_inference_steps == 8
    assert combination.runtime(RuntimeConfig()).quantization == "fp8"
    assert [cell.steps for cell, _ in stretched(cells, 12, 4)] == [range(0, 1), range(1, 4)]
    assert [cell.steps for cell, _ in stretched(cells, 12, 1)] == [range(0, 1)]


def test_axes_have_choices_and_are_found_by_name() -> None:
    hopper = Hardware(
        "cuda",
        "NVIDIA H200",
        (9, 0),
        (9, 15),
        "2.11.0",
        {"flash-attn-4": "4.0.0b36", "nvidia-cudnn-frontend": "1.32.0", "triton": "3.6.0"},
    )
    situation = Situation(GenerationRequest("a", num_inference_steps=24), hopper, frozenset({"fa"}))
    lines = {axis.name: [[choice.name for choice in line] for line in axis.lines(situation)] for axis in AXES}
    assert ["fp8_attn"] in lines["attention"]
    assert ["fa"] not in lines["attention"]
    assert lines["steps"] == [["20 steps", "17 steps", "14 steps", "12 steps", "10 steps", "8 steps"]]
    assert lines["quantization"] == [["int8"], ["fp8", "fp8-all"]]
    few = Situation(GenerationRequest("a", num_inference_steps=4), hopper)
    assert {axis.name: axis.lines(few) for axis in AXES}["step-cache"] == []
    assert [axis.name for axis in chosen_axes(["steps", "attention"])] == ["attention", "steps"]
    assert chosen_axes([]) == AXES
    with pytest.raises(ConfigError, match="--over: unknown axis 'step_cache'"):
        chosen_axes(["step_cache"])


def test_a_gpus_first_clip_of_a_setting_counts_for_nothing_and_the_quickest_of_the_next_ones_does() -> None:
    """Stand-ins: a clip takes 9 s where its kernels are compiled, then 0.3, 0.2 and 0.1 s."""
    trials = Trials(RuntimeConfig(), AttentionConfig(), {}, None, ClipMetrics(("latent",), None), Journal(None, {}))
    request, compiled = GenerationRequest("a", seed=0, num_inference_steps=2), [9.0, 0.3, 0.2, 0.1]
    taken: list[float] = []

    def made(pipeline: Any, *_: Any) -> tuple[Any, Any, dict[str, float]]:
        taken.append(compiled[min(len(taken), 3)] if pipeline.device.type == "cuda" else 1.0)
        return None, None, {"text": 0.0, "denoise": taken[-1], "decode": 0.0}

    trials._made = made  # type: ignore[assignment, method-assign]
    for device, seconds, count in (("cuda", 0.1, 4), ("cuda", 0.1, 7), ("cpu", 1.0, 8)):
        pipeline: Any = SimpleNamespace(device=torch.device(device))
        assert trials._quickest(pipeline, Combination(), request)[2]["denoise"] == seconds
        assert len(taken) == count


def test_a_setting_that_an_earlier_run_found_to_hang_is_left_out() -> None:
    journal, prompt = Journal(None, {}), PROMPTS[0]
    trials = Trials(RuntimeConfig(), AttentionConfig(), {}, None, ClipMetrics(("latent",), None), journal)

    def hang(*_: Any) -> Any:
        trials.keep_hang("no answer for 60 s")
        raise KeyboardInterrupt

    trials._row = hang  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trials.trial(Combination(), [prompt], lambda: None)
    with pytest.raises(DiffusionRuntimeError, match="no answer for 60 s"):
        trials.trial(Combination(), [prompt], lambda: None)
