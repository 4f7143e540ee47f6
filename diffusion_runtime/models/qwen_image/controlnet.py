"""Qwen-Image with a ControlNet (Zhang et al., arXiv:2302.05543): a few blocks of its own, which read the noisy latents,
a control image and the prompt, and add to the tokens of the transformer's blocks.

    patches(latents) + patches(control) -> c;  at each control block:  c = block(c),  residual = hint(c)
    transformer:  x = block(x);  x += scale * residual

In both branches of guidance the ControlNet reads the prompt, as in diffusers. Shapes as in transformer.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core import config_fields
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.model_folder import AnyFolder, component_class, read_config, read_index
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.double_stream import DoubleStreamBlock
from diffusion_runtime.layers.embeddings import PatchEmbedding, TimestepEmbedding
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.modulation_rows import modulations_of, rows_of_step
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.prompt_cache import cached_for_prompt
from diffusion_runtime.layers.reference_tokens import layout_with_references
from diffusion_runtime.models.controlnet_folder import COMPONENT, has_controlnet
from diffusion_runtime.models.image_control import counts_at, scales_of
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.models.qwen_image.config import FIXED, TIME_SCALE, UNREAD, QwenImageTransformerConfig
from diffusion_runtime.models.qwen_image.transformer import QwenImageTransformer
from diffusion_runtime.models.qwen_image.weights import STREAMS, embedding_pieces, transformer_pieces
from diffusion_runtime.text_encoders.interface import Conditions
from diffusion_runtime.weights.pieces import NamedPieces, double_stream_pieces, linear_pieces

PIPELINE, CLASS = "QwenImageControlNetPipeline", "QwenImageControlNetModel"
# Pipelines whose transformer takes a ControlNet from elsewhere.
_PIPELINES = ("QwenImagePipeline", PIPELINE)
ROLE = "qwen_image.controlnet"


@dataclass(frozen=True)
class QwenImageControlNetConfig:
    """Sizes of a ControlNet. num_layers: control blocks. All other sizes are the transformer's."""

    num_layers: int


def read_controlnet_config(
    folder: AnyFolder, transformer: QwenImageTransformerConfig
) -> QwenImageControlNetConfig | None:
    """Read controlnet/config.json, None for a model without a ControlNet.

    Raises ModelLoadError for one of another class or of other sizes than the transformer's, and for a pipeline that
    takes none.
    """
    if not has_controlnet(folder, PIPELINE):
        return None
    index = read_index(folder)
    if index.get("_class_name") not in _PIPELINES:
        raise ModelLoadError(
            f"{folder}: {index.get('_class_name')}: a ControlNet goes with {_PIPELINES[0]}, which makes images of text "
            "alone; leave out --controlnet-path"
        )
    if COMPONENT in index:
        _, name = component_class(folder, COMPONENT)
        if name != CLASS:
            raise ModelLoadError(
                f"{folder}: key '{COMPONENT}' of model_index.json: expected {CLASS}, got {name!r}; "
                "`--backend diffusers` runs it"
            )
    file = read_config(folder, COMPONENT)
    file.refuse_unknown(
        (*config_fields.keys_of(QwenImageTransformerConfig), *FIXED, *UNREAD, "in_channels", "extra_condition_channels")
    )
    if file.values.get("extra_condition_channels", 0) != 0:
        raise file.error(
            "extra_condition_channels",
            "0: a ControlNet that also takes a mask (inpainting) is not run natively in this version",
            file.values["extra_condition_channels"],
        )
    sizes = {
        "patch_size": 2,
        "in_channels": transformer.patch_channels,
        "attention_head_dim": transformer.head_dim,
        "num_attention_heads": transformer.num_heads,
        "joint_attention_dim": transformer.text_dim,
    }
    for key, size in sizes.items():
        if file.whole_number(key) != size:
            raise file.error(key, f"{size}, as in this model's transformer", file.values[key])
    axes = file.values.get("axes_dims_rope")
    if axes is not None and tuple(file.whole_numbers("axes_dims_rope", 3)) != transformer.axes:
        raise file.error("axes_dims_rope", f"{list(transformer.axes)}, as in this model's transformer", axes)
    num_layers = file.layer_count("num_layers")
    if num_layers > transformer.num_layers:
        raise file.error("num_layers", f"{transformer.num_layers}, the transformer's blocks, or fewer", num_layers)
    return QwenImageControlNetConfig(num_layers)


class ControlBlock(DoubleStreamBlock):
    """A block of the ControlNet. hint: map of the grid's tokens after it to the addition to the transformer's."""

    def __init__(self, config: QwenImageTransformerConfig, layer: LayerInfo, policy: AttentionPolicy) -> None:
        super().__init__(config.num_heads, config.head_dim, config.ffn_dim, config.eps, layer=layer, policy=policy)
        self.hint = Linear(config.dim, config.dim)

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        text: torch.Tensor,
        stacked: torch.Tensor,
        text_stacked: torch.Tensor,
        rotations: torch.Tensor,
        context: AttentionContext,
    ) -> torch.Tensor:
        """Return the hint [B, S, D]. x [B, S, D] and text [B, L, D] are overwritten; see DoubleStreamBlock.forward."""
        DoubleStreamBlock.forward(self, x, text, stacked, text_stacked, rotations, context)
        residual: torch.Tensor = self.hint(x)
        return residual


