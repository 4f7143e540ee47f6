"""Regional compilation: torch.compile for the blocks of diffusers' transformers, each class of them compiled once.

A model of 40 equal blocks compiles in the time of one, where compiling it whole takes seven times as long (9.6 and
67.4 s for FLUX.1 on an H100, by diffusers' measurement). Sizes are symbols: a graph serves every length of a text and
every size of a clip.
"""

from __future__ import annotations

import dataclasses
import time
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.errors import ConfigError, first_line
from diffusion_runtime.report.attention_report import AttentionRecorder

T = TypeVar("T")


class CompiledBlocks:
    """The compiled blocks of a diffusers pipeline, and what compiling cost. backend: torch.compile's, by name.

    Blocks may be given parts of a tensor in some layers and a tensor of their own in others; a graph knows which, so
    parts are copied.

    num_blocks: how many are compiled; num_graphs: how many graphs were made so far, one for every kind of block.
    seconds: of the calls that made one, with what they ran.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self.num_blocks = 0
        self.num_graphs = 0
        self.seconds = 0.0
        self._backend = backend
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._blocks: list[weakref.ref[nn.Module]] = []

    def compile_blocks(self, blocks: Iterable[nn.Module]) -> None:
        """Have each of these modules compiled at its first call."""
        for block in blocks:
            self._compile_block(block)

    def renew(self) -> None:
        """Compile again at the next call, as the contents of the blocks have changed: torch keeps up to 8 graphs."""
        self._compiled = {}
        for reference in self._blocks:
            block = reference()
            if block is not None:
                block.forward = _CompiledForward(self, self._function_of(block), block)

    def run(self, call: Callable[[], T]) -> T:
        """Call a compiled function, which may make a graph, and return its result."""
        num_graphs, started = self.num_graphs, time.perf_counter()
        result = call()
        if self.num_graphs != num_graphs:
            self.seconds += time.perf_counter() - started
        return result

    def _compile_block(self, block: nn.Module) -> None:
        self.num_blocks += 1
        self._blocks.append(weakref.ref(block))
        # An attribute of the module hides its class's method; hooks of the module stay outside of the graph.
        block.forward = _CompiledForward(self, self._function_of(block), block)

    def _function_of(self, block: nn.Module) -> Callable[..., Any]:
        original = type(block).forward
        if original not in self._compiled:
            self._compiled[original] = torch.compile(
                _copied(original), backend=self._counting_backend(), fullgraph=True
            )
        return self._compiled[original]

    def _counting_backend(self) -> Callable[..., Any]:
        """Wrap the backend in a function that counts."""
        compile_graph = torch._dynamo.lookup_backend(self._backend)

        def compile_and_count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            self.num_graphs += 1
            made: Callable[..., Any] = compile_graph(graph, inputs)
            return made

        return compile_and_count


class CompileCost:
    """Cost of compiling blocks in one generation. compiled: the blocks, None if they are not compiled."""

    def __init__(self, compiled: CompiledBlocks | None) -> None:
        self._compiled = compiled
        self._before = (0, 0.0) if compiled is None else (compiled.num_graphs, compiled.seconds)

    def report(self, recorder: AttentionRecorder) -> dict[str, float]:
        """Note what was compiled since, and return its seconds as a stage of its own, which is a part of the others."""
        if self._compiled is None:
            return {}
        num_graphs, seconds = self._compiled.num_graphs - self._before[0], self._compiled.seconds - self._before[1]
        made = f"{num_graphs} graph{'s' * (num_graphs != 1)} compiled in {seconds:.1f} s of the denoising"
        recorder.note(f"compile: {self._compiled.num_blocks} blocks, {made if num_graphs else 'nothing compiled anew'}")
        return {"compile": seconds}


class _CompiledForward:
    """Callable that runs a compiled block; its first tensor begins with the batch, as all streams do."""

    def __init__(self, owner: CompiledBlocks, compiled: Callable[..., Any], block: nn.Module) -> None:
        self._owner = owner
        self._compiled = compiled
        # The block holds this object.
        self._block = weakref.ref(block)
        self._batch_sizes: set[int] = set()

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        raise ConfigError("a transformer with compiled blocks cannot be copied; load the copy without compile")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        arguments = tuple(map(_of_its_own, arguments))
        named = {name: _of_its_own(value) for name, value in named.items()}
        given = (*arguments, *named.values())
        batch_size = next(value.shape[0] for value in given if isinstance(value, torch.Tensor))
        if batch_size not in self._batch_sizes:
            # A graph may be made now; 1 is always a constant of it, so another batch size may be another graph.
            self._batch_sizes.add(batch_size)
            _mark_dynamic(given)
        try:
            return self._owner.run(lambda: self._compiled(self._block(), *arguments, **named))
        except torch._dynamo.exc.TorchDynamoException as error:
            raise ConfigError(
                f"compile: regional: {type(self._block()).__name__} is not one graph: {first_line(error)}; "
                "leave out --compile"
            ) from error


def _of_its_own(value: Any) -> Any:
    """Return a tensor laid out like all of its size; other values unchanged."""
    if not isinstance(value, torch.Tensor) or (value.is_contiguous() and value.storage_offset() == 0):
        return value
    return value.clone(memory_format=torch.contiguous_format)


def _mark_dynamic(value: Any) -> None:
    """Have torch.compile take all sizes of tensors for symbols, except those that turn out to be the model's.

    Not by its `dynamic`, which makes symbols of numbers as well: the eps of every norm would be passed at every call.
    """
    if isinstance(value, torch.Tensor):
        torch._dynamo.maybe_mark_dynamic(value, list(range(value.dim())))
    elif isinstance(value, tuple | list):
        for item in value:
            _mark_dynamic(item)
    elif isinstance(value, dict):
        _mark_dynamic(tuple(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, AttentionContext):
        for field in dataclasses.fields(value):
            _mark_dynamic(getattr(value, field.name))


def _copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy the function with code of its own. torch keeps graphs by code object, up to 8 of them: those of another
    model of the process do not count, and all are freed with this one."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
