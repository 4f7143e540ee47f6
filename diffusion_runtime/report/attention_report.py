"""Attention report: what ran, role x backend x implementation, counted call by call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.report.attention_density import DensityCounter, Kept, LayerDensity, PlanPicture
from diffusion_runtime.report.report_html import report_html

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class ReportRow:
    """One kind of attention call that happened.

    implementation: who computed it, as the backend names it; count: how many calls.
    layers, steps: which ones, as inclusive ranges such as `0-5`; source and reason: why this backend was chosen.
    phase: `denoise` or `commit` where keys and values are cached: those of a video that is made chunk by chunk, or of a
    prefix that is computed once. Commits are no steps. None elsewhere.
    keys: of a cache in pages or in 8 bits, whether its keys were read `in place`, or `gathered` or `read back` into one
    tensor before; None elsewhere.
    is_guided: whether the calls were to a text and to a negative text, combined by normalized attention guidance.
    kind: `softmax`, or `linear` for attention whose state does not grow with the keys: a property of the architecture,
    never a choice.
    """

    role: str
    backend: str
    implementation: str
    count: int
    layers: str
    steps: str
    source: str
    reason: str
    phase: str | None = None
    keys: str | None = None
    kind: str = "softmax"
    is_guided: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values, without phase, keys or guidance if there are none, or a kind if it is the usual
        one."""
        usual = {"phase": None, "keys": None, "kind": "softmax", "is_guided": False}
        return {name: value for name, value in asdict(self).items() if name not in usual or value != usual[name]}

    def __str__(self) -> str:
        when = "commits" if self.phase == "commit" else f"steps {self.steps}"
        keys = "" if self.keys is None else f"cached keys {self.keys}, "
        role = self.role + ", linear" * (self.kind == "linear") + ", guided" * self.is_guided
        return (
            f"{role}: {self.backend} ({self.implementation}) x {self.count}, layers {self.layers}, {when}, {keys}"
            f"from {self.source}: {self.reason}"
        )


@dataclass(frozen=True)
class LibraryAttention:
    """Attention that a library runs itself and this runtime does not count. chosen: the choice that selects it; empty
    where it is the library's own."""

    component: str
    library: str
    implementation: str
    chosen: str = ""

    def __str__(self) -> str:
        why = f"chosen by {self.chosen}" if self.chosen else "not chosen here"
        return f"{self.component}: attention of {self.library} ({self.implementation}), {why}"


@dataclass(frozen=True)
class StepRow:
    """The steps of one guidance branch of one expert, in a generation that may reuse steps.

    branch: `cond` or `uncond`. num_computed, num_reused: how many; computed, reused: which ones, as inclusive ranges.
    reused_by: each method that reused some. largest_error: the largest accumulated estimate at which one was reused, in
    the method's own unit; None where it has none.
    """

    branch: str
    expert: int
    num_computed: int
    num_reused: int
    computed: str
    reused: str
    reused_by: tuple[str, ...] = ()
    largest_error: float | None = None

    def __str__(self) -> str:
        text = (
            f"{self.branch}, expert {self.expert}: {self.num_computed} of {self.num_computed + self.num_reused} steps "
            f"computed ({self.computed or 'none'})"
        )
        if self.num_reused:
            text += f", {self.num_reused} reused by {' and '.join(self.reused_by)} ({self.reused})"
        if self.largest_error is not None:
            text += f", largest accumulated error {self.largest_error:.3g}"
        return text


@dataclass(frozen=True)
class ErrorRow:
    """The measured error of a rounded backend on the model's own q, k and v (attention/measured_error.py).

    error: relative, of the layer's first call where it was largest; bound: what was allowed; layer: which layer that
    was. layers, steps: all that were measured, as inclusive ranges; no steps of a decoder.
    """

    role: str
    backend: str
    error: float
    bound: float
    layer: int
    layers: str
    steps: str

    def __str__(self) -> str:
        return (
            f"{self.role}: the error of {self.backend} is {self.error:.2g} at most, {self.bound:g} allowed: measured "
            f"on this model's q, k and v, layers {self.layers} (the largest in layer {self.layer})"
            + (f", steps {self.steps}" if self.steps else "")
        )


@dataclass(frozen=True)
class ProductRow:
    """Products of linear layers with quantised weights. implementation: how they were computed; count: how many."""

    implementation: str
    count: int


