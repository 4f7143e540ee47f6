"""Tiny LTX-2 folders with random weights, written by diffusers' own classes and a tokenizer made offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_encoders import HIDDEN
from tiny_hunyuan_video import word_tokenizer
from tiny_models import WORDS

# Sizes of a clip that is quick on two cores: 2 x 2 x 3 latents, and 9 moments of sound.
TINY_SIZES: dict[str, int] = {"height": 64, "width": 96, "num_frames": 9, "fps": 25}
VIDEO_CHANNELS, AUDIO_CHANNELS, AUDIO_BINS = 6, 2, 4
NUM_GEMMA_LAYERS = 3
# What LTX-2.3 changes of the transformer.
LTX23: dict[str, Any] = {
    **dict.fromkeys(("gated_attn", "audio_gated_attn", "cross_attn_mod", "audio_cross_attn_mod"), True),
    "perturbed_attn": True,
    "use_prompt_embeddings": False,
}
# What LTX-2.5 changes of that.
LTX25: dict[str, Any] = {
    **LTX23,
    "ff_bias": False,
    "use_prompt_adaln_single": False,
    "use_keyframes_abs_pos_embedding": True,
}
# What turns the further terms of guidance of diffusers' pipelines off.
ONE_SCALE: dict[str, Any] = {
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_scale": None,
    "audio_stg_scale": None,
    "audio_modality_scale": None,
    "audio_guidance_rescale": None,
    "spatio_temporal_guidance_blocks": None,
}


def write_tiny_ltx2(
    folder: Path,
    *,
    rope_type: str = "split",
    has_registers: bool = True,
    shifts_by_size: bool = True,
    is_ltx23: bool = False,
    is_ltx25: bool = False,
) -> Path:
    """Write a whole LTX-2 folder and return its path. About 1 MB; it depends on nothing but the arguments.

    is_ltx23: whether every part is as in LTX-2.3; is_ltx25: as in LTX-2.5. has_registers: whether the connectors fill
    what a prompt leaves. shifts_by_size: whether the flow shift follows the number of video tokens.
    """
    import torch
    from diffusers import LTX2Pipeline
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = gemma_tokenizer()
        is_ltx23 = is_ltx23 or is_ltx25
        pipeline = LTX2Pipeline(
            scheduler=_scheduler(shifts_by_size),
            vae=_vae(is_ltx23=is_ltx23),
            audio_vae=_audio_vae(),
            text_encoder=_gemma4(len(tokenizer)) if is_ltx25 else _gemma(len(tokenizer)),
            tokenizer=tokenizer,
            connectors=_connectors(rope_type, has_registers, is_ltx23=is_ltx23),
            transformer=random_transformer(rope_type=rope_type, **(LTX25 if is_ltx25 else LTX23 if is_ltx23 else {})),
            vocoder=_extended_vocoder() if is_ltx23 else _vocoder(),
        )
        decoder = _diffusion_decoder() if is_ltx25 else None
        if is_ltx25:
            pipeline.register_modules(duration_head=_duration_head())
    pipeline.save_pretrained(folder)
    if decoder is not None:
        # No pipeline of diffusers loads it with the others; the published folder has it all the same.
        decoder.save_pretrained(folder / "diffusion_decoder")
        index = json.loads((folder / "model_index.json").read_text())
        index["diffusion_decoder"] = ["diffusers", "LTX2VideoDiffusionDecoderModel"]
        (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def gemma_tokenizer() -> Any:
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<image_soft_token>")
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return word_tokenizer(WORDS, special, ["<bos>", "$A"], **names)


def _gemma(vocab_size: int) -> Any:
    """Gemma 3 with both kinds of layers, and its vision half."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": NUM_GEMMA_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            # Large weights: the states of two words would otherwise hardly differ.
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_index=4,
    )
    return Gemma3ForConditionalGeneration(config).eval()


def _gemma4(vocab_size: int) -> Any:
    """Gemma 4 with both kinds of layers, which have heads of their own width, and its halves that see and hear."""
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    config = Gemma4UnifiedConfig(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": NUM_GEMMA_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "initializer_range": 0.3,
        },
        vision_config={"mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": HIDDEN},
        audio_config={"audio_embed_dim": 16},
    )
    model = Gemma4UnifiedForConditionalGeneration(config).eval()
    for layer in model.model.language_model.layers:
        layer.layer_scalar.uniform_(0.5, 1.5)
    return model


