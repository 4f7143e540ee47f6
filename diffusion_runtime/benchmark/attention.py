"""Benchmarks attention backends shape by shape: checked first, then timed in alternation with a matrix product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from diffusion_runtime.attention.autotune import time_alternately
from diffusion_runtime.attention.backends.calling import run_backend
from diffusion_runtime.attention.backends.capability import AttentionRequirements
from diffusion_runtime.attention.backends.interface import AttentionCall, Backend
from diffusion_runtime.attention.backends.refusals import refusals
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.attention.backends.requirements import requirements_of
from diffusion_runtime.attention.catalogue import list_backends
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.attention.functional import attention
from diffusion_runtime.attention.self_test import quiet_log
from diffusion_runtime.attention.sparse.interface import SparseBackend
from diffusion_runtime.benchmark.accuracy import ExactRows, error_bound
from diffusion_runtime.benchmark.measurement import AttentionBenchmark, Measurement
from diffusion_runtime.benchmark.shapes import AttentionShape
from diffusion_runtime.core.hardware import Hardware, detect_hardware
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.parallel.interface import AttentionInputs
from diffusion_runtime.startup.importing import raised_line

# Called with the item under way.
OnProgress = Callable[[str], None]

# Past the steps and layers that sparse methods keep dense at first.
_LAYER, _STEP = (20, 40), StepInfo(30, 50)
_MATMUL = "matmul"


@dataclass(frozen=True)
class Effort:
    """num_rounds: samples per backend and shape. deadline: of time.monotonic(); shapes that have not begun by then are
    skipped, and rounds are cut short. matmul_size: edge of the square matrices of the reference product."""

    num_rounds: int
    deadline: float
    matmul_size: int


def default_backends(hardware: Hardware) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return all usable dense backends that are timed by default, lossless or not, and (name, reason) of the other
    dense ones and of those that cannot run."""
    names, left_out = [], []
    for info in list_backends(hardware):
        backend = _find(info.name) if info.usable else None
        if not info.usable:
            left_out.append((info.name, info.reason))
        elif backend is None or isinstance(backend, SparseBackend):
            continue
        elif backend.timed_by_default(hardware):
            names.append(info.name)
        else:
            left_out.append((info.name, f"not timed by default on this device; name it with --backends {info.name}"))
    return tuple(names), tuple(left_out)


def check_backends(names: Sequence[str], hardware: Hardware) -> None:
    """Raises BackendUnavailableError, with every reason, when one of `names` cannot run on this machine at all."""
    wrong = [(info.name, info.reason, info.fix) for info in list_backends(hardware) if not info.usable]
    found = [(name, reason + (f"; fix: {fix}" if fix else "")) for name, reason, fix in wrong if name in names]
    found += [(name, "this version does not have it") for name in names if _find(name) is None]
    if found:
        lines = "\n".join(f"  {name}: {reason}" for name, reason in found)
        raise BackendUnavailableError(f"--backends: these cannot run here:\n{lines}", found)


def benchmark_attention(
    shapes: Sequence[AttentionShape],
    names: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    effort: Effort,
    *,
    left_out: Sequence[tuple[str, str]] = (),
    on_progress: OnProgress = lambda _: None,
) -> AttentionBenchmark:
    """Time `names` at `shapes`. Any exception of a backend becomes its row; Ctrl-C alone propagates."""
    hardware = detect_hardware(str(device))
    measurements: list[Measurement] = []
    with torch.inference_mode(), quiet_log():
        for number, shape in enumerate(shapes, 1):
            on_progress(f"{number}/{len(shapes)} {shape.name}")
            if time.monotonic() >= effort.deadline:
                measurements += [Measurement(shape, name, "skipped", "the time limit was reached") for name in names]
                continue
            try:
                measurements += _measure_shape(shape, names, hardware, device, dtype, effort, on_progress)
            except (torch.OutOfMemoryError, MemoryError) as error:
                reason = f"the inputs do not fit: {raised_line(error)}"
                measurements += [Measurement(shape, name, "skipped", reason) for name in names]
    return AttentionBenchmark(
        device=f"{hardware.device_name}, {hardware.describe()}",
        versions={"torch": torch.__version__, **hardware.packages},
        dtype=str(dtype).removeprefix("torch."),
        matmul_size=effort.matmul_size,
        shapes=tuple(shapes),
        measurements=tuple(measurements),
        left_out=tuple(left_out),
    )


