"""The context of an attention call: one forward pass of a model, and the request cache it belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self, TypeVar, TypeVarTuple, cast

import torch

from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.cache.prefix import PrefixCache
from diffusion_runtime.attention.cache.reference import ReferenceFrames
from diffusion_runtime.attention.forward_plans import ForwardPlans
from diffusion_runtime.attention.handles import HandleTable
from diffusion_runtime.attention.normalized_guidance import NormalizedGuidance
from diffusion_runtime.core.block_stack import BlockRunner, MakeModulatedInput, RunBlock, Streams, without
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.parallel.sharding import SequenceSharding
from diffusion_runtime.report.attention_report import AttentionRecorder

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class CacheScope:
    """Values of one scope of a RequestCache, by key."""

    def __init__(self) -> None:
        self._values: dict[Hashable, object] = {}

    def get_or_create(self, key: Hashable, create: Callable[[], T]) -> T:
        """The value under `key`; the result of `create` when there is none yet."""
        if key not in self._values:
            self._values[key] = create()
        return cast(T, self._values[key])

    def compute_once(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """function(*arguments), computed at the first call with these arguments, which are hashable values."""
        return self.get_or_create((function, arguments), lambda: function(*arguments))

    def put(self, key: Hashable, value: object) -> None:
        """Set the value under `key`."""
        self._values[key] = value

    def find(self, key: Hashable, default: object = None) -> object:
        """The value under `key`, `default` when there is none."""
        return self._values.get(key, default)

    def find_all(self, name: str) -> Iterator[object]:
        """The values whose key is a tuple that begins with `name`."""
        return (value for key, value in self._values.items() if isinstance(key, tuple) and key[0] == name)

    def adopt(self, other: CacheScope, name: str, taken: Callable[[object], object] = lambda value: value) -> None:
        """Take over another's values whose key is a tuple that begins with `name`. taken: what of each."""
        self._values |= {
            key: taken(value) for key, value in other._values.items() if isinstance(key, tuple) and key[0] == name
        }


class RequestCache:
    """Values that live as long as one request, in three scopes.

    request: for all calls of the request, such as the tiles of its grid. of_branch: per transformer (expert) and
    guidance branch, such as projections of the prompt. of_layer: per layer of these, such as the centroids of the step
    before. Two requests share nothing. Keys begin with a name of the user's own, such as the backend's.
    """

    def __init__(self) -> None:
        # What operators have of it (attention/recorded_values.py); 0 for one that a compiled function makes.
        self.number = 0 if torch.compiler.is_dynamo_compiling() else REQUEST_CACHES.number_of(self)
        self._scopes: dict[Hashable, CacheScope] = {}
        self._seen: set[str] = set()
        self._expert: int | None = None
        self.request = self._scope("request")

    def of_branch(self, step: StepInfo) -> CacheScope:
        """The scope of the step's expert and guidance branch."""
        return self._scope((step.expert, step.branch))

    def of_layer(self, layer: LayerInfo, step: StepInfo) -> CacheScope:
        """The scope of one layer, by index and role, in the step's expert, guidance branch and context window."""
        return self._scope((step.expert, step.branch, layer.index, layer.role, step.window))

    def scope(self, key: Hashable) -> CacheScope:
        """The scope under a key of a FixedState's."""
        return self._scope(key)

    def find_all(self, name: str, branch: str | None = None) -> Iterator[object]:
        """Every scope's values whose key begins with the name of a user. branch: those of one guidance branch alone."""
        for key, scope in self._scopes.items():
            if branch is None or _is_of(key, branch):
                yield from scope.find_all(name)

    def adopt(self, other: RequestCache, name: str, taken: Callable[[object], object] = lambda value: value) -> None:
        """Take over the values of another whose key begins with the name of a user, scope by scope. taken: what of
        each."""
        for key, scope in other._scopes.items():
            self._scope(key).adopt(scope, name, taken)

    def keep_expert(self, expert: int) -> None:
        """Drop what belongs to other experts, of a loop that goes from high noise to low and does not come back: the
        projections of the prompt for one expert of 14 B and two branches are 0.84 GB."""
        if expert == self._expert:
            return
        self._expert = expert
        for key in [key for key in self._scopes if isinstance(key, tuple) and key[0] != expert]:
            del self._scopes[key]

    def drop_branch(self, branch: str) -> None:
        """Drop what belongs to a guidance branch of any expert, which does not run again."""
        for key in [key for key in self._scopes if _is_of(key, branch)]:
            del self._scopes[key]

    def is_first(self, what: str) -> bool:
        """Return True the first time it is called for `what` in this request: for messages that are logged once."""
        if what in self._seen:
            return False
        self._seen.add(what)
        return True

    def _scope(self, key: Hashable) -> CacheScope:
        scope = self._scopes.get(key)
        if scope is None:
            scope = self._scopes[key] = self._make_scope(key)
        return scope

    def _make_scope(self, key: Hashable) -> CacheScope:  # noqa: ARG002 - of a cache that replaces another
        return CacheScope()


