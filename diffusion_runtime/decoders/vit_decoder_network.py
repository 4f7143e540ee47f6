"""Vision transformer (ViT) that decodes latents of a video autoencoder (MiniMax-H3), with its published tensor names.

Every latent is one token. Learned register tokens (Darcet et al., arXiv:2309.16588) and one token of zeros follow,
which all tokens attend to and which become no pixels. Positions are parts of the extent of a clip, from -1 to 1 on each
axis, so that tiles of one size have the same. The residual stream, norms and layer scales (Touvron et al.,
arXiv:2103.17239) are float32 whatever the dtype of the products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm, modulated_norm
from diffusion_runtime.kernels.qk_norm_rope.api import norm_rope
from diffusion_runtime.layers.eight_bit_linear import input_of
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.norm import LayerNorm, RMSNorm

NUM_AXES = 3


@dataclass(frozen=True)
class VitDecoderSizes:
    """Sizes of the network. hidden_factor: width of the feed-forward networks in widths of the model. num_rotated:
    channels of a head that positions turn. patch: frames and pixels a side of a token. clip_length: frames that the
    encoder takes at once; num_dropped: latents that it drops at the end."""

    latent_channels: int
    num_layers: int
    num_heads: int
    head_dim: int
    num_registers: int
    hidden_factor: int
    num_rotated: int
    rope_theta: float
    eps: float
    patch: tuple[int, int]
    clip_length: int
    num_dropped: int

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def latents_per_clip(self) -> int:
        """Latent frames of `clip_length` frames."""
        return math.ceil(self.clip_length / self.patch[0])

    @property
    def shared_latents(self) -> int:
        """Latent frames that a clip is decoded with in addition, the first ones of the next clip."""
        return -self.num_dropped % self.latents_per_clip

    @property
    def num_lead_frames(self) -> int:
        """Frames that the first latent of a clip becomes too many: the encoder pads them."""
        return -self.clip_length % self.patch[0]

    def num_frames(self, num_latents: int) -> int:
        """Return the frames of so many latent frames; the first latent of every clip holds fewer than the others."""
        clips, rest = divmod(num_latents, self.latents_per_clip)
        return clips * self.clip_length + max(0, rest * self.patch[0] - self.num_lead_frames)

    def num_tokens(self, num_latents: int) -> int:
        """Return the tokens of a pass over so many latents: registers and the token of zeros follow."""
        return num_latents + self.num_registers + 1


class VitVideoAutoencoder(nn.Module):
    """The decoding half of an autoencoder: `post_quant_conv` and `decoder`. class_name: of the published one, for the
    report."""

    def __init__(self, class_name: str, sizes: VitDecoderSizes) -> None:
        super().__init__()
        self.class_name = class_name
        self.sizes = sizes
        self.spatial_compression_ratio = sizes.patch[1]
        self.post_quant_conv = nn.Conv3d(sizes.latent_channels, sizes.latent_channels, 1)
        self.decoder = VitDecoder(sizes)

    def forward(
        self, latents: torch.Tensor, attention: Sequence[AttentionLayer], context: AttentionContext
    ) -> torch.Tensor:
        """Decode tiles of one size, [tiles, channels, frames, height, width], to [tiles, 3, frames * patch, ..] in the
        dtype of the weights.

        attention: of each block, which hold no weights. context: of their calls.
        """
        weight = self.post_quant_conv.weight
        tokens = torch.nn.functional.linear(
            latents.flatten(2).transpose(1, 2), weight.flatten(1), self.post_quant_conv.bias
        )
        frames, height, width = latents.shape[2:]
        return self.decoder.pixels(tokens, (frames, height, width), attention, context)


class VitDecoder(nn.Module):
    """Blocks of self-attention and a gated feed-forward network, between two projections."""

    def __init__(self, sizes: VitDecoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.proj_in = Linear(sizes.latent_channels, sizes.dim)
        self.register_tokens = nn.Parameter(torch.zeros(1, sizes.num_registers, sizes.dim))
        self.transformer_blocks = nn.ModuleList(VitBlock(sizes) for _ in range(sizes.num_layers))
        self.norm_out = LayerNorm(sizes.dim, sizes.eps)
        self.proj_out = Linear(sizes.dim, 3 * sizes.patch[0] * sizes.patch[1] ** 2)

    def pixels(
        self,
        latents: torch.Tensor,
        grid: tuple[int, int, int],
        attention: Sequence[AttentionLayer],
        context: AttentionContext,
    ) -> torch.Tensor:
        """Return [batch, 3, frames, height, width]. latents: [batch, tokens of the grid, channels]."""
        batch, num_latents, _ = latents.shape
        tokens = self.proj_in(latents)
        x = tokens.new_empty(batch, self.sizes.num_tokens(num_latents), self.sizes.dim, dtype=torch.float32)
        x[:, :num_latents] = tokens
        x[:, num_latents:-1] = self.register_tokens
        x[:, -1] = 0.0
        call = _Call(context, rotations(self.sizes, grid, x.device), tokens.new_ones(self.sizes.head_dim))
        branch: Branch | None = None
        for block, layer in zip(self.transformer_blocks, attention, strict=True):
            branch = block(x, branch, tokens.dtype, layer, call)
        kept = None if branch is None else Branch(branch.values[:, :num_latents], branch.gate)
        normed = _normed(x[:, :num_latents], self.norm_out.as_norm, kept, tokens.dtype)
        del x, branch, kept
        return self._unfolded(self.proj_out(normed), grid)

    def _unfolded(self, patches: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """Return the pixels of the tokens' patches, [batch, tokens, 3 * frames * side * side]."""
        (frames, height, width), (depth, side) = grid, self.sizes.patch
        parts = patches.view(-1, frames, height, width, 3, depth, side, side).permute(0, 4, 1, 5, 2, 6, 3, 7)
        return parts.reshape(-1, 3, frames * depth, height * side, width * side)


