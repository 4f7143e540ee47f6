"""LTX-2 at its real size: config.json of the published 19B transformers of LTX-2.0 and LTX-2.5, and of one whose text
does not depend on the timestep; five seconds of 768 x 512 and their sound."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.families.step import FamilyStep, StepInputs
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.text_encoders.interface import Conditions, TextStream

_CONFIG: dict[str, Any] = {
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "attention_head_dim": 128,
    "attention_out_bias": True,
    "audio_attention_head_dim": 64,
    "audio_cross_attention_dim": 2048,
    "audio_hop_length": 160,
    "audio_in_channels": 128,
    "audio_num_attention_heads": 32,
    "audio_out_channels": 128,
    "audio_patch_size": 1,
    "audio_patch_size_t": 1,
    "audio_pos_embed_max_pos": 20,
    "audio_sampling_rate": 16000,
    "audio_scale_factor": 4,
    "base_height": 2048,
    "base_width": 2048,
    "caption_channels": 3840,
    "causal_offset": 1,
    "cross_attention_dim": 4096,
    "cross_attn_timestep_scale_multiplier": 1000,
    "in_channels": 128,
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "num_attention_heads": 32,
    "num_layers": 48,
    "out_channels": 128,
    "patch_size": 1,
    "patch_size_t": 1,
    "pos_embed_max_pos": 20,
    "qk_norm": "rms_norm_across_heads",
    "rope_double_precision": True,
    "rope_theta": 10000.0,
    "rope_type": "split",
    "timestep_scale_multiplier": 1000,
    "vae_scale_factors": [8, 32, 32],
}
_CONFIG_25: dict[str, Any] = {
    **_CONFIG,
    **dict.fromkeys(("gated_attn", "audio_gated_attn", "cross_attn_mod", "audio_cross_attn_mod"), True),
    "perturbed_attn": True,
    "use_prompt_embeddings": False,
    "ff_bias": False,
    "use_keyframes_abs_pos_embedding": True,
}
_SIZE = ClipSize(512, 768, 121, 24)
# Latents of such a clip, in channels, frames, height and width, and of its sound, in channels, moments and bins.
_VIDEO, _AUDIO = (128, 16, 16, 24), (8, 126, 16)
_TEXT_TOKENS = 1024


def _inputs(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> StepInputs:
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, generator=generator, device=device, dtype=dtype)

    video, audio = noise(*_VIDEO), noise(*_AUDIO)
    text_dims = (config["caption_channels"],) * 2
    if not config.get("use_prompt_embeddings", True):
        # Since LTX-2.3 the connectors make them as wide as the streams.
        text_dims = config["cross_attention_dim"], config["audio_cross_attention_dim"]
    text, audio_text = (noise(_TEXT_TOKENS, text_dim) for text_dim in text_dims)
    timestep = torch.full((1,), 700.0, device=device)
    conditions = Conditions.of(text, further=[TextStream(audio_text, (_TEXT_TOKENS,))])
    theirs = {
        "hidden_states": video.flatten(2).transpose(1, 2).contiguous(),
        "audio_hidden_states": audio.transpose(1, 2).flatten(2).contiguous(),
        "encoder_hidden_states": text,
        "audio_encoder_hidden_states": audio_text,
        "timestep": timestep,
        "sigma": timestep,
        # As their pipeline passes it: the connectors leave nothing to mask.
        "encoder_attention_mask": torch.ones(1, _TEXT_TOKENS, dtype=torch.long, device=device),
        "audio_encoder_attention_mask": torch.ones(1, _TEXT_TOKENS, dtype=torch.long, device=device),
        "num_frames": _VIDEO[1],
        "height": _VIDEO[2],
        "width": _VIDEO[3],
        "fps": float(_SIZE.fps),
        "audio_num_frames": _AUDIO[1],
        "use_cross_timestep": True,
        "return_dict": False,
    }
    return StepInputs((_flat(video, audio), timestep, DenoiserInputs(conditions, _SIZE)), theirs, _velocity)


def _velocity(out: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    video, audio = out
    moments = audio.unflatten(2, (_AUDIO[0], _AUDIO[2])).transpose(1, 2)
    return _flat(video.transpose(1, 2), moments)


def _flat(video: torch.Tensor, audio: torch.Tensor) -> torch.Tensor:
    return torch.cat([video.flatten(1), audio.flatten(1)], dim=1)


def _step(name: str, config: Mapping[str, Any]) -> FamilyStep:
    return FamilyStep(
        f"{name}, 512 x 768, 121 frames, sound",
        "LTX2VideoTransformer3DModel",
        config,
        functools.partial(_inputs, config),
        vae_config={"latent_channels": 128},
        other_configs={"audio_vae": {"latent_channels": 8, "mel_bins": 64}},
    )


STEPS = (
    _step("LTX-2 19B", _CONFIG),
    _step("LTX-2.5 19B", _CONFIG_25),
    _step("LTX-2.5 19B, text once per request", {**_CONFIG_25, "use_prompt_adaln_single": False}),
)