@dataclass(frozen=True)
class GraphReplays:
    """Forward passes with CUDA graphs. num_replayed: of num_forwards, how many were replayed from a graph; num_graphs:
    how many graphs the pipeline holds, in pool_bytes of device memory. eager: why the others ran without one, and how
    many for each reason. unit: whose passes, in words."""

    num_forwards: int
    num_replayed: int
    num_graphs: int
    pool_bytes: int
    eager: Mapping[str, int] = field(default_factory=dict)
    unit: str = "forward passes"

    def __str__(self) -> str:
        text = f"cuda graphs: {self.num_replayed} of {self.num_forwards} {self.unit} replayed from a CUDA graph"
        if self.num_graphs:
            plural = "s" * (self.num_graphs != 1)
            text += f" ({self.num_graphs} graph{plural} held in {self.pool_bytes / 1e9:.3f} GB)"
        reasons = [f"{count} {reason}" for reason, count in self.eager.items()]
        return f"{text}; run eagerly: {', '.join(reasons)}" if reasons else text


@dataclass(frozen=True)
class CacheRow:
    """The key-value cache of a video that was made chunk by chunk; all counts but the last two in latent frames.

    chunk_frames: of a chunk. window_frames: in sight, sink and chunk included, None for all; sink_frames: of these, the
    first ones of the video, which stay. cached_frames: that there was room for. positions: what keys are rotated by.
    num_bytes: on this process, of all layers, branches and experts, the most at a time. num_commits: forward passes
    that left final keys. dtype: `auto` for keys and values as they are computed; num_saturated: of those stored in
    fewer bits, the numbers that were too large. page_size: tokens of a page, None for keys in a row. compressed_frames:
    of cached_frames, those in larger patches. num_shared_bytes: of the pages that a fork and the stream it is of had in
    common when the last fork was made; a page that several have counts in parts in num_bytes.
    """

    chunk_frames: int
    window_frames: int | None
    sink_frames: int
    cached_frames: int
    positions: str
    num_bytes: int
    num_commits: int
    dtype: str = "auto"
    num_saturated: int = 0
    page_size: int | None = None
    compressed_frames: int = 0
    num_shared_bytes: int = 0

    def __str__(self) -> str:
        window = "all frames" if self.window_frames is None else f"{self.window_frames} latent frames"
        sink = f", {self.sink_frames} of them the first ones of the video (sink)" if self.sink_frames else ""
        stored = "" if self.dtype == "auto" else f", stored in {self.dtype} ({self.num_saturated} numbers saturated)"
        large = f", {self.compressed_frames} of them in larger patches" if self.compressed_frames else ""
        pages = "" if self.page_size is None else f", in pages of {self.page_size} tokens"
        shared = f", {size_text(self.num_shared_bytes)} shared at the last fork" if self.num_shared_bytes else ""
        return (
            f"key-value cache: {window} in sight{sink}, chunks of {self.chunk_frames}, {self.positions} positions, "
            f"{self.num_commits} commit{'s' * (self.num_commits != 1)}, "
            f"{size_text(self.num_bytes)} for {self.cached_frames} frames{large}{stored}{pages}{shared}"
        )