@dataclass(frozen=True)
class _Call:
    """Values that all blocks of a pass share. rotations: [tokens, head_dim / 2]; ones: weights of the norms of queries
    and keys."""

    context: AttentionContext
    rotations: torch.Tensor
    ones: torch.Tensor


class VitBlock(nn.Module):
    """Self-attention, then a gated feed-forward network, each scaled by channel."""

    def __init__(self, sizes: VitDecoderSizes) -> None:
        super().__init__()
        self.norm1 = RMSNorm(sizes.dim, sizes.eps)
        self.attn = VitAttention(sizes)
        self.scale1 = nn.Parameter(torch.zeros(sizes.dim))
        self.norm2 = RMSNorm(sizes.dim, sizes.eps)
        self.ff = VitFeedForward(sizes.dim, sizes.hidden_factor * sizes.dim)
        self.scale2 = nn.Parameter(torch.zeros(sizes.dim))

    def forward(
        self, x: torch.Tensor, branch: Branch | None, dtype: torch.dtype, attention: AttentionLayer, call: _Call
    ) -> Branch:
        """Apply the block to x, float32, in place, but for its last branch, which is returned to be added. branch: that
        of the block before."""
        normed = _normed(x, self.norm1.as_norm, branch, dtype)
        attended = Branch(self.attn(normed, attention, call), self.scale1.expand(len(x), -1))
        normed = _normed(x, self.norm2.as_norm, attended, dtype)
        return Branch(self.ff(normed), self.scale2.expand(len(x), -1))


class VitAttention(nn.Module):
    """Self-attention whose queries and keys have norms without weights."""

    def __init__(self, sizes: VitDecoderSizes) -> None:
        super().__init__()
        self.num_heads, self.num_rotated, self.eps = sizes.num_heads, sizes.num_rotated, sizes.eps
        self.to_q, self.to_k, self.to_v = (Linear(sizes.dim, sizes.dim) for _ in range(3))
        self.to_out = nn.ModuleList([Linear(sizes.dim, sizes.dim)])

    def forward(self, x: torch.Tensor, attention: AttentionLayer, call: _Call) -> torch.Tensor:
        """[batch, tokens, dim] to a new tensor like it."""
        layers = self.to_q, self.to_k, self.to_v
        given = input_of(layers, x)
        q, k, v = (layer(given).unflatten(2, (1, self.num_heads, -1)) for layer in layers)
        (q,) = norm_rope(q, (call.ones,), self.eps, call.rotations)
        (k,) = norm_rope(k, (call.ones,), self.eps, call.rotations)
        out: torch.Tensor = self.to_out[0](attention(q, k, v[:, :, 0], call.context).flatten(2))
        return out


class VitFeedForward(nn.Module):
    """net.2(a * silu(b)), where a and b are the halves of net.0.proj (Shazeer, arXiv:2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        up = nn.ModuleDict({"proj": Linear(dim, 2 * hidden_dim)})
        self.net = nn.ModuleList([up, nn.Identity(), Linear(hidden_dim, dim)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, dim] to a new tensor like it."""
        net: Any = self.net
        features, gate = net[0]["proj"](x).chunk(2, dim=-1)
        out: torch.Tensor = net[2].forward_after_silu(gate, features)
        return out


def _normed(x: torch.Tensor, norm: Norm, branch: Branch | None, dtype: torch.dtype) -> torch.Tensor:
    """Add a branch to x, float32, in place, and return the norm of the sum in `dtype`."""
    out = None if dtype == x.dtype else torch.empty(x.shape, dtype=dtype, device=x.device)
    return modulated_norm(x, norm, branch=branch, out=out)


def rotations(sizes: VitDecoderSizes, grid: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """Return complex64 [tokens, head_dim / 2] for channels in adjacent pairs (`pair_channels`): the axes one after the
    other, then pairs that nothing turns. Angles are float32, as the network was trained with."""
    steps = torch.arange(0, 1, 2 * NUM_AXES / sizes.num_rotated, dtype=torch.float32, device=device)
    paces = 1.0 / sizes.rope_theta**steps
    axes = [2.0 * (torch.arange(0.5, size, dtype=torch.float32, device=device) / size) - 1.0 for size in grid]
    positions = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(-1, NUM_AXES)
    angles = (2.0 * math.pi * positions[:, :, None] * paces).flatten(1)
    table = torch.ones(sizes.num_tokens(len(angles)), sizes.head_dim // 2, dtype=torch.complex64, device=device)
    table[: len(angles), : angles.shape[1]] = torch.polar(torch.ones_like(angles), angles)
    return table


def pair_channels(module: nn.Module, name: str, values: torch.Tensor) -> None:
    """Make the channels of queries and keys that turn together adjacent, where parameter `name` produces any: published
    weights have the two halves of the turned channels one after the other. values: changed in place."""
    owner, _, _ = name.rpartition(".")
    parent, _, part = owner.rpartition(".")
    if part not in ("to_q", "to_k") or not isinstance(attention := module.get_submodule(parent), VitAttention):
        return
    turned = values.view(attention.num_heads, -1, *values.shape[1:])[:, : attention.num_rotated]
    turned.copy_(torch.unflatten(turned, 1, (2, -1)).transpose(1, 2).flatten(1, 2))
