"""The LTX-2 transformer (arXiv:2601.03233) on our attention layers, for inference.

    video latents -> tokens -+                                       +-> modulated norm -> projection -> video velocity
                             +-> num_layers x block of two streams --+
    audio latents -> tokens -+                                       +-> modulated norm -> projection -> audio velocity

Both come and go as one flat tensor (geometry.py). Shapes in this file: B batch, S video tokens, A audio tokens, L text
tokens, D width of a stream.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput, overwriting
from diffusion_runtime.core.step_info import ISOLATED, PERTURBED
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.errors import RequestError
from diffusion_runtime.kernels.modulated_norm.api import Norm
from diffusion_runtime.layers.embeddings import TextEmbedding, TimestepModulation, patchify, unpatchify
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.reference_tokens import with_references
from diffusion_runtime.layers.token_runs import TokenRun, embedding_by_run, modulated_by_run, token_runs
from diffusion_runtime.layers.waiting_weights import held_weights
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.ltx2.block import LTX2Block, Perturbation, StreamInputs, Text
from diffusion_runtime.models.ltx2.config import LTX2Config, StreamConfig
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry
from diffusion_runtime.models.ltx2.positions import (
    audio_rotations,
    keyframe_rotations,
    shared_rotations,
    video_rotations,
)
from diffusion_runtime.models.ltx2.weights import NUM_WAVES

# The eps of the last norm, whatever the config sets for the others.
_OUT_EPS = 1e-6

# The text that every block attends to.
Texts = tuple[Text, ...]


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
        self.text_time = TimestepModulation(NUM_WAVES, dim, 2) if config.modulates_text else None
        self.out_modulation = nn.Parameter(torch.zeros(2, dim))
        self.out = Linear(dim, stream.num_channels)

    def exchange_rows(self, timestep: torch.Tensor, gate_factor: float) -> torch.Tensor:
        """Return [B, 5, D], float32, as StreamInputs takes them. timestep: [B], in [0, 1000]."""
        return torch.cat([self.exchange(timestep)[0], self.exchange_gate(timestep * gate_factor)[0]], dim=1)

    def text_rows(self, timestep: torch.Tensor) -> torch.Tensor | None:
        """Return [B, 2, D], float32, as StreamInputs takes them."""
        return None if self.text_time is None else self.text_time(timestep)[0]

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

    def __init__(self, config: LTX2Config, geometry: LTX2Geometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.video = Stream(config, config.video)
        self.audio = Stream(config, config.audio)
        self.blocks = nn.ModuleList(LTX2Block(config, index, policy) for index in range(config.num_layers))

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
        clip, noised = self._apart(latents, inputs)
        parts = self.geometry.parts(clip, inputs.size)
        assert parts.audio is not None
        grid, length = self.geometry.grid(parts.video.shape), parts.audio.shape[2]
        has_image, sound = _has_image(inputs), _sound(parts.audio, inputs)
        # A given sound is clean, and each stream reads the other at the other's time.
        sound_timestep = timestep if sound is parts.audio else torch.zeros_like(timestep)
        image = inputs.image
        keyframes, places = ((), ()) if image is None else (image.further, image.places)
        # Keyframes in full come first, and precede the others whether the latents hold them or not.
        clean = keyframes[: len(keyframes) - len(noised)]
        if not has_image and not keyframes:
            # The tokens of a first frame, at a timestep of their own, are a range in raster order alone.
            context = self.in_token_order(context, grid, latents.device)
        dtype, sharding = self.video.out.weight.dtype, context.sharding
        video = sharding.shard(self._tokens(_with_image(parts.video, inputs).to(dtype)))
        num_local = video.shape[1]
        video = with_references(video, clean, self._tokens, dtype, context)
        video = torch.cat([video, *(self._tokens(each.to(dtype)) for each in noised)], dim=1) if noised else video
        num_keyframe_tokens = video.shape[1] - num_local
        audio = self.audio.embedding(sound.to(dtype).transpose(1, 2).flatten(2))
        first_timestep = timestep * (1 - image.first_strength) if image is not None and has_image else None
        video_time = token_runs(timestep, self.video.time, grid, sharding, first_timestep=first_timestep)
        if keyframes:
            within = [dataclasses.replace(run, tokens=slice(*run.tokens.indices(num_local)[:2])) for run in video_time]
            video_time = (*within, *self._keyframe_runs(places, timestep, num_local, video.shape[1]))
        audio_time = (TokenRun(slice(None), *self.audio.time(sound_timestep)),)
        fps = inputs.size.fps
        video_turns, audio_turns, *shared = cached_for_request(
            "rotations", (grid, length, fps), context, lambda: self._rotations(grid, length, fps, video.device)
        )
        text, audio_text = self._text(inputs, context)
        num_text_tokens = max(1, *inputs.text.lengths)
        text_context = context.with_layout(TokenLayout.text(num_text_tokens, inputs.text.lengths))
        grid_context = context.with_layout(TokenLayout(grid, tile=sharding.tile))
        whole = TokenLayout(grid, num_suffix_tokens=num_keyframe_tokens, tile=sharding.tile)
        video_context = context.with_layout(whole) if keyframes else grid_context
        rotations, between = sharding.shard(video_turns, dim=0), sharding.shard(shared[0], dim=0)
        if keyframes:
            of_keyframes = cached_for_request(
                "keyframe_rotations",
                (grid, places, fps),
                context,
                lambda: self._keyframe_rotations(grid, [frame for frame, _ in places], fps, video.device),
            )
            rotations, between = (
                torch.cat([own, more]) for own, more in zip((rotations, between), of_keyframes, strict=True)
            )
        audio_context = context.with_layout(TokenLayout.text(length))
        video_inputs = StreamInputs(
            time=video_time,
            exchange=self.video.exchange_rows(sound_timestep, self.config.gate_factor),
            text=self.video.text_rows(timestep),
            rotations=rotations,
            shared_rotations=between,
            context=video_context,
            text_context=text_context,
            keys_context=video_context,
            grid_context=grid_context,
            num_keyframe_tokens=num_keyframe_tokens,
        )
        audio_inputs = StreamInputs(
            time=audio_time,
            exchange=self.audio.exchange_rows(timestep, self.config.gate_factor),
            text=self.audio.text_rows(sound_timestep),
            rotations=audio_turns,
            shared_rotations=shared[1],
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

        video, audio = context.run_blocks(blocks, (video, audio), math.prod(grid), modulated_input)
        finished = self.video.finish(video, video_time)
        tokens = sharding.gather(finished[:, :num_local], math.prod(grid))
        video_velocity = unpatchify(tokens, grid, self.geometry.patch, channels_first=True)
        moments = torch.unflatten(self.audio.finish(audio, audio_time), 2, (parts.audio.shape[1], -1))
        velocity = self.geometry.join(video_velocity, moments.transpose(1, 2)).to(latents.dtype)
        if not noised:
            return velocity
        behind = finished[:, finished.shape[1] - len(noised) * grid[1] * grid[2] :]
        of_noised = torch.unflatten(behind, 1, (len(noised), -1))
        patch, frame = self.geometry.patch, (1, *grid[1:])
        pictures = [unpatchify(each, frame, patch, channels_first=True) for each in of_noised.unbind(1)]
        return torch.cat([velocity, *(each.flatten(1).to(latents.dtype) for each in pictures)], dim=1)

    def start(self, noise: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        """Return the noise; where an image counts in part, s parts of it and 1 - s parts of the noise."""
        images = _noised_images(inputs)
        mixed = noise.clone() if images else noise
        for place, (clean, strength) in zip(self._noised_places(mixed, inputs), images, strict=True):
            place.mul_(1 - strength).add_(clean.to(place.device, place.dtype), alpha=strength)
        return mixed

    def hold(self, velocity: torch.Tensor, latents: torch.Tensor, sigma: float, inputs: DenoiserInputs) -> torch.Tensor:
        """Return the velocity to clean latents that are (1 - s) times the predicted ones and s times the image, for
        strength s; (1 - s) * v + s * (x - image) / sigma."""
        images = _noised_images(inputs)
        held = velocity.clone() if images else velocity
        places, noisy = self._noised_places(held, inputs), self._noised_places(latents, inputs)
        for place, now, (clean, strength) in zip(places, noisy, images, strict=True):
            away = now.to(place.dtype) - clean.to(place.device, place.dtype)
            place.mul_(1 - strength).add_(away, alpha=strength / sigma)
        return held

    def complete(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        """Return the latents with keyframes in full after the clip, before those that are denoised."""
        clip, _ = self._apart(latents, inputs)
        kept = [latents for latents, (_, strength) in _keyframes(inputs) if strength == 1]
        behind = [latents.flatten(1).to(clip.device, clip.dtype) for latents in kept]
        return self.settle(torch.cat([clip, *behind, latents[:, clip.shape[1] :]], dim=1), inputs)

    def settle(self, latents: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
        if inputs.image is None:
            return latents
        clip, _ = self._apart(latents, inputs)
        parts = self.geometry.parts(clip, inputs.size)
        assert parts.audio is not None
        settled = self.geometry.join(_with_image(parts.video, inputs), _sound(parts.audio, inputs))
        return torch.cat([settled, latents[:, clip.shape[1] :]], dim=1)

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

    def _keyframe_runs(
        self, places: Sequence[tuple[int, float]], timestep: torch.Tensor, start: int, stop: int
    ) -> Iterator[TokenRun]:
        """Yield the runs of the tokens of keyframes, [start, stop): neighbours of one strength s share t * (1 - s)."""
        num_tokens = (stop - start) // len(places)
        for strength, group in itertools.groupby(strength for _, strength in places):
            end = start + num_tokens * len(list(group))
            yield TokenRun(slice(start, end), *self.video.time(timestep * (1 - strength)))
            start = end

    def _apart(self, latents: torch.Tensor, inputs: DenoiserInputs) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return views of the clip's flat latents, and of the keyframes after it, [B, channels, 1, height, width]:
        those that are denoised with it, or all (`complete`)."""
        length = math.prod(self.geometry.sample_shape(inputs.size))
        if inputs.image is None or not inputs.image.further or latents.shape[1] == length:
            return latents, ()
        frames = torch.unflatten(latents[:, length:], 1, (-1, *inputs.image.further[0].shape[1:]))
        return latents[:, :length], frames.unbind(1)

    def _noised_places(self, latents: torch.Tensor, inputs: DenoiserInputs) -> list[torch.Tensor]:
        """Return views of the frames of `_noised_images`, in its order."""
        clip, noised = self._apart(latents, inputs)
        first = [self.geometry.parts(clip, inputs.size).video[:, :, :1]] if _noises_first(inputs) else []
        return [*first, *noised]

    def _perturbations(self, inputs: DenoiserInputs, branch: str) -> list[Perturbation]:
        """Return the parts that each block leaves out in a forward pass of a guidance branch."""
        skipped = (inputs.request.stg_blocks or ()) if branch == PERTURBED else ()
        isolates = branch == ISOLATED
        return [Perturbation(index in skipped, isolates) for index in range(self.num_blocks)]

    def _text(self, inputs: DenoiserInputs, context: AttentionContext) -> tuple[Texts, Texts]:
        """Return the text of both streams that every block attends to, as long as the longest prompt; kept for the
        other steps of the request: keys and values, which in LTX-2.0 take 1.2 GB a prompt in bfloat16, or since LTX-2.3
        the tokens, which every step modulates."""
        if not inputs.text.further:
            raise RequestError("this model takes two text embeddings, one for the video and one for the sound")
        num_tokens = max(1, *inputs.text.lengths)
        embeddings = (inputs.text.embeddings, inputs.text.further[0].embeddings)

        def project() -> tuple[Texts, Texts]:
            dtype = self.video.out.weight.dtype
            video = self.video.embed_text(embeddings[0][:, :num_tokens].to(dtype))
            audio = self.audio.embed_text(embeddings[1][:, :num_tokens].to(dtype))
            if self.config.modulates_text:
                return (video,) * self.num_blocks, (audio,) * self.num_blocks
            video_keys, audio_keys = [], []
            for block in self.all_blocks():
                with held_weights(block):
                    video_keys.append(block.video.cross_attention.keys_and_values(video))
                    audio_keys.append(block.audio.cross_attention.keys_and_values(audio))
            return tuple(video_keys), tuple(audio_keys)

        return cached_for_prompt("ltx2_text", embeddings[0], context, project)

    def all_blocks(self) -> Iterator[LTX2Block]:
        return (block for block in self.blocks if isinstance(block, LTX2Block))


