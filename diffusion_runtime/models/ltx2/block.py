"""A block of LTX-2: two streams, the video's and the sound's, that attend to themselves, to the text and to each other.

In LTX-2.3 the timestep modulates the text too, so that its keys and values belong to a step and not to the request.
Shapes: B batch, S tokens of a stream, L text tokens, D width of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer, LocalAttention, USPAttention
from diffusion_runtime.attention.opaque import gathered_tokens
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.kernels.modulated_norm.api import Norm
from diffusion_runtime.layers.across_heads_attention import (
    AcrossHeadsCrossAttention,
    AcrossHeadsSelfAttention,
    KeysAndValues,
)
from diffusion_runtime.layers.linear import FeedForward, Linear, LinearInput
from diffusion_runtime.layers.modulation import norm_for
from diffusion_runtime.layers.token_runs import (
    Gates,
    TokenRun,
    add_gated_by_run_,
    modulated_by_run,
    modulated_for,
    normed_after_branch,
    rows_by_run,
)
from diffusion_runtime.models.ltx2.config import LTX2Config, StreamConfig

# The sound is a line of tokens, not a grid, and so is its text: category `cross` keeps sparse choices off.
AUDIO_SELF_ROLE = "ltx2.audio_self"
AUDIO_CROSS_ROLE = "ltx2.audio_cross"
AUDIO_TO_VIDEO_ROLE = "ltx2.audio_to_video"
VIDEO_TO_AUDIO_ROLE = "ltx2.video_to_audio"

# The text that a stream attends to: keys and values, or in LTX-2.3 the tokens [B, L, D] that they are made of.
Text: TypeAlias = KeysAndValues | torch.Tensor

# Still to be added to a stream: a branch [B, S, D] and the gates of its runs, None for 1.
GatedBranch: TypeAlias = tuple[torch.Tensor, Gates | None]

# The eps of the norms of q and k, whatever the config sets for the others.
QK_EPS = 1e-6


@dataclass(frozen=True)
class StreamInputs:
    """Inputs of every block of one forward pass in addition to the tokens of a stream.

    time: rows of the timestep for self-attention and feed-forward, and since LTX-2.3 for attention to the text, [B, 6
    or 9, D] of each run of tokens; exchange: for attention between the streams, [B, 5, D], of the other stream's
    timestep, and text: for the text itself, [B, 2, D], None but in LTX-2.3, of the timestep that is not an image's; all
    float32. rotations, shared_rotations: of its tokens within the stream and between the streams. context,
    text_context, keys_context: the forward pass where the keys are the stream itself, its text, or the stream as
    attended to by the other one. num_keyframe_tokens: of pictures that follow the grid's tokens, whole on every
    process; grid_context: of the grid alone.
    """

    time: tuple[TokenRun, ...]
    exchange: torch.Tensor
    text: torch.Tensor | None
    rotations: torch.Tensor
    shared_rotations: torch.Tensor
    context: AttentionContext
    text_context: AttentionContext
    keys_context: AttentionContext
    grid_context: AttentionContext | None = None
    num_keyframe_tokens: int = 0


@dataclass(frozen=True)
class Perturbation:
    """Parts that a forward pass leaves out of a block, for guidance away from it. takes_values_alone: self-attention of
    both streams; isolates_streams: attention between them."""

    takes_values_alone: bool = False
    isolates_streams: bool = False


class StreamBlock(nn.Module):
    """The part of a block within one stream.

    modulation: the block's own part of StreamInputs.time: shift, scale and gate of self-attention, of the feed-forward
    network and of attention to the text; text_modulation: shift and scale of the text, to which LTX-2.3 adds
    StreamInputs.text. exchange_modulation: of
    StreamInputs.exchange: scale and shift for audio-to-video, scale and shift for video-to-audio, and the gate of the
    other stream's branch.
    """

    def __init__(
        self, config: LTX2Config, stream: StreamConfig, self_attention: AttentionLayer, to_text: AttentionLayer
    ) -> None:
        super().__init__()
        self.eps = config.eps
        dim, has_gates = stream.dim, stream.has_gates
        self.modulation = nn.Parameter(torch.zeros(config.num_rows, dim))
        self.text_modulation = nn.Parameter(torch.zeros(2, dim)) if config.modulates_text else None
        self.exchange_modulation = nn.Parameter(torch.zeros(5, dim))
        self.self_attention = AcrossHeadsSelfAttention(dim, QK_EPS, self_attention, has_gates=has_gates)
        self.cross_attention = AcrossHeadsCrossAttention(dim, dim, dim, QK_EPS, to_text, has_gates=has_gates)
        self.feed_forward = FeedForward(stream.dim, stream.ffn_dim, bias=stream.has_ffn_bias)

    def attend(self, x: torch.Tensor, inputs: StreamInputs, text: Text, *, takes_values_alone: bool) -> GatedBranch:
        """Apply self-attention and attention to the text. x [B, S, D] is overwritten; the norm that follows adds the
        text's branch to it."""
        rows, norm = rows_by_run(self.modulation, inputs.time, slice(0, 3)), Norm("rms", self.eps)
        shifts = [(tokens, each[0], each[1]) for tokens, each in rows]
        normalized = modulated_for(self.self_attention.input_layers, x, norm, shifts)
        branch = self.self_attention(
            normalized, inputs.rotations, inputs.context, takes_values_alone=takes_values_alone
        )
        gates = [(tokens, each[2]) for tokens, each in rows]
        readers = self.cross_attention.input_layers
        if self.text_modulation is None:
            assert isinstance(text, tuple)
            normalized = normed_after_branch(x, branch, gates, norm, layers=readers)
            return self.cross_attention(normalized, text, inputs.text_context), None
        rows = rows_by_run(self.modulation, inputs.time, slice(6, 9))
        shifts = [(tokens, each[0], each[1]) for tokens, each in rows]
        normalized = normed_after_branch(x, branch, gates, norm, layers=readers, shifts=shifts)
        keys = text if isinstance(text, tuple) else self.keys_of(text, inputs.text)
        attended = self.cross_attention(normalized, keys, inputs.text_context)
        return attended, [(tokens, each[2]) for tokens, each in rows]

    def keys_of(self, text: torch.Tensor, rows: torch.Tensor | None = None) -> KeysAndValues:
        """Return keys and values of tokens [B, L, D]. rows: StreamInputs.text of a timestep."""
        if self.text_modulation is None:
            return self.cross_attention.keys_and_values(text)
        shift, scale = (self.text_modulation[None] if rows is None else self.text_modulation + rows).unbind(1)
        modulated = text * (1 + scale[:, None]) + shift[:, None]
        return self.cross_attention.keys_and_values(modulated.to(text.dtype))

    def modulated_input(self, x: torch.Tensor, inputs: StreamInputs) -> ModulatedInput:
        """Return the input of the first block after modulation, which TeaCache compares."""
        rows = rows_by_run(self.modulation, inputs.time, slice(0, 2))
        shifts = [(tokens, each[0], each[1]) for tokens, each in rows]
        return ModulatedInput(modulated_by_run(x, Norm("rms", self.eps), shifts))

    def exchange_rows(self, inputs: StreamInputs) -> tuple[torch.Tensor, ...]:
        """Return five times [B, D], in the order of exchange_modulation."""
        return (self.exchange_modulation + inputs.exchange).unbind(1)

    def feed(self, x: torch.Tensor, inputs: StreamInputs, before: GatedBranch) -> None:
        """Apply the feed-forward network. x [B, S, D] is overwritten. before: added to x first."""
        rows = rows_by_run(self.modulation, inputs.time, slice(3, 6))
        shifts = [(tokens, each[0], each[1]) for tokens, each in rows]
        readers = (self.feed_forward.up,)
        normalized = normed_after_branch(x, *before, Norm("rms", self.eps), layers=readers, shifts=shifts)
        add_gated_by_run_(x, self.feed_forward(normalized), [(tokens, each[2]) for tokens, each in rows])