def _connectors(rope_type: str, has_registers: bool, *, is_ltx23: bool = False) -> Any:
    import torch
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

    num_registers = 128 if has_registers else None
    changes: dict[str, Any] = {}
    if is_ltx23:
        # As wide as the streams.
        changes = dict.fromkeys(("video_gated_attn", "audio_gated_attn", "per_modality_projections", "proj_bias"), True)
        changes |= {"video_hidden_dim": 32, "audio_hidden_dim": 16}
    model = LTX2TextConnectors(
        caption_channels=HIDDEN,
        text_proj_in_factor=NUM_GEMMA_LAYERS + 1,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=HIDDEN // 2,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=num_registers,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=8 if is_ltx23 else HIDDEN // 2,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=num_registers,
        rope_type=rope_type,
        **changes,
    )
    with torch.no_grad():
        # A prompt is a few tokens among a thousand: it would otherwise be too quiet to compare anything by.
        for name, parameter in model.named_parameters():
            if "registers" in name:
                parameter.mul_(0.1)
            if "text_proj_in" in name:
                parameter.mul_(20.0)
    return model.eval()


def random_transformer(*, rope_type: str = "split", num_layers: int = 2, **changes: Any) -> Any:
    """Heads whose width no number of axes divides, so that some channels do not turn."""
    import torch
    from diffusers import LTX2VideoTransformer3DModel

    settings: dict[str, Any] = {
        "in_channels": VIDEO_CHANNELS,
        "out_channels": VIDEO_CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "audio_in_channels": AUDIO_CHANNELS * AUDIO_BINS,
        "audio_out_channels": AUDIO_CHANNELS * AUDIO_BINS,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
        "num_layers": num_layers,
        "caption_channels": HIDDEN,
        "cross_attn_timestep_scale_multiplier": 500,
        # As in the published model; a smaller one would leave the quickest channels slow.
        "rope_theta": 10000.0,
        "rope_type": rope_type,
        **changes,
    }
    model = LTX2VideoTransformer3DModel(**settings)
    with torch.no_grad():
        if settings.get("use_keyframes_abs_pos_embedding"):
            # Zeros by default; from a generator of its own, since the other weights follow the global one.
            model.keyframes_abs_pos_embedding.normal_(generator=torch.Generator().manual_seed(1))
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one and small modulations would hide a part that is left out.
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if "table" in name or ".linear" in name:
                parameter.mul_(2.0)
            if "attn2.to_out" in name or "_attn.to_out" in name:
                parameter.mul_(3.0)
            if "attn2.norm" in name:
                # Sharp attention, else a few words among a thousand learned tokens would hardly count.
                parameter.mul_(3.0)
    return model.eval()


