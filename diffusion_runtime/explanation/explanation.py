"""Explanation of a generation: what would run and what it would cost, by layer and step, known without a weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.core.token_layout import Extent
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.explanation.decoder_cost import count_decoding
from diffusion_runtime.explanation.forward_cost import AttentionCost, ForwardCost, count_forward, sum_of
from diffusion_runtime.explanation.passes import PassGroup, StepPass, groups_of, num_first_steps
from diffusion_runtime.explanation.request_remarks import request_remarks
from diffusion_runtime.loading.description import PipelineDescription
from diffusion_runtime.loading.interface import InspectableModel, Prepared
from diffusion_runtime.loading.memory_planning import planned_batch
from diffusion_runtime.models.memory_demand import PlannedRequest, forward_on_meta
from diffusion_runtime.report.attention_report import index_ranges
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.batch_settings import BatchSettings

SCHEMA = "diffusion_runtime.explain/1"
# In place of a backend, in steps in which a ControlNet does not run.
NOT_RUN = "not run"

# Operations per second that each part reached on one H200 in bfloat16 at Wan 2.1 1.3B's shapes: linear products and
# dense attention by FlashAttention-4 (benchmarks/results/bench_step.json), VSA at sparsity 0.9 in 4x4x4 tiles with its
# packing and planning (static_order_gpu.json), the exact decoder (few_steps_gpu.json).
_RATES = {"linear layers": 720e12, "dense": 690e12, "sparse": 280e12, "decode": 260e12}
# Norms, modulation and rotations take this much of a step's time on the device, with fused kernels (bench_step.json).
_REST = 0.035
# Of `parts`, what is no part of a step.
_OUTSIDE_STEPS = ("prefill", "text, once per request", "decode")
# Bytes per second from pinned memory to an H200 (offload_gpu.json).
_COPY_RATE = 55e9


@dataclass(frozen=True)
class LayerSchedule:
    """Attention of one layer over the steps of a request.

    backends: by step, `video_sparse_attn`, or `video_sparse_attn: dense torch_sdpa` where a rule of its options makes
    the call dense, NOT_RUN in a step in which the layer does not run. density: by step, the share of pairs that is
    computed; None where the content decides. commit: what computes the keys of finished frames, in a video that is made
    chunk by chunk, or of a prefix; None elsewhere. Rules by chunk are shown as of the first one. implementations: by
    step, what computes the call, as the report of a generation names it; None where that is found at the call, or the
    layer does not run. warnings: of its calls.
    """

    role: str
    index: int
    backends: tuple[str, ...]
    density: tuple[float | None, ...]
    commit: str | None = None
    implementations: tuple[str | None, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values, without `commit` if there is none; warnings are the explanation's remarks."""
        lists = {name: list(getattr(self, name)) for name in ("backends", "density", "implementations")}
        plain = {**asdict(self), **lists}
        del plain["warnings"]
        return {name: value for name, value in plain.items() if name != "commit" or value is not None}


@dataclass(frozen=True)
class PartCost:
    """operations: of the whole request, as dense attention would need them; kept: that are computed, at most, where the
    content decides how many are left out. share: of the time that is expected, in [0, 1]."""

    name: str
    operations: float
    kept: float
    share: float


@dataclass(frozen=True)
class _Stage:
    """Consecutive steps of one size. cost: of one step, all its passes; schedule: by layer, of these steps alone."""

    cost: ForwardCost
    steps: range
    schedule: tuple[LayerSchedule, ...]