def _has_image(inputs: DenoiserInputs) -> bool:
    return inputs.image is not None and inputs.image.latents.shape[2] > 0


def _noises_first(inputs: DenoiserInputs) -> bool:
    """Return whether the first frame is an image that does not count in full."""
    return _has_image(inputs) and inputs.image is not None and inputs.image.first_strength < 1


def _noised_images(inputs: DenoiserInputs) -> list[tuple[torch.Tensor, float]]:
    """Return the images that do not count in full, each with its strength: the first frame's, then keyframes."""
    image = inputs.image
    if image is None:
        return []
    first = [(image.latents, image.first_strength)] if _noises_first(inputs) else []
    return [*first, *((latents, strength) for latents, (_, strength) in _keyframes(inputs) if strength < 1)]


def _keyframes(inputs: DenoiserInputs) -> list[tuple[torch.Tensor, tuple[int, float]]]:
    """Return the latents of each keyframe with its place."""
    image = inputs.image
    return [] if image is None else list(zip(image.further, image.places, strict=True))


def _with_image(video: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
    """Return latents [B, channels, frames, height, width] with the image as first frame, if it counts in full."""
    if inputs.image is None or not _has_image(inputs) or _noises_first(inputs):
        return video
    return torch.cat([inputs.image.latents.to(video.device, video.dtype), video[:, :, 1:]], dim=2)


def _sound(audio: torch.Tensor, inputs: DenoiserInputs) -> torch.Tensor:
    """Return latents [B, channels, length, bins]: the given sound's, where there is one."""
    if inputs.image is None or inputs.image.sound is None:
        return audio
    return inputs.image.sound.to(audio.device, audio.dtype)