# Every request cache, for the operators in compiled graphs.
REQUEST_CACHES: HandleTable[RequestCache] = HandleTable()


def _is_of(scope: Hashable, branch: str) -> bool:
    """Return whether the key of a scope belongs to a guidance branch, or to a layer in it."""
    return isinstance(scope, tuple) and scope[1] == branch


_UNSHARDED = SequenceSharding()


@dataclass(frozen=True)
class AttentionContext:
    """One forward pass of a model, as its attention layers see it.

    layout: where the key tokens sit; None when nothing is padded and no backend asks for a grid.
    step: where in the denoising loop; state: the cache of the request; recorder: counts what ran.
    sharding: how the grid's tokens are cut over the processes that share the sequence. block_runner: runs the blocks of
    a transformer, or reuses what they made. plans: what backends prepare once per forward pass. cache: the keys and
    values of earlier frames, for layers that are built with cached_keys; None where there are none. prefix: the same,
    of tokens that every forward pass attends to and none computes again, such as those of reference images. reference:
    the same, of a clip whose frames are seen by the frames of the same index alone, for ReferenceFrameAttention.
    guidance: of attention to text, in a pass that has the negative texts after the texts; None without. shapes_only:
    whether attention layers make outputs and allocate what a backend needs, and compute nothing: for a
    pass on the meta device. handle: what operators in compiled graphs have of it (attention/opaque.py), None for one
    that is made while torch.compile traces.
    """

    layout: TokenLayout | None = None
    # Functions: torch.compile traces no class as a factory.
    step: StepInfo = field(default_factory=lambda: StepInfo())
    state: RequestCache = field(default_factory=lambda: RequestCache())
    recorder: AttentionRecorder = field(default_factory=lambda: _default_recorder())
    sharding: SequenceSharding = field(default_factory=lambda: _UNSHARDED)
    block_runner: BlockRunner = field(default_factory=lambda: BlockRunner())
    plans: ForwardPlans = field(default_factory=lambda: ForwardPlans())
    cache: FrameCache | None = None
    prefix: PrefixCache | None = None
    reference: ReferenceFrames | None = None
    guidance: NormalizedGuidance | None = None
    shapes_only: bool = False
    handle: torch.Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not torch.compiler.is_dynamo_compiling():
            object.__setattr__(self, "handle", CONTEXTS.handle_of(self))

    @property
    def counts_nothing(self) -> bool:
        """Return whether it was made while torch.compile traces, without a recorder."""
        return self.recorder is _UNREAD

    def run_blocks(
        self,
        blocks: Iterable[RunBlock],
        streams: Streams,
        num_grid_tokens: int,
        modulated_input: MakeModulatedInput,
    ) -> Streams:
        """The streams after the last block of a transformer; they are overwritten.

        streams: the first one begins with this process's slice of the grid. num_grid_tokens: of the whole grid.
        modulated_input: called before the blocks run, by a step cache that compares it.
        """
        num_own = self.sharding.num_own(num_grid_tokens)
        run = without(list(blocks), self.step.skipped_blocks)
        return self.block_runner.run(run, streams, self.step, num_own, modulated_input)

    def for_prefill(self) -> Self:
        """The pass that computes a prefix within this one: without a layout, in a phase of its own (`commit`)."""
        self.recorder.distinguish_phases()
        return dataclasses.replace(self, layout=None, step=dataclasses.replace(self.step, phase="commit"))

    def with_layout(self, layout: TokenLayout | None) -> Self:
        """The same forward pass for a call whose keys sit otherwise, such as a cross-attention's."""
        return dataclasses.replace(self, layout=layout)


# The recorder of contexts that are made while torch.compile traces: its counts are not read.
_UNREAD = AttentionRecorder()


def _default_recorder() -> AttentionRecorder:
    return _UNREAD if torch.compiler.is_dynamo_compiling() else AttentionRecorder()


# The contexts of the forward passes that run now, for the operators in compiled graphs.
CONTEXTS: HandleTable[AttentionContext] = HandleTable()