class LTX2Block(nn.Module):
    """Block of both streams: each within itself, then to the other, then the feed-forward networks."""

    def __init__(self, config: LTX2Config, index: int, policy: AttentionPolicy) -> None:
        super().__init__()
        self.eps = config.eps
        video, audio = config.video, config.audio

        def local(role: str, place: str, stream: StreamConfig) -> LocalAttention:
            layer = LayerInfo(index, config.num_layers, role, f"blocks.{index}.{place}")
            return LocalAttention(stream.num_heads, stream.head_dim, layer=layer, policy=policy)

        def between(stream: StreamConfig, other: StreamConfig, role: str, place: str) -> AcrossHeadsCrossAttention:
            # As wide as the sound, in both directions.
            layer = local(role, place, audio)
            return AcrossHeadsCrossAttention(
                stream.dim, other.dim, audio.dim, QK_EPS, layer, has_gates=stream.has_gates
            )

        layer = LayerInfo(index, config.num_layers, "self", f"blocks.{index}.video.self_attention")
        grid = USPAttention(video.num_heads, video.head_dim, layer=layer, policy=policy)
        self.video = StreamBlock(config, video, grid, local("cross", "video.cross_attention", video))
        self.audio = StreamBlock(
            config,
            audio,
            local(AUDIO_SELF_ROLE, "audio.self_attention", audio),
            local(AUDIO_CROSS_ROLE, "audio.cross_attention", audio),
        )
        self.audio_to_video = between(video, audio, AUDIO_TO_VIDEO_ROLE, "audio_to_video")
        self.video_to_audio = between(audio, video, VIDEO_TO_AUDIO_ROLE, "video_to_audio")

    def forward(
        self,
        video: torch.Tensor,
        audio: torch.Tensor,
        video_inputs: StreamInputs,
        audio_inputs: StreamInputs,
        text: Text,
        audio_text: Text,
        perturbation: Perturbation,
    ) -> None:
        """Run the block; video [B, S, D] and audio, of its own length and width, are overwritten. text, audio_text: the
        text of this block that the video and the sound attend to. perturbation: of this block.

        Where processes share the sequence, video and its rotations are this one's slice, and audio is whole on all of
        them.
        """
        values_alone = perturbation.takes_values_alone
        to_video = self.video.attend(video, video_inputs, text, takes_values_alone=values_alone)
        to_audio = self.audio.attend(audio, audio_inputs, audio_text, takes_values_alone=values_alone)
        if not perturbation.isolates_streams:
            to_video, to_audio = self._exchange(video, audio, video_inputs, audio_inputs, to_video, to_audio)
        self.video.feed(video, video_inputs, to_video)
        self.audio.feed(audio, audio_inputs, to_audio)

    def _exchange(
        self,
        video: torch.Tensor,
        audio: torch.Tensor,
        video_inputs: StreamInputs,
        audio_inputs: StreamInputs,
        before_video: GatedBranch,
        before_audio: GatedBranch,
    ) -> tuple[GatedBranch, GatedBranch]:
        """Return the branch of each stream from the other as it was before either changed, still to be added.
        before_video, before_audio: added to the streams first."""
        video_rows, audio_rows = self.video.exchange_rows(video_inputs), self.audio.exchange_rows(audio_inputs)
        video_turns, audio_turns = video_inputs.shared_rotations, audio_inputs.shared_rotations

        def modulated(
            layers: Sequence[Linear],
            x: torch.Tensor,
            scale: torch.Tensor,
            shift: torch.Tensor,
            *,
            before: GatedBranch | None = None,
        ) -> LinearInput:
            norm = Norm("rms", self.eps)
            if before is None:
                return norm_for(layers, x, norm, shift=shift, scale=scale)
            return normed_after_branch(x, *before, norm, layers=layers, shifts=[(slice(None), shift, scale)])

        into_video, into_audio = self.audio_to_video, self.video_to_audio
        audio_kv = into_video.keys_and_values(
            modulated((into_video.kv,), audio, *audio_rows[:2], before=before_audio), audio_turns
        )
        to_video = into_video(
            modulated(into_video.input_layers, video, *video_rows[:2], before=before_video),
            audio_kv,
            audio_inputs.keys_context,
            video_turns,
        )
        video_kv = into_audio.keys_and_values(modulated((into_audio.kv,), video, *video_rows[2:4]), video_turns)
        # The sound is too short to share: every process attends to the whole video.
        video_kv = (_whole_video(video_kv[0], video_inputs), _whole_video(video_kv[1], video_inputs))
        to_audio = into_audio(
            modulated(into_audio.input_layers, audio, *audio_rows[2:4]),
            video_kv,
            video_inputs.keys_context,
            audio_turns,
        )
        return (to_video, [(slice(None), video_rows[4])]), (to_audio, [(slice(None), audio_rows[4])])


def _whole_video(x: torch.Tensor, inputs: StreamInputs) -> torch.Tensor:
    """Return the whole grid's keys or values [B, tokens, heads, head_dim], from this process's slice and keyframes."""
    if not inputs.num_keyframe_tokens:
        return gathered_tokens(x, inputs.keys_context)
    assert inputs.grid_context is not None
    num_local = x.shape[1] - inputs.num_keyframe_tokens
    return torch.cat([gathered_tokens(x[:, :num_local], inputs.grid_context), x[:, num_local:]], dim=1)
