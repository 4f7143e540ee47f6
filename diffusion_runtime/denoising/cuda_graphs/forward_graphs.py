"""Forward graphs: which forward passes of a pipeline are replayed, by what decides their kernels, and what is counted.

A pass that the host launches slower than the device computes is launch-bound: the second one of its kind is timed, and
the third is captured where the host took more than LAUNCH_BOUND of the device's time. Later requests find the graph:
their first pass runs eagerly and leaves what it keeps for the request, which is copied to where the graph reads it.

Processes that share a sequence capture and replay the same passes: a graph holds the exchanges between them. They agree
where they may decide otherwise, on times, failures and addresses, and nowhere else: a replay within a request does not
wait.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from diffusion_runtime.attention.backends.registry import num_changes
from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.attention.fixed_state import form_of
from diffusion_runtime.attention.force import current_force
from diffusion_runtime.attention.forward_plans import WatchedPlans
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.core.block_stack import BlockRunner
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.cuda_graphs.capture import Capture, ForwardTime
from diffusion_runtime.denoising.cuda_graphs.captured_forward import CapturedForward, ForwardPass, NotReplayable
from diffusion_runtime.kernels.implementation import fusion_is_on
from diffusion_runtime.layers.modulation_rows import plan_key
from diffusion_runtime.layers.stored_linear import StoredLinear
from diffusion_runtime.parallel.collectives import RankGroup, agreed_refusal, reasons_of
from diffusion_runtime.report.attention_report import AttentionRecorder, GraphReplays

# Host time of a forward pass over its device time, above which launches bound it.
LAUNCH_BOUND = 0.8
# Kinds of forward passes that are known at a time; the one that was not run for longest makes room.
MAX_FORMS = 8
# A graph whose values take another form in so many requests in a row is not made again.
_MAX_MISFITS = 3

FIRST = "the first of its kind"
TIMED = "the second of its kind, which is timed"
CAPTURED = "captured"
NEW_REQUEST = "the first of its request"


class _Form:
    """Forward passes of one kind: the same kernels on tensors of the same sizes."""

    def __init__(self) -> None:
        self.branch = ""
        self.num_passes = 0
        self.time: ForwardTime | None = None
        self.graph: CapturedForward | None = None
        self.refusal: str | None = None
        self.num_misfits = 0
        self.holds_cache = False
        self.misfit_of: weakref.ref[RequestCache] | None = None


class ForwardGraphs:
    """The CUDA graphs of one pipeline. is_probed: whether only launch-bound passes are captured, rather than all.
    shared_refusal: why none is that several processes share."""

    def __init__(self, capture: Capture, *, is_probed: bool = True, shared_refusal: str | None = None) -> None:
        self.capture = capture
        self.is_probed = is_probed
        self.shared_refusal = shared_refusal
        self._forms: OrderedDict[Hashable, _Form] = OrderedDict()
        self._weights: Hashable = None

    @property
    def num_graphs(self) -> int:
        return sum(form.graph is not None for form in self._forms.values())

    def of_generation(
        self,
        model: nn.Module,
        recorder: AttentionRecorder,
        *,
        read: Callable[[Any], Hashable] = lambda inputs: inputs,
        refusal: str | None = None,
        group: RankGroup | None = None,
        eager_reason: Callable[[], str | None] = lambda: None,
    ) -> GraphedForward:
        """Return the model's forward passes in one generation. read: the inputs without what the model does not read.
        refusal: why none of them can be replayed. group: the processes that share the sequence, all of which make the
        same calls; None for one. eager_reason: why no pass is captured or replayed now, asked at every pass; None for
        no reason.

        Weights that lie elsewhere than before end all graphs; weights that were overwritten are read by later replays.
        """
        weights = (
            tuple((x.data_ptr(), x.dtype, x.shape) for x in (*model.parameters(), *model.buffers())),
            # The same bytes at the same address may be other blocks, where a LoRA was switched in between.
            tuple(layer.layout for layer in model.modules() if isinstance(layer, StoredLinear)),
        )
        group = RankGroup() if group is None else group
        refusal = refusal or (self.shared_refusal if group.size > 1 else None) or refusal_of_group(group)
        agree = Agreement(group, next(model.parameters()).device) if refusal is None else Agreement()
        moved = None if weights == self._weights else "its weights lie elsewhere"
        if agree.refusal(moved) is not None:
            self._forms.clear()
        self._weights = weights
        return GraphedForward(self, model, recorder, read, refusal, agree, eager_reason)

    def forget_videos(self, branch: str | None = None) -> None:
        """End the graphs of passes with a key-value cache, which hold the keys of the video that they were captured
        for: gigabytes, which the next video allocates again. branch: of one guidance branch alone."""
        held = [key for key, form in self._forms.items() if form.holds_cache and branch in (None, form.branch)]
        for key in held:
            del self._forms[key]

    def form(self, key: Hashable) -> _Form:
        """Return what is known of a kind of forward pass."""
        form = self._forms.setdefault(key, _Form())
        self._forms.move_to_end(key)
        if len(self._forms) > MAX_FORMS:
            self._forms.popitem(last=False)
        return form


@dataclass(frozen=True)
class Agreement:
    """Decisions that the processes of a group take together. device: of their tensors. Every call is a collective
    one."""

    group: RankGroup = field(default_factory=RankGroup)
    device: torch.device | None = None

    def refusal(self, own: str | None) -> str | None:
        """Return why the group refuses, or None if every process agrees. own: this process's reason."""
        return agreed_refusal(self.group, own, self.device)

    def refusal_of_all(self, own: str | None) -> str | None:
        """Return the own reason if every process has one, else None: the others wait for one without."""
        return None if None in reasons_of(self.group, own, self.device) else own


