"""Instruments of a loaded pipeline: context managers that watch, time, count or change what its generations do, and the
named ranges of a forward pass for torch.profiler.

Each works through the pipeline's public parts and its `hooks`, and leaves the pipeline as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.profiler import record_function

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.denoising.interface import OnStep, Wrapper
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.generation.interface import GenerationPipeline, InspectablePipeline
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.profiling.attention_clock import AttentionClock, timed_layers


@contextmanager
def named_ranges(pipeline: GenerationPipeline) -> Iterator[None]:
    """Context manager: name forward passes (`forward cond`) and attention calls (`attention self, layer 3, fa`) as
    ranges of torch.profiler, and replay no CUDA graph. It may begin and end between two steps. Diffusers' own pipelines
    call what has no names that all share."""
    native = pipeline.inspectable
    if native is None:
        yield
        return
    with (
        pipeline.hooks.holding("eager_reason", "a profile records the step"),
        forward_ranges(native.transformer),
    ):
        yield


@contextmanager
def timed_attention(pipeline: InspectablePipeline) -> Iterator[AttentionClock]:
    """Context manager: time the calls of the transformer's attention layers, and replay no CUDA graph."""
    with (
        pipeline.hooks.holding("eager_reason", "attention is timed"),
        timed_layers(pipeline.transformer, pipeline.device) as clock,
    ):
        yield clock


@contextmanager
def counted_density(pipeline: GenerationPipeline) -> Iterator[None]:
    """Context manager: attention reports show which share of the pairs every layer computed at every step, and show a
    plan (`density`, `plan`). Forward passes run without CUDA graphs, and each call waits for the device."""
    with (
        pipeline.hooks.holding("counts_density", True),
        pipeline.hooks.holding("eager_reason", "the density of each call is counted"),
    ):
        yield


def watched_latents(pipeline: InspectablePipeline, watch: OnStep) -> AbstractContextManager[None]:
    """Context manager: call `watch` after every denoising step with its StepInfo and the latents at its end, float32
    [batch, *sample_shape] on the model's device, which it must not keep."""
    return pipeline.hooks.holding("on_step", watch)


def wrapped_predictions(pipeline: InspectablePipeline, wrap: Wrapper) -> AbstractContextManager[None]:
    """Context manager: the sampler calls `wrap(predict)` for the model's guided prediction of every step."""
    return pipeline.hooks.holding("wrap", wrap)


@contextmanager
def attention_choices(
    pipeline: InspectablePipeline, choices: AttentionConfig, below: AttentionConfig | None = None
) -> Iterator[None]:
    """Context manager: the transformer's layers attend as if `choices` were the command line's; nothing is loaded
    again. Recipes made meanwhile record what the pipeline was loaded with. below: the config's choices meanwhile; None
    keeps those that the pipeline was loaded with.

    Raises ConfigError and BackendUnavailableError as loading does, and ConfigError where CUDA graphs hold the choices.
    """
    if pipeline.parts.graphs is not None:
        raise ConfigError("attention_choices: CUDA graphs hold the kernels of one choice; use cuda_graphs='off'")
    layers = [(layer, layer.policy) for layer in pipeline.transformer.attention_layers()]
    policies: dict[int, AttentionPolicy] = {}
    try:
        for layer, policy in layers:
            # One policy for all, as the model was built with: what is announced is announced once.
            config = policy.config if below is None else below
            chosen = dataclasses.replace(policy, cli=choices, config=config)
            layer.decisions.choose(policies.setdefault(id(policy), chosen))
        yield
    finally:
        for layer, policy in layers:
            layer.decisions.choose(policy)


# (module, positional arguments, keyword arguments) of a call -> the name of its range.
_NameOf: TypeAlias = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], str]


@contextmanager
def forward_ranges(transformer: DiffusionTransformer) -> Iterator[None]:
    """Context manager: mark calls of the transformer and of its attention layers as ranges, such as `forward cond` and
    `attention self, layer 3, fa`."""
    with ExitStack() as stack:
        _name_calls(stack, transformer, _name_of_pass)
        for layer in transformer.attention_layers():
            _name_calls(stack, layer, _name_of_attention)
        yield


def _name_calls(stack: ExitStack, module: nn.Module, name_of: _NameOf) -> None:
    """Calls of `module` are ranges until the stack ends."""
    begun: list[record_function] = []

    def begin(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # torch.compile traces hooks; the operator that stands for attention in its graph calls them when it runs.
        if not torch.compiler.is_compiling():
            begun.append(record_function(name_of(called, args, kwargs)))
            begun[-1].__enter__()  # type: ignore[no-untyped-call]

    def end(*_: object) -> None:
        if begun and not torch.compiler.is_compiling():
            begun.pop().__exit__(None, None, None)

    def end_all() -> None:
        # What an exception left open.
        while begun:
            end()

    stack.callback(end_all)
    stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(end).remove)


def _name_of_pass(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    context: AttentionContext = args[3] if len(args) > 3 else kwargs["context"]
    expert = f", expert {context.step.expert}" if context.step.expert else ""
    return f"forward {context.step.branch}{expert}"


def _name_of_attention(layer: AttentionLayer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    context = args[3] if len(args) > 3 else kwargs.get("context")
    inputs = {name: kwargs.get(name) for name in ("gate", "mask", "block_mask")}
    backend = layer.backend_of(args[0] if args else kwargs["q"], context, **inputs)
    return f"attention {layer.layer.role}, layer {layer.layer.index}, {backend}"
