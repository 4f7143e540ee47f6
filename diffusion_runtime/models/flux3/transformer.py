"""The FLUX.3 transformer on our attention layers, for inference.

    latents    -> tokens -> blocks of the image  \
    references -> tokens -> blocks of references  > joined -> joint blocks -> modulated norm -> velocity
    text       -> tokens -> blocks of the text   /

One kind of block serves all: attention and a gated feed-forward side by side. Before they are joined, tokens attend to
those of their own kind alone. The image is modulated by the step's timestep, references and text by timestep 0, so that
their tokens in front of the joint blocks are the same at every step, and are computed once per request. In a flow map,
the distilled kind, the timestep that a step leads to modulates them as well, so that they are computed at every step.
All blocks of one kind share their modulation. Shapes in this file: B batch, S grid tokens, R tokens of references,
L text tokens, T tokens of one sequence, D width (num_heads * head_dim).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer, LocalAttention, USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput, RunBlock, Streams, overwriting, then_joined
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.activations.api import silu_mul
from diffusion_runtime.kernels.modulated_norm.api import Norm
from diffusion_runtime.layers.embeddings import ConditionEmbedding, patchify, unpatchify
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.modulation import Modulation, modulated_layer_norm
from diffusion_runtime.layers.modulation_rows import ModulationRows, rows_of_request, rows_of_step
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.reference_tokens import layout_with_references
from diffusion_runtime.layers.rope import norm_and_rotate, position_rotations
from diffusion_runtime.layers.token_runs import add_gated_by_run_, modulated_for
from diffusion_runtime.models.flux3.config import Flux3TransformerConfig
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.text_encoders.interface import Conditions

TEXT_ROLE, REFERENCE_ROLE = "flux3.text_self", "flux3.reference_self"
# The model takes time in [0, 1] and multiplies it by this.
_TIME_SCALE = 1000.0
# What rows and columns of pictures are multiplied by, as in training.
_PLACE_SCALES = (1.0, 0.5, 0.5, 1.0)
# (tokens, shift, scale and gate of them, [3, B, D]).
Runs = Sequence[tuple[slice, torch.Tensor]]


class Flux3Block(nn.Module):
    """Attention and a gated feed-forward side by side (Dehghani et al., arXiv:2302.05442), without biases, and
    modulated by rows that all blocks of a kind share. One projection makes q, k, v, and gate and features of the
    feed-forward."""

    def __init__(self, config: Flux3TransformerConfig, attention: AttentionLayer) -> None:
        super().__init__()
        self.eps = config.eps
        self.qkv_up = Linear(config.dim, 3 * config.dim + 2 * config.ffn_dim, bias=False)
        self.norm_q = RMSNorm(config.head_dim, config.eps)
        self.norm_k = RMSNorm(config.head_dim, config.eps)
        self.out = Linear(config.dim, config.dim, bias=False)
        self.down = Linear(config.ffn_dim, config.dim, bias=False)
        self.attention = attention

    def forward(self, x: torch.Tensor, runs: Runs, rotations: torch.Tensor, context: AttentionContext) -> None:
        """Run the block; x [B, T, D] is overwritten. runs: of all its tokens, in order. rotations: [T, head_dim / 2],
        complex."""
        shifts = [(tokens, rows[0], rows[1]) for tokens, rows in runs]
        projected = self.qkv_up(modulated_for((self.qkv_up,), x, Norm("layer", self.eps), shifts))
        dim = self.attention.num_heads * self.attention.head_dim
        qkv, gate, features = torch.split(projected, [3 * dim, self.down.in_features, self.down.in_features], dim=-1)
        packed = torch.unflatten(qkv, -1, (3, self.attention.num_heads, -1))
        shares = self.attention.num_shares
        q, k, v = norm_and_rotate(packed, (self.norm_q, self.norm_k), rotations, num_shares=shares)
        attended = self.attention(q, k, v, context)
        hidden = silu_mul(gate, features, in_place=True, num_shares=shares)
        branch = self.out.forward_sum(attended.flatten(2), self.down, hidden)
        add_gated_by_run_(x, branch, [(tokens, rows[2]) for tokens, rows in runs])


class Flux3Transformer(DiffusionTransformer):
    """The whole denoiser."""

    def __init__(self, config: Flux3TransformerConfig, geometry: LatentGeometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.rows_take_next = config.is_flow_map
        self.image_embedding = Linear(config.num_channels, config.dim, bias=False)
        self.reference_embedding = Linear(config.num_channels, config.dim, bias=False)
        self.text_embedding = Linear(config.text_dim, config.dim, bias=False)
        self.condition_embedding = ConditionEmbedding(
            config.dim, num_waves=config.num_waves, takes_next_timestep=config.is_flow_map, bias=False
        )
        modulation = partial(Modulation, config.dim, 3, bias=False)
        self.image_modulation, self.joint_image_modulation = modulation(), modulation()
        self.reference_modulation, self.joint_reference_modulation = modulation(), modulation()
        self.text_modulation, self.joint_text_modulation = modulation(), modulation()

        def make(kind: type[AttentionLayer], role: str, name: str, count: int, first: int = 0) -> nn.ModuleList:
            layers = [LayerInfo(first + index, config.num_layers, role, f"{name}.{index}") for index in range(count)]
            attention = partial(kind, config.num_heads, config.head_dim, policy=policy)
            return nn.ModuleList(Flux3Block(config, attention(layer=layer)) for layer in layers)

        own = config.num_double_layers
        self.text_blocks = make(LocalAttention, TEXT_ROLE, "text_blocks", own)
        self.reference_blocks = make(LocalAttention, REFERENCE_ROLE, "reference_blocks", own)
        self.blocks = make(USPAttention, "self", "blocks", own)
        self.single_blocks = make(USPAttention, "self", "single_blocks", config.num_single_layers, own)
        self.out_modulation = Modulation(config.dim, 2, bias=False)
        self.out = Linear(config.dim, config.num_channels, bias=False)

    @property
    def num_blocks(self) -> int:
        return self.config.num_layers

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity. The text's padding counts as text in the lengths, as in training."""
        grid, lengths = self.geometry.grid(latents.shape), inputs.text.lengths
        references = () if inputs.image is None else inputs.image.references
        context = self.in_token_order(context, grid, latents.device)
        x = context.sharding.shard(self._embed(self.image_embedding, (latents,)))
        grids = (grid, *(self.geometry.grid(each.shape) for each in references))
        sizes = x.shape[1], sum(math.prod(each) for each in grids[1:]), max(lengths)
        rotations = self._rotations(grids, sizes[2], context)
        of_image, of_references, of_text = torch.split(rotations, list(sizes))
        rows, constant = self._rows(timestep, context), self._constant_rows(timestep, context)
        given = [self._text(inputs.text, constant, of_text, context)]
        if references:
            given.insert(0, self._references(references, constant, of_references, context))
        first_rows, entering = rows.of(self.image_modulation), x
        in_image = context.with_layout(TokenLayout(grid, tile=context.sharding.tile))
        image_blocks = [_on_first(block, [(slice(None), first_rows)], of_image, in_image) for block in self.blocks]
        joint = context.with_layout(
            layout_with_references(grid, sizes[1], sizes[2], lengths, tile=context.sharding.tile)
        )
        runs = self._joint_runs(sizes, rows, constant)
        joint_blocks = [overwriting(block, runs, rotations, joint) for block in self.single_blocks]
        (x,) = context.run_blocks(
            [*then_joined(image_blocks), *joint_blocks],
            (x, torch.cat(given, dim=1)),
            math.prod(grid),
            lambda: ModulatedInput(modulated_layer_norm(entering, first_rows[0], first_rows[1], self.config.eps)),
        )
        scale, shift = rows.of(self.out_modulation)
        tokens = self.out(modulated_layer_norm(x[:, : sizes[0]], shift, scale, self.config.eps))
        tokens = context.sharding.gather(tokens, math.prod(grid))
        return unpatchify(tokens, grid, self.geometry.patch).to(latents.dtype)

    def _rows(self, timestep: torch.Tensor, context: AttentionContext) -> ModulationRows:
        """Return the modulation rows of the image's tokens."""
        modulations = self.image_modulation, self.joint_image_modulation, self.out_modulation
        is_flow_map = self.config.is_flow_map
        return rows_of_step("image", None, modulations, timestep, self._condition, context, takes_next=is_flow_map)

    def _constant_rows(self, timestep: torch.Tensor, context: AttentionContext) -> ModulationRows:
        """Return the modulation rows of references and text, at timestep 0."""
        modulations = (
            self.reference_modulation,
            self.joint_reference_modulation,
            self.text_modulation,
            self.joint_text_modulation,
        )
        name, zero = "references and text", torch.zeros_like(timestep)
        if not self.config.is_flow_map:
            return rows_of_request(
                name, None, modulations, len(timestep), lambda: self._condition(zero[:1], None), context
            )

        def condition(timestep: torch.Tensor, following: torch.Tensor | None) -> torch.Tensor:
            return self._condition(torch.zeros_like(timestep), following)

        return rows_of_step(name, None, modulations, timestep, condition, context, takes_next=True)

    def _condition(self, timestep: torch.Tensor, following: torch.Tensor | None) -> torch.Tensor:
        """Return [B, D], after its activation. The division and the product round as they do in training: at hundreds
        of radians it shows in the fifth digit."""
        after = None if following is None else following / _TIME_SCALE * _TIME_SCALE
        return F.silu(self.condition_embedding(timestep / _TIME_SCALE * _TIME_SCALE, next_timestep=after))

    def _text(
        self, text: Conditions, rows: ModulationRows, rotations: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Return the text's tokens in front of the joint blocks, [B, L, D], as long as the longest prompt."""

        def embed() -> torch.Tensor:
            embeddings = text.embeddings[:, : max(text.lengths)].to(self.out.weight.dtype)
            tokens: torch.Tensor = self.text_embedding(embeddings)
            return tokens

        def run(tokens: torch.Tensor) -> None:
            own = context.with_layout(TokenLayout.text(tokens.shape[1], text.lengths))
            for block in self.text_blocks:
                block(tokens, [(slice(None), rows.of(self.text_modulation))], rotations, own)

        return self._kept("text", text.embeddings, embed, run, context)

    def _references(
        self,
        references: Sequence[torch.Tensor],
        rows: ModulationRows,
        rotations: torch.Tensor,
        context: AttentionContext,
    ) -> torch.Tensor:
        """Return the tokens of all references in front of the joint blocks, [B, R, D]."""

        def run(tokens: torch.Tensor) -> None:
            own = context.with_layout(TokenLayout.text(tokens.shape[1]))
            for block in self.reference_blocks:
                block(tokens, [(slice(None), rows.of(self.reference_modulation))], rotations, own)

        embed = partial(self._embed, self.reference_embedding, references)
        return self._kept("references", references[0], embed, run, context)

    def _kept(
        self,
        name: str,
        source: object,
        embed: Callable[[], torch.Tensor],
        run: Callable[[torch.Tensor], None],
        context: AttentionContext,
    ) -> torch.Tensor:
        """Return embedded tokens after blocks of their own: those of a request's first pass serve the others, in a flow
        map as embedded alone. run: runs the blocks, and overwrites the tokens."""
        if self.config.is_flow_map:
            tokens = cached_for_prompt(f"{name}_embedding", source, context, embed).clone()
            run(tokens)
            return tokens

        def compute() -> torch.Tensor:
            tokens = embed()
            run(tokens)
            context.recorder.note(
                f"{name}: {tokens.shape[1]} tokens in front of the joint blocks computed once, "
                f"{size_text(tokens.nbytes)}"
            )
            return tokens

        return cached_for_prompt(name, source, context, compute)

    def _joint_runs(self, sizes: tuple[int, int, int], rows: ModulationRows, constant: ModulationRows) -> Runs:
        """Return the runs of the joint sequence. sizes: tokens of the image on this process, references and text."""
        made = (
            rows.of(self.joint_image_modulation),
            constant.of(self.joint_reference_modulation),
            constant.of(self.joint_text_modulation),
        )
        ends = sizes[0], sizes[0] + sizes[1], sum(sizes)
        places = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return [(place, own) for place, own in zip(places, made, strict=True) if place.start < place.stop]

    def _embed(self, embedding: Linear, latents: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tokens [B, tokens, D] of latents [B, channels, 1, height, width] of one or more pictures."""
        dtype, patch = self.out.weight.dtype, self.geometry.patch
        tokens: torch.Tensor = embedding(torch.cat([patchify(each.to(dtype), patch) for each in latents], dim=1))
        return tokens

    def _rotations(
        self, grids: tuple[tuple[int, int, int], ...], num_text_tokens: int, context: AttentionContext
    ) -> torch.Tensor:
        """Return [S + R + L, head_dim / 2]. grids: the output's, and those of the references. Pictures vary along rows
        and columns, the references at -1, -2, ... on the last axis; the text along that axis, from 0 on."""

        def compute() -> torch.Tensor:
            on_grid, *whole = (
                self._table((range(1), range(rows), range(columns), range(-index, 1 - index)))
                for index, (_, rows, columns) in enumerate(grids)
            )
            text = self._table((range(1), range(1), range(1), range(num_text_tokens)))
            return torch.cat([context.sharding.shard(on_grid, dim=0), *whole, text])

        return cached_for_request("rotations", (grids, num_text_tokens), context, compute)

    def _table(self, places: tuple[range, ...]) -> torch.Tensor:
        config, device = self.config, self.out.weight.device
        return position_rotations(places, config.axes, device, config.theta, scales=_PLACE_SCALES)


def _on_first(block: nn.Module, *inputs: object) -> RunBlock:
    """Return a block that is called with the first stream and `inputs`, and overwrites that stream."""

    def run(streams: Streams) -> Streams:
        block(streams[0], *inputs)
        return streams

    return run
