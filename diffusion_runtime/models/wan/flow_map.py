"""AnyFlow (arXiv:2605.13724): Wan checkpoints that predict the mean velocity from a timestep t to a later one r.

Other models predict the direction of the latents at t; a flow map predicts how far they get until r, so that one
checkpoint makes a video in any number of steps. It has one network more, which embeds r; the rest is Wan's, and one
Euler step is x_r = x_t - (sigma_t - sigma_r) * v(x_t, t, r). The causal checkpoints (AnyFlow-FAR) keep older frames in
patches four times as large: far.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from diffusion_runtime.core.model_folder import ConfigFile
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.layers.embeddings import TimestepEmbedding
from diffusion_runtime.weights.pieces import NamedPieces, two_layer_pieces

# Diffusers' names, and those of the authors' own code, which has one class for both kinds of checkpoints.
AUTHORS_CLASS = "FAR_Wan_Transformer3DModel"
FLOW_MAP_CLASSES = ("AnyFlowTransformer3DModel", "AnyFlowFARTransformer3DModel", AUTHORS_CLASS)
FLOW_MAP_PIPELINES = ("AnyFlowPipeline", "WanAnyFlowPipeline")
FAR_PIPELINES = ("AnyFlowFARPipeline", "FARWanAnyFlowPipeline")
FLOW_MAP_KEYS = ("gate_value", "deltatime_type")
FAR_KEYS = ("chunk_partition", "compressed_patch_size", "full_chunk_limit")
# Keys of the authors' class for the kind of checkpoint.
AUTHORS_KEYS = ("init_flowmap_model", "init_far_model", *FAR_KEYS)
# Defaults of the authors' examples: any number of steps works, and guidance is part of the weights.
FLOW_MAP_DEFAULTS = {
    "num_inference_steps": 4,
    "guidance_scale": 1.0,
    "flow_shift": 5.0,
    "sampler": "flow_map_euler",
}
_TARGETS = {"r": False, "t-r": True}


@dataclass(frozen=True)
class FlowMapConfig:
    """Settings of a flow map. share: of the embedding of r in that of both timesteps, from 0 to 1. is_interval: whether
    t - r is embedded in place of r."""

    share: float
    is_interval: bool


def read_flow_map(file: ConfigFile) -> FlowMapConfig:
    """Read the keys gate_value and deltatime_type of a transformer's config. Raises ModelLoadError that names the file
    and the key."""
    if file.values.get("init_flowmap_model", True) is not True:
        raise file.error("init_flowmap_model", "true", file.values["init_flowmap_model"])
    share, target = file.number("gate_value", 0.25), file.values.get("deltatime_type", "r")
    if not 0 <= share <= 1:
        raise file.error("gate_value", "a number from 0 to 1", share)
    if not isinstance(target, str) or target not in _TARGETS:
        raise file.error("deltatime_type", " or ".join(map(repr, _TARGETS)), target)
    return FlowMapConfig(share, _TARGETS[target])


class FlowMapEmbedding(nn.Module):
    """The embedding of both timesteps: (1 - share) * that of t + share * that of r, or of t - r."""

    def __init__(self, config: FlowMapConfig, num_waves: int, dim: int) -> None:
        super().__init__()
        self.config = config
        self.start = TimestepEmbedding(num_waves, dim)
        self.target = TimestepEmbedding(num_waves, dim)

    def forward(self, timestep: torch.Tensor, step: StepInfo) -> torch.Tensor:
        """Embed both timesteps to [batch, dim]. timestep: t, [batch], in [0, 1000]; r is step.next_timestep."""
        assert step.next_timestep is not None, "a flow map takes the timestep that a step leads to"
        target = torch.full_like(timestep, step.next_timestep)
        embedded = self.target(timestep - target if self.config.is_interval else target)
        mixed: torch.Tensor = torch.lerp(self.start(timestep), embedded, self.config.share)
        return mixed


def embedding_pieces(ours: str, theirs: str, num_waves: int, dim: int) -> Iterator[NamedPieces]:
    """Yield the pieces of a FlowMapEmbedding. theirs: the checkpoint's name of the condition embedder."""
    yield from two_layer_pieces(f"{ours}.start", f"{theirs}.time_embedder", num_waves, dim)
    yield from two_layer_pieces(f"{ours}.target", f"{theirs}.delta_embedder", num_waves, dim)
