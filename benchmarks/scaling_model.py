"""A model of how one denoising step gets shorter with more processes, from measurements of one and two GPUs.

    t = attention x (its share of heads) / ring + others / (sequence x tensor) + norms / sequence + fixed + exchanges

A step on one GPU is a committed measurement, of which attention takes its operations at an H200's rate, and norms (with
modulation, gates and residuals, which a tensor group does not share) their bytes at its bandwidth; attention grows with
the square of the tokens, all else with the tokens. `fixed` (text, timesteps, gaps between kernels) is the same for
every layer. Of an exchange that overlaps with attention a small part is exposed, and the rest slows down attention,
since both run on the same multiprocessors. A step takes no less than the host needs to launch its kernels.

Constants are fitted to three rows and a profile, each to what it is about (`fit`); every other row is predicted.
Between hosts nothing was measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.communication_volume import ForwardShape, communication_volume

RESULTS = Path(__file__).parent / "results"
GPUS_PER_HOST = 8
# Assumed: a collective's start within a host, in ms, and one 400 Gb/s link per GPU between hosts, in bytes per ms.
LATENCY_MS = 0.02
BETWEEN_HOSTS = 50e6
# Bytes per ms that an H200 reads and writes, and how often a block's norms, modulation, gates and residuals read or
# write the channels of a token: three fused kernels that read two tensors and write two.
MEMORY_BANDWIDTH = 4.3e9
NORM_PASSES = 12
# Of a request of `shapes` (12 steps, 29 frames), counted: its exchanges between two processes, of which 160
# are of rows of the decoder's convolutions. Assumed: what the host takes to launch one with the copies around it.
GANG_STEPS, GANG_EXCHANGES, GANG_EXCHANGE_S = 12, 221, 2e-4
POLLS = (0.0002, 1.25, 0.02)
# From the launcher's call of torch's elastic launcher until its processes run, and what opening a communicator adds.
ELASTIC_S, COMMUNICATOR_S = 0.6, 0.4


@dataclass(frozen=True)
class Model:
    """A transformer whose step on one GPU is measured. num_tokens: of the grid, in that measurement; num_text_tokens:
    in self-attention. milliseconds: of one forward, by quantization. sums_per_layer: all-reduces of a tensor group,
    each of all tokens' channels (width)."""

    name: str
    num_layers: int
    num_heads: int
    head_dim: int
    num_tokens: int
    milliseconds: Mapping[str, float]
    sums_per_layer: float
    width: int
    num_text_tokens: int = 0


@dataclass(frozen=True)
class Degrees:
    """branches: 2 where guidance's branches run on two groups. num_head_groups: see AttentionPolicy."""

    ulysses: int = 1
    ring: int = 1
    branches: int = 1
    tensor: int = 1
    num_head_groups: int = 1

    @property
    def num_processes(self) -> int:
        return self.ulysses * self.ring * self.branches * self.tensor


@dataclass(frozen=True)
class Constants:
    """fixed_ms, host_ms: per layer. Bandwidths in bytes per ms, of what a process sends. exposed: the share of an
    overlapping all-to-all during which nothing else runs; slowed: what attention loses per ms of an exchange beside
    it."""

    attention_rate: float
    fixed_ms: float
    host_ms: float
    all_to_all: float
    all_reduce: float
    exposed: float
    slowed: float


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of a step by cause, and what bounds it."""

    attention: float
    others: float
    norms: float
    fixed: float
    exchanges: float
    host: float

    @property
    def device(self) -> float:
        return self.attention + self.others + self.norms + self.fixed + self.exchanges

    @property
    def total(self) -> float:
        return max(self.device, self.host)

    @property
    def bound(self) -> str:
        """The largest cause, or `host` where the GPUs wait for launches."""
        if self.host > self.device:
            return "host"
        causes = ("attention", "others", "norms", "fixed", "exchanges")
        return max(causes, key=lambda cause: float(getattr(self, cause)))

    def times(self, passes: int) -> Prediction:
        return Prediction(*(passes * getattr(self, name) for name in self.__dataclass_fields__))


def results_of(name: str) -> dict[str, Any]:
    """Return a committed document of benchmarks/results."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def rows_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a result by their names."""
    return {row["name"]: row for row in results_of(name)["rows"]}


def models() -> dict[str, Model]:
    """Return the models whose forward on one H200 is committed."""
    wan, a14b = rows_of("parallel_gpu")["one GPU"]["ms"], rows_of("tensor_parallel_gpu")
    h3 = {row["name"]: row["median_ms"] for row in results_of("minimax_h3_gpu")["forward"]["rows"]}
    flux2 = next(row for row in results_of("families_gpu")["rows"] if row["step"].startswith("FLUX.2 [dev]"))
    of_a14b = {"none": a14b["one GPU"]["ms"], "fp8": a14b["one GPU, fp8"]["ms"]}
    found = (
        Model("wan2.1-1.3b", 30, 12, 128, 32760, {"none": wan}, 3, 1536),
        Model("wan2.2-t2v-a14b", 40, 40, 128, 32760, of_a14b, 3, 5120),
        Model("minimax-h3", 50, 56, 128, 37296, {"none": h3["ours, eager"], "fp8": h3["ours, fp8"]}, 2, 5376),
        # 8 double blocks with two sums of two streams, 48 single ones with one sum.
        Model("flux.2-dev", 56, 48, 128, 4096, {"none": flux2["ours_ms"]}, (8 * 2 + 48) / 56, 6144, 512),
    )
    return {model.name: model for model in found}