@dataclass(frozen=True)
class AttentionReport:
    """Every attention call of one generation, and the components whose attention is their library's own. steps: empty
    where every step is computed by request. products: of quantised linear layers; empty where there are none. graphs,
    decoder_graphs: None where CUDA graphs were not to be used. Calls and products of a replayed forward pass count as
    those of any. cache: of a video that was made chunk by chunk, None for one made at once. density, plan: where they
    were to be counted (`profiling.instruments.counted_density`); plan is None where every call was dense. errors: of
    rounded backends, which notes repeat."""

    rows: tuple[ReportRow, ...] = ()
    libraries: tuple[LibraryAttention, ...] = ()
    notes: tuple[str, ...] = ()
    steps: tuple[StepRow, ...] = ()
    products: tuple[ProductRow, ...] = ()
    graphs: GraphReplays | None = None
    decoder_graphs: GraphReplays | None = None
    cache: CacheRow | None = None
    density: tuple[LayerDensity, ...] = ()
    plan: PlanPicture | None = None
    errors: tuple[ErrorRow, ...] = ()

    @property
    def num_calls(self) -> int:
        return sum(row.count for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in a sidecar."""
        return {
            "num_calls": self.num_calls,
            "rows": [row.to_dict() for row in self.rows],
            "libraries": [asdict(library) for library in self.libraries],
            "steps": [{**asdict(row), "reused_by": list(row.reused_by)} for row in self.steps],
            "products": [asdict(row) for row in self.products],
            "errors": [asdict(row) for row in self.errors],
            "graphs": None if self.graphs is None else asdict(self.graphs),
            "decoder_graphs": None if self.decoder_graphs is None else asdict(self.decoder_graphs),
            "cache": None if self.cache is None else asdict(self.cache),
            "density": [row.to_dict() for row in self.density],
            "plan": None if self.plan is None else self.plan.to_dict(),
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return f"<AttentionReport: {self.num_calls} calls>" + f"\n{self}" * bool(str(self))

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        return report_html(self.to_dict())

    def __str__(self) -> str:
        lines = [str(row) for row in self.rows]
        lines += [
            f"{item.component}: {item.library}'s own attention ({item.implementation})"
            + (f", chosen by {item.chosen}" if item.chosen else "")
            for item in self.libraries
        ]
        lines += [f"steps of {row}" for row in self.steps]
        lines += [f"quantised linear layers: {row.count} x {row.implementation}" for row in self.products]
        lines += [str(graphs) for graphs in (self.graphs, self.decoder_graphs) if graphs is not None]
        lines += [] if self.cache is None else [str(self.cache)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


class _Tally:
    """The calls of one row while they are being counted."""

    def __init__(self) -> None:
        self.count = 0
        self.layers: set[int] = set()
        self.steps: set[int] = set()


class _StepTally:
    """The steps of one row while they are being counted."""

    def __init__(self) -> None:
        self.computed: set[int] = set()
        self.reused: set[int] = set()
        self.reused_by: dict[str, None] = {}
        self.largest_error: float | None = None


class _ErrorTally:
    """The errors of one row while they are being collected."""

    def __init__(self) -> None:
        self.by_layer: dict[int, float] = {}
        self.steps: set[int] = set()


@dataclass
class CallTape:
    """Records of a captured forward pass, which each of its replays counts. calls: a layer, and the other arguments of
    `record`; products: of `record_product`; notes: of `note`."""

    calls: list[tuple[LayerInfo, dict[str, Any]]] = field(default_factory=list)
    products: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class AttentionRecorder:
    """Counts the calls of one request; `report()` is what it saw so far. counts_density: see attention_density.py."""

    def __init__(self, *, counts_density: bool = False) -> None:
        self._density = DensityCounter() if counts_density else None
        self._steps: dict[tuple[str, int], _StepTally] = {}
        self._tallies: dict[tuple[str, str, str, str, str, str, str, str, bool], _Tally] = {}
        self._has_phases = False
        self._libraries: list[LibraryAttention] = []
        self._notes: dict[str, None] = {}
        self._products: dict[str, int] = {}
        self._errors: dict[tuple[str, str, float], _ErrorTally] = {}
        self._graphs: GraphReplays | None = None
        self._decoder_graphs: GraphReplays | None = None
        self._tape: CallTape | None = None
        self._cache: CacheRow | None = None

    def fork(self) -> AttentionRecorder:
        """Return the recorder of a video that continues here: with the notes and libraries so far, counting from now
        on."""
        twin = AttentionRecorder(counts_density=self._density is not None)
        twin._has_phases = self._has_phases
        twin._notes, twin._libraries = dict(self._notes), list(self._libraries)
        return twin

    def distinguish_phases(self) -> None:
        """Say that keys and values are computed in passes of their own: each row is of one phase."""
        self._has_phases = True

    @contextmanager
    def taped(self) -> Iterator[CallTape]:
        """Context manager: record on the tape without counting, as a captured forward pass computes nothing."""
        self._tape = CallTape()
        try:
            yield self._tape
        finally:
            self._tape = None

    def play(self, tape: CallTape, step: StepInfo) -> None:
        """Count what is on a tape, as of `step`."""
        for layer, named in tape.calls:
            self.record(layer, step, **named)
        for implementation in tape.products:
            self.record_product(implementation)
        for note in tape.notes:
            self.note(note)

    def record(
        self,
        layer: LayerInfo,
        step: StepInfo,
        *,
        backend: str,
        implementation: str,
        source: str,
        reason: str,
        kept: Sequence[Kept] = (Kept(),),
        keys: str = "",
        kind: str = "softmax",
        is_guided: bool = False,
    ) -> None:
        """Count one call. kept: of its pairs, by the parts of its heads in which it was computed; every pair unless
        given. keys, kind, is_guided: as ReportRow, empty for no keys."""
        if self._density is not None:
            self._density.add(layer, step, kept)
        if self._tape is not None:
            named: dict[str, Any] = {"backend": backend, "implementation": implementation, "source": source}
            named |= {"reason": reason, "keys": keys, "kind": kind, "is_guided": is_guided}
            self._tape.calls.append((layer, named))
            return
        key = (layer.role, backend, implementation, source, reason, step.phase, keys, kind, is_guided)
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = _Tally()
        tally.count += 1
        tally.layers.add(layer.index)
        if step.phase == "denoise":
            tally.steps.add(step.index)

    def record_library(self, component: str, library: str, implementation: str, chosen: str = "") -> None:
        """Record that a component ran its library's own attention. chosen: the choice that selects it."""
        row = LibraryAttention(component, library, implementation, chosen)
        if row not in self._libraries:
            self._libraries.append(row)

    def record_computed(self, step: StepInfo, branches: Iterable[str]) -> None:
        """Count a computed step of these guidance branches, in a generation that may reuse steps."""
        for branch in branches:
            self._step_tally(branch, step).computed.add(step.index)

    def record_reused(self, step: StepInfo, branches: Iterable[str], method: str, error: float | None = None) -> None:
        """Count a step that `method` reused. error: its accumulated estimate, in the method's own unit."""
        for branch in branches:
            tally = self._step_tally(branch, step)
            tally.reused.add(step.index)
            tally.reused_by[method] = None
            if error is not None:
                tally.largest_error = max(error, tally.largest_error or 0.0)

    def record_product(self, implementation: str) -> None:
        """Count one product of a quantised linear layer."""
        if self._tape is not None:
            self._tape.products.append(implementation)
            return
        self._products[implementation] = self._products.get(implementation, 0) + 1

    def record_error(self, layer: LayerInfo, step: StepInfo, *, backend: str, error: float, bound: float) -> None:
        """Record the measured error of a rounded backend in one call. It is of these inputs, so no replay counts it."""
        tally = self._errors.setdefault((layer.role, backend, bound), _ErrorTally())
        tally.by_layer[layer.index] = max(error, tally.by_layer.get(layer.index, 0.0))
        tally.steps.add(step.index)

    def record_errors_of(self, other: AttentionRecorder) -> None:
        """Take over the measured errors of layers that run at no step, as a decoder's."""
        for key, found in other._errors.items():
            tally = self._errors.setdefault(key, _ErrorTally())
            for layer, error in found.by_layer.items():
                tally.by_layer[layer] = max(error, tally.by_layer.get(layer, 0.0))

    def record_graphs(self, graphs: GraphReplays) -> None:
        """Say what of the transformer was replayed from CUDA graphs."""
        self._graphs = graphs

    def record_decoder_graphs(self, graphs: GraphReplays) -> None:
        """Say what of the decoder was replayed from CUDA graphs."""
        self._decoder_graphs = graphs

    def record_cache(self, cache: CacheRow) -> None:
        """Say what the key-value cache of the video was."""
        self._cache = cache

    def _step_tally(self, branch: str, step: StepInfo) -> _StepTally:
        return self._steps.setdefault((branch, step.expert), _StepTally())

    def note(self, text: str) -> None:
        """Add a remark once, such as a choice that does not apply to a role."""
        if self._tape is not None:
            self._tape.notes.append(text)
            return
        self._notes[text] = None

    def report(self) -> AttentionReport:
        """Return what was counted."""
        rows = [
            ReportRow(
                role,
                backend,
                implementation,
                tally.count,
                index_ranges(tally.layers),
                index_ranges(tally.steps),
                source,
                reason,
                phase if self._has_phases else None,
                keys or None,
                kind,
                is_guided,
            )
            for (role, backend, implementation, source, reason, phase, keys, kind, is_guided), tally in (
                self._tallies.items()
            )
        ]
        steps = [
            StepRow(
                branch,
                expert,
                len(tally.computed),
                len(tally.reused),
                index_ranges(tally.computed),
                index_ranges(tally.reused),
                tuple(tally.reused_by),
                tally.largest_error,
            )
            for (branch, expert), tally in sorted(self._steps.items(), key=lambda item: item[0][::-1])
        ]
        errors = tuple(_error_row(*key, tally) for key, tally in self._errors.items())
        products = tuple(ProductRow(implementation, count) for implementation, count in self._products.items())
        return AttentionReport(
            rows=tuple(rows),
            libraries=tuple(self._libraries),
            notes=(*self._notes, *map(str, errors)),
            steps=tuple(steps),
            products=products,
            graphs=self._graphs,
            decoder_graphs=self._decoder_graphs,
            cache=self._cache,
            density=() if self._density is None else self._density.layers(),
            plan=None if self._density is None else self._density.picture,
            errors=errors,
        )


def _error_row(role: str, backend: str, bound: float, tally: _ErrorTally) -> ErrorRow:
    layer, error = max(tally.by_layer.items(), key=lambda item: item[1])
    return ErrorRow(role, backend, error, bound, layer, index_ranges(tally.by_layer), index_ranges(tally.steps))


def index_ranges(numbers: Iterable[int]) -> str:
    """{0, 1, 2, 5} as `0-2,5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
