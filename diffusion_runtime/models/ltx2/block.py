"""A block of LTX-2: two streams, the video's and the sound's, that attend to themselves, to the text and to each other.

Shapes: B batch, S tokens of a stream, L text tokens, D width of a stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer, LocalAttention, USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.block_stack import ModulatedInput
from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm, modulated_norm
from diffusion_runtime.layers.linear import FeedForward, Linear
from diffusion_runtime.layers.modulation import add_gated_, modulated_rms_norm
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.rope import norm_and_rotate
from diffusion_runtime.models.ltx2.config import LTX2Config, StreamConfig
from diffusion_runtime.step_info import LayerInfo

# The sound is a line of tokens, not a grid, and so is its text: nothing for a sparse choice, which `cross` says.
AUDIO_SELF_ROLE = "ltx2.audio_self"
AUDIO_CROSS_ROLE = "ltx2.audio_cross"
AUDIO_TO_VIDEO_ROLE = "ltx2.audio_to_video"
VIDEO_TO_AUDIO_ROLE = "ltx2.video_to_audio"

# Of the norms of q and k, whatever the config says of the others.
_QK_EPS = 1e-6

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class SelfAttention(nn.Module):
    """Attention among the tokens of a stream."""

    def __init__(self, stream: StreamConfig, attention: AttentionLayer) -> None:
        super().__init__()
        self.num_heads = stream.num_heads
        self.qkv = Linear(stream.dim, 3 * stream.dim)
        self.norm_q = RMSNorm(stream.dim, _QK_EPS)
        self.norm_k = RMSNorm(stream.dim, _QK_EPS)
        self.out = Linear(stream.dim, stream.dim)
        self.attention = attention

    def forward(self, x: torch.Tensor, rotations: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """x: [B, S, D]; rotations: [S, heads, head_dim / 2], complex; context.layout: the stream."""
        packed = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = norm_and_rotate(packed, (self.norm_q, self.norm_k), rotations[None])
        out: torch.Tensor = self.out(self.attention(q, k, v, context).flatten(2))
        return out


class CrossAttention(nn.Module):
    """Attention from the tokens of a stream to those of something else. inner: the heads it has in between.

    rotations, where given: [tokens, heads, head_dim / 2], complex.
    """

    def __init__(self, dim: int, source_dim: int, inner: StreamConfig, attention: AttentionLayer) -> None:
        super().__init__()
        self.num_heads = inner.num_heads
        self.q = Linear(dim, inner.dim)
        self.kv = Linear(source_dim, 2 * inner.dim)
        self.norm_q = RMSNorm(inner.dim, _QK_EPS)
        self.norm_k = RMSNorm(inner.dim, _QK_EPS)
        self.out = Linear(inner.dim, dim)
        self.attention = attention

    def keys_and_values(self, source: torch.Tensor, rotations: torch.Tensor | None = None) -> KeysAndValues:
        """Both [B, tokens, heads, head_dim], of a source [B, tokens, source_dim]."""
        k, v = self._turned(self.kv(source), 2, self.norm_k, rotations)
        return k, v

    def forward(
        self,
        x: torch.Tensor,
        keys_and_values: KeysAndValues,
        context: AttentionContext,
        rotations: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [B, S, D]; context.layout: the keys."""
        (q,) = self._turned(self.q(x), 1, self.norm_q, rotations)
        out: torch.Tensor = self.out(self.attention(q, *keys_and_values, context).flatten(2))
        return out

    def _turned(
        self, product: torch.Tensor, num_parts: int, norm: RMSNorm, rotations: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        packed = torch.unflatten(product, -1, (num_parts, self.num_heads, -1))
        return norm_and_rotate(packed, (norm,), None if rotations is None else rotations[None])


@dataclass(frozen=True)
class StreamInputs:
    """What every block of one forward pass reads beside the tokens of a stream.

    time: rows of the timestep for self-attention and feed-forward, [B, 6, D]; exchange: for attention between the
    streams, [B, 5, D]; both float32. rotations, shared_rotations: of its tokens within the stream and between the
    streams.
    context, text_context, keys_context: the forward pass where the stream itself, its text, or the stream as what the
    other one attends to, are the keys.
    """

    time: torch.Tensor
    exchange: torch.Tensor
    rotations: torch.Tensor
    shared_rotations: torch.Tensor
    context: AttentionContext
    text_context: AttentionContext
    keys_context: AttentionContext


class StreamBlock(nn.Module):
    """What a block does within one stream.

    modulation: the block's own part of StreamInputs.time, shift, scale and gate twice. exchange_modulation: of
    StreamInputs.exchange: scale and shift for audio-to-video, scale and shift for video-to-audio, and the gate of what
    comes from the other stream.
    """

    def __init__(
        self, stream: StreamConfig, eps: float, self_attention: AttentionLayer, to_text: AttentionLayer
    ) -> None:
        super().__init__()
        self.eps = eps
        self.modulation = nn.Parameter(torch.zeros(6, stream.dim))
        self.exchange_modulation = nn.Parameter(torch.zeros(5, stream.dim))
        self.self_attention = SelfAttention(stream, self_attention)
        self.cross_attention = CrossAttention(stream.dim, stream.dim, stream, to_text)
        self.feed_forward = FeedForward(stream.dim, stream.ffn_dim)

    def attend(self, x: torch.Tensor, inputs: StreamInputs, text: KeysAndValues) -> None:
        """Self-attention and attention to the text. x [B, S, D] is overwritten."""
        shift, scale, gate = self._attention_rows(inputs)
        branch = self.self_attention(modulated_rms_norm(x, shift, scale, self.eps), inputs.rotations, inputs.context)
        normalized = modulated_norm(x, Norm("rms", self.eps), branch=Branch(branch, gate))
        x.add_(self.cross_attention(normalized, text, inputs.text_context))

    def modulated_input(self, x: torch.Tensor, inputs: StreamInputs) -> ModulatedInput:
        """Of a model whose first block this is."""
        shift, scale, _ = self._attention_rows(inputs)
        return ModulatedInput(modulated_rms_norm(x, shift, scale, self.eps))

    def _attention_rows(self, inputs: StreamInputs) -> tuple[torch.Tensor, ...]:
        return (self.modulation[:3] + inputs.time[:, :3]).unbind(1)

    def exchange_rows(self, inputs: StreamInputs) -> tuple[torch.Tensor, ...]:
        """Five times [B, D], in the order of exchange_modulation."""
        return (self.exchange_modulation + inputs.exchange).unbind(1)

    def feed(self, x: torch.Tensor, inputs: StreamInputs) -> None:
        """The feed-forward network. x [B, S, D] is overwritten."""
        shift, scale, gate = (self.modulation[3:] + inputs.time[:, 3:]).unbind(1)
        add_gated_(x, self.feed_forward(modulated_rms_norm(x, shift, scale, self.eps)), gate)


class LTX2Block(nn.Module):
    """Both streams within themselves, then each to the other, then their feed-forward networks."""

    def __init__(self, config: LTX2Config, index: int, policy: AttentionPolicy) -> None:
        super().__init__()
        self.eps = config.eps
        video, audio = config.video, config.audio

        def local(role: str, place: str, stream: StreamConfig) -> LocalAttention:
            layer = LayerInfo(index, config.num_layers, role, f"blocks.{index}.{place}")
            return LocalAttention(stream.num_heads, stream.head_dim, layer=layer, policy=policy)

        layer = LayerInfo(index, config.num_layers, "self", f"blocks.{index}.video.self_attention")
        grid = USPAttention(video.num_heads, video.head_dim, layer=layer, policy=policy)
        self.video = StreamBlock(video, config.eps, grid, local("cross", "video.cross_attention", video))
        self.audio = StreamBlock(
            audio,
            config.eps,
            local(AUDIO_SELF_ROLE, "audio.self_attention", audio),
            local(AUDIO_CROSS_ROLE, "audio.cross_attention", audio),
        )
        # Both are as wide as the sound in between.
        self.audio_to_video = CrossAttention(
            video.dim, audio.dim, audio, local(AUDIO_TO_VIDEO_ROLE, "audio_to_video", audio)
        )
        self.video_to_audio = CrossAttention(
            audio.dim, video.dim, audio, local(VIDEO_TO_AUDIO_ROLE, "video_to_audio", audio)
        )

    def forward(
        self,
        video: torch.Tensor,
        audio: torch.Tensor,
        video_inputs: StreamInputs,
        audio_inputs: StreamInputs,
        text: KeysAndValues,
        audio_text: KeysAndValues,
    ) -> None:
        """video [B, S, D] and audio, of its own length and width, are overwritten. text, audio_text: for this block,
        what the video and what the sound attend to.

        Where processes share the sequence, video and its rotations are this one's slice, and audio is whole on all of
        them.
        """
        self.video.attend(video, video_inputs, text)
        self.audio.attend(audio, audio_inputs, audio_text)
        self._exchange(video, audio, video_inputs, audio_inputs)
        self.video.feed(video, video_inputs)
        self.audio.feed(audio, audio_inputs)

    def _exchange(
        self, video: torch.Tensor, audio: torch.Tensor, video_inputs: StreamInputs, audio_inputs: StreamInputs
    ) -> None:
        """Each stream reads the other as it was before either changed."""
        video_rows, audio_rows = self.video.exchange_rows(video_inputs), self.audio.exchange_rows(audio_inputs)
        video_turns, audio_turns = video_inputs.shared_rotations, audio_inputs.shared_rotations

        def modulated(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            return modulated_rms_norm(x, shift, scale, self.eps)

        audio_kv = self.audio_to_video.keys_and_values(modulated(audio, *audio_rows[:2]), audio_turns)
        to_video = self.audio_to_video(
            modulated(video, *video_rows[:2]), audio_kv, audio_inputs.keys_context, video_turns
        )
        video_kv = self.video_to_audio.keys_and_values(modulated(video, *video_rows[2:4]), video_turns)
        # The sound is too short to share: every process attends to the whole video.
        sharding, num_tokens = video_inputs.context.sharding, _num_tokens(video_inputs.keys_context)
        video_kv = sharding.gather_in_order(video_kv[0], num_tokens), sharding.gather_in_order(video_kv[1], num_tokens)
        to_audio = self.video_to_audio(
            modulated(audio, *audio_rows[2:4]), video_kv, video_inputs.keys_context, audio_turns
        )
        add_gated_(video, to_video, video_rows[4])
        add_gated_(audio, to_audio, audio_rows[4])


def _num_tokens(context: AttentionContext) -> int:
    assert context.layout is not None
    return context.layout.num_tokens
