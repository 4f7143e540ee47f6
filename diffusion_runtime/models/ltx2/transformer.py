"""The LTX-2 transformer (arXiv:2601.03233) on our attention layers, for inference.

    video latents -> tokens -+                                       +-> modulated norm -> projection -> video velocity
                             +-> num_layers x block of two streams --+
    audio latents -> tokens -+                                       +-> modulated norm -> projection -> audio velocity

Both come and go as one flat tensor (geometry.py). Shapes in this file: B batch, S video tokens, A audio tokens, L text
tokens, D width of a stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.block_stack import ModulatedInput, overwriting
from diffusion_runtime.errors import RequestError
from diffusion_runtime.kernels.modulated_norm.api import Norm
from diffusion_runtime.layers.across_heads_attention import KeysAndValues
from diffusion_runtime.layers.embeddings import TextEmbedding, TimestepModulation, patchify, unpatchify
from diffusion_runtime.layers.held_weights import held_weights
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.token_runs import TokenRun, embedding_by_run, modulated_by_run, token_runs
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.ltx2.block import LTX2Block, StreamInputs
from diffusion_runtime.models.ltx2.config import LTX2Config, StreamConfig
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry
from diffusion_runtime.models.ltx2.positions import audio_rotations, shared_rotations, video_rotations
from diffusion_runtime.token_layout import TokenLayout

NUM_WAVES = 256
# Of the last norm, whatever the config says of the others.
_OUT_EPS = 1e-6

# Keys and values of every block's attention to the text.
TextKeys = tuple[KeysAndValues, ...]


class Stream(nn.Module):
    """What a stream has outside the blocks: its way in and out, its text, and the rows of the timestep.

    time: for self-attention, feed-forward and the end; exchange, exchange_gate: for attention between the streams.
    """

    def __init__(self, config: StreamConfig, text_dim: int) -> None:
        super().__init__()
        self.embedding = Linear(config.num_channels, config.dim)
        self.text_embedding = TextEmbedding(text_dim, config.dim)
        self.time = TimestepModulation(NUM_WAVES, config.dim, 6)
        self.exchange = TimestepModulation(NUM_WAVES, config.dim, 4)
        self.exchange_gate = TimestepModulation(NUM_WAVES, config.dim, 1)
        self.out_modulation = nn.Parameter(torch.zeros(2, config.dim))
        self.out = Linear(config.dim, config.num_channels)

    def exchange_rows(self, timestep: torch.Tensor, gate_factor: float) -> torch.Tensor:
        """[B, 5, D], float32, as StreamInputs takes them. timestep: [B], in [0, 1000]."""
        return torch.cat([self.exchange(timestep)[0], self.exchange_gate(timestep * gate_factor)[0]], dim=1)

    def finish(self, x: torch.Tensor, runs: tuple[TokenRun, ...]) -> torch.Tensor:
        """[B, tokens, channels] of x [B, tokens, D]. runs: of its tokens."""
        out: torch.Tensor = self.out(
            modulated_by_run(x, Norm("layer", _OUT_EPS), embedding_by_run(self.out_modulation, runs))
        )
        return out


class LTX2Transformer(DiffusionTransformer):
    """The whole denoiser. In a model of another dtype than float32 the modulation, the modulated norms and the gated
    sums are still computed in float32."""

    geometry: LTX2Geometry

    def __init__(self, config: LTX2Config, geometry: LTX2Geometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.video = Stream(config.video, config.text_dim)
        self.audio = Stream(config.audio, config.text_dim)
        self.blocks = nn.ModuleList(LTX2Block(config, index, policy) for index in range(config.num_layers))

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """See DiffusionTransformer.forward. latents: [B, *geometry.sample_shape(inputs.size)].

        inputs.text: the embeddings for the video, and as the first further stream those for the sound. Raises
        RequestError when that is missing, or the latents are another clip's.
        """
        parts = self.geometry.parts(latents, inputs.size)
        assert parts.audio is not None
        grid, length = self.geometry.grid(parts.video.shape), parts.audio.shape[2]
        if inputs.image is None:
            # The tokens of a first frame, at a timestep of their own, are a range in raster order alone.
            context = self.in_token_order(context, grid, latents.device)
        dtype, sharding = self.video.out.weight.dtype, context.sharding
        video = sharding.shard(
            self.video.embedding(patchify(_with_image(parts.video, inputs).to(dtype), self.geometry.patch))
        )
        audio = self.audio.embedding(parts.audio.to(dtype).transpose(1, 2).flatten(2))
        video_time = token_runs(timestep, self.video.time, grid, sharding, has_image=inputs.image is not None)
        audio_time = (TokenRun(slice(None), *self.audio.time(timestep)),)
        fps = inputs.size.fps
        video_turns, audio_turns, *shared = cached_for_request(
            "rotations", (grid, length, fps), context, lambda: self._rotations(grid, length, fps, video.device)
        )
        text, audio_text = self._text(inputs, context)
        text_context = context.with_layout(TokenLayout.text(text[0][0].shape[1], inputs.text.lengths))
        video_context = context.with_layout(TokenLayout(grid, tile=sharding.tile))
        audio_context = context.with_layout(TokenLayout.text(length))
        video_inputs = StreamInputs(
            time=video_time,
            exchange=self.video.exchange_rows(timestep, self.config.gate_factor),
            rotations=sharding.shard(video_turns, dim=0),
            shared_rotations=sharding.shard(shared[0], dim=0),
            context=video_context,
            text_context=text_context,
            keys_context=video_context,
        )
        audio_inputs = StreamInputs(
            time=audio_time,
            exchange=self.audio.exchange_rows(timestep, self.config.gate_factor),
            rotations=audio_turns,
            shared_rotations=shared[1],
            context=audio_context,
            text_context=text_context,
            keys_context=audio_context,
        )
        blocks = (
            overwriting(block, video_inputs, audio_inputs, *of_block)
            for block, *of_block in zip(self.blocks, text, audio_text, strict=True)
        )
        first, entering = next(self.all_blocks()), video

        def modulated_input() -> ModulatedInput:
            with held_weights(first):
                return first.video.modulated_input(entering, video_inputs)

        video, audio = context.run_blocks(blocks, (video, audio), math.prod(grid), modulated_input)
        tokens = sharding.gather(self.video.finish(video, video_time), math.prod(grid))
        video_velocity = unpatchify(tokens, grid, self.geometry.patch, channels_first=True)
        moments = torch.unflatten(self.audio.finish(audio, audio_time), 2, (parts.audio.shape[1], -1))
        return self.geometry.join(video_velocity, moments.transpose(1, 2)).to(latents.dtype)

    def settle(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        if inputs.image is None:
            return latents
        parts = self.geometry.parts(latents, inputs.size)
        assert parts.audio is not None
        return self.geometry.join(_with_image(parts.video, inputs), parts.audio)

    def _rotations(
        self, grid: tuple[int, int, int], length: int, fps: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the video, of the sound, and of both where they attend to each other."""
        rules, video, audio = self.config.positions, self.config.video, self.config.audio
        return (
            video_rotations(rules, grid, fps, video.num_heads, video.dim, device),
            audio_rotations(rules, length, audio.num_heads, audio.dim, device),
            *shared_rotations(rules, grid, fps, length, audio.num_heads, audio.dim, device),
        )

    def _text(self, inputs: DenoiserInputs, context: AttentionContext) -> tuple[TextKeys, TextKeys]:
        """Every block's keys and values of the text, for both streams, as long as the longest prompt; kept for the
        other steps of the request. In the published model they take 1.2 GB a prompt in bfloat16."""
        if not inputs.text.further:
            raise RequestError("this model takes two text embeddings, one for the video and one for the sound")
        num_tokens = max(1, *inputs.text.lengths)
        embeddings = (inputs.text.embeddings, inputs.text.further[0].embeddings)

        def project() -> tuple[TextKeys, TextKeys]:
            dtype = self.video.out.weight.dtype
            video = self.video.text_embedding(embeddings[0][:, :num_tokens].to(dtype))
            audio = self.audio.text_embedding(embeddings[1][:, :num_tokens].to(dtype))
            video_keys, audio_keys = [], []
            for block in self.all_blocks():
                with held_weights(block):
                    video_keys.append(block.video.cross_attention.keys_and_values(video))
                    audio_keys.append(block.audio.cross_attention.keys_and_values(audio))
            return tuple(video_keys), tuple(audio_keys)

        return cached_for_prompt("ltx2_text", embeddings[0], context, project)

    def all_blocks(self) -> Iterator[LTX2Block]:
        return (block for block in self.blocks if isinstance(block, LTX2Block))


def _with_image(video: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
    """Latents [B, channels, frames, height, width] whose first frame is the image's, where there is one."""
    if inputs.image is None:
        return video
    return torch.cat([inputs.image.latents.to(video.device, video.dtype), video[:, :, 1:]], dim=2)