@dataclass(frozen=True)
class _Case:
    """A shape with its inputs: q [batch, seq_q, heads, head_dim]; k, v [batch, seq_k, heads, head_dim]."""

    shape: AttentionShape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def draw(cls, shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> _Case:
        """Normally distributed numbers, the same in every run on this kind of device; attending to the padding would
        change the result."""
        generator = torch.Generator(device).manual_seed(0)
        sizes = [(shape.batch, seq, shape.num_heads, shape.head_dim) for seq in (shape.seq_q, shape.seq_k, shape.seq_k)]
        q, k, v = (torch.randn(size, generator=generator, device=device, dtype=dtype) for size in sizes)
        for sample in range(shape.batch):
            real = torch.zeros(shape.seq_k, dtype=torch.bool)
            for start, stop in shape.layout.key_ranges(sample):
                real[start:stop] = True
            padded = (~real).to(device)
            k[sample, padded], v[sample, padded] = 30.0, 30.0
        return cls(shape, q, k, v)

    @property
    def layer(self) -> LayerInfo:
        return LayerInfo(*_LAYER, role=self.shape.role)

    def requirements(self, hardware: Hardware) -> AttentionRequirements:
        return replace(requirements_of(self._call(None, RequestCache())), hardware=hardware)

    def call(self, backend: Backend, state: RequestCache) -> AttentionCall:
        return self._call(backend.options_type(), state)

    def _call(self, options: object, state: RequestCache) -> AttentionCall:
        return AttentionCall(
            AttentionInputs(self.q, self.k, self.v, self.shape.layout), options, self.layer, _STEP, state
        )

    def run(self, name: str, state: RequestCache) -> torch.Tensor:
        """Make a call as a model makes it, our own part of it included."""
        return attention(
            *(self.q, self.k, self.v), backend=name, layout=self.shape.layout, layer=self.layer, step=_STEP, state=state
        )


def _measure_shape(
    shape: AttentionShape,
    names: Sequence[str],
    hardware: Hardware,
    device: torch.device,
    dtype: torch.dtype,
    effort: Effort,
    on_progress: OnProgress,
) -> list[Measurement]:
    """Measure one row per name at one shape."""
    case = _Case.draw(shape, device, dtype)
    exact = ExactRows(case.q, case.k, case.v, shape.layout)
    checked: dict[str, Measurement] = {}
    states: dict[str, RequestCache] = {}
    for name in names:
        on_progress(f"{shape.name}: {name}")
        states[name] = RequestCache()
        checked[name] = _check(case, name, states[name], hardware, exact)
    functions = {name: _runner(case, name, states[name]) for name, row in checked.items() if row.state == "measured"}
    if not functions:
        return list(checked.values())
    on_progress(f"{shape.name}: timing")
    samples = _time_together(functions, checked, device, dtype, effort)
    if not samples:
        return list(checked.values())
    matmul_tflops = 2.0 * effort.matmul_size**3 / statistics.median(samples.pop(_MATMUL)) / 1e9
    for name, times in samples.items():
        checked[name] = replace(checked[name], samples=tuple(times), matmul_tflops=matmul_tflops)
    return list(checked.values())


def _check(case: _Case, name: str, state: RequestCache, hardware: Hardware, exact: ExactRows) -> Measurement:
    """Make the first call of a backend, compilation included: refused, failed, wrong, or ready to be timed."""
    shape = case.shape
    reasons = refusals(name, case.requirements(hardware))
    backend = _find(name)
    if reasons or backend is None:
        return Measurement(shape, name, "refused", "; ".join(reasons))
    bound = error_bound(backend, case.q.dtype, hardware)
    implementation = ""
    try:
        result = run_backend(backend, case.call(backend, state))
        implementation = result.implementation
        error = exact.error_of(result.out)
        # What `attention` does on top of the backend must not fail either.
        case.run(name, state)
    except Exception as raised:  # any exception of a kernel or its package
        return Measurement(shape, name, "failed", raised_line(raised), implementation, bound=bound)
    if error != error or error == float("inf"):
        return Measurement(shape, name, "wrong", "the result is not finite", implementation, bound=bound)
    if bound is not None and error > bound:
        reason = f"the error {error:.1e} is above the bound {bound:.1e}"
        return Measurement(shape, name, "wrong", reason, implementation, error=error, bound=bound)
    return Measurement(shape, name, "measured", "", implementation, error=error, bound=bound)


class _CallError(Exception):
    """A backend raised while it was timed, after successful calls."""

    def __init__(self, name: str, raised: Exception) -> None:
        super().__init__(name)
        self.name = name
        self.raised = raised


def _runner(case: _Case, name: str, state: RequestCache) -> Callable[[], object]:
    def run() -> object:
        try:
            return case.run(name, state)
        except Exception as raised:  # any exception of a kernel or its package
            raise _CallError(name, raised) from raised

    return run


def _time_together(
    functions: dict[str, Callable[[], object]],
    checked: dict[str, Measurement],
    device: torch.device,
    dtype: torch.dtype,
    effort: Effort,
) -> dict[str, list[float]]:
    """Return samples of the functions and of a matrix product timed with them; empty when none is left.

    A function that raises is removed, its row in `checked` records why, and the others start again.
    """
    matmul = _matmul(effort.matmul_size, device, dtype)
    # The first product initialises the library, which is not to be timed.
    matmul()
    while functions:
        timed = {**functions, _MATMUL: matmul}
        try:
            return time_alternately(timed, device, num_rounds=effort.num_rounds, deadline=effort.deadline)
        except _CallError as error:
            del functions[error.name]
            checked[error.name] = replace(checked[error.name], state="failed", reason=raised_line(error.raised))
    return {}


def _matmul(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _find(name: str) -> Backend | None:
    try:
        return find_backend(name)
    except Exception:  # importing a backend's file may fail with the packages it imports
        return None
