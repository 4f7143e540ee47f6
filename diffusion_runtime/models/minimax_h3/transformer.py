"""The MiniMax-H3 transformer on our attention layers, for inference.

    video  -> tokens -+
    given  -> tokens -+                                          +-> modulated norm -> projection -> video velocity
    sound  -> tokens -+-> num_layers x block, full attention  ---+
    text   -> refiner +                                          +-> modulated norm -> projection -> audio velocity

The sequence is the grid of the video, images that the clip is made from or references of any kind in their order, the
sound, and the text last, whose padding is lengths; the published order is another, which attention does not see. Video
and sound come and go as one flat tensor. Projections of latents, the timestep's network and the last projections are
float32, as in training. Shapes in this file: B batch, S grid tokens, G given tokens, A audio tokens, L text tokens, D
width.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer, LocalAttention, USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput, RunBlock, Streams
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.denoising.flow_schedule import shifted
from diffusion_runtime.denoising.guidance import RequestGuidance
from diffusion_runtime.denoising.interface import Predict
from diffusion_runtime.denoising.part_schedules import (
    carries_sound,
    estimate_along_schedule_of_sound,
    with_carried_sound,
    with_scaled_sound,
    with_schedule_of_sound,
)
from diffusion_runtime.kernels.modulated_norm.api import Branch, add_branch_, modulated_norm
from diffusion_runtime.layers.embeddings import TimestepEmbedding, patchify, unpatchify
from diffusion_runtime.layers.linear import GatedFeedForward, Linear, LinearInput
from diffusion_runtime.layers.modulation import ModulatedBlock, norm_for
from diffusion_runtime.layers.modulation_rows import ModulationRows, modulations_of, rows_of_request, rows_of_step
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.rotated_attention import rotated_attention
from diffusion_runtime.layers.token_runs import (
    add_gated_by_run_,
    modulated_by_run,
    modulated_for,
    normed_after_branch,
)
from diffusion_runtime.memory.waiting_weights import held_weights
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer, GivenMedia, ImageCondition
from diffusion_runtime.models.minimax_h3.config import MiniMaxH3Config
from diffusion_runtime.models.minimax_h3.geometry import MiniMaxH3Geometry
from diffusion_runtime.models.minimax_h3.keyframes import NOISE_LEVEL
from diffusion_runtime.models.minimax_h3.modulation import (
    AUDIO,
    TEXT,
    VIDEO,
    ModalityModulation,
    OutModulation,
    Span,
    TimeTable,
    rows_of_spans,
)
from diffusion_runtime.models.minimax_h3.positions import (
    ReferenceGrid,
    frame_times,
    grid_positions,
    grid_rotations,
    last_time,
    reference_positions,
    rotations_of,
    sound_positions,
    text_positions,
)
from diffusion_runtime.text_encoders.interface import Conditions

TEXT_ROLE = "minimax_h3.text_refiner"
_TRAINED_TIMESTEPS = 1000.0


class MiniMaxH3Attention(nn.Module):
    """Attention among all tokens, with rotary positions; no bias anywhere. gate: of Video Sparse Attention's coarse
    branch, in weights that were trained with it."""

    def __init__(self, config: MiniMaxH3Config, attention: AttentionLayer, *, has_gate: bool = False) -> None:
        super().__init__()
        self.qkv = Linear(config.dim, 3 * config.inner_dim, bias=False)
        self.norm_q = RMSNorm(config.head_dim, config.qk_eps)
        self.norm_k = RMSNorm(config.head_dim, config.qk_eps)
        self.gate: Linear | None = None
        self.out = Linear(config.inner_dim, config.dim, bias=False)
        self.attention = attention
        if has_gate:
            self.add_gate(config)

    def add_gate(self, config: MiniMaxH3Config) -> None:
        """Add the gate, without values."""
        self.gate, self.attention.has_gate = Linear(config.dim, config.inner_dim, bias=False), True

    @property
    def input_layers(self) -> tuple[Linear, ...]:
        """Linear layers that read x."""
        return (self.qkv,) if self.gate is None else (self.qkv, self.gate)

    def forward(self, x: LinearInput, rotations: torch.Tensor | None, context: AttentionContext) -> torch.Tensor:
        """Attend. x: [B, tokens, D]; rotations: [B or nothing, tokens, head_dim / 2], complex, None for none."""
        product = self.qkv(x).unflatten(-1, (3, self.attention.num_heads, -1))
        gate = None
        if self.gate is not None and self.attention.takes_gate(product, context):
            gate = self.gate(x).unflatten(-1, (self.attention.num_heads, -1))
        norms = self.norm_q, self.norm_k
        attended = rotated_attention(self.attention, product, norms, rotations, context, gate=gate)
        out: torch.Tensor = self.out(attended.flatten(2))
        return out


class MiniMaxH3RefinerBlock(nn.Module):
    """Block of the text alone: neither modulation nor rotary positions."""

    def __init__(self, config: MiniMaxH3Config, layer: LayerInfo, policy: AttentionPolicy) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.eps)
        attention = LocalAttention(config.num_heads, config.head_dim, layer=layer, policy=policy)
        self.self_attention = MiniMaxH3Attention(config, attention)
        self.ffn_norm = RMSNorm(config.dim, config.eps)
        self.feed_forward = GatedFeedForward(config.dim, config.ffn_dim)

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Run the block and return x [B, L, D], which is overwritten."""
        normalized = norm_for(self.self_attention.input_layers, x, self.attention_norm.as_norm)
        branch = Branch(self.self_attention(normalized, None, context))
        normalized = norm_for((self.feed_forward.up,), x, self.ffn_norm.as_norm, branch=branch)
        return add_branch_(x, Branch(self.feed_forward(normalized)))