class GraphedForward:
    """The forward passes of one generation: replayed where a graph is there, captured where it pays, else eager."""

    def __init__(
        self,
        graphs: ForwardGraphs,
        model: nn.Module,
        recorder: AttentionRecorder,
        read: Callable[[Any], Hashable],
        refusal: str | None,
        agree: Agreement,
        eager_reason: Callable[[], str | None],
    ) -> None:
        self._graphs = graphs
        self._agree = agree
        self._model = model
        self._recorder = recorder
        self._read = read
        self._refusal = refusal
        self._eager_reason = eager_reason
        self._layers = tuple(module for module in model.modules() if isinstance(module, AttentionLayer))
        self._num_replayed = 0
        self._eager: Counter[str] = Counter()
        # By identity, with the inputs themselves, so that no others get their number.
        self._forms_of_inputs: dict[int, tuple[Any, Hashable]] = {}
        self._step_keys: dict[Hashable, Hashable] = {}

    def __call__(self, given: ForwardPass) -> torch.Tensor:
        """Return the model's velocity."""
        refusal = self._refusal or self._eager_reason() or _refusal_of(given)
        if refusal is not None:
            return self._run(given, refusal)
        form = self._graphs.form(self._key(given))
        form.num_passes += 1
        form.branch, form.holds_cache = given.context.step.branch, given.context.cache is not None
        if form.graph is not None:
            return self._replay(form, given)
        if form.num_passes == 1:
            return self._watch(form, given)
        if form.refusal is None:
            if not self._graphs.is_probed:
                return self._capture(form, given)
            if form.time is None:
                return self._time(form, given)
            form.refusal = self._agree.refusal_of_all(refusal_after(form.time))
            if form.refusal is None:
                return self._capture(form, given)
        return self._run(given, form.refusal)

    def report(self) -> None:
        """Tell the recorder what was replayed."""
        num_graphs, eager = self._graphs.num_graphs, dict(self._eager)
        pool_bytes = self._graphs.capture.pool_bytes() if num_graphs else 0
        num_passes = self._num_replayed + sum(eager.values())
        self._recorder.record_graphs(GraphReplays(num_passes, self._num_replayed, num_graphs, pool_bytes, eager))

    def end_branch(self, branch: str) -> None:
        """No further pass of a guidance branch reads the key-value cache of this generation."""
        self._graphs.forget_videos(branch)

    def end_video(self) -> None:
        """No further pass reads the key-value cache of this generation."""
        self._graphs.forget_videos()

    def _key(self, given: ForwardPass) -> Hashable:
        """Return all that decides which kernels a pass launches and with which numbers, except those in its tensors."""
        context, step = given.context, given.context.step
        if id(given.inputs) not in self._forms_of_inputs:
            self._forms_of_inputs[id(given.inputs)] = given.inputs, form_of(self._read(given.inputs))
        return (
            (given.latents.shape, given.latents.dtype, given.latents.device),
            form_of(given.timestep),
            self._forms_of_inputs[id(given.inputs)][1],
            (step.branch, step.expert, step.skipped_blocks, context.layout),
            plan_key(context, takes_next=bool(getattr(self._model, "rows_take_next", False))),
            _cache_key(context.cache, step),
            self._step_key(step),
            kernel_switches(given.latents.device.type),
        )

    def _step_key(self, step: StepInfo) -> Hashable:
        """Return the properties of a step that decide which kernels attention launches."""
        chunks = self._layers[0].policy.chunk_rules(step) if self._layers else ()
        moment = (step.index, step.num_steps, step.expert, step.phase, current_force(), num_changes(), chunks)
        if moment not in self._step_keys:
            key = tuple(layer.decisions.step_key(step) for layer in self._layers)
            self._step_keys[moment] = key, moment[3:]
        return self._step_keys[moment]

    def _watch(self, form: _Form, given: ForwardPass) -> torch.Tensor:
        """Run the first pass, in which the backends that serve it are asked."""
        plans = WatchedPlans()
        watched = dataclasses.replace(given, context=dataclasses.replace(given.context, plans=plans))
        velocity = watched.run(self._model)
        form.refusal = self._agree.refusal("; ".join(plans.refusals) or None)
        self._eager[form.refusal or FIRST] += 1
        return velocity

    def _time(self, form: _Form, given: ForwardPass) -> torch.Tensor:
        self._eager[TIMED] += 1
        velocity, form.time = self._graphs.capture.timed(lambda: given.run(self._model))
        return velocity

    def _capture(self, form: _Form, given: ForwardPass) -> torch.Tensor:
        try:
            form.graph = CapturedForward(self._graphs.capture, self._model, given, self._agree.refusal)
        except NotReplayable as answer:
            form.refusal = str(answer)
            if answer.velocity is None:
                return self._run(given, form.refusal)
            self._eager[form.refusal] += 1
            return answer.velocity
        self._eager[CAPTURED] += 1
        return form.graph.first

    def _replay(self, form: _Form, given: ForwardPass) -> torch.Tensor:
        """Replay, or run the eager pass that has to come before: a request's first, which fills its cache."""
        assert form.graph is not None
        misfit = None if form.graph.is_bound_to(given) else self._agree.refusal(form.graph.misfit(given))
        if misfit is None:
            if not form.graph.is_bound_to(given):
                form.num_misfits = 0
            self._num_replayed += 1
            return form.graph.replay(given)
        if form.misfit_of is None or form.misfit_of() is not given.context.state:
            form.misfit_of = weakref.ref(given.context.state)
            return self._run(given, NEW_REQUEST)
        form.num_misfits += 1
        form.graph = None
        if form.num_misfits < _MAX_MISFITS:
            return self._capture(form, given)
        form.refusal = f"what requests keep does not fit one graph: {misfit}"
        return self._run(given, form.refusal)

    def _run(self, given: ForwardPass, reason: str) -> torch.Tensor:
        self._eager[reason] += 1
        return given.run(self._model)