def attention_operations(model: Model, num_tokens: int) -> float:
    seq = num_tokens + model.num_text_tokens
    return 4.0 * model.num_layers * model.num_heads * model.head_dim * seq**2


def fit() -> Constants:
    """Fit the constants: attention's rate to the profile of MiniMax-H3's forward; fixed and all_to_all to `ulysses 2`,
    exposed and slowed to `ulysses 2, 2 head groups` (Wan 1.3B); all_reduce to `tensor parallel 2` (Wan 14B). host_ms is
    what launches the kernels of a block of Wan 14B, of a run on an H100."""
    rows, forward = rows_of("parallel_gpu"), results_of("minimax_h3_gpu")["forward"]
    h3 = models()["minimax-h3"]
    attention = attention_operations(h3, h3.num_tokens) / forward["rows"][0]["shares"]["attention"]
    one, two, grouped = rows["one GPU"]["ms"], rows["ulysses 2"], rows["ulysses 2, 2 head groups"]
    alone = two["ms"] - two["exposed_ms"]
    fixed = one - 2 * (one - alone)
    tensor = rows_of("tensor_parallel_gpu")["tensor parallel 2"]
    a14b = models()["wan2.2-t2v-a14b"]
    on_h100 = results_of("bench_step")["on_h100"][0]
    return Constants(
        attention_rate=attention,
        fixed_ms=fixed / 30,
        host_ms=on_h100["rows"][0]["host_ms"] / on_h100["num_blocks"],
        all_to_all=two["sent_bytes"] / two["nccl_ms"],
        all_reduce=_reduced_bytes(a14b, a14b.num_tokens, 2) / tensor["nccl_ms"],
        exposed=grouped["exposed_ms"] / two["nccl_ms"],
        slowed=(grouped["ms"] - grouped["exposed_ms"] - alone) / (grouped["nccl_ms"] - grouped["exposed_ms"]),
    )


def _reduced_bytes(model: Model, num_tokens: float, size: int) -> float:
    """Bytes that a process sends for the sums of one forward in a group of `size` (a ring all-reduce)."""
    numbers = model.sums_per_layer * model.num_layers * (num_tokens + model.num_text_tokens) * model.width
    return 2 * numbers * 2 * (size - 1) / size


def predict(
    model: Model,
    degrees: Degrees,
    constants: Constants,
    *,
    num_tokens: int | None = None,
    quantization: str = "none",
    is_guided: bool = False,
    one_ms: float | None = None,
) -> Prediction:
    """Predict a forward pass, or a guided step of two. num_tokens: of the grid, the model's own by default. one_ms: of
    a forward of the model's own size on one GPU, where it is not the committed one."""
    tokens = model.num_tokens if num_tokens is None else num_tokens
    whole = model.milliseconds[quantization] if one_ms is None else one_ms
    fixed = constants.fixed_ms * model.num_layers
    own_attention = min(attention_operations(model, model.num_tokens) / constants.attention_rate, 0.8 * (whole - fixed))
    seq = model.num_tokens + model.num_text_tokens
    own_norms = NORM_PASSES * 2.0 * seq * model.width * model.num_layers / MEMORY_BANDWIDTH
    longer = tokens / model.num_tokens
    attention, norms = own_attention * longer**2, own_norms * longer
    others = (whole - fixed - own_attention - own_norms) * longer
    sequence = degrees.ulysses * degrees.ring
    heads = model.num_heads / degrees.tensor
    # Heads that do not divide evenly: all wait for who has most.
    share = math.ceil(heads / degrees.ulysses) / model.num_heads
    attention = attention * share / degrees.ring
    exchanges = _exchange_ms(model, degrees, constants, tokens, attention)
    found = Prediction(
        attention=attention,
        others=others / (sequence * degrees.tensor),
        norms=norms / sequence,
        fixed=fixed,
        exchanges=exchanges,
        host=constants.host_ms * model.num_layers + _num_exchanges(model, degrees) * LATENCY_MS,
    )
    passes = 2 // degrees.branches if is_guided else 1
    return found.times(passes)


def _num_exchanges(model: Model, degrees: Degrees) -> float:
    of_heads = 2 * degrees.num_head_groups if degrees.ulysses > 1 else 0
    of_keys = 2 * (degrees.ring - 1)
    of_weights = model.sums_per_layer if degrees.tensor > 1 else 0
    return model.num_layers * (of_heads + of_keys + of_weights)


