"""Search for the fastest setting within a bound on quality, over every axis of AXES together.

1. The strongest choice of each line makes one clip: lines that save nothing here are left out.
2. Of each other line the strongest choice within the bound is found by bisection. Sparse methods that save time get
   schedules by layer and step.
3. Combinations are tried in the order of their expected time; one that misses the bound rules out those that are
   expected to lose more.
4. The fastest within the bound is verified on other prompts, beside as many plain steps as take its time.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from diffusion_runtime.attention.self_test import device_answers
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.explanation.estimate import duration_text
from diffusion_runtime.session.reporter import Reporter
from diffusion_runtime.startup.importing import raised_line
from diffusion_runtime.tuning.axes import Axis, Choice, Situation, plain_steps
from diffusion_runtime.tuning.budget import Budget, all_met, empty_bounds
from diffusion_runtime.tuning.clip_metrics import TunedPrompt
from diffusion_runtime.tuning.clip_progress import counted_clips
from diffusion_runtime.tuning.combination import Combination, Expectation, Trial, expected
from diffusion_runtime.tuning.found import Found, LeftOut
from diffusion_runtime.tuning.measurement import Measurement
from diffusion_runtime.tuning.plan import Plan
from diffusion_runtime.tuning.search import thinned
from diffusion_runtime.tuning.sensitivity import cells_to_measure, frontier, sensitivities
from diffusion_runtime.tuning.time_limit import TimeIsOverError, TimeLimit
from diffusion_runtime.tuning.trials import Trials

# A choice that takes more of the time as given than this saves nothing that a clock can tell.
SAVES_FROM = 0.97
# Schedules by layer and step that are measured, of the frontier.
SPARSE_POINTS = 5
# After a combination that missed, the next one is expected to lose at most this share of its loss.
LESS_LOSS = 0.7
MAX_COMBINATIONS = 10
MAX_VERIFIED = 3
# Of the minutes, kept for verification.
_SHARE_OF_VERIFICATION = 0.25


@dataclass
class FastestSearch:
    """minutes: the most that the search takes, verification included, from its begin. sparse_plan: None where sparse
    methods are left out. limit: of the trials; ends a clip that is not done at the deadline of the search."""

    trials: Trials
    axes: Sequence[Axis]
    situation: Situation
    budgets: Sequence[Budget]
    measured: Sequence[TunedPrompt]
    verified: Sequence[TunedPrompt]
    minutes: float
    reporter: Reporter
    sparse_plan: Plan | None = None
    limit: TimeLimit = field(default_factory=TimeLimit)
    left_out: list[LeftOut] = field(default_factory=list)
    ended_by: str = ""

    def found(self) -> Found:
        end = time.monotonic() + 60 * self.minutes
        given = Combination()
        if not self.trials.is_measured(given, self.measured):
            # The first clip of a process also imports, allocates and compiles.
            self.trials.warm_up(self.measured[0])
        self.reference = self._trial(given, self.measured)
        remarks = empty_bounds(self.budgets, self.reference.values)
        for remark in remarks:
            self.reporter.say(remark)
        # Verified are the setting as given, what is found, and plain steps.
        verification = 3 * len(self.verified) * self._seconds_per_clip
        self.deadline = end - max(verification, 60 * self.minutes * _SHARE_OF_VERIFICATION)
        self._say_times()
        every = [(axis, line) for axis in self.axes for line in axis.lines(self.situation)]
        saving = [(axis, runs) for axis, line in every if (runs := self._saving(axis, line))]
        saving = [*self._schedules(saving), *((axis, line) for axis, line in saving if not axis.by_cell)]
        alone = [each for axis, line in saving for each in self._alone(axis, line)]
        tried = self._combined([each for each in alone if self._is_met(each[2], self.reference)])
        tried += [
            (Combination(((axis, choice),)), trial, self._is_met(trial, self.reference))
            for axis, choice, trial in alone
        ]
        reference = self._trial(given, self.verified)
        chosen, verified, missed = self._verified(tried, reference)
        is_met = chosen is not None
        plain = None if verified is None else self._plain(verified, reference)
        return Found(
            self.reference,
            reference,
            chosen or given,
            verified or reference,
            is_met,
            alone,
            tried,
            missed,
            self.left_out,
            plain,
            plain is not None and self._is_met(plain, reference),
            self.ended_by,
            remarks,
        )

    def counts(self) -> dict[str, int]:
        """Return the number of choices by axis."""
        found = {axis.name: sum(map(len, axis.lines(self.situation))) for axis in self.axes}
        return {name: count for name, count in found.items() if count}

    @property
    def num_clips(self) -> int:
        """The most clips that a search makes without schedules by layer and step."""
        lines = [line for axis in self.axes for line in axis.lines(self.situation) if line]
        probes = sum(math.ceil(math.log2(len(line) + 1)) for line in lines)
        return (probes + MAX_COMBINATIONS + 1) * len(self.measured) + (MAX_VERIFIED + 2) * len(self.verified)

    @property
    def num_clips_of_schedules(self) -> int:
        """The most clips of the sensitivity of cells, each half a clip on average, and of schedules."""
        if self.sparse_plan is None:
            return 0
        cells = len(cells_to_measure(self.sparse_plan, list(self.sparse_plan.ladders)))
        return math.ceil((cells / 2 + math.log2(SPARSE_POINTS + 1)) * len(self.measured))

    @property
    def _seconds_per_clip(self) -> float:
        return self.trials.seconds_per_clip or self.reference.total

    def _say_times(self) -> None:
        """Say what the search takes at most, now that one clip's time is known."""
        each = self._seconds_per_clip
        seconds = each * self.num_clips
        schedules = ""
        if self.num_clips_of_schedules:
            more = duration_text(each * self.num_clips_of_schedules)
            schedules = f", and {more} for schedules by layer and step if a sparse method saves time"
        ends = f"; the search ends after {self.minutes:g} min with the best so far"
        self.reporter.say(f"a clip as given takes {each:.1f} s: at most {duration_text(seconds)}{schedules}{ends}")

    def _saving(self, axis: Axis, line: Sequence[Choice]) -> list[Choice]:
        """Return the choices of a line that run; none where the strongest saves no time, by one clip."""
        runnable = []
        if self._is_late(f"{axis.name}: {line[-1].name}" if line else axis.name):
            return []
        for choice in line:
            error = self.trials.refusal_of(
                Combination(((axis.name, choice),)), self.situation.request.num_inference_steps or 1
            )
            if error is None:
                runnable.append(choice)
            else:
                self._leave_out(choice.name, _first_line(error))
        if not runnable or self._is_late(f"{axis.name}: {runnable[-1].name}"):
            return []
        trial = self._tried(axis.name, runnable[-1], self.measured[:1])
        if trial is None:
            return []
        if trial.total > SAVES_FROM * self.reference.total:
            self._leave_out(runnable[-1].name, f"{self.reference.total / trial.total:.2f}x as fast as given")
            return []
        return runnable

    def _alone(self, axis: Axis, line: Sequence[Choice]) -> list[tuple[str, Choice, Trial]]:
        """Return the choices of a line that were measured: by bisection for the strongest within the bound."""
        found: list[tuple[str, Choice, Trial]] = []
        low, high = 0, len(line)
        while low < high:
            # The strongest first, as it may be within the bound.
            middle = high - 1 if not found else (low + high) // 2
            choice = line[middle]
            if self._is_late(f"{axis.name}: {choice.name}"):
                return found
            trial = self._tried(axis.name, choice)
            if trial is not None and trial.total <= SAVES_FROM * self.reference.total:
                found.append((axis.name, choice, trial))
            if trial is not None and self._is_met(trial, self.reference):
                low = middle + 1
            else:
                high = middle
        return found

    def _schedules(self, saving: Sequence[tuple[Axis, list[Choice]]]) -> list[tuple[Axis, list[Choice]]]:
        """Return a line of schedules by layer and step of the sparse methods that save time, from dense to sparse."""
        plan = self.sparse_plan
        mine = [(axis, line) for axis, line in saving if axis.by_cell]
        if plan is None or not mine or self._is_late("schedules by layer and step"):
            return []
        own = [choice for _, line in mine for choice in line]
        methods = [method for method, choice in self.situation.sparse.items() if choice in own]
        todo = cells_to_measure(plan, methods)
        pipeline = self.trials.pipeline(Combination())
        measurement = Measurement(pipeline, self.trials.dense, ("latent",), self.trials.journal, sign=self.limit.sign)
        title = f"sensitivity of {len(plan.cells)} cells"
        try:
            with (
                self.limit.until(self.deadline),
                counted_clips(self.reporter, title, len(todo) * len(self.measured)) as done,
            ):
                measured = sensitivities(todo, self.measured, measurement.distance, done)
        except TimeIsOverError:
            self._is_late(f"the {title} was measured")
            return []
        line = frontier(plan.cells, measured)[1:]
        kept = {id(point) for point in thinned([point for _, point in line], SPARSE_POINTS)}
        name, num_steps = ", ".join(methods), plan.explanation.num_steps
        choices = [
            Choice(f"{name} {point.kept:.2f} kept", cells=cells, num_steps=num_steps)
            for cells, point in line
            if id(point) in kept
        ]
        return [(mine[0][0], choices)]

    def _combined(self, met: Sequence[tuple[str, Choice, Trial]]) -> list[tuple[Combination, Trial, bool]]:
        """Try combinations of choices that are within the bound alone, the fastest first."""
        tried: list[tuple[Combination, Trial, bool]] = []
        lost, kept = math.inf, 0.0
        candidates = self._expectations(met)
        while len(tried) < MAX_COMBINATIONS:
            # Between what was within the bound and what missed it, in the middle of both; the fastest of those.
            bound = lost * LESS_LOSS if kept == 0.0 else math.sqrt(kept * lost)
            fastest = min((trial.total for _, trial, is_met in tried if is_met), default=math.inf)
            left = [each for each in candidates if each.loss <= bound and each.seconds < fastest * SAVES_FROM]
            left = [each for each in left if each.combination not in [known for known, _, _ in tried]]
            if not left or self._is_late("combinations"):
                return tried
            best = min(left, key=lambda each: each.seconds)
            trial = self._tried_combination(best.combination, self.measured)
            if trial is None:
                candidates = [each for each in candidates if each.combination != best.combination]
                continue
            is_met = self._is_met(trial, self.reference)
            tried.append((best.combination, trial, is_met))
            if is_met:
                kept = max(kept, best.loss, 1e-12)
                if lost == math.inf:
                    return tried
            else:
                lost = min(lost, best.loss)
        return tried

    def _expectations(self, met: Sequence[tuple[str, Choice, Trial]]) -> list[Expectation]:
        """Every combination of two choices or more, of different axes."""
        by_axis = [[None, *((choice, trial) for name, choice, trial in met if name == axis.name)] for axis in self.axes]
        names = [axis.name for axis in self.axes]
        found = []
        for picks in itertools.product(*by_axis):
            parts = [((name, pick[0]), pick[1]) for name, pick in zip(names, picks, strict=True) if pick is not None]
            if len(parts) > 1:
                found.append(expected(parts, self.reference))
        return found

    def _verified(
        self, tried: Sequence[tuple[Combination, Trial, bool]], reference: Trial
    ) -> tuple[Combination | None, Trial | None, list[tuple[Combination, Trial]]]:
        """The fastest that is within the bound on the other prompts too; those that missed there."""
        missed: list[tuple[Combination, Trial]] = []
        within = sorted((each for each in tried if each[2]), key=lambda each: each[1].total)
        for combination, _, _ in within[:MAX_VERIFIED]:
            trial = self._tried_combination(combination, self.verified, is_limited=False)
            if trial is not None and self._is_met(trial, reference) and self._is_faster(trial, reference):
                return combination, trial, missed
            if trial is not None:
                missed.append((combination, trial))
        return None, None, missed

    def _plain(self, verified: Trial, reference: Trial) -> Trial | None:
        """Return the figures of as many plain steps as take the time of the setting; None where it saves none."""
        others = reference.total - reference.seconds["denoise"]
        per_step = reference.seconds["denoise"] / reference.num_steps
        count = max(1, round((verified.total - others) / per_step)) if per_step > 0 else reference.num_steps
        if count >= reference.num_steps:
            return None
        return self._tried_combination(Combination((("steps", plain_steps(count)),)), self.verified, is_limited=False)

    def _tried(self, axis: str, choice: Choice, prompts: Sequence[TunedPrompt] | None = None) -> Trial | None:
        return self._tried_combination(Combination(((axis, choice),)), prompts or self.measured)

    def _tried_combination(
        self, combination: Combination, prompts: Sequence[TunedPrompt], *, is_limited: bool = True
    ) -> Trial | None:
        """None, and why, where a combination fails that seemed to run, or is not done at the deadline of the search.
        is_limited: False for verification, which has its own time."""
        try:
            with self.limit.until(self.deadline if is_limited else math.inf):
                return self._trial(combination, prompts)
        except TimeIsOverError:
            self._is_late(f"{combination} was measured")
        except DiffusionRuntimeError as error:
            self._leave_out(str(combination), _first_line(error))
        except Exception as error:  # any exception: a compiler of kernels may raise anything
            if not device_answers(self.situation.device):
                raise
            self._leave_out(str(combination), raised_line(error))
        return None

    def _trial(self, combination: Combination, prompts: Sequence[TunedPrompt]) -> Trial:
        with counted_clips(self.reporter, str(combination), len(prompts)) as done:
            return self.trials.trial(combination, prompts, done)

    def _is_met(self, trial: Trial, reference: Trial) -> bool:
        return all_met(self.budgets, trial.values, reference.values)

    def _is_faster(self, trial: Trial, reference: Trial) -> bool:
        return trial.total < reference.total

    def _is_late(self, what: str) -> bool:
        if time.monotonic() < self.deadline:
            return False
        if not self.ended_by:
            self.ended_by = f"{self.minutes:g} minutes ended before {what}"
            self.reporter.say(self.ended_by)
        return True

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out.append(LeftOut(name, reason))
        self.reporter.say(f"left out: {name}: {reason}")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