def _refusal_of(given: ForwardPass) -> str | None:
    """Return why a pass cannot be replayed, judged by its context alone, or None."""
    if type(given.context.block_runner) is not BlockRunner:
        return "a step cache or a measurement decides within the forward pass"
    cache, step = given.context.cache, given.context.step
    if step.shares_keys and step.branch != "cond":
        return "guidance of a new prompt goes on from the keys of the conditional branch, for a few passes"
    if cache is not None and not cache.plan.is_full:
        return "the key-value cache is not full, or read in part: every pass reads another number of keys"
    return None


def _cache_key(cache: FrameCache | None, step: StepInfo) -> Hashable:
    """Return the properties of a pass with a key-value cache that decide its kernels: all but the slots that it writes
    and its positions. The tokens of a pass whose frames have timesteps of their own are cut where these change."""
    if cache is None:
        return None
    runs = tuple(len(list(group)) for _, group in itertools.groupby(step.frame_timesteps or ()))
    plan = cache.plan
    sizes = (plan.num_frames, plan.tokens_per_frame, plan.num_slots, plan.read)
    return step.phase, sizes, runs, cache.positions, cache.make_store


def refusal_of_group(group: RankGroup) -> str | None:
    """Return why a pass that these processes share cannot be captured, or None."""
    if group.size == 1 or group.backend == "nccl":
        return None
    return f"several processes exchange tokens by {group.backend}, which no CUDA graph holds; NCCL can"


def refusal_after(time: ForwardTime) -> str | None:
    """Return why a pass of this duration is not captured, or None if it is launch-bound. Waits for the pass."""
    host, device = 1000 * time.host_seconds, 1000 * time.device_seconds()
    return None if host > LAUNCH_BOUND * device else f"not launch-bound (the host takes {host:.1f} of {device:.1f} ms)"


def kernel_switches(device_type: str) -> Hashable:
    """Return the settings that choose kernels and may change around a generation: torch's switches, autocast, and the
    environment's choice of the fused kernels."""
    cudnn = torch.backends.cudnn
    return (
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        fusion_is_on(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
    )
