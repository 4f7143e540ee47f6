"""CUDA graphs around a transformer: what is captured, when a graph is made anew, what is refused, what is counted.

On the CPU, where recorded operators stand for a graph (tests/recorded_capture.py); on a GPU: test_cuda_graphs_gpu.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from recorded_capture import RecordedCapture
from torch import nn

from diffusion_runtime.attention import (
    AttentionCall,
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    AttentionResult,
    Availability,
    Backend,
    Capability,
    LocalAttention,
    RequestCache,
    StepInfo,
    TokenLayout,
    attention,
    register_backend,
    unregister_backend,
)
from diffusion_runtime.attention.backends.fp8_attn import Fp8Backend
from diffusion_runtime.attention.forward_plans import ForwardPlan, PlanLimits
from diffusion_runtime.core.block_stack import BlockRunner
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.denoising.cuda_graphs import forward_graphs
from diffusion_runtime.denoising.cuda_graphs.captured_forward import ForwardPass
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import CAPTURED, FIRST, NEW_REQUEST, TIMED, ForwardGraphs
from diffusion_runtime.kernels.implementation import VARIABLE
from diffusion_runtime.layers.eight_bit_linear import ProductCounter
from diffusion_runtime.layers.prompt_cache import cached_for_prompt
from diffusion_runtime.layers.stored_linear import PackedRows, StoredLinear
from diffusion_runtime.report.attention_report import AttentionRecorder, GraphReplays
from diffusion_runtime.weights.stored_formats.gguf import GgufBlocks
from diffusion_runtime.weights.stored_formats.plain_numbers import PlainNumbers

GRID = (2, 4, 4)


@dataclass(frozen=True)
class Inputs:
    """text: [batch, tokens, dim]."""

    text: torch.Tensor


class Model(nn.Module):
    """Two layers of self-attention; what it makes of the text is kept for the request."""

    def __init__(self, **choices: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        policy = AttentionPolicy(config=AttentionConfig.parse(choices or None))
        self.qkv = nn.Linear(32, 96)
        self.text = nn.Linear(32, 32)
        self.attention = nn.ModuleList(
            LocalAttention(2, 16, layer=LayerInfo(index, 2, "self", f"{index}"), policy=policy) for index in range(2)
        )
        self.projections = 0

    def forward(
        self, x: torch.Tensor, timestep: torch.Tensor, inputs: Inputs, context: AttentionContext
    ) -> torch.Tensor:
        def project() -> torch.Tensor:
            self.projections += 1
            return self.text(inputs.text).mean(1, keepdim=True)

        x = x + cached_for_prompt("text", inputs.text, context, project) + timestep[:, None, None] / 1000
        now = context.with_layout(TokenLayout((x.shape[1] // 16, 4, 4)))
        for layer in self.attention:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
            x = x + layer(q, k, v, now).flatten(2)
        return x


class Requests:
    """Requests of one model, eager or with graphs. capture: what the graphs are made by."""

    def __init__(self, model: Model, **share: float) -> None:
        self.model = model
        self.capture = RecordedCapture(**share)
        self.graphs = ForwardGraphs(self.capture)

    @torch.inference_mode()
    def run(
        self,
        *,
        seed: int = 0,
        num_steps: int = 6,
        num_tokens: int = 32,
        with_graphs: bool = True,
        runner: BlockRunner | None = None,
        refusal: str | None = None,
        eager_reason: str | None = None,
    ) -> tuple[list[torch.Tensor], AttentionRecorder]:
        generator = torch.Generator().manual_seed(seed)
        inputs = Inputs(torch.randn(1, 3, 32, generator=generator))
        state, recorder = RequestCache(), AttentionRecorder()
        forward = self.graphs.of_generation(self.model, recorder, refusal=refusal, eager_reason=lambda: eager_reason)
        made = []
        for index in range(num_steps):
            step = StepInfo(index, num_steps, timestep=1000.0 - index)
            context = AttentionContext(
                step=step, state=state, recorder=recorder, block_runner=BlockRunner() if runner is None else runner
            )
            latents = torch.randn(1, num_tokens, 32, generator=generator)
            given = ForwardPass(latents, torch.tensor([1000.0 - index]), inputs, context)
            made.append(forward(given) if with_graphs else given.run(self.model))
        if with_graphs:
            forward.report()
        return made, recorder

    def check(self, **values: Any) -> GraphReplays:
        """What was replayed of a request, whose numbers and counts are those of an eager run."""
        found, recorder = self.run(**values)
        expected, eager = self.run(**{**values, "with_graphs": False})
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(ours, theirs), index
        report = recorder.report()
        assert (report.rows, report.notes) == (eager.report().rows, eager.report().notes)
        assert report.graphs is not None
        assert report.graphs.num_forwards == len(found)
        assert report.graphs.num_replayed + sum(report.graphs.eager.values()) == len(found)
        return report.graphs


def test_the_second_pass_is_timed_the_third_captured_and_later_requests_begin_with_one_eager_pass() -> None:
    requests = Requests(Model())
    graphs = requests.check()
    assert graphs.eager == {FIRST: 1, TIMED: 1, CAPTURED: 1}
    assert (graphs.num_replayed, graphs.num_graphs, graphs.pool_bytes) == (3, 1, 1000)
    assert requests.capture.calls == ["timed", "warm up", "capture", "replay", "replay", "replay"]
    assert requests.check(seed=1).eager == {NEW_REQUEST: 1}
    # Another number of tokens is another graph, and the first is still there.
    assert requests.check(num_tokens=48).eager == {FIRST: 1, TIMED: 1, CAPTURED: 1}
    again = requests.check(seed=2)
    assert (again.num_replayed, again.num_graphs) == (5, 2)
    assert str(again) == (
        "cuda graphs: 5 of 6 forward passes replayed from a CUDA graph (2 graphs held in 0.000 GB); "
        f"run eagerly: 1 {NEW_REQUEST}"
    )


def test_what_the_device_bounds_is_not_captured() -> None:
    requests = Requests(Model(), host_share=0.79)
    graphs = requests.check()
    assert graphs.eager == {FIRST: 1, TIMED: 1, "not launch-bound (the host takes 7.9 of 10.0 ms)": 4}
    assert requests.capture.calls == ["timed"]
    assert requests.check(seed=1).eager == {"not launch-bound (the host takes 7.9 of 10.0 ms)": 6}


def test_without_the_probe_every_pass_is_captured_at_its_second_run() -> None:
    requests = Requests(Model(), host_share=0.1)
    requests.graphs.is_probed = False
    assert requests.check().eager == {FIRST: 1, CAPTURED: 1}


def test_weights_that_are_overwritten_are_read_and_weights_that_move_are_captured_anew() -> None:
    model = Model()
    requests = Requests(model)
    requests.check()
    with torch.no_grad():
        model.qkv.weight.mul_(0.5)
    assert requests.check(seed=1).eager == {NEW_REQUEST: 1}
    model.qkv.weight = nn.Parameter(model.qkv.weight.detach() * 2)
    graphs = requests.check(seed=2)
    assert graphs.eager == {FIRST: 1, TIMED: 1, CAPTURED: 1}
    assert graphs.num_graphs == 1


def test_blocks_of_another_layout_at_the_same_address_are_captured_anew() -> None:
    """As the allocator may place them when LoRA files are switched twice."""

    class BlocksModel(Model):
        def __init__(self) -> None:
            super().__init__()
            self.text = StoredLinear(32, 32, bias=False, counter=ProductCounter())  # type: ignore[assignment]

    def rows(kind: str) -> PackedRows:
        numbers = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
        if kind == "F32":
            return PackedRows(PlainNumbers(torch.float32), (numbers,))
        return PackedRows(GgufBlocks(kind), (torch.randint(0, 50, (16, 34), dtype=torch.uint8),))

    model = BlocksModel()
    layer = model.text
    assert isinstance(layer, StoredLinear)
    layer.hold([rows("F32"), rows("Q8_0")], torch.device("cpu"))
    place = layer.weight.detach()
    requests = Requests(model)
    # In the graph, as what is kept for a request is not.
    model.attention[0].register_forward_hook(lambda *given: given[2] + layer(torch.ones(32)).mean())
    requests.check()
    layer.hold([rows("Q8_0"), rows("F32")], torch.device("cpu"))
    place.copy_(layer.weight)
    layer.weight = nn.Parameter(place, requires_grad=False)
    assert requests.check(seed=1).eager == {FIRST: 1, TIMED: 1, CAPTURED: 1}


def test_what_a_caller_sets_around_a_generation_is_a_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(Model())
    requests.check()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert requests.check(seed=1).eager[FIRST] == 1
    assert requests.check(seed=2).eager == {NEW_REQUEST: 1}
    monkeypatch.setenv(VARIABLE, "reference")
    assert requests.check(seed=3).eager[FIRST] == 1


def test_graphs_are_bounded_and_the_one_unused_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_graphs, "MAX_FORMS", 2)
    requests = Requests(Model())
    for num_tokens in (16, 32, 16, 48):
        graphs = requests.check(num_tokens=num_tokens)
    assert graphs.num_graphs == 2
    assert requests.check(num_tokens=16).eager == {NEW_REQUEST: 1}
    assert requests.check(num_tokens=32).eager == {FIRST: 1, TIMED: 1, CAPTURED: 1}


def test_a_capture_that_fails_is_said_and_the_pass_counts_once() -> None:
    requests = Requests(Model())
    requests.capture.failure = RuntimeError("operation not permitted when stream is capturing\nof the driver")
    reason = "the capture failed: operation not permitted when stream is capturing"
    assert requests.check().eager == {FIRST: 1, TIMED: 1, reason: 4}
    assert requests.capture.calls == ["timed", "warm up", "capture"]


def test_step_caches_and_reasons_of_the_caller_run_eagerly() -> None:
    class Skipping(BlockRunner):
        """Of a step cache."""

    requests = Requests(Model())
    reason = "a step cache or a measurement decides within the forward pass"
    assert requests.check(runner=Skipping()).eager == {reason: 6}
    assert requests.check(refusal="several processes run the model together").eager == {
        "several processes run the model together": 6
    }
    paused = requests.check(eager_reason="a profile records the step")
    assert paused.eager == {"a profile records the step": 6}
    assert requests.capture.calls == []
    assert requests.check().num_replayed == 3


def test_a_schedule_of_backends_and_a_dense_schedule_are_graphs_of_their_own() -> None:
    rule = {"default": "torch_sdpa", "schedule": [{"steps": "0-3", "backend": "reference"}]}
    requests = Requests(Model(**rule))
    graphs = requests.check(num_steps=9)
    assert graphs.eager == {FIRST: 2, TIMED: 2, CAPTURED: 2}
    assert graphs.num_graphs == 2
    # What the first kind left for the request is all that the second needs.
    assert requests.check(num_steps=9, seed=1).eager == {NEW_REQUEST: 1}
    tiles = {"tile_size": [2, 2, 2], "window": [1, 1, 1], "skip_time_steps": 4}
    requests = Requests(Model(default={"backend": "sliding_tile_attn", "extra": tiles}))
    graphs = requests.check(num_steps=9)
    # What serves a layer is known after the first call, so the first step is of a kind of its own.
    assert graphs.num_graphs == 2
    assert requests.check(num_steps=9, seed=1).num_replayed == 7


@pytest.mark.parametrize(
    ("spec", "num_replayed", "reason"),
    [
        ({"backend": "video_sparse_attn", "sparsity": 0.5, "tile_size": [4, 4, 4]}, 5, None),
        ({"backend": "vmoba_attn", "spatial_chunk_size": [2, 2], "st_chunk_size": [1, 2, 2]}, 5, None),
        (
            {"backend": "sparse_video_gen_2_attn", "svg2_num_q_centroids": 3, "svg2_num_k_centroids": 4},
            0,
            "sparse_video_gen_2_attn: its clustering starts from the clusters of the step before",
        ),
        ({"backend": "measured", "measure": False}, 0, "measured: which backend serves a call is found at the call"),
    ],
    ids=lambda value: value["backend"] if isinstance(value, dict) else "",
)
def test_sparse_backends_are_replayed_or_say_why_not(
    spec: dict[str, Any], num_replayed: int, reason: str | None
) -> None:
    name, *extra = spec.items()
    requests = Requests(Model(default={**dict([name]), "extra": dict(extra)}))
    first = requests.check(num_tokens=128)
    second = requests.check(seed=1, num_tokens=128)
    assert second.num_replayed == num_replayed, second
    if reason is not None:
        assert any(reason in said for said in first.eager), first


@torch.inference_mode()
def test_8_bit_attention_quantises_anew_in_a_replay() -> None:
    """Of padded keys too, which are cut before scales and means are made."""
    layout = TokenLayout((1, 4, 10), num_suffix_tokens=8, valid_lengths=(3,))
    q, k, v = (torch.randn(1, 48, 2, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))

    def attend() -> torch.Tensor:
        return attention(q, k, v, layout=layout, backend="fp8_attn")

    replay = RecordedCapture().capture(attend)
    for x in (q, k, v):
        x.mul_(3).add_(x.roll(1, dims=1))
    assert torch.equal(replay(), attend())
    assert Fp8Backend.not_replayed is None


@dataclass(frozen=True)
class SigmaPlan:
    """A number of the step, on the device."""

    number: torch.Tensor


class CountingBackend(Backend):
    """Scales its output by a number of the step, which it reads from a tensor."""

    name = "counting_attn"
    summary = "for tests"
    capability = Capability(features=frozenset({"key_padding"}))
    not_replayed = None
    prepares = True
    reserved: ClassVar[list[PlanLimits]] = []
    prepared: ClassVar[list[tuple[int, bool]]] = []
    runs: ClassVar[list[int]] = []

    def probe(self, hardware: Hardware) -> Availability:
        return Availability(hardware.torch_version)

    def reserve(self, limits: PlanLimits) -> SigmaPlan:
        self.reserved.append(limits)
        return SigmaPlan(torch.zeros(1, dtype=limits.dtype, device=limits.device))

    def prepare(self, plan: ForwardPlan, into: SigmaPlan | None = None) -> SigmaPlan:
        self.prepared.append((plan.step.index, into is not None))
        if into is None:
            into = SigmaPlan(torch.zeros(1, dtype=plan.limits.dtype, device=plan.limits.device))
        into.number.fill_(1.0 + plan.step.index)
        return into

    def run(self, call: AttentionCall) -> AttentionResult:
        self.runs.append(call.step.index)
        out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (call.q, call.k, call.v)))
        return AttentionResult(out.transpose(1, 2) * call.prepared.number, None, "counted")


@pytest.fixture
def counting() -> Iterator[type[CountingBackend]]:
    register_backend(CountingBackend)
    for seen in (CountingBackend.reserved, CountingBackend.prepared, CountingBackend.runs):
        seen.clear()
    yield CountingBackend
    unregister_backend(CountingBackend.name)


def test_a_plan_is_prepared_once_per_pass_in_buffers_that_a_graph_reads(counting: type[CountingBackend]) -> None:
    requests = Requests(Model(default="counting_attn"))
    found, _ = requests.run()
    # Once per pass for both layers: in passes that run eagerly a plan of its own, from the capture on in its buffers.
    assert counting.prepared == [(0, False), (1, False), (2, True), (3, True), (4, True), (5, True)]
    assert len(counting.reserved) == 1
    assert counting.reserved[0].layout == TokenLayout(GRID)
    # Two layers: of the eager passes, and of the capture, which computes nothing that counts.
    assert counting.runs == [0, 0, 1, 1, 2, 2, 2, 2]
    expected, _ = requests.run(with_graphs=False)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert len({float(velocity.norm()) for velocity in found}) == 6


def test_a_backend_that_declares_nothing_is_not_captured(
    counting: type[CountingBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "not_replayed", Backend.not_replayed)
    graphs = Requests(Model(default="counting_attn")).check()
    assert graphs.eager == {f"counting_attn: {Backend.not_replayed}": 6}
    (layer, _) = Model(default="counting_attn").attention
    assert layer.decisions.replay_refusals() == ("counting_attn: it does not declare that its calls can be replayed",)


def test_state_that_a_step_changes_is_not_replayed() -> None:
    class Counting(Model):
        """Keeps the number of its passes."""

        def forward(self, x: Any, timestep: Any, inputs: Any, context: AttentionContext) -> torch.Tensor:
            scope = context.state.of_branch(context.step)
            count = scope.get_or_create("count", lambda: 0)
            scope.put("count", count + 1)
            return super().forward(x, timestep, inputs, context) * count

    graphs = Requests(Counting()).check()
    assert graphs.eager["it keeps count from step to step"] == 4


def test_values_of_another_form_in_a_request_make_the_graph_anew() -> None:
    class Varying(Model):
        """Keeps tokens whose number is another in each request, whatever the inputs are."""

        length = 0

        def forward(self, x: Any, timestep: Any, inputs: Any, context: AttentionContext) -> torch.Tensor:
            kept = context.state.request.get_or_create(("varying", "tokens"), lambda: x.new_ones(self.length))
            return super().forward(x, timestep, inputs, context) * kept.sum()

    requests = Requests(Varying())
    counts = []
    for length in (1, 2, 3, 4):
        Varying.length = length
        counts.append(requests.check(seed=length).eager)
    assert counts[1] == counts[2] == {NEW_REQUEST: 1, CAPTURED: 1}
    misfit = "what requests keep does not fit one graph: varying tokens has another form"
    assert counts[3] == {NEW_REQUEST: 1, misfit: 5}


def test_a_request_leaves_nothing_in_a_graph_but_its_numbers() -> None:
    requests = Requests(Model())
    requests.check()
    before = requests.model.projections
    requests.run(seed=1)
    # The text of a request is projected in its first pass alone.
    assert requests.model.projections == before + 1
    (form,) = requests.graphs._forms.values()
    assert form.graph is not None
    assert form.graph._bound[0]() is None, "the inputs of a request that is over"


def test_replays_of_a_transformer_keep_step_and_branch_apart() -> None:
    recorder = AttentionRecorder()
    with recorder.taped() as tape:
        recorder.record(LayerInfo(3, 4), StepInfo(1, 9), backend="a", implementation="b", source="c", reason="d")
        recorder.record_product("8-bit products")
        recorder.note("a note")
    assert recorder.report().num_calls == 0
    for index in (4, 5):
        recorder.play(tape, StepInfo(index, 9))
    report = recorder.report()
    assert [(row.layers, row.steps, row.count) for row in report.rows] == [("3", "4-5", 2)]
    assert [(row.implementation, row.count) for row in report.products] == [("8-bit products", 2)]
    assert report.notes == ("a note",)
    assert dataclasses.asdict(GraphReplays(1, 0, 0, 0)) == {
        "num_forwards": 1,
        "num_replayed": 0,
        "num_graphs": 0,
        "pool_bytes": 0,
        "eager": {},
        "unit": "forward passes",
    }
