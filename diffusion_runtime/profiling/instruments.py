"""Instruments of a loaded pipeline: context managers that watch, time, count or change what its generations do.

Each works through the pipeline's public parts and its `hooks`, and leaves the pipeline as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.denoising.interface import OnStep, Wrapper
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.generation.interface import GenerationPipeline
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.profiling.attention_clock import AttentionClock, timed_layers
from diffusion_runtime.profiling.forward_ranges import forward_ranges


@contextmanager
def named_ranges(pipeline: GenerationPipeline) -> Iterator[None]:
    """Context manager: name forward passes (`forward cond`) and attention calls (`attention self, layer 3, fa`) as
    ranges of torch.profiler, and replay no CUDA graph. It may begin and end between two steps. Diffusers' own pipelines
    call what has no names that all share."""
    if not isinstance(pipeline, Pipeline):
        yield
        return
    with (
        pipeline.hooks.holding("eager_reason", "a profile records the step"),
        forward_ranges(pipeline.transformer),
    ):
        yield


@contextmanager
def timed_attention(pipeline: Pipeline) -> Iterator[AttentionClock]:
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


def watched_latents(pipeline: Pipeline, watch: OnStep) -> AbstractContextManager[None]:
    """Context manager: call `watch` after every denoising step with its StepInfo and the latents at its end, float32
    [batch, *sample_shape] on the model's device, which it must not keep."""
    return pipeline.hooks.holding("on_step", watch)


def wrapped_predictions(pipeline: Pipeline, wrap: Wrapper) -> AbstractContextManager[None]:
    """Context manager: the sampler calls `wrap(predict)` for the model's guided prediction of every step."""
    return pipeline.hooks.holding("wrap", wrap)


@contextmanager
def attention_choices(pipeline: Pipeline, choices: AttentionConfig) -> Iterator[None]:
    """Context manager: the transformer's layers attend as if `choices` were the command line's; nothing is loaded
    again. Recipes made meanwhile record what the pipeline was loaded with.

    Raises ConfigError and BackendUnavailableError as loading does, and ConfigError where CUDA graphs hold the choices.
    """
    if pipeline.parts.graphs is not None:
        raise ConfigError("attention_choices: CUDA graphs hold the kernels of one choice; use cuda_graphs='off'")
    layers = [(layer, layer.policy) for layer in pipeline.transformer.attention_layers()]
    policies: dict[int, AttentionPolicy] = {}
    try:
        for layer, policy in layers:
            # One policy for all, as the model was built with: what is announced is announced once.
            layer.decisions.choose(policies.setdefault(id(policy), dataclasses.replace(policy, cli=choices)))
        yield
    finally:
        for layer, policy in layers:
            layer.decisions.choose(policy)