class QwenImageControlNet(nn.Module):
    """The blocks and the layers before them."""

    def __init__(
        self,
        config: QwenImageTransformerConfig,
        own: QwenImageControlNetConfig,
        geometry: LatentGeometry,
        policy: AttentionPolicy,
    ) -> None:
        super().__init__()
        self.patch_embedding = PatchEmbedding(config.num_channels, config.dim, geometry.patch)
        self.control_embedding = PatchEmbedding(config.num_channels, config.dim, geometry.patch)
        self.text_norm = RMSNorm(config.text_dim, config.eps)
        self.text_embedding = Linear(config.text_dim, config.dim)
        self.timestep_embedding = TimestepEmbedding(config.num_waves, config.dim, scale=TIME_SCALE)
        self.blocks = nn.ModuleList(
            ControlBlock(
                config,
                LayerInfo(index, own.num_layers, ROLE, f"{COMPONENT}.blocks.{index}.joint_attention"),
                policy,
            )
            for index in range(own.num_layers)
        )

    def forward(
        self,
        latents: torch.Tensor,
        control: torch.Tensor,
        timestep: torch.Tensor,
        text: Conditions,
        rotations: torch.Tensor,
        context: AttentionContext,
    ) -> list[torch.Tensor]:
        """Return the residual of each block, [B, S, D] of this process's tokens.

        latents, control: [B, channels, 1, height, width]. timestep: [B], in [0, 1000]. rotations: [S + L, head_dim /
        2], complex. context: with the layout of grid and text.
        """
        dtype, shard = self.text_embedding.weight.dtype, context.sharding.shard
        x = shard(self.patch_embedding(latents.to(dtype)))
        x = x + shard(self.control_embedding(control.to(x.device, dtype)))
        tokens = self._text(text, context).clone()

        def condition(timestep: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
            return F.silu(self.timestep_embedding(timestep / TIME_SCALE))

        blocks = [block for block in self.blocks if isinstance(block, ControlBlock)]
        rows = rows_of_step("controlnet", None, modulations_of(blocks), timestep, condition, context)
        return [block(x, tokens, *map(rows.of, block.modulations), rotations, context) for block in blocks]

    def _text(self, text: Conditions, context: AttentionContext) -> torch.Tensor:
        """Return the text's tokens [B, L, D], kept for the other steps of the request."""

        def project() -> torch.Tensor:
            # A copy: the norm writes into float32 inputs.
            tokens = text.embeddings[:, : max(text.lengths)].to(self.text_embedding.weight.dtype, copy=True)
            projected: torch.Tensor = self.text_embedding(self.text_norm(tokens))
            return projected

        return cached_for_prompt("controlnet_text", text.embeddings, context, project)


class QwenImageControlledTransformer(QwenImageTransformer):
    """The transformer with its ControlNet. inputs.image.latents: of the control image, [B, channels, 1, height, width]
    of the latents' size; inputs.prompt: text of the ControlNet in every branch, None for inputs.text."""

    def __init__(
        self,
        config: QwenImageTransformerConfig,
        own: QwenImageControlNetConfig,
        geometry: LatentGeometry,
        policy: AttentionPolicy,
    ) -> None:
        super().__init__(config, geometry, policy)
        blocks = self.blocks
        # Declared in the order in which they run, the order of offloading and reports.
        del self.blocks
        self.controlnet = QwenImageControlNet(config, own, geometry, policy)
        self.blocks = blocks

    def replay_refusal(self) -> str | None:
        return "which steps a ControlNet takes part in is read of the step (control_guidance_start and _end)"

    def references_of(self, inputs: DenoiserInputs) -> tuple[torch.Tensor, ...]:
        """Return nothing: the image is the ControlNet's."""
        return ()

    def residuals_of(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> Sequence[torch.Tensor]:
        """Return the residuals after each block. A ControlNet of fewer blocks adds each residual several times."""
        scales = scales_of(inputs.request, len(self.controlnet.blocks))
        if not counts_at(inputs.request, context.step) or not any(scales):
            return ()
        assert inputs.image is not None, "the control image is needed by every request"
        text = inputs.text if inputs.prompt is None else inputs.prompt
        # Both branches in one pass have the same latents twice: one is enough.
        batch = len(text.lengths)
        num_text_tokens = max(text.lengths)
        grid = self.geometry.grid(latents.shape)
        layout = layout_with_references(grid, 0, num_text_tokens, text.lengths, tile=context.sharding.tile)
        residuals = self.controlnet(
            latents[:batch],
            inputs.image.latents[:batch],
            timestep[:batch],
            text,
            self.rotations((grid,), num_text_tokens, context),
            context.with_layout(layout),
        )
        times = len(latents) // batch
        scaled = [(each * scale).repeat(times, 1, 1) for each, scale in zip(residuals, scales, strict=True)]
        interval = -(-self.num_blocks // len(scaled))
        return [scaled[index // interval] for index in range(self.num_blocks)]


def controlled_pieces(config: QwenImageTransformerConfig, own: QwenImageControlNetConfig) -> Iterator[NamedPieces]:
    """Yield the pieces of the transformer, and those of the ControlNet after `controlnet.`."""
    yield from transformer_pieces(config)
    for name, several in _controlnet_pieces(config, own):
        renamed = (dataclasses.replace(each, name=f"{COMPONENT}.{each.name}") for each in several)
        yield f"{COMPONENT}.{name}", tuple(renamed)


def _controlnet_pieces(config: QwenImageTransformerConfig, own: QwenImageControlNetConfig) -> Iterator[NamedPieces]:
    dim = config.dim
    yield from embedding_pieces(config)
    yield from linear_pieces("control_embedding.projection", [("controlnet_x_embedder", dim)], config.patch_channels)
    for index in range(own.num_layers):
        names = f"blocks.{index}", f"transformer_blocks.{index}"
        yield from double_stream_pieces(*names, dim, config.head_dim, config.ffn_dim, STREAMS)
        yield from linear_pieces(f"blocks.{index}.hint", [(f"controlnet_blocks.{index}", dim)], dim)