def _vae(*, is_ltx23: bool = False) -> Any:
    import torch
    from diffusers import AutoencoderKLLTX2Video

    decoder: dict[str, Any] = {
        "decoder_block_out_channels": (8, 16, 32),
        "decoder_layers_per_block": (1, 1, 1, 1),
    }
    if is_ltx23:
        decoder = {
            "decoder_block_out_channels": (8, 16, 16, 32),
            "decoder_layers_per_block": (1, 1, 1, 1, 1),
            "decoder_spatio_temporal_scaling": (True,) * 4,
            "decoder_inject_noise": (False,) * 5,
            "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
            "upsample_residual": (False,) * 4,
            "upsample_factor": (2, 2, 1, 2),
            "decoder_spatial_padding_mode": "zeros",
        }
    model = AutoencoderKLLTX2Video(
        latent_channels=VIDEO_CHANNELS,
        block_out_channels=(8, 8, 8, 16),
        layers_per_block=(1, 1, 1, 1, 1),
        **decoder,
        decoder_causal=False,
        scaling_factor=0.7,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    model.latents_mean.copy_(0.3 * torch.randn(VIDEO_CHANNELS))
    model.latents_std.copy_(0.5 + torch.rand(VIDEO_CHANNELS))
    return model.eval()


def _diffusion_decoder() -> Any:
    import torch
    from diffusers import LTX2VideoDiffusionDecoderModel

    model = LTX2VideoDiffusionDecoderModel(
        latent_channels=VIDEO_CHANNELS,
        scaling_factor=0.7,
        decoder_head_dim=8,
        decoder_stage_channels=(16, 8, 8, 8, 8),
        decoder_stage_depths=(1, 1, 1, 1, 1),
        decoder_stage_kernels=((3, 2, 2), (3, 2, 3), (3, 3, 3), (3, 3, 5)),
        decoder_upsample_channel_reductions=(2, 1, 1, 1),
        decoder_stage5_kernel=(5, 3, 5),
        decoder_t_emb_dim=16,
    )
    model.latents_mean.copy_(0.3 * torch.randn(VIDEO_CHANNELS))
    model.latents_std.copy_(0.5 + torch.rand(VIDEO_CHANNELS))
    return model.eval()


def _duration_head() -> Any:
    """A length of a second or two, which differs between prompts."""
    import torch
    from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead

    model = LTX2DurationHead(
        video_cross_attention_dim=32,
        audio_cross_attention_dim=16,
        pooler_hidden_dim=16,
        num_queries=2,
        num_pooler_heads=2,
        mlp_hidden_dim=8,
    )
    with torch.no_grad():
        # Sharp attention, else a few words among a thousand learned tokens would hardly count.
        model.attention_pooler.query_tokens.mul_(100.0)
        model.attention_pooler.to_k.weight.mul_(100.0)
        model.mlp_out.weight.mul_(30.0)
        model.mlp_out.bias.fill_(0.7)
    return model.eval()


def _audio_vae() -> Any:
    import torch
    from diffusers import AutoencoderKLLTX2Audio

    width = AUDIO_CHANNELS * AUDIO_BINS
    model = AutoencoderKLLTX2Audio(
        base_channels=width,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        resolution=16,
        latent_channels=AUDIO_CHANNELS,
        mel_bins=4 * AUDIO_BINS,
    )
    model.latents_mean.copy_(0.3 * torch.randn(width))
    model.latents_std.copy_(0.5 + torch.rand(width))
    return model.eval()


def _vocoder() -> Any:
    import torch
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    model = LTX2Vocoder(
        in_channels=2 * 4 * AUDIO_BINS,
        hidden_channels=16,
        upsample_kernel_sizes=[16, 10],
        upsample_factors=[8, 5],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]],
        output_sampling_rate=4000,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Else the biases would be all there is to hear.
            parameter.mul_(0.1 if name.endswith("bias") else 2.5)
    return model.eval()


def _extended_vocoder() -> Any:
    """With bandwidth extension: 4000 samples per second become 8000."""
    import torch
    from diffusers.pipelines.ltx2.vocoder import LTX2VocoderWithBWE

    networks: dict[str, Any] = {
        "upsample_kernel_sizes": [16, 11],
        "upsample_factors": [8, 5],
        "resnet_kernel_sizes": [3],
        "resnet_dilations": [[1, 3]],
    }
    model = LTX2VocoderWithBWE(
        in_channels=2 * 4 * AUDIO_BINS,
        hidden_channels=16,
        **networks,
        # Two channels of the mel bins below; twice the hop of 20 samples.
        bwe_in_channels=2 * 8,
        bwe_hidden_channels=8,
        **{f"bwe_{key}": value for key, value in networks.items()},
        filter_length=32,
        hop_length=20,
        window_length=32,
        num_mel_channels=8,
        input_sampling_rate=4000,
        output_sampling_rate=8000,
    )
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.startswith("mel_stft"):
                value.copy_(0.3 * torch.randn_like(value).abs_() if "mel_basis" in name else torch.randn_like(value))
            elif name.endswith("filter"):
                continue
            else:
                value.mul_(0.1 if name.endswith("bias") else 0.9)
    return model.eval()


def _scheduler(shifts_by_size: bool) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    if not shifts_by_size:
        return FlowMatchEulerDiscreteScheduler(shift=3.0)
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
