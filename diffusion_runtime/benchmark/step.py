"""Benchmarks one denoising step of a transformer: ours in each mode next to diffusers' own, eager and compiled.

The same random weights everywhere, so every velocity is compared with the first one. Models are built one after the
other and each is timed together with a large matrix product. A step is one in the middle of a generation: what depends
on prompt, size and timesteps alone was computed at the first one, where a model of ours keeps it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.self_test import quiet_log
from diffusion_runtime.benchmark.clock import Clock, matmul_tflops
from diffusion_runtime.benchmark.device_time import time_shares
from diffusion_runtime.benchmark.operations import count_operations
from diffusion_runtime.benchmark.replayed_step import ReplayedStep, steps_around
from diffusion_runtime.benchmark.step_model import StepModel
from diffusion_runtime.benchmark.step_result import StepBenchmark, StepRow
from diffusion_runtime.core.hardware import detect_hardware
from diffusion_runtime.denoising.cuda_graphs.capture import CudaCapture
from diffusion_runtime.denoising.cuda_graphs.captured_forward import ForwardPass
from diffusion_runtime.diffusers_bridge.random_transformer import compile_blocks, why_no_twin
from diffusion_runtime.diffusers_bridge.sample_inputs import StepInputs
from diffusion_runtime.errors import ConfigError, DeviceMemoryError
from diffusion_runtime.layers.modulation_rows import plan_steps
from diffusion_runtime.loading.cuda_graphs import replay_refusals
from diffusion_runtime.memory.device_memory import release_device_memory
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.startup.importing import raised_line

# Called with the item under way.
OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class _Way:
    """Settings with which a mode computes the step."""

    quantization: str = "none"
    is_replayed: bool = False


# Modes of one quantization share a model.
_WAYS = {
    "eager": _Way(),
    "graphs": _Way(is_replayed=True),
    "fp8": _Way("fp8"),
    "fp8+graphs": _Way("fp8", is_replayed=True),
    "fp8-all": _Way("fp8-all"),
    "fp8-all+graphs": _Way("fp8-all", is_replayed=True),
    "int8": _Way("int8"),
    "int8+graphs": _Way("int8", is_replayed=True),
}
MODES = tuple(_WAYS)
_NUM_STEPS = 20
# Relative L2 of two bfloat16 forwards of random weights that round at other places; of float32, hundreds of times less.
_MAX_DIFFERENCE = 0.05
# A forward of so many milliseconds needs only one sample.
_SLOW_MS = 20_000.0


@dataclass(frozen=True)
class StepEffort:
    """num_samples: of each row. matmul_size: edge of the square matrices of the reference product."""

    num_samples: int
    matmul_size: int


@dataclass(frozen=True)
class StepChoice:
    """Step to be timed. modes: those of MODES in which our model runs; None for all that run on the device, on a CPU
    `eager`. with_diffusers: also diffusers' eager model, and on a GPU its compiled one. attention: backend of our
    model, as --attention-backend takes it."""

    modes: Sequence[str] | None = None
    with_diffusers: bool = True
    attention: str | None = None

    def __post_init__(self) -> None:
        if self.modes is None:
            return
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes:
            raise ConfigError(f"--mode: expected some of {','.join(MODES)}, got {','.join(self.modes) or 'none'}")


def benchmark_step(
    opened: StepModel,
    choice: StepChoice,
    device: torch.device,
    dtype: torch.dtype,
    effort: StepEffort,
    *,
    on_progress: OnProgress = lambda _: None,
) -> StepBenchmark:
    """Time the step in every way. An exception of one way becomes its row.

    Raises DeviceMemoryError before anything is built where the weights do not fit, BackendUnavailableError and
    ConfigError for an attention choice that cannot run, and ConfigError for a mode with graphs that cannot be replayed.
    """
    with quiet_log():
        _check_memory(opened, device, dtype)
    hardware = detect_hardware(str(device))
    with torch.inference_mode(), quiet_log():
        run = _Run(opened, choice, device, dtype, effort, on_progress)
        rows = tuple(run.rows())
    return StepBenchmark(
        model=opened.describe(),
        device=f"{hardware.device_name}, {hardware.describe()}",
        versions={"torch": torch.__version__, **hardware.packages},
        dtype=str(dtype).removeprefix("torch."),
        num_blocks=opened.num_blocks,
        whole_blocks=opened.whole_blocks,
        operations=run.operations,
        matmul_size=effort.matmul_size,
        rows=rows,
    )


class _Run:
    """The rows of one benchmark. operations: of one forward, once the first model was built."""

    def __init__(
        self,
        opened: StepModel,
        choice: StepChoice,
        device: torch.device,
        dtype: torch.dtype,
        effort: StepEffort,
        on_progress: OnProgress,
    ) -> None:
        self.operations = 0.0
        self._opened = opened
        self._choice = choice
        self._device = device
        self._dtype = dtype
        self._effort = effort
        self._say = on_progress
        self._clock = Clock(device)
        self._inputs = opened.inputs(device, dtype)
        self._expected: torch.Tensor | None = None
        attention = AttentionConfig.parse(choice.attention)
        self._policy = AttentionPolicy(cli=attention, device=str(device), dtype=dtype)
        self._left_out = ""
        self._modes = self._chosen_modes()

    def _chosen_modes(self) -> tuple[str, ...]:
        """Return the modes in the order in which they are timed. Everything is compared with the first one."""
        wanted = _default_modes(self._device) if self._choice.modes is None else self._choice.modes
        if any(_WAYS[mode].is_replayed for mode in wanted):
            empty = self._opened.model.build_transformer(self._policy)
            refusals = replay_refusals(self._device, empty, list(empty.attention_layers()))
            self._left_out = "; ".join(refusals)
            if refusals and self._choice.modes is not None:
                raise ConfigError(
                    "\n".join(
                        [
                            f"--mode {','.join(wanted)}: the step cannot be replayed from a CUDA graph here:",
                            *(f"  {refusal}" for refusal in refusals),
                            f"  Use some of {','.join(mode for mode in MODES if not _WAYS[mode].is_replayed)}",
                        ]
                    )
                )
        return tuple(mode for mode in MODES if mode == "eager" or mode in wanted)

    def rows(self) -> Iterator[StepRow]:
        for quantization in dict.fromkeys(_WAYS[mode].quantization for mode in self._modes):
            yield from self._ours(quantization, [m for m in self._modes if _WAYS[m].quantization == quantization])
        if self._choice.with_diffusers:
            yield from self._theirs()

    def _ours(self, quantization: str, modes: Sequence[str]) -> Iterator[StepRow]:
        """Rows of one model of ours."""
        self._say(f"building ours, {modes[0]}")
        before = _memory_in_use(self._device)
        begin = time.perf_counter()
        model, rules = self._opened.build(self._policy, self._device, self._dtype, quantization)
        self._clock.synchronize()
        build_s = time.perf_counter() - begin
        products: Counter[str] = Counter()
        if rules is not None:
            rules.counter.start(lambda how: products.update([how]))
        if not self.operations:
            # Of one step: with what a generation computes for all of them at once, but for a prefix, which neither side
            # computes again.
            forward = _forward_of(model, self._inputs, is_planned=False)
            if self._inputs.with_prefix is not None:
                forward()
            self.operations = count_operations(model, forward)
        for mode in modes:
            name, way = f"ours, {mode}", _WAYS[mode]
            if way.is_replayed and self._left_out:
                yield StepRow(name, "left out", self._left_out)
                continue
            run: Callable[[], torch.Tensor] = _forward_of(model, self._inputs)
            if way.is_replayed:
                run = _replayed(model, self._inputs, self._device)
            row = self._row(name, run, before)
            detail = ", ".join([*_backends_of(model), *products])
            yield replace(row, build_s=build_s, detail=detail)
            # A graph holds its memory until then.
            del run
        del model
        release_device_memory(self._device)

    def _theirs(self) -> Iterator[StepRow]:
        if reason := why_no_twin(self._opened.transformer_class):
            yield StepRow("diffusers, eager", "left out", reason)
            return
        self._say("building diffusers'")
        before = _memory_in_use(self._device)
        begin = time.perf_counter()
        try:
            model = self._opened.build_theirs(self._device, self._dtype)
        except Exception as error:  # any exception of diffusers
            yield StepRow("diffusers, eager", "failed", raised_line(error))
            return
        build_s = time.perf_counter() - begin
        run = self._inputs.forward_of_theirs(model)
        yield replace(self._row("diffusers, eager", run, before), build_s=build_s)
        if self._device.type != "cpu":
            # On a CPU compiling takes longer than the step.
            try:
                compile_blocks(model)
            except Exception as error:  # any exception: not every class names its blocks
                yield StepRow("diffusers, compile", "failed", raised_line(error))
            else:
                yield replace(self._row("diffusers, compile", run, before), build_s=build_s)
        del model, run
        release_device_memory(self._device)

    def _row(self, name: str, run: Callable[[], torch.Tensor], memory_before: int | None) -> StepRow:
        self._say(name)
        try:
            return self._measured(name, run, memory_before)
        except Exception as error:  # any exception of a kernel, a compiler or a package
            return StepRow(name, "failed", raised_line(error))

    def _measured(self, name: str, run: Callable[[], torch.Tensor], memory_before: int | None) -> StepRow:
        clock, effort = self._clock, self._effort
        begin = time.perf_counter()
        found = run().float()
        clock.synchronize()
        first_s = time.perf_counter() - begin
        if self._expected is None:
            self._expected = found
        difference = float((found - self._expected).norm() / self._expected.norm())
        del found
        reasons = []
        if "fp8" not in name and not difference < _MAX_DIFFERENCE:
            reasons.append(f"the velocity differs by {difference:.2g} (relative L2) from the first row's")
        replayed = run if isinstance(run, ReplayedStep) else None
        if replayed is not None and not (replayed.difference or 0.0) < _MAX_DIFFERENCE:
            reasons.append(f"the replay differs by {replayed.difference:.2g} (relative L2) from the eager pass")
        rate = matmul_tflops(clock, self._dtype, effort.matmul_size)
        _reset_peak(self._device)
        samples = [clock.milliseconds(run)]
        peak = _peak(self._device, memory_before)
        if peak is not None and replayed is not None:
            # What a graph keeps between its kernels is free memory to torch once it is captured.
            peak += replayed.pool_bytes
        if samples[0] < _SLOW_MS:
            samples = [clock.milliseconds(run) for _ in range(effort.num_samples)]
        shares = time_shares(run, self._device)
        host = None
        if self._device.type == "cpu":
            # An operator's time holds what interrupts it, and the profiler's own.
            shares = shares.scaled_to(statistics.median(samples))
        else:
            host = min(clock.host_ms(run) for _ in range(3))
        return StepRow(
            name=name,
            state="wrong" if reasons else "measured",
            reason="; ".join(reasons),
            samples=tuple(samples),
            host_ms=host,
            shares=shares,
            matmul_tflops=rate,
            peak_bytes=peak,
            first_s=first_s,
            difference=difference,
        )


def _default_modes(device: torch.device) -> tuple[str, ...]:
    return ("eager",) if device.type == "cpu" else MODES


def _backends_of(model: DiffusionTransformer) -> list[str]:
    """Return the backends that self-attention was given."""
    layers = [layer for layer in model.attention_layers() if layer.layer.role == "self"]
    return list(dict.fromkeys(layer.decisions.possible[0][1].backend for layer in layers))


def _forward_of(
    model: DiffusionTransformer, inputs: StepInputs, *, is_planned: bool = True
) -> Callable[[], torch.Tensor]:
    """Forwards of one request. is_planned: whether the first one also computes what belongs to all steps, as in a
    generation."""
    state, steps = RequestCache(), steps_around(inputs.ours[1], _NUM_STEPS)
    plan_steps(state, steps if is_planned else ())
    step = steps[_NUM_STEPS // 2]

    def run() -> torch.Tensor:
        out: torch.Tensor = model(*inputs.ours, AttentionContext(step=step, state=state))
        return out

    return run


def _replayed(model: DiffusionTransformer, inputs: StepInputs, device: torch.device) -> ReplayedStep:
    """Return the same forwards, replayed from a CUDA graph."""
    latents, timestep, conditions = inputs.ours
    state, steps = RequestCache(), steps_around(timestep, _NUM_STEPS)
    plan_steps(state, steps)
    step = steps[_NUM_STEPS // 2]

    def make_pass(recorder: AttentionRecorder) -> ForwardPass:
        context = AttentionContext(step=step, state=state, recorder=recorder)
        return ForwardPass(latents, timestep, conditions, context)

    return ReplayedStep(CudaCapture(device), model, make_pass)


def _check_memory(opened: StepModel, device: torch.device, dtype: torch.dtype) -> None:
    """Raise DeviceMemoryError for weights that do not fit, naming the part that would."""
    needed = opened.num_parameters() * dtype.itemsize
    room = _memory_room(device)
    if room is None or needed <= room:
        return
    raise DeviceMemoryError(
        f"{opened.name}: expected room for {needed / 1e9:.1f} GB of weights in {str(dtype).removeprefix('torch.')}, "
        f"{device} has {room / 1e9:.1f} GB; --layers 4 builds a part of its {opened.num_blocks} blocks"
    )


def _memory_room(device: torch.device) -> int | None:
    """Bytes: what is free on a GPU, all that a CPU has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device.type == "cpu" else None
    except (AttributeError, ValueError, OSError):
        return None


def _memory_in_use(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device, before: int | None) -> int | None:
    return None if before is None else torch.cuda.max_memory_allocated(device) - before