@dataclass(frozen=True)
class Explanation:
    """grid: tokens (frames, height, width) at full size; num_text_tokens: that self-attention sees in addition.
    num_first_steps: of the first chunk of a causal model's video, where the others take num_steps and it does
    not; `schedule` has them before those of the others. num_forwards: passes of the request: of every step and
    guidance branch, whatever step caches leave out. is_joined: whether the two branches of classifier-free
    guidance are one pass; num_joined: how many of the passes have both. is_bound: whether the kept operations
    are an upper bound, because the content decides what some layers leave out. is_in_chunks: whether the video
    is made chunk by chunk. warnings: what calls will warn of. step_seconds: mean seconds of a step's
    computation, as of `parts`; copy_seconds: of the copies of streamed weights that a step has, 0 without, which
    run behind it. references: a line about each one of several kinds."""

    description: PipelineDescription
    request: GenerationRequest
    grid: Extent
    num_text_tokens: int
    num_steps: int
    num_first_steps: int | None
    num_forwards: int
    is_joined: bool
    num_joined: int
    schedule: tuple[LayerSchedule, ...]
    parts: tuple[PartCost, ...]
    is_bound: bool
    is_in_chunks: bool = False
    warnings: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    step_seconds: float = 0.0
    copy_seconds: float = 0.0

    @property
    def step_text(self) -> str:
        """`a step: 3.33 s of computation on one H200, and 0.55 s of copies of streamed weights behind it`."""
        copies = ""
        if self.copy_seconds:
            hidden = "behind it" if self.copy_seconds <= self.step_seconds else "which it waits for"
            copies = f", and {self.copy_seconds:.3g} s of copies of streamed weights {hidden}"
        return f"a step: {self.step_seconds:.3g} s of computation on one H200{copies}"

    def __repr__(self) -> str:
        """Return one line; `schedule` has every layer and step."""
        model, shares = self.description.config.model_path, (f"{part.name} {part.share:.0%}" for part in self.parts)
        return f"<Explanation: {model}, passes {self.passes_text}; expected time: {', '.join(shares)}>"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks that the generation's report will make on unused values, on unknown words and on attention that would
        be dense throughout, and on options that leave out passes counted here."""
        skipping = [
            f"{name} {value}"
            for name, value in (("step_cache", self.request.step_cache), ("cfg_gate", self.request.cfg_gate))
            if value is not None
        ]
        counted = (
            (f"counted as if every step computed all of it, although {' and '.join(skipping)} may leave some out",)
            if skipping
            else ()
        )
        return (*request_remarks(self.description, self.request), *self.warnings, *counted)

    @property
    def passes_text(self) -> str:
        """`12 in 12 steps, each of both guidance branches`."""
        joined = ""
        if self.is_joined:
            alike = self.num_joined == self.num_forwards
            joined = f", {'each' if alike else self.num_joined} of both guidance branches"
        if not self.is_in_chunks:
            return f"{self.num_forwards} in {self.num_steps} steps{joined}"
        own = self.request.first_chunk_sampler
        sampler = "" if own in (None, self.request.sampler) else f" by {own}"
        num_first = self.num_steps if self.num_first_steps is None else self.num_first_steps
        first = f", {num_first} for the first{sampler}" if sampler or self.num_first_steps is not None else ""
        return f"{self.num_forwards}: {self.num_steps} for a chunk{first}, and commits{joined}"

    def steps_text(self, columns: Sequence[int]) -> str:
        """Inclusive ranges of places in a layer's schedule: `0-3, 7`, or `0-11 of the first chunk, 0-3 of the
        others`."""
        num_first = self.num_first_steps or 0
        first, others = [each for each in columns if each < num_first], [each for each in columns if each >= num_first]
        texts = [f"{index_ranges(first)} of the first chunk"] if first else []
        if others:
            texts.append(index_ranges(each - num_first for each in others) + (" of the others" if num_first else ""))
        return ", ".join(texts)

    def to_dict(self) -> dict[str, Any]:
        memory, planned_on = self.description.memory, self.description.planned_on
        return {
            "schema": SCHEMA,
            **{key: value for key, value in self.description.to_dict().items() if key != "schema"},
            "libraries": [asdict(library) for library in self.description.libraries],
            "request": self.request.to_dict(),
            "grid": list(self.grid),
            "num_text_tokens": self.num_text_tokens,
            "references": list(self.references),
            "num_steps": self.num_steps,
            "num_first_chunk_steps": self.num_first_steps,
            "num_forwards": self.num_forwards,
            "passes": self.passes_text,
            "step": self.step_text,
            "guidance_branches_are_joined": self.is_joined,
            "implementations": [row.to_dict() for row in implementation_rows(self)],
            "schedule": [row.to_dict() for row in self.schedule],
            "parts": [asdict(part) for part in self.parts],
            "kept_is_upper_bound": self.is_bound,
            "planned_on": None if planned_on is None else planned_on.to_dict(),
            "memory": None if memory is None else memory.to_dict(),
            "remarks": list(self.remarks),
        }


def inspected(prepared: Prepared) -> InspectableModel:
    """Return the parts of a native model. Raises ConfigError for a model that diffusers' own pipeline runs: its layers
    are known once it is loaded."""
    if (native := prepared.inspectable) is not None:
        return native
    raise ConfigError(
        "explain: diffusers' own pipeline runs this model, and its attention is known once its weights are loaded; "
        "generate --dry-run says what is known before"
    )


def explain(given: Prepared, request: GenerationRequest) -> Explanation:
    """Count what a generation would run, without weights. request: resolved by the model's rules.

    Raises what `inspected` raises.
    """
    prepared = inspected(given)
    modules = prepared.model.modules(prepared.transformer)
    reads_files = prepared.model.weights.make_room(modules, prepared.loras)
    settings = BatchSettings.of([request], prepared.rules.sampling)
    planned, costs = planned_batch(prepared.rules, [request]), _PassCosts(prepared, request)
    groups = groups_of(prepared, planned, settings)
    stages = [_stage_of(group, costs) for group in groups]
    shape = prepared.model.geometry.latent_shape(planned.size.height, planned.size.width, planned.size.num_frames)
    largest = stages[-1].cost
    widest = max((each.layout for each in largest.attention if each.layout is not None), key=_num_grid, default=None)
    text = 0 if widest is None else widest.num_text_tokens
    media = prepared.model.inputs.media
    schedule = tuple(_joined(rows) for rows in zip(*(stage.schedule for stage in stages), strict=True))
    parts, seconds = _parts(
        prepared, planned, stages, costs.prefill, groups[0].passes[0].weight, len(settings.segments)
    )
    of_steps = sum(time for name, time in seconds.items() if name not in _OUTSIDE_STEPS)
    num_forwards = sum(each.num for group in groups for each in group.passes)
    num_steps = sum(len(stage.steps) for stage in stages)
    return Explanation(
        description=prepared.description,
        request=request,
        grid=prepared.model.geometry.grid(shape),
        num_text_tokens=text,
        num_steps=settings.num_steps,
        num_first_steps=num_first_steps(settings),
        num_forwards=num_forwards,
        is_joined=planned.is_guided and planned.is_batched,
        num_joined=sum(each.num for group in groups for each in group.passes if each.is_guided),
        is_in_chunks=prepared.rules.sampling.is_causal,
        references=() if media is None else tuple(media.describe(request, planned.size)),
        schedule=schedule,
        parts=parts,
        step_seconds=of_steps / num_steps,
        copy_seconds=num_forwards / num_steps * _copied_per_pass(prepared) / _COPY_RATE,
        is_bound=any(each is None for row in schedule for each in row.density),
        warnings=tuple(
            each if reads_files else f"its weights are not here, and tell whether this holds: {each}"
            for each in dict.fromkeys(each for row in schedule for each in row.warnings)
        ),
    )


class _PassCosts:
    """The cost of each kind of pass, counted once. prefill: what the first pass of a request computes once, a prefix or
    what is made of the text or of tokens that no step changes; None for a model without."""

    def __init__(self, prepared: InspectableModel, request: GenerationRequest) -> None:
        self._prepared = prepared
        self._request = request
        self._found: dict[Hashable, ForwardCost] = {}
        self.prefill: ForwardCost | None = None

    def of(self, each: StepPass) -> ForwardCost:
        """Return the cost of a pass after the first of a request, which projects text and computes a prefix, too."""
        if each.kind not in self._found:
            first, self._found[each.kind] = self._counted(each)
            if each.cache is None and self.prefill is None:
                self.prefill = _prefill_of(first, self._found[each.kind])
        return self._found[each.kind]

    def _counted(self, each: StepPass) -> tuple[ForwardCost, ForwardCost]:
        """Count the first pass of a request and a later one."""
        prepared, request = self._prepared, self._request
        if not each.is_controlled:
            request = dataclasses.replace(request, conditioning_scale=0.0)
        planned = dataclasses.replace(planned_batch(prepared.rules, [self._request]), size=each.size, request=request)
        cache = None if each.cache is None else FrameCache(each.cache, request.positions or "absolute")
        model, transformer = prepared.model, prepared.transformer
        run = forward_on_meta(model, transformer, prepared.dtype, planned, cache)
        return count_forward([transformer], run), count_forward([transformer], run)


def _stage_of(group: PassGroup, costs: _PassCosts) -> _Stage:
    """Return the mean cost of one step of a group, and the schedule of its layers."""
    # A ControlNet that skips all steps is shown as well.
    whole = dataclasses.replace(group.passes[0], is_controlled=True)
    kinds, weights = {whole.kind: whole}, {whole.kind: 0.0}
    for each in group.passes:
        kinds.setdefault(each.kind, each)
        weights[each.kind] = weights.get(each.kind, 0.0) + each.weight
    num_steps = len(group.steps)
    cost = sum_of([(weights[kind] / num_steps, costs.of(each)) for kind, each in kinds.items()])
    layers = {kind: {(each.role, each.index) for each in costs.of(one).attention} for kind, one in kinds.items()}
    running: dict[int, set[tuple[str, int]]] = {}
    for each in group.passes:
        if each.step is not None:
            running.setdefault(each.step, set()).update(layers[each.kind])
    rows = _schedules_of(cost, costs.prefill, group.steps, group.num_steps)
    schedule = tuple(
        _without(row, {step for step in group.steps if (row.role, row.index) not in running.get(step, ())}, group.steps)
        for row in rows
    )
    return _Stage(cost, group.steps, schedule)


def _without(row: LayerSchedule, skipped: Collection[int], steps: range) -> LayerSchedule:
    """Return a layer's schedule with the steps in which it does not run."""
    if not skipped:
        return row
    runs = [step not in skipped for step in steps]
    return dataclasses.replace(
        row,
        backends=tuple(name if ran else NOT_RUN for name, ran in zip(row.backends, runs, strict=True)),
        density=tuple(found if ran else 0.0 for found, ran in zip(row.density, runs, strict=True)),
        implementations=tuple(name if ran else None for name, ran in zip(row.implementations, runs, strict=True)),
    )


def _prefill_of(first: ForwardCost, later: ForwardCost) -> ForwardCost | None:
    """Return what the first pass of a request computes once, or None."""
    ran = {each.layer for each in later.attention}
    attention = tuple(each for each in first.attention if each.layer not in ran)
    products = first.products - later.products
    return ForwardCost(products, attention) if attention or products > 0 else None


def _num_grid(layout: Any) -> int:
    return int(layout.num_grid_tokens)


def _joined(rows: Sequence[LayerSchedule]) -> LayerSchedule:
    """Join one layer's schedules of consecutive steps."""
    backends = tuple(each for row in rows for each in row.backends)
    density = tuple(each for row in rows for each in row.density)
    implementations = tuple(each for row in rows for each in row.implementations)
    warnings = tuple(dict.fromkeys(each for row in rows for each in row.warnings))
    # Of a video whose first chunk is apart, commits are for the others.
    return LayerSchedule(rows[0].role, rows[0].index, backends, density, rows[-1].commit, implementations, warnings)


def _schedules_of(
    cost: ForwardCost, prefill: ForwardCost | None, steps: range, num_steps: int
) -> tuple[LayerSchedule, ...]:
    """Return the schedules by layer. prefill: whose layers compute a prefix in place of those of the same index."""
    commits = {(each.role, each.index): each for each in (() if prefill is None else prefill.attention)}
    return tuple(
        _schedule_of(each, commits.get((each.role, each.index), each), steps, num_steps) for each in cost.attention
    )


def _schedule_of(cost: AttentionCost, commits: AttentionCost, steps: range, num_steps: int) -> LayerSchedule:
    backends, density, implementations = [], [], []
    known: dict[Hashable, str | None] = {}
    warnings: dict[str, None] = {}
    for index in steps:
        step = StepInfo(index=index, num_steps=num_steps)
        resolved = cost.layer.decisions.resolved_at(step, cost.layout)
        share = resolved.backend.expected_density(resolved.options, cost.layout, cost.layer.layer, step)
        is_dense = resolved.dense is not None and share == 1.0
        dense = f": dense {resolved.dense.backend.name}" if is_dense and resolved.dense is not None else ""
        backends.append(resolved.decision.backend + dense)
        density.append(share)
        # What of the step decides which kernels run, so that a layer is asked once and not at every step.
        kind = id(resolved), resolved.backend.step_key(resolved.options, cost.layer.layer, step)
        if kind not in known:
            known[kind] = cost.layer.decisions.expected_implementation(step, cost.call)
            if (warning := cost.layer.decisions.expected_warning(step, cost.call)) is not None:
                warnings[warning] = None
        implementations.append(known[kind])
    commit = None
    if commits.layer.policy.has_phases and commits.layer.layer.phase != "denoise":
        last = StepInfo(index=num_steps - 1, num_steps=num_steps, phase="commit")
        ran = commits.layer.decisions.resolved_at(last, commits.layout).decision.backend
        commit = ran if commits.in_commits else NOT_RUN
    return LayerSchedule(
        cost.role, cost.index, tuple(backends), tuple(density), commit, tuple(implementations), tuple(warnings)
    )


def _parts(
    prepared: InspectableModel,
    planned: PlannedRequest,
    stages: Sequence[_Stage],
    prefill: ForwardCost | None,
    branches: float,
    num_segments: int,
) -> tuple[tuple[PartCost, ...], Mapping[str, float]]:
    """Return the parts of the whole request, and their expected seconds: linear layers, attention by role, what is
    computed once of a prefix or of the text, the rest of the steps, decoding. branches: that compute it. num_segments:
    that are decoded."""
    seconds: dict[str, float] = {}
    operations: dict[str, list[float]] = {}

    def add(name: str, dense: float, kept: float, time: float) -> None:
        found = operations.setdefault(name, [0.0, 0.0])
        found[0] += dense
        found[1] += kept
        seconds[name] = seconds.get(name, 0.0) + time

    products = sum(stage.cost.products * len(stage.steps) for stage in stages)
    add("linear layers", products, products, products / _RATES["linear layers"])
    for stage in stages:
        for each, row in zip(stage.cost.attention, stage.schedule, strict=True):
            dense = each.operations * len(stage.steps)
            ran = [share for name, share in zip(row.backends, row.density, strict=True) if name != NOT_RUN] or [1.0]
            shares = [_kept_share(each, share) for share in ran]
            kept = dense * sum(shares) / len(shares)
            rates = [_RATES["dense" if share == 1.0 else "sparse"] for share in ran]
            time = sum(dense / len(shares) * share / rate for share, rate in zip(shares, rates, strict=True))
            add(f"attention, {each.role}", dense, kept, time)
    if prefill is not None:
        attention = sum(each.operations for each in prefill.attention) * branches
        products = prefill.products * branches
        time = products / _RATES["linear layers"] + attention / _RATES["dense"]
        name = "prefill" if prefill.attention else "text, once per request"
        add(name, products + attention, products + attention, time)
    add("norms, modulation, rotations", 0.0, 0.0, _REST / (1 - _REST) * sum(seconds.values()))
    decoding = count_decoding(prepared.model, planned, torch.device("meta")) * num_segments
    add("decode", decoding, decoding, decoding / _RATES["decode"])
    total = sum(seconds.values())
    parts = [PartCost(name, dense, kept, seconds[name] / total) for name, (dense, kept) in operations.items()]
    return tuple(parts), seconds


def _copied_per_pass(prepared: InspectableModel) -> float:
    """Return the mean bytes of streamed weights that a pass through a transformer copies to the device."""
    plan = prepared.description.memory
    if plan is None or plan.offload != "layers" or plan.waits_in_files:
        return 0.0
    parts = plan.demand.transformers
    return sum(map(plan.copied_per_pass, parts)) / len(parts)


def _kept_share(cost: AttentionCost, density: float | None) -> float:
    """Return the share of all pairs of a call that is kept, text included, which sparse methods keep whole. density: of
    the grid's pairs, None for all."""
    if density is None or cost.layout is None or not cost.layout.num_grid_tokens:
        return 1.0
    grid = cost.layout.num_grid_tokens**2 / max(1, cost.num_pairs)
    return 1.0 - min(1.0, grid) * (1.0 - density)


@dataclass(frozen=True)
class ImplementationRow:
    """Calls of one role with one implementation, as a ReportRow names them. implementation: None where that is found at
    the call. layers, steps: inclusive ranges; of steps see Explanation.steps_text."""

    role: str
    layers: str
    steps: str
    backend: str
    implementation: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def implementation_rows(explanation: Explanation) -> tuple[ImplementationRow, ...]:
    """Return what computes the calls of the denoising steps, by role, without layers in steps that skip them."""
    places: dict[tuple[str, str, str | None], tuple[dict[int, None], dict[int, None]]] = {}
    for row in explanation.schedule:
        for step, (backend, name) in enumerate(zip(row.backends, row.implementations, strict=True)):
            if backend == NOT_RUN:
                continue
            layers, steps = places.setdefault((row.role, backend.partition(":")[0], name), ({}, {}))
            layers[row.index] = None
            steps[step] = None
    return tuple(
        ImplementationRow(role, index_ranges(sorted(layers)), explanation.steps_text(sorted(steps)), backend, name)
        for (role, backend, name), (layers, steps) in places.items()
    )


def layer_map(schedule: Sequence[LayerSchedule]) -> Mapping[str, Sequence[LayerSchedule]]:
    """Return the schedule by role, in the order in which roles first run."""
    rows: dict[str, list[LayerSchedule]] = {}
    for row in schedule:
        rows.setdefault(row.role, []).append(row)
    return rows