class MiniMaxH3TextRefiner(nn.Module):
    """Blocks of the text alone, and the norm behind them."""

    def __init__(self, config: MiniMaxH3Config, policy: AttentionPolicy) -> None:
        super().__init__()
        total = config.num_refiner_layers
        self.blocks = nn.ModuleList(
            MiniMaxH3RefinerBlock(
                config,
                LayerInfo(index, total, TEXT_ROLE, f"text_refiner.blocks.{index}.self_attention.attention"),
                policy,
            )
            for index in range(total)
        )
        self.norm = RMSNorm(config.dim, config.out_eps)

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Refine x [B, L, D], which is overwritten."""
        for block in self.blocks:
            x = block(x, context)
        return modulated_norm(x, self.norm.as_norm)


class MiniMaxH3Block(ModulatedBlock):
    """Block: attention and a gated feed-forward, each after a norm, with the modulation of each token's span."""

    def __init__(self, config: MiniMaxH3Config, index: int, policy: AttentionPolicy) -> None:
        super().__init__()
        self.modulation = ModalityModulation(config.dim, config.time_dim)
        self.attention_norm = RMSNorm(config.dim, config.eps)
        layer = LayerInfo(index, config.num_layers, "self", f"blocks.{index}.self_attention.attention")
        attention = USPAttention(config.num_heads, config.head_dim, layer=layer, policy=policy)
        self.self_attention = MiniMaxH3Attention(config, attention, has_gate=config.has_gate)
        self.ffn_norm = RMSNorm(config.dim, config.eps)
        self.feed_forward = GatedFeedForward(config.dim, config.ffn_dim)

    def forward(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        given: torch.Tensor | None,
        spans: Sequence[Span],
        rotations: torch.Tensor,
        context: AttentionContext,
    ) -> None:
        """Run the block; x [B, tokens, D] is overwritten. rows, given: as in rows_of_spans."""
        attention, feed_forward = rows_of_spans(spans, rows, given)
        normalized = modulated_for(self.self_attention.input_layers, x, self.attention_norm.as_norm, attention.shifts)
        branch = self.self_attention(normalized, rotations, context)
        normalized = normed_after_branch(
            x,
            branch,
            attention.gates,
            self.ffn_norm.as_norm,
            layers=(self.feed_forward.up,),
            shifts=feed_forward.shifts,
        )
        add_gated_by_run_(x, self.feed_forward(normalized), feed_forward.gates)

    def modulated_input(
        self, x: torch.Tensor, rows: torch.Tensor, given: torch.Tensor | None, spans: Sequence[Span]
    ) -> ModulatedInput:
        """Return the input of the first block after modulation, which TeaCache compares."""
        attention, _ = rows_of_spans(spans, rows, given)
        return ModulatedInput(modulated_by_run(x, self.attention_norm.as_norm, attention.shifts))


