"""Random inputs of one denoising step at any size: for our transformer, and the same for diffusers' own.

Keys are class names of diffusers. Text has the length of an ordinary prompt where a model takes its tokens unpadded,
and else the length that the model's pipeline pads to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry
from diffusion_runtime.denoising.flow_schedule import shifted
from diffusion_runtime.errors import ConfigError, shown
from diffusion_runtime.layers.embeddings import patchify, unpatchify
from diffusion_runtime.layers.first_frame import beside_latents, in_first_frame
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.ltx_video.config import LTXVideoGeometry
from diffusion_runtime.models.minimax_h3.positions import (
    frame_times,
    grid_positions,
    sound_positions,
    text_positions,
)
from diffusion_runtime.text_encoders.interface import Conditions, TextStream
from diffusion_runtime.text_encoders.token_ids import digits_of

# diffusers rounds a thousandth of the timestep to bfloat16, and a thousand times the guidance scale: it holds these.
_TIMESTEP, _GUIDANCE = 500.0, 4.0
# Of a flow map, where the timed step leads.
NEXT_TIMESTEP = 250.0
_LATENT_PATCH = (1, 2, 2)
# Tokens of CLIP at 224 x 224: 256 patches and the class.
_NUM_IMAGE_TOKENS = 257
# Tokens that the transformer gets of the 576 of the image that HunyuanVideo's language model sees, by how the video
# starts from the image.
_NUM_SEEN_TOKENS = {"latent_concat": 288, "token_replace": 144}
# Tokens of a prompt of a few sentences and of a negative prompt, alternating over a batch.
_PROMPT_LENGTHS = (120, 6)


@dataclass(frozen=True)
class StepInputs:
    """Inputs of one step. ours: latents, timestep and inputs of DiffusionTransformer.forward. theirs: keyword arguments
    of diffusers' forward for the same step. theirs_to_velocity: their output as a velocity of ours, in the shape of our
    latents. with_prefix: of a model that computes the prompt's keys and values once per request: computes them by
    diffusers' model, and returns the further keyword arguments of its steps; None for any other."""

    ours: tuple[torch.Tensor, torch.Tensor, DenoiserInputs]
    theirs: Mapping[str, Any]
    theirs_to_velocity: Callable[[Any], torch.Tensor]
    with_prefix: Callable[[nn.Module], Mapping[str, Any]] | None = None

    def forward_of_theirs(self, model: nn.Module) -> Callable[[], torch.Tensor]:
        """Return a function that runs steps of diffusers' model in the middle of a request, as velocities of ours."""
        prefix: dict[str, Any] = {}

        def run() -> torch.Tensor:
            if self.with_prefix is not None and not prefix:
                prefix.update(self.with_prefix(model))
            return self.theirs_to_velocity(model(**self.theirs, **prefix))

        return run


@dataclass(frozen=True)
class StepSample:
    """Settings that inputs are drawn for. config: of the transformer, from its config.json; geometry, size: of the
    clip. batch: samples; text_tokens: room for text, None for the model's usual. num_images: of that size, which are
    edited."""

    config: Mapping[str, Any]
    geometry: LatentGeometry
    size: ClipSize
    batch: int
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator
    text_tokens: int | None = None
    num_images: int = 0

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.batch, *shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def latents(self) -> torch.Tensor:
        """Return random latents [batch, *geometry.sample_shape]."""
        return self.random(*self.geometry.sample_shape(self.size))

    def references(self) -> tuple[torch.Tensor, ...]:
        """Return the latents of the images to edit."""
        return tuple(self.latents() for _ in range(self.num_images))

    def grid(self, latents: torch.Tensor) -> tuple[int, int, int]:
        return self.geometry.grid(tuple(latents.shape))

    def full(self, value: float) -> torch.Tensor:
        """Return a tensor of `value`, [batch], float32."""
        return torch.full((self.batch,), value, device=self.device)

    def lengths(self, *lengths: int, room: int) -> tuple[int, ...]:
        """Return the length of each sample's text: the given ones alternating, within the room."""
        return tuple(min(room, lengths[index % len(lengths)]) for index in range(self.batch))

    def is_real(self, room: int, lengths: tuple[int, ...]) -> torch.Tensor:
        """Return the mask of real tokens, [batch, room], bool."""
        bounds = torch.tensor(lengths, device=self.device)
        return torch.arange(room, device=self.device)[None] < bounds[:, None]

    def padded(self, room: int, dim: int, lengths: tuple[int, ...]) -> torch.Tensor:
        """Return random text [batch, room, dim], zero past each length."""
        return self.random(room, dim) * self.is_real(room, lengths)[..., None]


