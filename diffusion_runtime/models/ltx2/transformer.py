"""The LTX-2 transformer (arXiv:2601.03233) on our attention layers, for inference.

    video latents -> tokens -+                                       +-> modulated norm -> projection -> video velocity
                             +-> num_layers x block of two streams --+
    audio latents -> tokens -+                                       +-> modulated norm -> projection -> audio velocity

Both come and go as one flat tensor (geometry.py). Shapes in this file: B batch, S video tokens, A audio tokens, L text
tokens, D width of a stream.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput, overwriting
from diffusion_runtime.core.step_info import ISOLATED, PERTURBED
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.denoising.guidance import RequestGuidance
from diffusion_runtime.denoising.guidance_terms import GuidanceTerms
from diffusion_runtime.denoising.interface import Predict
from diffusion_runtime.errors import RequestError
from diffusion_runtime.kernels.modulated_norm.api import Norm
from diffusion_runtime.layers.embeddings import TextEmbedding, TimestepModulation, patchify, unpatchify
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.reference_tokens import with_references
from diffusion_runtime.layers.token_runs import TokenRun, embedding_by_run, modulated_by_run, token_runs
from diffusion_runtime.memory.waiting_weights import held_weights
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.ltx2.block import AUDIO_CROSS_ROLE, LTX2Block, Perturbation, StreamInputs, Text
from diffusion_runtime.models.ltx2.conditioned_latents import ConditionedLatents
from diffusion_runtime.models.ltx2.config import LTX2Config, StreamConfig
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry
from diffusion_runtime.models.ltx2.guidance import TermsOfParts, of_mixed_latents
from diffusion_runtime.models.ltx2.positions import (
    audio_rotations,
    keyframe_rotations,
    shared_rotations,
    video_rotations,
)
from diffusion_runtime.models.ltx2.token_plan import TokenPlan
from diffusion_runtime.models.ltx2.weights import NUM_WAVES
from diffusion_runtime.parallel.sharding import SequenceSharding

# The eps of the last norm, whatever the config sets for the others.
_OUT_EPS = 1e-6

# The text that every block attends to.
Texts = tuple[Text, ...]


class Rotations(NamedTuple):
    """Rotations of a pass: within each stream, and where the streams attend to each other."""

    video: torch.Tensor
    audio: torch.Tensor
    video_shared: torch.Tensor
    audio_shared: torch.Tensor


class Stream(nn.Module):
    """The layers of a stream outside the blocks: input and output projections, its text, and the rows of the timestep.

    time: for self-attention, feed-forward, attention to the text and the end; exchange, exchange_gate: for attention
    between the streams; text_time: for the text itself.
    """

    def __init__(self, config: LTX2Config, stream: StreamConfig) -> None:
        super().__init__()
        dim = stream.dim
        self.embedding = Linear(stream.num_channels, dim)
        self.text_embedding = TextEmbedding(stream.text_dim, dim) if config.projects_text else None
        self.time = TimestepModulation(NUM_WAVES, dim, config.num_rows)
        self.exchange = TimestepModulation(NUM_WAVES, dim, 4)
        self.exchange_gate = TimestepModulation(NUM_WAVES, dim, 1)
        self.text_time = TimestepModulation(NUM_WAVES, dim, 2) if config.text_follows_time else None
        self.out_modulation = nn.Parameter(torch.zeros(2, dim))
        self.out = Linear(dim, stream.num_channels)

    def exchange_rows(self, timestep: torch.Tensor, gate_factor: float) -> torch.Tensor:
        """Return [B, 5, D], float32, as StreamInputs takes them. timestep: [B], in [0, 1000]."""
        return torch.cat([self.exchange(timestep)[0], self.exchange_gate(timestep * gate_factor)[0]], dim=1)

    def text_rows(self, timestep: torch.Tensor, num_texts: int) -> torch.Tensor | None:
        """Return [B, 2, D] of B texts, float32, as StreamInputs takes them. timestep: of each sample, which may have
        several texts."""
        if self.text_time is None:
            return None
        rows: torch.Tensor = self.text_time(timestep)[0]
        return rows if len(rows) == num_texts else rows.repeat(num_texts // len(rows), 1, 1)

    def embed_text(self, text: torch.Tensor) -> torch.Tensor:
        """Map [B, L, text_dim] to [B, L, D]."""
        embedded: torch.Tensor = text if self.text_embedding is None else self.text_embedding(text)
        return embedded

    def finish(self, x: torch.Tensor, runs: tuple[TokenRun, ...]) -> torch.Tensor:
        """Map x [B, tokens, D] to [B, tokens, channels]. runs: of its tokens."""
        out: torch.Tensor = self.out(
            modulated_by_run(x, Norm("layer", _OUT_EPS), embedding_by_run(self.out_modulation, runs))
        )
        return out


class LTX2Transformer(DiffusionTransformer):
    """The whole denoiser. In a model of another dtype than float32, the modulation, the modulated norms and the gated
    sums are still computed in float32."""

    geometry: LTX2Geometry
    text_is_keys = True

    def __init__(self, config: LTX2Config, geometry: LTX2Geometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.video = Stream(config, config.video)
        self.audio = Stream(config, config.audio)
        # Added to the tokens of single frames: of the first latent, and of keyframes that are made beside the video.
        self.keyframe_marker = nn.Parameter(torch.zeros(1, config.video.dim)) if config.marks_keyframes else None
        self.blocks = nn.ModuleList(LTX2Block(config, index, policy) for index in range(config.num_layers))

    @property
    def text_roles(self) -> frozenset[str]:
        return super().text_roles | {AUDIO_CROSS_ROLE}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity. latents: [B, *geometry.sample_shape(inputs.size)].

        inputs.text: the embeddings for the video, and as the first further stream those for the sound. Raises
        RequestError when that is missing, or the latents are another clip's.
        """
        plan = TokenPlan.of(latents, inputs, self.geometry)
        if not plan.is_raster:
            context = self.in_token_order(context, plan.grid, latents.device)
        # With a given sound, each stream reads the other at the other's time.
        sound_timestep, num_grid_tokens = plan.sound_timestep(timestep), math.prod(plan.grid)
        num_texts = len(inputs.text.lengths)
        text, audio_text = self._text(inputs, context)
        text_context = context.with_layout(TokenLayout.text(max(1, *inputs.text.lengths), inputs.text.lengths))
        video, num_local = self._video_tokens(plan, context)
        video_time = self._video_time(plan, timestep, num_local, video.shape[1], context.sharding)
        turns = self._turns(plan, video.device, context)
        grid_context = context.with_layout(plan.layout(0, context.sharding.tile))
        video_context = grid_context
        if plan.places:
            video_context = context.with_layout(plan.layout(video.shape[1] - num_local, context.sharding.tile))
        video_inputs = StreamInputs(
            time=video_time,
            exchange=self.video.exchange_rows(sound_timestep, self.config.gate_factor),
            text=self.video.text_rows(timestep, num_texts),
            rotations=turns.video,
            shared_rotations=turns.video_shared,
            context=video_context,
            text_context=text_context,
            keys_context=video_context,
            grid_context=grid_context,
            num_keyframe_tokens=video.shape[1] - num_local,
        )
        audio = self.audio.embedding(plan.audio.to(self.video.out.weight.dtype).transpose(1, 2).flatten(2))
        audio_time = (TokenRun(slice(None), *self.audio.time(sound_timestep)),)
        audio_context = context.with_layout(TokenLayout.text(plan.length))
        audio_inputs = StreamInputs(
            time=audio_time,
            exchange=self.audio.exchange_rows(timestep, self.config.gate_factor),
            text=self.audio.text_rows(sound_timestep, num_texts),
            rotations=turns.audio,
            shared_rotations=turns.audio_shared,
            context=audio_context,
            text_context=text_context,
            keys_context=audio_context,
        )
        perturbations = self._perturbations(inputs, context.step.branch)
        blocks = (
            overwriting(block, video_inputs, audio_inputs, *of_block)
            for block, *of_block in zip(self.blocks, text, audio_text, perturbations, strict=True)
        )
        first, entering = next(self.all_blocks()), video

        def modulated_input() -> ModulatedInput:
            with held_weights(first):
                return first.video.modulated_input(entering, video_inputs)

        video, audio = context.run_blocks(blocks, (video, audio), num_grid_tokens, modulated_input)
        finished = self.video.finish(video, video_time)
        tokens = context.sharding.gather(finished[:, :num_local], num_grid_tokens)
        moments = torch.unflatten(self.audio.finish(audio, audio_time), 2, (plan.audio.shape[1], -1))
        pictures = unpatchify(tokens, plan.grid, self.geometry.patch, channels_first=True)
        velocity = self.geometry.join(pictures, moments.transpose(1, 2)).to(latents.dtype)
        behind = self._noised_velocities(plan, finished, latents.dtype)
        return torch.cat([velocity, *behind], dim=1) if behind else velocity

    def guided(self, predict: Predict, guidance: RequestGuidance, inputs: DenoiserInputs) -> Predict:
        conditions, terms = ConditionedLatents(self.geometry, inputs), GuidanceTerms.of(inputs.request)
        guided = (
            super().guided(predict, guidance, inputs)
            if terms.is_plain
            else TermsOfParts(conditions, terms).around(predict, guidance)
        )
        return of_mixed_latents(guided, conditions)

    def begin_again(self, clean: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        return ConditionedLatents(self.geometry, inputs).with_noised_images(clean)

    def settle(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        conditions = ConditionedLatents(self.geometry, inputs)
        return conditions.settled(conditions.mixed(latents))

    def _video_tokens(self, plan: TokenPlan, context: AttentionContext) -> tuple[torch.Tensor, int]:
        """Return this process's tokens of the grid, then of keyframes, [B, tokens, D]; how many are the grid's."""
        dtype = self.video.out.weight.dtype
        tokens = self._tokens(plan.video.to(dtype))
        noised = [self._tokens(each.to(dtype)) for each in plan.noised]
        if plan.num_generated:
            assert self.keyframe_marker is not None
            tokens[:, : math.prod(plan.grid[1:])] += self.keyframe_marker
            for each in noised[-plan.num_generated :]:
                each += self.keyframe_marker
        local = context.sharding.shard(tokens)
        video = with_references(local, plan.clean, self._tokens, dtype, context)
        return torch.cat([video, *noised], dim=1) if noised else video, local.shape[1]

    def _video_time(
        self, plan: TokenPlan, timestep: torch.Tensor, num_local: int, num_tokens: int, sharding: SequenceSharding
    ) -> tuple[TokenRun, ...]:
        """Return the runs of the video's tokens: of a first image, of the other frames, and of keyframes, whose
        neighbours of one strength s share t * (1 - s)."""
        first_timestep = plan.first_timestep(timestep)
        runs = token_runs(timestep, self.video.time, plan.grid, sharding, first_timestep=first_timestep)
        if not plan.places:
            return runs
        within = [dataclasses.replace(run, tokens=slice(*run.tokens.indices(num_local)[:2])) for run in runs]
        behind = (
            TokenRun(tokens, *self.video.time(timestep * (1 - strength)))
            for tokens, strength in plan.keyframe_ranges(num_local, num_tokens)
        )
        return (*within, *behind)

    def _noised_velocities(self, plan: TokenPlan, finished: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the flat velocities of keyframes that are denoised, out of the last tokens [B, tokens, channels]."""
        if not plan.noised:
            return []
        frame, patch = (1, *plan.grid[1:]), self.geometry.patch
        behind = finished[:, finished.shape[1] - len(plan.noised) * math.prod(frame) :]
        pictures = [unpatchify(each, frame, patch, channels_first=True) for each in behind.chunk(len(plan.noised), 1)]
        return [picture.flatten(1).to(dtype) for picture in pictures]

    def _turns(self, plan: TokenPlan, device: torch.device, context: AttentionContext) -> Rotations:
        """Return the rotations of this process's tokens, kept for the other steps of the request."""
        grid, length, fps, sharding = plan.grid, plan.length, plan.fps, context.sharding
        video, audio, video_shared, audio_shared = cached_for_request(
            "rotations", (grid, length, fps), context, lambda: self._rotations(grid, length, fps, device)
        )
        video, video_shared = sharding.shard(video, dim=0), sharding.shard(video_shared, dim=0)
        if plan.places:
            frames = [frame for frame, _ in plan.places]
            of_keyframes = cached_for_request(
                "keyframe_rotations",
                (grid, plan.places, fps),
                context,
                lambda: self._keyframe_rotations(grid, frames, fps, device),
            )
            video, video_shared = (
                torch.cat([own, more]) for own, more in zip((video, video_shared), of_keyframes, strict=True)
            )
        return Rotations(video, audio, video_shared, audio_shared)

    def _rotations(
        self, grid: tuple[int, int, int], length: int, fps: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rotations of the video, of the sound, and of both where they attend to each other."""
        rules, video, audio = self.config.positions, self.config.video, self.config.audio
        return (
            video_rotations(rules, grid, fps, video.num_heads, video.dim, device),
            audio_rotations(rules, length, audio.num_heads, audio.dim, device),
            *shared_rotations(rules, grid, fps, length, audio.num_heads, audio.dim, device),
        )

    def _tokens(self, latents: torch.Tensor) -> torch.Tensor:
        """Map latents [B, channels, frames, height, width] to tokens [B, tokens, D]."""
        tokens: torch.Tensor = self.video.embedding(patchify(latents, self.geometry.patch))
        return tokens

    def _keyframe_rotations(
        self, grid: tuple[int, int, int], frames: Sequence[int], fps: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotations of single frames, within the video and where the streams attend to each other."""
        rules, video, audio = self.config.positions, self.config.video, self.config.audio
        heads = (video.num_heads, video.dim), (audio.num_heads, audio.dim)
        return keyframe_rotations(rules, grid, frames, fps, *heads, device)

    def _perturbations(self, inputs: DenoiserInputs, branch: str) -> list[Perturbation]:
        """Return the parts that each block leaves out in a forward pass of a guidance branch."""
        skipped = (inputs.request.stg_blocks or ()) if branch == PERTURBED else ()
        isolates = branch == ISOLATED
        return [Perturbation(index in skipped, isolates) for index in range(self.num_blocks)]

    def _text(self, inputs: DenoiserInputs, context: AttentionContext) -> tuple[Texts, Texts]:
        """Return the text of both streams that every block attends to, as long as the longest prompt; kept for the
        other steps of the request: keys and values, which take 1.2 GB a prompt in bfloat16, or in LTX-2.3 the tokens,
        which every step modulates."""
        if not inputs.text.further:
            raise RequestError("this model takes two text embeddings, one for the video and one for the sound")
        num_tokens = max(1, *inputs.text.lengths)
        embeddings = (inputs.text.embeddings, inputs.text.further[0].embeddings)

        def project() -> tuple[Texts, Texts]:
            dtype = self.video.out.weight.dtype
            video = self.video.embed_text(embeddings[0][:, :num_tokens].to(dtype))
            audio = self.audio.embed_text(embeddings[1][:, :num_tokens].to(dtype))
            if self.config.text_follows_time:
                return (video,) * self.num_blocks, (audio,) * self.num_blocks
            video_keys, audio_keys = [], []
            for block in self.all_blocks():
                with held_weights(block):
                    video_keys.append(block.video.keys_of(video))
                    audio_keys.append(block.audio.keys_of(audio))
            return tuple(video_keys), tuple(audio_keys)

        return cached_for_prompt("ltx2_text", embeddings[0], context, project)

    def all_blocks(self) -> Iterator[LTX2Block]:
        return (block for block in self.blocks if isinstance(block, LTX2Block))