class MiniMaxH3Transformer(DiffusionTransformer):
    """The whole denoiser."""

    geometry: MiniMaxH3Geometry

    def __init__(self, config: MiniMaxH3Config, geometry: MiniMaxH3Geometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.patch_embedding = Linear(config.patch_channels, config.dim)
        self.audio_embedding = Linear(config.num_audio_channels, config.dim)
        self.text_embedding = Linear(config.text_dim, config.dim)
        self.time_embedding = (
            TimeTable(config.table_size, config.time_dim)
            if config.table_size
            else TimestepEmbedding(config.num_waves, config.time_dim, config.time_hidden_dim)
        )
        self.text_refiner = MiniMaxH3TextRefiner(config, policy)
        self.blocks = nn.ModuleList(MiniMaxH3Block(config, index, policy) for index in range(config.num_layers))
        self.out_norm = RMSNorm(config.dim, config.out_eps)
        self.out_modulation = OutModulation(config.dim, config.time_dim)
        self.out = Linear(config.dim, config.patch_channels)
        self.audio_out = Linear(config.dim, config.num_audio_channels)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def add_gates(self) -> None:
        """Give every block the gate of Video Sparse Attention, without values, which the weights have."""
        self.config = dataclasses.replace(self.config, has_gate=True)
        for block in self.blocks:
            assert isinstance(block, MiniMaxH3Block)
            if block.self_attention.gate is None:
                with torch.device("meta"):
                    block.self_attention.add_gate(self.config)

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity. latents: [B, *geometry.sample_shape(inputs.size)]. The sound is at the noise level of
        its own schedule that goes with the timestep of the video."""
        parts = self.geometry.parts(latents, inputs.size)
        assert parts.audio is not None
        grid, image = self.geometry.grid(parts.video.shape), inputs.image
        num_tokens = math.prod(grid)
        context = self.in_token_order(context, grid, latents.device)
        sharding = context.sharding
        pictures = self._patches(parts.video)
        own = sharding.shard(pictures)
        given = () if image is None else self._given(image, context)
        audio = self._moments(parts.audio)
        text = cached_for_prompt("text", inputs.text.embeddings, context, lambda: self._text(inputs.text, context))
        x = torch.cat([own, *(each.tokens for each in given), audio, text], dim=1)
        num_given = sum(each.tokens.shape[1] for each in given)
        num_before = num_given + audio.shape[1]
        layout = TokenLayout(
            grid,
            num_suffix_tokens=num_before + text.shape[1],
            valid_lengths=tuple(num_before + length for length in inputs.text.lengths),
            tile=sharding.tile,
            text_segments=(num_given, audio.shape[1], text.shape[1]),
            num_given_tokens=num_before,
        )
        joint = context.with_layout(layout)
        spans = _spans(own.shape[1], given, audio.shape[1], text.shape[1], inputs.text.picture_ranges)
        rows, of_given = self._rows(timestep, inputs, context, has_given=num_given > 0)
        rotations = self._rotations(grid, parts.audio.shape[2], inputs, context)

        def run_of(block: nn.Module) -> RunBlock:
            assert isinstance(block, MiniMaxH3Block)

            def run(streams: Streams) -> Streams:
                of_block = None if of_given is None else of_given.of(block.modulation)
                block(*streams, rows.of(block.modulation), of_block, spans, rotations, joint)
                return streams

            return run

        first, entering = self.blocks[0], x
        assert isinstance(first, MiniMaxH3Block)

        def modulated_input() -> ModulatedInput:
            of_block = None if of_given is None else of_given.of(first.modulation)
            with held_weights(first):
                return first.modulated_input(entering, rows.of(first.modulation), of_block, spans)

        (x,) = context.run_blocks([run_of(block) for block in self.blocks], (x,), num_tokens, modulated_input)
        end = rows.of(self.out_modulation)
        tokens = sharding.gather(self._finished(x[:, : own.shape[1]], end[:2], self.out), num_tokens)
        of_sound = slice(own.shape[1] + num_given, own.shape[1] + num_before)
        sound = self._finished(x[:, of_sound], end[2:], self.audio_out)
        video = unpatchify(tokens, grid, self.geometry.patch, channels_first=True)
        sides = torch.unflatten(sound, 1, (parts.audio.shape[3], -1)).permute(0, 3, 2, 1)
        # The model's own time runs from noise to data.
        return self.geometry.join(video, sides).neg_().to(latents.dtype)

    def guided(self, predict: Predict, guidance: RequestGuidance, inputs: DenoiserInputs) -> Predict:
        """Return the prediction with the sound's velocity along the video's schedule."""
        guided = super().guided(predict, guidance, inputs)
        along = with_carried_sound if carries_sound(inputs.request) else with_schedule_of_sound
        return along(guided, self.geometry, inputs.size, self._shift_of_sound(inputs))

    def estimate(
        self, latents: torch.Tensor, velocity: torch.Tensor, step: StepInfo, inputs: DenoiserInputs
    ) -> torch.Tensor:
        if carries_sound(inputs.request):
            return super().estimate(latents, velocity, step, inputs)
        of_sound = self._shift_of_sound(inputs)
        return estimate_along_schedule_of_sound(latents, velocity, step, self.geometry, inputs.size, of_sound)

    def settle(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        """Return the clean latents, with the sound as it is where the sampler carried it along the video's schedule."""
        if not carries_sound(inputs.request):
            return latents
        return with_scaled_sound(latents, self.geometry, inputs.size, self._shift_of_sound(inputs))

    def begin_again(self, clean: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        """Return the clean latents with the sound as it is carried along the video's schedule; see `settle`."""
        if not carries_sound(inputs.request):
            return clean
        return with_scaled_sound(clean, self.geometry, inputs.size, 1 / self._shift_of_sound(inputs))

    def read_inputs(self, inputs: DenoiserInputs) -> DenoiserInputs:
        read, asked = super().read_inputs(inputs), inputs.request
        request = dataclasses.replace(read.request, flow_shift=asked.flow_shift, sigmas=asked.sigmas)
        return dataclasses.replace(read, request=request)

    def _shift_of_sound(self, inputs: DenoiserInputs) -> float:
        """Return the flow shift from the video's noise levels to the sound's. Levels that a request names run as they
        are, without its flow shift: the sound's are those that the model was trained with beside them."""
        of_video, of_sound = self.config.shifts
        request = inputs.request
        return of_sound / (of_video if request.flow_shift is None or request.sigmas is not None else request.flow_shift)

    def _patches(self, video: torch.Tensor) -> torch.Tensor:
        """Map latents [B, channels, frames, height, width] to tokens [B, tokens, D]."""
        patches = patchify(video.to(self.patch_embedding.weight.dtype), self.geometry.patch)
        tokens: torch.Tensor = self.patch_embedding(patches)
        return tokens.to(self.text_embedding.weight.dtype)

    def _moments(self, sound: torch.Tensor) -> torch.Tensor:
        """Map latents of sound [B, channels, length, sides] to tokens [B, tokens, D]: the left side's moments, then the
        right side's."""
        moments = sound.permute(0, 3, 2, 1).flatten(1, 2)
        tokens: torch.Tensor = self.audio_embedding(moments.to(self.audio_embedding.weight.dtype))
        return tokens.to(self.text_embedding.weight.dtype)

    def _given(self, image: ImageCondition, context: AttentionContext) -> tuple[_Given, ...]:
        """Return the tokens of the images and references that the clip is made from, kept for the request."""

        def compute() -> tuple[_Given, ...]:
            found = [_Given(self._patches(each), VIDEO) for each in image.references if each.shape[2]]
            for each in image.media:
                if each.sound is not None:
                    found.append(_Given(self._moments(each.sound), AUDIO))
                if each.pictures is not None:
                    found.append(_Given(self._patches(each.pictures), VIDEO))
            return tuple(found)

        return cached_for_prompt("given_tokens", image, context, compute)

    def _text(self, text: Conditions, context: AttentionContext) -> torch.Tensor:
        """Return the refined tokens [B, L, D], as long as the longest prompt."""
        num_tokens = max(1, *text.lengths)
        embeddings = text.embeddings[:, :num_tokens].to(self.text_embedding.weight.dtype)
        of_text = context.with_layout(TokenLayout.text(num_tokens, text.lengths))
        refined: torch.Tensor = self.text_refiner(self.text_embedding(embeddings), of_text)
        return refined

    def _rows(
        self, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext, *, has_given: bool
    ) -> tuple[ModulationRows, ModulationRows | None]:
        """Return the rows of the step, and of what is given, at the same timestep in every step."""
        modulations, shift = (*modulations_of(self.blocks), self.out_modulation), self._shift_of_sound(inputs)

        def of_step(times: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
            sigma = times / _TRAINED_TIMESTEPS
            return self._conditioning(sigma, shifted(sigma, shift))

        rows = rows_of_step("video and sound", None, modulations, timestep, of_step, context)
        if not has_given:
            return rows, None

        def of_given() -> torch.Tensor:
            return self._conditioning(timestep.new_full((1,), NOISE_LEVEL), timestep.new_zeros(1))

        blocks = modulations_of(self.blocks)
        return rows, rows_of_request("given tokens", None, blocks, len(timestep), of_given, context)

    def _conditioning(self, video: torch.Tensor, audio: torch.Tensor) -> torch.Tensor:
        """Return [B, 2 * time_dim] after its activation. video, audio: noise levels, [B]."""
        embedded = self.time_embedding(1 - torch.stack([video, audio], dim=1).flatten())
        activated = embedded if self.config.table_size else F.silu(embedded)
        return activated.to(self.text_embedding.weight.dtype).view(len(video), -1)

    def _finished(self, x: torch.Tensor, rows: torch.Tensor, out: Linear) -> torch.Tensor:
        """Map x [B, tokens, D] to [B, tokens, channels]. rows: shift and scale, [2, B, D]."""
        normalized = modulated_norm(x, self.out_norm.as_norm, shift=rows[0], scale=rows[1])
        finished: torch.Tensor = out(normalized.to(out.weight.dtype))
        return finished

    def _rotations(
        self, grid: tuple[int, int, int], length: int, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the rotations of this process's tokens, [B or nothing, tokens, head_dim / 2]; kept for the other steps
        of the request."""
        image, lengths = inputs.image, inputs.text.lengths
        places = () if image is None else ((0.0,) * image.latents.shape[2] + (last_time(grid[0]),) * len(image.further))
        media = () if image is None else tuple(self._grid_of(each) for each in image.media)
        config, (frames, height, width) = self.config, grid

        def turned(positions: torch.Tensor) -> torch.Tensor:
            return rotations_of(positions, config.num_paces, config.head_dim, config.theta)

        def compute() -> torch.Tensor:
            device = self.out.weight.device
            references, start = reference_positions(media, height, width)
            paces = config.num_paces, config.head_dim, config.theta
            of_grid = grid_rotations(start + frame_times(frames), height, width, *paces, device)
            given = [*(grid_positions(torch.tensor([time]), height, width) for time in places), *references]
            given.append(sound_positions(length, height, width, start))
            clip = [context.sharding.shard(of_grid, dim=0), *(turned(each).to(device) for each in given)]
            texts = [torch.cat([*clip, turned(text_positions(max(1, *lengths), each)).to(device)]) for each in lengths]
            return texts[0] if len(set(lengths)) == 1 else torch.stack(texts)

        return cached_for_request("rotations", (grid, length, lengths, places, media), context, compute)

    def _grid_of(self, media: GivenMedia) -> ReferenceGrid:
        pictures, sound = media.pictures, media.sound
        sides = None if pictures is None else self.geometry.grid(pictures.shape)
        return ReferenceGrid(sides, 0 if sound is None else sound.shape[2])


@dataclass(frozen=True)
class _Given:
    """Tokens of an image or a reference, [B, tokens, D], of one modality."""

    tokens: torch.Tensor
    modality: int


def _spans(
    num_own: int, given: Sequence[_Given], num_audio: int, num_text: int, pictures: Sequence[tuple[int, int]]
) -> tuple[Span, ...]:
    """Return the spans of a sequence. pictures: first token of each picture in the text, and the one behind its last;
    they are those of a video to the modulation."""
    of_given = [(each.modality, each.tokens.shape[1], True) for each in given]
    bounds = [(VIDEO, num_own, False), *_joined(of_given), (AUDIO, num_audio, False)]
    done = 0
    for start, stop in pictures:
        bounds += [(TEXT, start - done, False), (VIDEO, stop - start, False)]
        done = stop
    bounds.append((TEXT, num_text - done, False))
    spans, first = [], 0
    for modality, count, is_given in bounds:
        if count:
            spans.append(Span(slice(first, first + count), modality, is_given))
        first += count
    return tuple(spans)


def _joined(bounds: Sequence[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """Return neighbours of one modality as one."""
    groups = itertools.groupby(bounds, key=lambda each: (each[0], each[2]))
    return [(modality, sum(each[1] for each in group), is_given) for (modality, is_given), group in groups]