def step_inputs(transformer_class: str, sample: StepSample) -> StepInputs:
    """Return inputs of one step of a diffusers class. Raises ConfigError for a class without known inputs, and
    RequestError for a size that the model does not make."""
    if transformer_class not in _MAKERS:
        known = ", ".join(sorted(_MAKERS))
        raise ConfigError(f"no sample inputs are known for {shown(transformer_class)}; expected one of {known}")
    return _MAKERS[transformer_class](sample)


def _video_cross(sample: StepSample) -> StepInputs:
    latents = sample.latents()
    text = sample.random(sample.text_tokens or 512, sample.config["text_dim"])
    timestep = sample.full(700.0)
    theirs = {"hidden_states": latents, "timestep": timestep, "encoder_hidden_states": text, "return_dict": False}
    image = None
    num_channels = sample.config["in_channels"] - sample.config["out_channels"]
    if num_channels:
        image = ImageCondition(sample.random(num_channels, *latents.shape[2:]), _image_tokens(sample))
        theirs["hidden_states"] = torch.cat([latents, image.latents], dim=1)
        if image.embeddings is not None:
            # diffusers takes those of a first and a last image as two samples.
            theirs["encoder_hidden_states_image"] = image.embeddings.reshape(-1, _NUM_IMAGE_TOKENS, _width(image))
    inputs = DenoiserInputs(Conditions.of(text), sample.size, image=image)
    return StepInputs((latents, timestep, inputs), theirs, lambda out: out[0])


def _video_flow_map(sample: StepSample) -> StepInputs:
    """Return inputs with the timesteps of every frame, and frames second."""
    made = _video_cross(sample)
    latents, timestep, _ = made.ours
    times = timestep[:, None].repeat(1, latents.shape[2])
    further = {"timestep": times, "r_timestep": torch.full_like(times, NEXT_TIMESTEP)}
    theirs = {**made.theirs, "hidden_states": latents.transpose(1, 2).contiguous(), **further}
    return StepInputs(made.ours, theirs, lambda out: out[0].transpose(1, 2))


def _video_controlled(sample: StepSample) -> StepInputs:
    """Return inputs with a control video and no reference images."""
    latents = sample.latents()
    control = sample.random(sample.config["vace_in_channels"], *latents.shape[2:])
    text = sample.random(sample.text_tokens or 512, sample.config["text_dim"])
    timestep = sample.full(700.0)
    theirs = {
        "hidden_states": latents,
        "timestep": timestep,
        "encoder_hidden_states": text,
        "control_hidden_states": control,
        "return_dict": False,
    }
    inputs = DenoiserInputs(Conditions.of(text), sample.size, image=ImageCondition(control))
    return StepInputs((latents, timestep, inputs), theirs, lambda out: out[0])


def _image_tokens(sample: StepSample) -> torch.Tensor | None:
    """Return the tokens of a Wan model's image encoder, None for a model without one: of one image, or of two where
    tokens have learned positions."""
    width = sample.config.get("image_dim")
    return None if width is None else sample.random(sample.config.get("pos_embed_seq_len") or _NUM_IMAGE_TOKENS, width)


def _width(image: ImageCondition) -> int:
    assert image.embeddings is not None
    return image.embeddings.shape[-1]


