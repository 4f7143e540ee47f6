"""CUDA graphs (`--cuda-graphs`): whether a model that is being loaded may use them, and what speaks against `on`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.denoising.cuda_graphs.capture import CudaCapture
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.models.decoder_graphs import DecoderGraphs
from diffusion_runtime.models.interface import DiffusionTransformer


def check_graphs(
    config: RuntimeConfig, device: torch.device, transformer: DiffusionTransformer, layers: Sequence[AttentionLayer]
) -> None:
    """Raises ConfigError with every reason where `on` cannot be had. layers: of the transformer."""
    if config.cuda_graphs != "on":
        return
    reasons = list(dict.fromkeys(_reasons(config, device, transformer, layers)))
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


def make_graphs(config: RuntimeConfig, device: torch.device, is_offloaded: bool) -> ForwardGraphs | None:
    """Those of a pipeline; None where none are wanted, on devices that have none, and where weights are offloaded: a
    graph reads them at the addresses they had. Raises ConfigError for `on` with such weights."""
    if is_offloaded and config.cuda_graphs == "on":
        raise ConfigError(
            "cuda_graphs: on: weights are offloaded, and a graph would read them where they were when it was captured; "
            "use --cuda-graphs auto, or --offload none"
        )
    if config.cuda_graphs == "off" or device.type != "cuda" or is_offloaded:
        return None
    return ForwardGraphs(CudaCapture(device), is_probed=config.cuda_graphs == "auto")


def make_decoder_graphs(config: RuntimeConfig, device: torch.device) -> DecoderGraphs | None:
    """The same for the decoder, in a memory pool of its own. With `on` too only what launches bound is captured: a
    graph keeps its activations, gigabytes of a large decoder."""
    if config.cuda_graphs == "off" or device.type != "cuda":
        return None
    return DecoderGraphs(CudaCapture(device))


def _reasons(
    config: RuntimeConfig, device: torch.device, transformer: DiffusionTransformer, layers: Sequence[AttentionLayer]
) -> Iterator[str]:
    if device.type != "cuda":
        yield f"needs a CUDA or ROCm GPU, got {device.type}"
    if config.parallel.num_processes > 1:
        yield f"needs one process, got {config.parallel.num_processes}; leave out --num-gpus"
    refusal = transformer.replay_refusal()
    if refusal is not None:
        yield refusal
    for layer in layers:
        yield from (f"{layer.layer.role}: {reason}" for reason in layer.replay_refusals())
