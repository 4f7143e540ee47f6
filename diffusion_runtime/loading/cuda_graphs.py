"""CUDA graphs (`--cuda-graphs`): whether a model that is being loaded may use them, and what speaks against `on`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.decoders.decoder_graphs import DecoderGraphs
from diffusion_runtime.denoising.cuda_graphs.capture import CudaCapture
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.parallel.collectives import RankGroup, agreed_refusal
from diffusion_runtime.rules.combinations import refusal
from diffusion_runtime.rules.features import ChosenRuntime

# Under `auto`: the tests on two GPUs (tests/parallel/test_graphs_of_ranks_gpu.py) have not run yet.
UNTRIED_EXCHANGES = "several processes, whose exchanges --cuda-graphs on captures"


def check_graphs(
    config: RuntimeConfig, device: torch.device, transformer: DiffusionTransformer, layers: Sequence[AttentionLayer]
) -> None:
    """Raises ConfigError with every reason where `on` cannot be had. layers: of the transformer."""
    if config.cuda_graphs != "on":
        return
    reasons = replay_refusals(device, transformer, layers)
    if reasons:
        raise ConfigError(
            "\n".join(
                [
                    "cuda_graphs: on: forward passes of this model cannot be replayed here:",
                    *(f"  {reason}" for reason in reasons),
                    "  Use --cuda-graphs auto, which replays what can be and pays, or off.",
                ]
            )
        )


def make_graphs(
    config: RuntimeConfig, device: torch.device, is_offloaded: bool, group: RankGroup | None = None
) -> ForwardGraphs | None:
    """Return the graphs of a pipeline; None where none are wanted, on devices that have none, and where weights are
    offloaded: a graph reads them at the addresses they had. group: all processes that run the model, which all have
    graphs or none; a collective call of them. Raises ConfigError for `on` with such weights."""
    if is_offloaded and config.cuda_graphs == "on":
        raise refusal("CUDA graphs", "offloaded weights", ChosenRuntime(config))
    if config.cuda_graphs == "off" or device.type != "cuda":
        return None
    reason = "its weights are offloaded" if is_offloaded else None
    if group is not None:
        reason = agreed_refusal(group, reason, device)
    if reason is not None:
        return None
    is_probed = config.cuda_graphs == "auto"
    return ForwardGraphs(
        CudaCapture(device), is_probed=is_probed, shared_refusal=UNTRIED_EXCHANGES if is_probed else None
    )


def make_decoder_graphs(config: RuntimeConfig, device: torch.device) -> DecoderGraphs | None:
    """The same for the decoder, in a memory pool of its own. With `on` too only what launches bound is captured: a
    graph keeps its activations, gigabytes of a large decoder."""
    if config.cuda_graphs == "off" or device.type != "cuda":
        return None
    return DecoderGraphs(CudaCapture(device))


def replay_refusals(
    device: torch.device, transformer: DiffusionTransformer, layers: Sequence[AttentionLayer]
) -> tuple[str, ...]:
    """Return why forward passes cannot be replayed; empty where they can. layers: of the transformer, as it was
    built."""
    return tuple(dict.fromkeys(_reasons(device, transformer, layers)))


def _reasons(
    device: torch.device, transformer: DiffusionTransformer, layers: Sequence[AttentionLayer]
) -> Iterator[str]:
    if device.type != "cuda":
        yield f"needs a CUDA or ROCm GPU, got {device.type}"
    reason = transformer.replay_refusal()
    if reason is not None:
        yield reason
    for layer in layers:
        yield from (f"{layer.layer.role}: {reason}" for reason in layer.decisions.replay_refusals())