def _image_joint(sample: StepSample) -> StepInputs:
    latents, num_tokens = sample.latents(), sample.text_tokens or 512
    text = sample.random(num_tokens, sample.config["joint_attention_dim"])
    pooled = sample.random(sample.config["pooled_projection_dim"])
    timestep, grid = sample.full(_TIMESTEP), sample.grid(latents)
    guidance, references = _GUIDANCE if sample.config["guidance_embeds"] else None, sample.references()
    places = _places(grid, sample.device).float()
    further = [places + torch.tensor([1.0, 0.0, 0.0], device=sample.device) for _ in references]
    tokens = torch.cat([patchify(each, _LATENT_PATCH) for each in (latents, *references)], dim=1)
    image, num_channels = _condition(references), sample.config["in_channels"]
    beside = num_channels - (sample.config.get("out_channels") or num_channels)
    if beside:
        image = ImageCondition(sample.random(beside // math.prod(_LATENT_PATCH), *latents.shape[2:]))
        tokens = torch.cat([tokens, patchify(image.latents, _LATENT_PATCH)], dim=-1)
    theirs = {
        "hidden_states": tokens,
        "timestep": timestep / 1000,
        "guidance": None if guidance is None else sample.full(guidance),
        "pooled_projections": pooled,
        "encoder_hidden_states": text,
        "txt_ids": torch.zeros(num_tokens, 3, device=sample.device),
        "img_ids": torch.cat([places, *further]),
        "return_dict": False,
    }
    conditions = Conditions.of(text, pooled=pooled)
    inputs = DenoiserInputs(conditions, sample.size, guidance=guidance, image=image)
    return StepInputs(
        (latents, timestep, inputs),
        theirs,
        lambda out: unpatchify(out[0][:, : len(places)], grid, _LATENT_PATCH, channels_first=True),
    )


def _image_on_diagonal(sample: StepSample) -> StepInputs:
    """Return inputs whose pictures have the positions that follow 512 tokens of text."""
    latents, num_tokens = sample.latents(), sample.text_tokens or 512
    text = sample.random(num_tokens, sample.config["joint_attention_dim"])
    timestep, grid = sample.full(_TIMESTEP), sample.grid(latents)
    diagonal = torch.arange(num_tokens, device=sample.device)[:, None]
    theirs = {
        "hidden_states": patchify(latents, _LATENT_PATCH),
        "timestep": timestep / 1000,
        "encoder_hidden_states": text,
        "txt_ids": diagonal * torch.tensor([0, 1, 1], device=sample.device),
        "img_ids": _places(grid, sample.device) + torch.tensor([1, 512, 512], device=sample.device),
        "return_dict": False,
    }
    inputs = DenoiserInputs(Conditions.of(text), sample.size)
    return StepInputs(
        (latents, timestep, inputs), theirs, lambda out: unpatchify(out[0], grid, _LATENT_PATCH, channels_first=True)
    )


def _image_joint_on_four_axes(sample: StepSample) -> StepInputs:
    """Return inputs whose text tokens are all attended, padding too."""
    latents, num_tokens = sample.latents(), sample.text_tokens or 512
    text = sample.random(num_tokens, sample.config["joint_attention_dim"])
    timestep, grid, references = sample.full(_TIMESTEP), sample.grid(latents), sample.references()
    guidance, places = _GUIDANCE if sample.config["guidance_embeds"] else None, _places((*grid, 1), sample.device)
    apart = torch.tensor([10, 0, 0, 0], device=sample.device)
    theirs = {
        "hidden_states": torch.cat([patchify(each, (1, 1, 1)) for each in (latents, *references)], dim=1),
        "timestep": timestep / 1000,
        "guidance": None if guidance is None else sample.full(guidance),
        "encoder_hidden_states": text,
        "txt_ids": _places((1, 1, 1, num_tokens), sample.device),
        "img_ids": torch.cat([places + index * apart for index in range(1 + len(references))]),
        "return_dict": False,
    }
    inputs = DenoiserInputs(Conditions.of(text), sample.size, guidance=guidance, image=_condition(references))
    return StepInputs(
        (latents, timestep, inputs), theirs, lambda out: unpatchify(out[0][:, : len(places)], grid, (1, 1, 1))
    )


def _image_of_kinds(sample: StepSample) -> StepInputs:
    """Return inputs whose text, a description of the whole scene, is attended with its padding."""
    latents, num_tokens = sample.latents(), sample.text_tokens or 320
    text = sample.random(num_tokens, sample.config["joint_attention_dim"])
    timestep, grid, references = sample.full(_TIMESTEP), sample.grid(latents), sample.references()
    halves = torch.tensor([1.0, 0.5, 0.5, 1.0], device=sample.device)
    places = _places((*grid, 1), sample.device) * halves
    following = torch.tensor([0.0, 0.0, 0.0, 1.0], device=sample.device)
    theirs = {
        "hidden_states": patchify(latents, (1, 1, 1)),
        "timestep": timestep / 1000,
        "encoder_hidden_states": text,
        "txt_ids": _places((1, 1, 1, num_tokens), sample.device),
        "img_ids": places,
        "return_dict": False,
    }
    if references:
        theirs["image_cond_hidden_states"] = torch.cat([patchify(each, (1, 1, 1)) for each in references], dim=1)
        theirs["image_cond_ids"] = torch.cat([places - (1 + index) * following for index in range(len(references))])
    if sample.config.get("flow_map"):
        theirs["target_timestep"] = sample.full(NEXT_TIMESTEP) / 1000
    inputs = DenoiserInputs(Conditions.of(text), sample.size, image=_condition(references))
    return StepInputs((latents, timestep, inputs), theirs, lambda out: unpatchify(out[0], grid, (1, 1, 1)))


def _image_text_first(sample: StepSample) -> StepInputs:
    latents = sample.latents()
    # For the pictures that a language model sees with the prompt, 28 x 28 pixels each.
    seen = sample.num_images * (sample.size.height * sample.size.width // 28**2)
    wanted = [seen + length for length in _PROMPT_LENGTHS]
    lengths = sample.lengths(*wanted, room=sample.text_tokens or max(wanted))
    room = max(lengths)
    text = sample.padded(room, sample.config["joint_attention_dim"], lengths)
    timestep, grid, references = sample.full(_TIMESTEP), sample.grid(latents), sample.references()
    theirs = {
        "hidden_states": torch.cat([patchify(each, _LATENT_PATCH) for each in (latents, *references)], dim=1),
        "timestep": timestep / 1000,
        "encoder_hidden_states": text,
        "encoder_hidden_states_mask": sample.is_real(room, lengths),
        "img_shapes": [[grid] * (1 + len(references))] * sample.batch,
        "return_dict": False,
    }
    inputs = DenoiserInputs(Conditions.of(text, lengths), sample.size, image=_condition(references))
    return StepInputs(
        (latents, timestep, inputs),
        theirs,
        lambda out: unpatchify(out[0][:, : math.prod(grid)], grid, _LATENT_PATCH, channels_first=True),
    )


def _image_after_prefix(sample: StepSample) -> StepInputs:
    """Return inputs with texts of one length: in diffusers the grid of every sample begins after the longest text."""
    latents = sample.latents()
    text = sample.random(sample.text_tokens or _PROMPT_LENGTHS[0], sample.config["context_in_dim"])
    timestep, (frames, rows, columns) = sample.full(_TIMESTEP), sample.grid(latents)
    # Each slot of the picture in the language model's sequence stands for 2 x 2 latents.
    slots = torch.arange(text.shape[1] + rows * columns // 4, device=sample.device) >= text.shape[1]
    theirs = {
        "hidden_states": patchify(latents, (1, 1, 1)),
        "encoder_hidden_states": text,
        "timestep": timestep / 1000,
        "img_shapes": [[(frames, rows, columns)]] * sample.batch,
        "img_mask": slots.expand(sample.batch, -1),
        "return_dict": False,
    }

    def with_prefix(model: nn.Module) -> Mapping[str, Any]:
        # As its pipeline does by default: the first step fills the cache, the others read it.
        from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

        cache = QwenImage21KVCache(sample.config["num_layers"])
        model(**theirs, kv_cache=cache, kv_cache_mode="extract")
        return {"kv_cache": cache, "kv_cache_mode": "cached"}

    return StepInputs(
        (latents, timestep, DenoiserInputs(Conditions.of(text), sample.size)),
        theirs,
        lambda out: unpatchify(out[0][:, -rows * columns :], (frames, rows, columns), (1, 1, 1)),
        with_prefix,
    )


def _image_with_text_layers(sample: StepSample) -> StepInputs:
    """Return inputs whose text diffusers pads to 512 tokens and masks."""
    config, latents = sample.config, sample.latents()
    room = sample.text_tokens or 512
    lengths, grid = sample.lengths(*_PROMPT_LENGTHS, room=room), sample.grid(latents)
    text = sample.padded(room, config["num_text_layers"] * config["text_hidden_dim"], lengths)
    timestep, places = sample.full(_TIMESTEP), _places(grid, sample.device)
    theirs = {
        "hidden_states": patchify(latents, _LATENT_PATCH),
        "encoder_hidden_states": torch.unflatten(text, -1, (config["num_text_layers"], config["text_hidden_dim"])),
        "timestep": timestep / 1000,
        "position_ids": torch.cat([places.new_zeros(room, 3), places]),
        "encoder_attention_mask": sample.is_real(room, lengths),
        "return_dict": False,
    }
    inputs = DenoiserInputs(Conditions.of(text, lengths), sample.size)
    return StepInputs(
        (latents, timestep, inputs), theirs, lambda out: unpatchify(out[0], grid, _LATENT_PATCH, channels_first=True)
    )


def _image_with_token_ids(sample: StepSample) -> StepInputs:
    """Return inputs of Anima: states of a language model and ids of T5, of equal lengths. Its text conditioner makes
    states as wide as it takes them."""
    latents, room = sample.latents(), sample.text_tokens or 512
    lengths = sample.lengths(*_PROMPT_LENGTHS, room=room)
    states = sample.padded(room, sample.config["text_embed_dim"], lengths)
    ids = torch.arange(room, device=sample.device).expand(sample.batch, -1)
    text = Conditions.of(states, lengths, further=[TextStream(digits_of(ids).to(sample.dtype), lengths)])
    inputs = DenoiserInputs(text, sample.size)
    return StepInputs((latents, sample.full(_TIMESTEP), inputs), {}, lambda out: out)


def _image_behind_text(sample: StepSample) -> StepInputs:
    """Return inputs of MOSS-Image, which diffusers does not have."""
    latents, room = sample.latents(), sample.text_tokens or max(_PROMPT_LENGTHS)
    lengths = sample.lengths(*_PROMPT_LENGTHS, room=room)
    text = Conditions.of(sample.padded(room, sample.config["text_dim"], lengths), lengths)
    return StepInputs((latents, sample.full(_TIMESTEP), DenoiserInputs(text, sample.size)), {}, lambda out: out)


def _image_lists(sample: StepSample) -> StepInputs:
    latents = sample.latents()
    text = sample.random(sample.text_tokens or 100, sample.config["cap_feat_dim"])
    timestep = sample.full(700.0)
    theirs = {"x": list(latents), "t": (1000 - timestep) / 1000, "cap_feats": list(text), "return_dict": False}
    inputs = DenoiserInputs(Conditions.of(text), sample.size)
    return StepInputs((latents, timestep, inputs), theirs, lambda out: -torch.stack(out[0]))


def _video_joint(sample: StepSample) -> StepInputs:
    """Return inputs whose text diffusers pads to 256 tokens, in addition to those of an image, and masks."""
    latents, kind = sample.latents(), sample.config.get("image_condition_type")
    seen = 0 if kind is None else _NUM_SEEN_TOKENS[kind]
    room = seen + (sample.text_tokens or 256)
    lengths = sample.lengths(seen + 80, seen + 6, room=room)
    image, given = None, latents
    if kind is not None:
        image = ImageCondition(sample.random(latents.shape[1], 1, *latents.shape[3:]))
        given = (in_first_frame if kind == "token_replace" else beside_latents)(latents, image.latents)
    text = sample.padded(room, sample.config["text_embed_dim"], lengths)
    pooled, timestep = sample.random(sample.config["pooled_projection_dim"]), sample.full(700.0)
    guidance = 6.0 if sample.config["guidance_embeds"] else None
    theirs = {
        "hidden_states": given,
        "timestep": timestep,
        "encoder_hidden_states": text,
        "encoder_attention_mask": sample.is_real(room, lengths).to(sample.dtype),
        "pooled_projections": pooled,
        "guidance": None if guidance is None else (1000 * sample.full(guidance)).to(sample.dtype),
        "return_dict": False,
    }
    inputs = DenoiserInputs(Conditions.of(text, lengths, pooled=pooled), sample.size, guidance, image)
    return StepInputs((latents, timestep, inputs), theirs, lambda out: out[0])


def _video_joint_two_encoders(sample: StepSample) -> StepInputs:
    """Return inputs whose texts diffusers pads, together with 729 tokens of an image where there is none, and masks."""
    config, latents = sample.config, sample.latents()
    room, glyph_room, num_image_tokens = sample.text_tokens or 1000, 256, 729
    lengths, glyphs = sample.lengths(*_PROMPT_LENGTHS, room=room), sample.lengths(20, 1, room=glyph_room)
    text = sample.padded(room, config["text_embed_dim"], lengths)
    glyph_text = sample.padded(glyph_room, config["text_embed_2_dim"], glyphs)
    # A value that bfloat16 holds: diffusers' pipeline rounds it.
    timestep, image = sample.full(704.0), None
    embeddings = torch.zeros(
        sample.batch, num_image_tokens, config["image_embed_dim"], device=sample.device, dtype=sample.dtype
    )
    shape = latents.shape
    first_frame = torch.zeros(shape[0], shape[1] + 1, *shape[2:], device=sample.device, dtype=sample.dtype)
    if config.get("task_type") == "i2v":
        embeddings = sample.random(*embeddings.shape[1:])
        image = ImageCondition(sample.random(shape[1], 1, *shape[3:]), embeddings)
        first_frame[:, :-1, :1], first_frame[:, -1:, :1] = image.latents, 1
    theirs = {
        "hidden_states": torch.cat([latents, first_frame], dim=1),
        "timestep": timestep.to(sample.dtype),
        "encoder_hidden_states": text,
        "encoder_attention_mask": sample.is_real(room, lengths).to(sample.dtype),
        "encoder_hidden_states_2": glyph_text,
        "encoder_attention_mask_2": sample.is_real(glyph_room, glyphs).to(sample.dtype),
        "image_embeds": embeddings,
        "return_dict": False,
    }
    conditions = Conditions.of(text, lengths, further=[TextStream(glyph_text, glyphs)])
    inputs = DenoiserInputs(conditions, sample.size, image=image)
    return StepInputs((latents, timestep, inputs), theirs, lambda out: out[0])


def _video_with_sound(sample: StepSample) -> StepInputs:
    """Return inputs with the text that the pipeline's connectors produce, of which nothing is masked."""
    latents, num_tokens = sample.latents(), sample.text_tokens or 1024
    parts = sample.geometry.parts(latents, sample.size)
    video, audio = parts.video, parts.audio
    assert audio is not None
    text_dims = (sample.config["caption_channels"],) * 2
    if not sample.config.get("use_prompt_embeddings", True):
        # Since LTX-2.3 the connectors make them as wide as the streams.
        text_dims = sample.config["cross_attention_dim"], sample.config["audio_cross_attention_dim"]
    text, audio_text = (sample.random(num_tokens, text_dim) for text_dim in text_dims)
    timestep = sample.full(700.0)
    every_token = torch.ones(sample.batch, num_tokens, dtype=torch.long, device=sample.device)
    theirs = {
        "hidden_states": video.flatten(2).transpose(1, 2).contiguous(),
        "audio_hidden_states": audio.transpose(1, 2).flatten(2).contiguous(),
        "encoder_hidden_states": text,
        "audio_encoder_hidden_states": audio_text,
        "timestep": timestep,
        "sigma": timestep,
        "encoder_attention_mask": every_token,
        "audio_encoder_attention_mask": every_token,
        "num_frames": video.shape[2],
        "height": video.shape[3],
        "width": video.shape[4],
        "fps": float(sample.size.fps),
        "audio_num_frames": audio.shape[2],
        "use_cross_timestep": True,
        "return_dict": False,
    }

    def velocity(out: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        pictures, sound = out
        moments = torch.unflatten(sound, 2, (audio.shape[1], audio.shape[3])).transpose(1, 2)
        return torch.cat([pictures.transpose(1, 2).flatten(1), moments.flatten(1)], dim=1)

    further = [TextStream(audio_text, (num_tokens,) * sample.batch)]
    inputs = DenoiserInputs(Conditions.of(text, further=further), sample.size)
    return StepInputs((latents, timestep, inputs), theirs, velocity)


def _packed_sequence(sample: StepSample) -> StepInputs:
    """Return inputs with a text of one length for every sample. diffusers takes the place of every row of the sequence
    with them, text, sound and video: its time, and the modality that modulates it."""
    latents, num_tokens = sample.latents(), sample.text_tokens or _PROMPT_LENGTHS[0]
    parts = sample.geometry.parts(latents, sample.size)
    video, audio, grid = parts.video, parts.audio, sample.grid(parts.video)
    assert audio is not None
    text, timestep = sample.random(num_tokens, sample.config["text_dim"]), sample.full(_TIMESTEP)
    length, sides = audio.shape[2:]
    counts = (num_tokens, sides * length, math.prod(grid))
    positions = (
        text_positions(num_tokens, num_tokens),
        sound_positions(length, *grid[1:]),
        grid_positions(frame_times(grid[0]), *grid[1:]),
    )
    rows = torch.split(torch.arange(sum(counts)), list(counts))
    kinds, sigma = torch.repeat_interleave(torch.arange(3), torch.tensor(counts)), _TIMESTEP / 1000
    theirs = {
        "hidden_states": patchify(video, sample.geometry.patch),
        "audio_hidden_states": audio.permute(0, 3, 2, 1).flatten(1, 2),
        "encoder_hidden_states": text,
        # Of the published schedules of pictures and sound; the text has that of the pictures.
        "timestep": torch.tensor([1 - sigma, 1 - shifted(sigma, 3 / 12)]),
        "timestep_indices": torch.tensor([0, 1, 0])[kinds],
        "token_tags": torch.tensor([1, 2, 0])[kinds],
        "position_ids": torch.cat(positions),
        **dict(zip(("text_indices", "audio_indices", "video_indices"), rows, strict=True)),
        "return_dict": False,
    }
    theirs = {key: each.to(sample.device) if isinstance(each, torch.Tensor) else each for key, each in theirs.items()}

    def velocity(out: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        pictures, sound = out
        moments = torch.unflatten(sound, 1, (sides, length)).permute(0, 3, 2, 1)
        return -sample.geometry.join(unpatchify(pictures, grid, sample.geometry.patch, channels_first=True), moments)

    return StepInputs((latents, timestep, DenoiserInputs(Conditions.of(text), sample.size)), theirs, velocity)


def _video_by_coordinates(sample: StepSample) -> StepInputs:
    """Return inputs with text as long as the prompts, which the pipeline masks to."""
    geometry = sample.geometry
    assert isinstance(geometry, LTXVideoGeometry)
    latents, num_tokens = sample.latents(), sample.text_tokens or 128
    lengths, grid = sample.lengths(*_PROMPT_LENGTHS, room=num_tokens), sample.grid(latents)
    text, timestep = sample.random(num_tokens, sample.config["caption_channels"]), sample.full(700.0)
    starts = torch.cartesian_prod(*geometry.token_starts(grid, sample.size.fps)).to(sample.device)
    theirs = {
        "hidden_states": latents.flatten(2).transpose(1, 2).contiguous(),
        "encoder_hidden_states": text,
        "timestep": timestep,
        "encoder_attention_mask": sample.is_real(num_tokens, lengths).long(),
        "video_coords": starts.t()[None].repeat(sample.batch, 1, 1),
        "return_dict": False,
    }
    inputs = DenoiserInputs(Conditions.of(text, lengths), sample.size)
    return StepInputs(
        (latents, timestep, inputs),
        theirs,
        lambda out: torch.unflatten(out[0].transpose(1, 2), 2, grid),
    )


def _condition(references: tuple[torch.Tensor, ...]) -> ImageCondition | None:
    return ImageCondition(references[0], further=references[1:]) if references else None


def _places(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return each token's position on every axis, [tokens, axes]."""
    return torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes))


_Maker: TypeAlias = Callable[[StepSample], StepInputs]
_MAKERS: Mapping[str, _Maker] = {
    "CausalWanTransformer3DModel": _video_cross,
    "WanTransformer3DModel": _video_cross,
    "AnyFlowTransformer3DModel": _video_flow_map,
    "AnyFlowFARTransformer3DModel": _video_flow_map,
    "WanVACETransformer3DModel": _video_controlled,
    "HunyuanVideoTransformer3DModel": _video_joint,
    "HunyuanVideo15Transformer3DModel": _video_joint_two_encoders,
    "LTX2VideoTransformer3DModel": _video_with_sound,
    "MiniMaxH3Transformer3DModel": _packed_sequence,
    "LTXVideoTransformer3DModel": _video_by_coordinates,
    "FluxTransformer2DModel": _image_joint,
    "LongCatImageTransformer2DModel": _image_on_diagonal,
    "Flux2Transformer2DModel": _image_joint_on_four_axes,
    "Flux3Transformer2DModel": _image_of_kinds,
    "QwenImageTransformer2DModel": _image_text_first,
    "QwenImage21Transformer2DModel": _image_after_prefix,
    "ZImageTransformer2DModel": _image_lists,
    "Krea2Transformer2DModel": _image_with_text_layers,
    "CosmosTransformer3DModel": _image_with_token_ids,
    "MOSSImageTransformer": _image_behind_text,
}
