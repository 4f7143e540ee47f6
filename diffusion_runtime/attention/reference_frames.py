"""Attention within a clip and to a reference clip, whose frames are seen by the frames of the same index alone
(in-context attention of Wan-Animate 2).

    grid of queries            keys of the grid    keys of the reference
    num_before frames          all                 none
    frame num_before + i       all                 frame i

A block mask over both kinds of keys describes the same. Here the grid is one call, of any backend for a whole sequence,
the reference another one with a frame per row of its batch, and the two are merged by their log-sum-exps: nothing is
padded to the blocks of a mask, and no pair of frames is computed that is not seen.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias, cast

import torch
from torch.nn.attention.flex_attention import BlockMask

from diffusion_runtime.attention.backends.interface import AttentionResult
from diffusion_runtime.attention.cache.reference import ReferenceFrames
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layer_decisions import ResolvedCall
from diffusion_runtime.attention.layers import LocalAttention, UlyssesAttention
from diffusion_runtime.attention.measured_error import ErrorSample
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import RASTER, TokenLayout
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.parallel.interface import AttentionInputs, Exchange
from diffusion_runtime.parallel.merging import PartialAttention
from diffusion_runtime.parallel.ulysses import UlyssesExchange
from diffusion_runtime.report.attention_density import Kept

# The name of every layer's keys and values in a RequestCache.
_KEYS = "reference keys"
_Keys: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class ReferenceFrameAttention(UlyssesAttention):
    """Self-attention whose frames attend to those of a reference clip too, where the context has one.

    frames: the attention to the reference, a layer with a role of its own and so with a choice of its own. All heads of
    a process are computed at once. On a mesh with a ring axis the heads are shared among all processes of the sequence:
    the keys of the reference stay where they are computed.

    Raises, in addition to what AttentionLayer raises, ConfigError for more processes than heads.
    """

    def __init__(
        self, num_heads: int, head_dim: int, *, layer: LayerInfo, policy: AttentionPolicy, reference_role: str
    ) -> None:
        if policy.mesh.sequence.size > num_heads // policy.mesh.tensor.size:
            raise ConfigError(
                f"{layer.role}: {policy.mesh.sequence.size} processes share the sequence by the "
                f"{num_heads // policy.mesh.tensor.size} attention heads of this model, with ring_degree too, as its "
                "keys of the reference clip are held by head; use fewer processes"
            )
        super().__init__(num_heads, head_dim, layer=layer, policy=policy, merges=True)
        of_frames = dataclasses.replace(
            layer, role=reference_role, name=f"{layer.name}.attention.frames", phase="denoise"
        )
        self.frames = LocalAttention(num_heads, head_dim, layer=of_frames, policy=policy, merges=True)

    def _run(
        self,
        inputs: AttentionInputs,
        context: AttentionContext,
        served: ResolvedCall,
        sample: ErrorSample | None = None,
        block_mask: BlockMask | None = None,
    ) -> AttentionResult:
        result = super()._run(inputs, context, served, sample, block_mask)
        reference = context.reference
        if reference is None:
            return result
        if reference.is_written:
            self._write(inputs.k, inputs.v, inputs.first_head, context)
            return result
        assert result.lse is not None, "a backend that was chosen for its log-sum-exp returned none"
        start = reference.num_before * _tokens_per_frame(inputs.layout)
        merged = PartialAttention()
        merged.add(result.out[:, start:], result.lse[:, :, start:])
        merged.add(*self._attend_frames(inputs, reference, context))
        result.out[:, start:] = merged.result(result.out)
        # Nobody reads it: processes that share the sequence hold all keys.
        return result._replace(lse=None)

    def _attend_frames(
        self, inputs: AttentionInputs, reference: ReferenceFrames, context: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result over the reference's keys, of the frames that see some, and its log-sum-exp."""
        batch = inputs.q.shape[0]
        keys = self._read(inputs.first_head, context)
        q, k, v = by_frame(inputs.q, keys, reference, inputs.layout)
        context = context.with_layout(None)
        served = self.frames.decisions.served(q, context)
        call = AttentionInputs(q, k, v, first_head=inputs.first_head, num_heads_total=inputs.num_heads_total)
        sample = ErrorSample.due(served.rounding, self.frames.layer, context, q)
        result = self.frames._run(call, context, served, sample)
        if sample is not None:
            sample.check(self.policy.mesh.forward, q.device)
        kept = [Kept(result.plan)]
        self.frames._count(context, served, result.implementation, kept, result.keys)
        assert result.lse is not None, "a backend that was chosen for its log-sum-exp returned none"
        num_frames, rows, heads, head_dim = q.shape
        out = result.out.reshape(num_frames, batch, rows // batch, heads, head_dim).transpose(0, 1).flatten(1, 2)
        lse = result.lse.reshape(num_frames, heads, batch, rows // batch).permute(2, 1, 0, 3).flatten(2)
        return out, lse

    def _allocate(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        out = super()._allocate(q, k, v, context)
        reference = context.reference
        if reference is None:
            return out
        if reference.is_written:
            self._write(k, v, self.first_head, context)
            return out
        keys = self._read(self.first_head, context)
        seen = self.frames(*by_frame(q, keys, reference, context.layout), context.with_layout(None))
        merged = torch.empty(2, *seen.shape, dtype=torch.float32, device=q.device)
        del seen, merged
        return out

    def _write(self, k: torch.Tensor, v: torch.Tensor, first_head: int, context: AttentionContext) -> None:
        # Copies: they may be views of a tensor that also holds the queries.
        keys = tuple(x.clone(memory_format=torch.contiguous_format) for x in (k, v))
        context.state.request.put((_KEYS, self.layer.index, first_head), keys)

    def _read(self, first_head: int, context: AttentionContext) -> _Keys:
        found = context.state.request.find((_KEYS, self.layer.index, first_head))
        assert found is not None, "the reference's pass comes first"
        return cast(_Keys, found)

    @staticmethod
    def _make_exchange(mesh: ProcessMesh, num_head_groups: int) -> Exchange:  # noqa: ARG004
        return UlyssesExchange(mesh.sequence)


def by_frame(
    q: torch.Tensor, keys: _Keys, reference: ReferenceFrames, layout: TokenLayout | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values with a frame of the reference per row: [frames, batch * tokens of a frame, heads,
    head_dim] and [frames, tokens of its frame, heads, head_dim].

    q: [batch, seq, heads, head_dim] of a grid in raster order; keys: of the reference, [1, seq, heads, head_dim], which
    all samples see. Raises ConfigError for a reference of another number of frames.
    """
    per_frame = _tokens_per_frame(layout)
    q = q[:, reference.num_before * per_frame :]
    batch, num_queries, heads, head_dim = q.shape
    num_frames = num_queries // per_frame
    k, v = keys
    if k.shape[:2] != (1, num_frames * per_frame):
        raise ConfigError(
            f"reference frames: expected keys of one sample with {num_frames} frames, got {list(k.shape)} for queries "
            f"{list(q.shape)}"
        )
    rows = q.reshape(batch, num_frames, per_frame, heads, head_dim).transpose(0, 1).flatten(1, 2)
    return rows, k[0].view(num_frames, per_frame, heads, head_dim), v[0].view(num_frames, per_frame, heads, head_dim)


def _tokens_per_frame(layout: TokenLayout | None) -> int:
    """Return the tokens of a frame. Raises ConfigError for anything but a grid in raster order."""
    if layout is None or layout.num_text_tokens or layout.tile != RASTER:
        raise ConfigError(f"reference frames: expected a grid in raster order, got {layout}")
    return layout.grid[1] * layout.grid[2]