def _exchange_ms(model: Model, degrees: Degrees, constants: Constants, num_tokens: int, attention: float) -> float:
    """Exposed, and what attention loses beside what is hidden."""

    def sent(ulysses: int, ring: int) -> float:
        shape = ForwardShape(
            num_grid_tokens=num_tokens,
            num_layers=model.num_layers,
            num_heads=model.num_heads // degrees.tensor,
            head_dim=model.head_dim,
            num_text_tokens=model.num_text_tokens,
        )
        return float(communication_volume(shape, ulysses=ulysses, ring=ring).total)

    is_wide = degrees.num_processes > GPUS_PER_HOST
    by_heads = sent(degrees.ulysses, 1) / degrees.ring if degrees.ulysses > 1 else 0.0
    by_keys = sent(degrees.ulysses, degrees.ring) - by_heads if degrees.ring > 1 else 0.0
    inside = constants.all_to_all if degrees.ulysses <= GPUS_PER_HOST else BETWEEN_HOSTS
    heads_ms = by_heads / inside
    keys_ms = by_keys / (BETWEEN_HOSTS if is_wide else constants.all_to_all)
    exposed = constants.exposed if degrees.num_head_groups > 1 else 1.0
    total = heads_ms * (exposed + (1 - exposed) * constants.slowed)
    # A ring waits for what its blocks' attention does not hide.
    hidden = min(keys_ms, attention)
    total += keys_ms - hidden + hidden * constants.slowed
    total += _reduced_bytes(model, num_tokens / (degrees.ulysses * degrees.ring), degrees.tensor) / constants.all_reduce
    latency = 0 if is_wide and degrees.ulysses == 1 else LATENCY_MS
    return total + _num_exchanges(model, degrees) * latency


def decode_seconds() -> dict[tuple[str, str], float]:
    """Return the seconds of decoding on one GPU, by model and size; 720p has 2.3 times the pixels of 480p."""
    wan = results_of("decode_gpu")["times"]["channels first"]["median_ms"] / 1e3
    h3 = results_of("minimax_h3_decode_gpu")["ours"][0]["frames_as_bytes"]["seconds"]
    return {
        ("wan2.1-1.3b", "480p"): wan,
        ("wan2.1-1.3b", "720p"): wan * 720 * 1280 / (480 * 832),
        ("minimax-h3", "5 s"): h3,
    }


@dataclass(frozen=True)
class Program:
    """A committed measurement of two processes that is no step, or what is said of more. topic: in the name of a row
    that measures it. measured: None where no run was."""

    name: str
    topic: str
    num_processes: int
    unit: str
    predicted: float
    measured: float | None = None


def _late(seconds: float, first: float, longer: float, longest: float) -> float:
    """Seconds by which a poll finds late what happens after `seconds` (parallel/run_store.py)."""
    now, pause = 0.0, first
    while now < seconds:
        now, pause = now + pause, min(longer * pause, longest)
    return now - seconds


def programs(num: int) -> list[Program]:
    """Return what is predicted of `num` processes that are no step: replicas, a gang of shapes, and the
    start; with what two of them took, where `num` is 2.

    A start: the launcher imports torch before its ranks begin to, and the ranks' first collectives open NCCL. A gang
    has no CUDA graphs, each of its exchanges is launched by the host, and its followers poll for the request and for
    every step of rank 0's.
    """
    found: list[Program] = []
    replicas = results_of("replicas_gpu")
    for name, label in (("embedded", "shapes"), ("flux", "FLUX.1 [dev]")):
        one, several = replicas[name]["rows"][:2]
        made, unit = num * one["requests_per_minute"], "requests per minute"
        measured = several["requests_per_minute"] if num == 2 else None
        found.append(Program(f"{num} replicas, {label}", label, num, unit, made, measured))
    one, _, gang = replicas["embedded"]["rows"]
    seconds = next(row["stages"] for row in results_of("cuda_graphs_gpu")["rows"] if row["case"] == "shapes")
    denoise_off = seconds["off"]["denoise"]
    seconds = {mode: stages["denoise"] + stages["decode"] for mode, stages in seconds.items()}
    # What was measured polled from 2 ms on, twice as long each time, 50 ms at most.
    first, longer, longest = (0.002, 2.0, 0.05) if num == 2 else POLLS
    off_step = denoise_off / GANG_STEPS
    late = GANG_STEPS * _late(off_step, first, longer, longest) + longest / 2
    made = one["seconds_per_request"] + seconds["off"] - seconds["auto"] + GANG_EXCHANGES * GANG_EXCHANGE_S + late
    measured = gang["seconds_per_request"] if num == 2 else None
    found.append(Program(f"a gang of {num}, shapes", "shapes", num, "s", made, measured))
    start = results_of("start_gpu")["one_and_two_gpus"]
    warm = {run["num_processes"]: run for run in start["runs"] if run["kernel_cache"] == "warm"}
    alone = warm[1]["seconds_to_first_step"]
    launcher = warm[1]["parts"]["interpreter, command line, launcher"]
    made = alone + launcher + ELASTIC_S + (1 + math.log2(num)) * COMMUNICATOR_S
    measured = warm[2]["seconds_to_first_step"] if num == 2 else None
    found.append(
        Program(f"start to first step, {num} processes, warm", "start to first step", num, "s", made, measured)
    )
    return found
