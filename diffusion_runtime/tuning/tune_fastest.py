"""Tune over everything: the fastest setting within a bound on quality, on the user's prompts and machine."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.config import RuntimeConfig, runtime_options
from diffusion_runtime.core.hardware import detect_hardware
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError
from diffusion_runtime.explanation.estimate import duration_text
from diffusion_runtime.explanation.expected_time import planned_times
from diffusion_runtime.explanation.explanation import explain, inspected
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.interface import InspectableModel
from diffusion_runtime.models.lora_sources import recorded_loras
from diffusion_runtime.quality.clip_score import ClipScore
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.combinations import check_combinations
from diffusion_runtime.rules.features import ChosenRuntime
from diffusion_runtime.session.reporter import Reporter
from diffusion_runtime.tuning.axes import Axis, Choice, Situation
from diffusion_runtime.tuning.budget import RELATIVE
from diffusion_runtime.tuning.clip_metrics import ClipMetrics, TunedPrompt
from diffusion_runtime.tuning.fastest import FastestSearch
from diffusion_runtime.tuning.fastest_result import FastestResult
from diffusion_runtime.tuning.found import LeftOut
from diffusion_runtime.tuning.journal import Journal
from diffusion_runtime.tuning.plan import ROLE, Plan, Tuning
from diffusion_runtime.tuning.time_limit import TimeLimit
from diffusion_runtime.tuning.trials import Trials


def tune_fastest(
    tuning: Tuning, axes: Sequence[Axis], minutes: float, reporter: Reporter, journal_path: Path | None = None
) -> FastestResult:
    """minutes: the most that the search takes. journal_path: where measurements are kept until the end, so that an
    interrupted tuning goes on.

    Raises ConfigError, RequestError, BackendUnavailableError before any weight is read for what cannot be tuned.
    """
    started = time.perf_counter()
    check_combinations("tuning", ChosenRuntime(tuning.runtime))
    dense = AttentionConfig.parse(
        tuning.runtime.attention if tuning.runtime.attention_override is None else tuning.runtime.attention_override
    )
    # Graphs hold the kernels of one choice. Every setting is timed without them.
    runtime = dataclasses.replace(tuning.runtime, attention=None, attention_override=dense, cuda_graphs="off")
    prepared = inspected(prepare(runtime))
    requests = [prepared.rules.resolve(request, tuning.preset) for request in tuning.requests]
    left_out: list[LeftOut] = []
    axes = [axis for axis in axes if _is_searched(axis, tuning, left_out)]
    plan = _sparse_plan(tuning, axes, left_out)
    if plan is None:
        axes = [axis for axis in axes if axis.name != "sparse"]
    backends = _backends(prepared, requests[0])
    device = str(prepared.device)
    situation = Situation(requests[0], detect_hardware(device), backends, _sparsest(plan), device)
    axes = [axis for axis in axes if _has_choices(axis, situation, left_out)]
    if not axes:
        reasons = "; ".join(f"{each.name}: {each.reason}" for each in left_out)
        raise ConfigError(f"tune: nothing is left to search: {reasons}")
    identity = _identity(tuning, prepared, dense, requests[0])
    journal = Journal(journal_path, identity)
    if journal.num_found:
        reporter.say(f"going on with {journal.num_found} measurements of {journal_path}")
    prompts = [TunedPrompt(*each) for each in zip(requests, tuning.attributes, strict=True)]
    limit = TimeLimit()
    loaded = runtime if plan is None else plan.prepared.description.config
    search = FastestSearch(
        trials=_trials(tuning, loaded, dense, requests, journal, limit),
        limit=limit,
        axes=axes,
        situation=situation,
        budgets=tuning.budgets,
        measured=prompts[: tuning.num_measured],
        verified=prompts[tuning.num_measured :],
        minutes=minutes,
        reporter=reporter,
        sparse_plan=plan,
        left_out=left_out,
    )
    _say_plan(search, prepared, requests, left_out, reporter)

    def end_process(quiet: float) -> None:
        reason = f"no answer for {quiet:.0f} s after the end of {minutes:g} min"
        search.trials.keep_hang(reason)
        again = "" if journal_path is None else f"; the same command goes on from {journal_path} without this setting"
        reporter.say(f"tune: the clip under way hangs: {reason}; this process ends{again}")
        # A call that waits for a device cannot be interrupted.
        os._exit(1)

    try:
        with limit.ending_what_hangs(time.monotonic() + 60 * minutes, end_process):
            found = search.found()
        trials = search.trials
        key = next(iter(trials.requests))
        request = trials.resolved(found.chosen, key, prepare(found.chosen.runtime(trials.runtime)).rules.resolve)
    finally:
        search.trials.close()
    chosen = found.chosen
    return FastestResult(
        found=found,
        runtime=chosen.runtime(dataclasses.replace(tuning.runtime, attention=None, attention_override=None)),
        request=request,
        attention=chosen.attention(dense, request.num_inference_steps or 1),
        budgets=tuple(map(str, tuning.budgets)),
        axes=tuple(axis.name for axis in axes),
        measured_prompts=[(each.request.prompt, each.request.seed) for each in search.measured],
        verified_prompts=[(each.request.prompt, each.request.seed) for each in search.verified],
        identity=identity,
        minutes=minutes,
        num_candidates=sum(search.counts().values()),
        num_made=search.trials.num_made,
        seconds=time.perf_counter() - started,
    )


def _is_searched(axis: Axis, tuning: Tuning, left_out: list[LeftOut]) -> bool:
    """Return whether an axis is open: nothing of it was given, and the budget can judge it."""
    options, request = runtime_options(), tuning.requests[0]
    for name in axis.fields:
        is_option = name in options
        value = getattr(tuning.runtime if is_option else request, name)
        if value != (options[name].default if is_option else None):
            left_out.append(LeftOut(axis.name, f"{name} is given"))
            return False
    if axis.makes_another_clip and any(budget.metric not in RELATIVE for budget in tuning.budgets):
        reason = f"it makes another clip, which only budgets of {' and '.join(RELATIVE)} can judge"
        left_out.append(LeftOut(axis.name, reason))
        return False
    return True


def _has_choices(axis: Axis, situation: Situation, left_out: list[LeftOut]) -> bool:
    has_some = any(axis.lines(situation))
    if not has_some:
        count = situation.request.num_inference_steps
        left_out.append(LeftOut(axis.name, f"it has no choice on this machine for {count} steps"))
    return has_some


def _sparse_plan(tuning: Tuning, axes: Sequence[Axis], left_out: list[LeftOut]) -> Plan | None:
    """The cells and densities of sparse methods; None where there can be none."""
    if not any(axis.name == "sparse" for axis in axes):
        return None
    try:
        return Plan.of(tuning)
    except DiffusionRuntimeError as error:
        left_out.append(LeftOut("sparse", str(error).splitlines()[0]))
        return None


def _backends(prepared: InspectableModel, request: GenerationRequest) -> frozenset[str]:
    """The backends of self-attention, as given."""
    rows = [row for row in explain(prepared, request).schedule if row.role == ROLE]
    return frozenset(backend for row in rows for backend in row.backends)


def _sparsest(plan: Plan | None) -> dict[str, Choice]:
    """The sparsest setting of each method, which tells whether the method saves time here."""
    found = {}
    for method, specs in {} if plan is None else plan.uniform.items():
        assert plan is not None
        shares = [(plan.kept(spec, plan.cells), spec) for spec in specs]
        kept, spec = min(shares, key=lambda each: each[0], default=(1.0, None))
        if kept < 1.0:
            cells = tuple((cell, spec) for cell in plan.cells)
            found[method] = Choice(f"{method} {kept:.2f} kept", cells=cells, num_steps=plan.explanation.num_steps)
    return found


def _trials(
    tuning: Tuning,
    runtime: RuntimeConfig,
    dense: AttentionConfig,
    requests: Sequence[GenerationRequest],
    journal: Journal,
    limit: TimeLimit,
) -> Trials:
    metrics = dict.fromkeys(["latent", *(budget.metric for budget in tuning.budgets)])
    if all(attributes is not None for attributes in tuning.attributes):
        metrics["accuracy"] = None
    clip = ClipScore(tuning.clip_path, runtime.device) if "clip" in metrics and tuning.clip_path else None
    pairs = zip(requests, tuning.requests, strict=True)
    by_key: dict[tuple[str, int | None], GenerationRequest] = {(each.prompt, each.seed): given for each, given in pairs}
    return Trials(runtime, dense, by_key, tuning.preset, ClipMetrics(tuple(metrics), clip), journal, limit)


def _identity(
    tuning: Tuning, prepared: InspectableModel, dense: AttentionConfig, request: GenerationRequest
) -> dict[str, Any]:
    """Return what every measurement depends on, in addition to its combination and its prompt."""
    description = prepared.description
    config = description.config
    versions = {
        "diffusion_runtime": str(description.to_dict()["version"]),
        "torch": str(torch.__version__),
        **detect_hardware(str(prepared.device)).packages,
    }
    paths = {name: str(getattr(config, name)) for name, each in runtime_options().items() if each.changes_output}
    return {
        "model": config.model_path,
        "config_sha256": description.model_folder.digest,
        "device": description.device,
        "dtype": description.dtype,
        "lora": recorded_loras(config.lora),
        "options": {name: value for name, value in paths.items() if "attention" not in name},
        "clip_path": tuning.clip_path,
        "dense": dense.to_dict(),
        "request": {**request.to_dict(), "prompt": None, "seed": None},
        "versions": versions,
    }


def _say_plan(
    search: FastestSearch,
    prepared: InspectableModel,
    requests: Sequence[GenerationRequest],
    left_out: Sequence[LeftOut],
    reporter: Reporter,
) -> None:
    """Say what will be searched and for how long, before any weight is read."""
    counts = search.counts()
    by_axis = ", ".join(f"{name} {count}" for name, count in counts.items())
    planned = planned_times(prepared.description, requests[:1], lambda _: "mp4")
    total = planned[0].total if planned else None
    takes = (
        "how long that takes is said after the first clip"
        if total is None
        else f"expected to take {duration_text(total * search.num_clips)}"
    )
    more = search.num_clips_of_schedules
    schedules = f", {more} more for schedules by layer and step if a sparse method saves time" if more else ""
    reporter.say(
        f"tune: at most {search.minutes:g} min (--minutes) for {sum(counts.values())} candidates ({by_axis}) and "
        f"their combinations: up to {search.num_clips} clips of {len(search.measured)} measured and "
        f"{len(search.verified)} other prompts{schedules}; {takes}"
    )
    for each in left_out:
        reporter.say(f"left out: {each.name}: {each.reason}")
