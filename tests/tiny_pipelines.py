"""Tiny folders of diffusers pipelines that this runtime has no family for, and of kinds that it does not run natively.

Random weights, written by diffusers' own classes; the text side is the tiny tokenizer and a tiny T5 or CLIP.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import MAX_TEXT_TOKENS, SPECIAL_TOKENS, WORDS, tiny_tokenizer

VOCABULARY = len(SPECIAL_TOKENS) + len(WORDS)


def write_tiny_video_pipeline(folder: Path) -> Path:
    """CogVideoX: its processors call torch's attention directly. 9 frames of 16 x 16."""
    import torch
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel
    from transformers import T5Config, T5EncoderModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = CogVideoXPipeline(
            tokenizer=tiny_tokenizer(),
            text_encoder=T5EncoderModel(
                T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
            ).eval(),
            vae=AutoencoderKLCogVideoX(
                in_channels=3,
                out_channels=3,
                down_block_types=("CogVideoXDownBlock3D",) * 4,
                up_block_types=("CogVideoXUpBlock3D",) * 4,
                block_out_channels=(8, 8, 8, 8),
                latent_channels=4,
                layers_per_block=1,
                norm_num_groups=2,
                temporal_compression_ratio=4,
            ).eval(),
            transformer=CogVideoXTransformer3DModel(
                num_attention_heads=4,
                attention_head_dim=8,
                in_channels=4,
                out_channels=4,
                time_embed_dim=2,
                text_embed_dim=32,
                num_layers=2,
                sample_width=2,
                sample_height=2,
                sample_frames=9,
                patch_size=2,
                temporal_compression_ratio=4,
            ).eval(),
            scheduler=CogVideoXDDIMScheduler(),
        )
    pipeline.save_pretrained(folder)
    return folder


def write_tiny_image_pipeline(folder: Path) -> Path:
    """SD 1.5: a UNet. 16 x 16."""
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_config = CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=2,
            max_position_embeddings=MAX_TEXT_TOKENS,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=2,
        )
        pipeline = StableDiffusionPipeline(
            tokenizer=tiny_tokenizer(),
            text_encoder=CLIPTextModel(text_config).eval(),
            vae=AutoencoderKL(
                block_out_channels=(8, 8),
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                latent_channels=4,
                norm_num_groups=4,
            ).eval(),
            unet=UNet2DConditionModel(
                sample_size=8,
                in_channels=4,
                out_channels=4,
                block_out_channels=(8, 16),
                layers_per_block=1,
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
                cross_attention_dim=32,
                attention_head_dim=2,
                norm_num_groups=4,
            ).eval(),
            scheduler=DDIMScheduler(clip_sample=False, steps_offset=1, set_alpha_to_one=False),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipeline.save_pretrained(folder)
    return folder


def write_tiny_tiled_pipeline(folder: Path) -> Path:
    """Allegro: its autoencoder decodes in tiles alone. 8 frames of 16 x 16."""
    import torch
    from diffusers import AllegroPipeline, AllegroTransformer3DModel, AutoencoderKLAllegro, DDIMScheduler
    from tiny_encoders import HIDDEN, tiny_t5

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder, tokenizer = tiny_t5(MAX_TEXT_TOKENS)
        pipeline = AllegroPipeline(
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            vae=AutoencoderKLAllegro(
                block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2
            ).eval(),
            transformer=AllegroTransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=4,
                out_channels=4,
                num_layers=1,
                cross_attention_dim=24,
                sample_width=8,
                sample_height=8,
                sample_frames=8,
                caption_channels=HIDDEN,
            ).eval(),
            scheduler=DDIMScheduler(),
        )
    pipeline.save_pretrained(folder)
    return folder


def write_tiny_conditioned_pipeline(folder: Path) -> Path:
    """LTX with conditions: its transformer is told where tokens are by coordinates. 9 frames of 32 x 64."""
    import torch
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXConditionPipeline,
        LTXVideoTransformer3DModel,
    )
    from tiny_encoders import HIDDEN, tiny_t5

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder, tokenizer = tiny_t5(MAX_TEXT_TOKENS)
        pipeline = LTXConditionPipeline(
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            vae=AutoencoderKLLTXVideo(
                latent_channels=8,
                block_out_channels=(8, 8, 8, 8),
                decoder_block_out_channels=(8, 8, 8, 8),
                layers_per_block=(1, 1, 1, 1, 1),
                decoder_layers_per_block=(1, 1, 1, 1, 1),
                spatio_temporal_scaling=(True, True, False, False),
                decoder_spatio_temporal_scaling=(True, True, False, False),
                patch_size=1,
            ).eval(),
            transformer=LTXVideoTransformer3DModel(
                in_channels=8,
                out_channels=8,
                num_attention_heads=4,
                attention_head_dim=16,
                cross_attention_dim=64,
                num_layers=1,
                caption_channels=HIDDEN,
            ).eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(),
        )
    pipeline.save_pretrained(folder)
    return folder


def write_tiny_picture_pipeline(folder: Path) -> Path:
    """Kandinsky 5, text to image: its result is the field `image`, and its sizes are a list."""
    import torch
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        Kandinsky5T2IPipeline,
        Kandinsky5Transformer3DModel,
    )
    from tiny_encoders import HIDDEN, tiny_clip, tiny_qwen2_5_vl

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder, tokenizer = tiny_qwen2_5_vl()
        text_encoder_2, tokenizer_2 = tiny_clip()
        pipeline = Kandinsky5T2IPipeline(
            transformer=Kandinsky5Transformer3DModel(
                in_visual_dim=4,
                out_visual_dim=4,
                in_text_dim=HIDDEN,
                in_text_dim2=HIDDEN,
                time_dim=16,
                model_dim=32,
                ff_dim=32,
                num_text_blocks=1,
                num_visual_blocks=1,
                axes_dims=(4, 6, 6),
            ).eval(),
            vae=AutoencoderKL(
                block_out_channels=(8, 8, 8, 8),
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                latent_channels=4,
                norm_num_groups=4,
            ).eval(),
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
            scheduler=FlowMatchEulerDiscreteScheduler(),
        )
    pipeline.save_pretrained(folder)
    return folder


def pipeline_of(folder: Path) -> Any:
    """The folder as diffusers itself loads it."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
