"""Tiny HunyuanVideo-1.5 folders with random weights, written by diffusers' own classes and tokenizers made offline."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tiny_hunyuan_video import word_tokenizer, words_of
from tiny_models import WORDS

from diffusion_runtime.models.hunyuan_video_15.text import TEMPLATE

# Sizes and frames of a clip that is quick on two cores: 3 x 8 x 12 latents, each a token. 32 x 48 is what diffusers'
# image-to-video pipeline makes of an image of that size.
TINY_SIZES: dict[str, int] = {"height": 32, "width": 48, "num_frames": 9}
TARGET_SIZE = 40
CHANNELS, TEXT_DIM, GLYPH_DIM, IMAGE_DIM = 8, 24, 20, 28

# Qwen2.5's, for text.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_hunyuan_video_15(
    folder: Path,
    *,
    starts_from_image: bool = False,
    guidance_scale: float = 3.0,
    num_layers: int = 2,
    use_meanflow: bool = False,
) -> Path:
    """Write a whole folder and return its path. About 20 MB; it depends on nothing but the arguments.

    guidance_scale: of its guider.
    """
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15ImageToVideoPipeline,
        HunyuanVideo15Pipeline,
    )
    from diffusers.guiders import ClassifierFreeGuidance
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    tokens = qwen_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts: dict[str, Any] = {
            "text_encoder": _qwen(len(tokens)),
            "tokenizer": tokens,
            "transformer": random_transformer(
                starts_from_image=starts_from_image, num_layers=num_layers, use_meanflow=use_meanflow
            ),
            "vae": _vae(),
            "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
            "guider": ClassifierFreeGuidance(guidance_scale=guidance_scale),
            **_byt5(),
        }
        if starts_from_image:
            HunyuanVideo15ImageToVideoPipeline(**parts, **_siglip()).save_pretrained(folder)
        else:
            HunyuanVideo15Pipeline(**parts).save_pretrained(folder)
    return folder


def qwen_tokenizer() -> Any:
    """The template's beginning is as many tokens as the real tokenizer makes of it: a word of it is told more often."""
    from tokenizers import normalizers

    # The last one tells a blank prompt from an empty one, as the real tokenizer does.
    special = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>", " <|im_end|>")
    words = words_of(re.sub(r"<\|\w+\|>", " ", TEMPLATE.before), "assistant", " ".join(WORDS), '"')
    tokenizer = word_tokenizer(words, special, ["$A"], pad_token="<pad>", eos_token="<|im_end|>")
    missing = TEMPLATE.num_cropped - len(tokenizer(TEMPLATE.before).input_ids)
    assert missing > 0
    repeated = normalizers.Replace("You are", "You " * (missing + 1) + "are")
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([repeated, backend.normalizer])
    assert len(tokenizer(TEMPLATE.before).input_ids) == TEMPLATE.num_cropped
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _qwen(vocab_size: int) -> Any:
    from transformers import Qwen2_5_VLTextModel
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

    config = Qwen2_5_VLTextConfig(
        vocab_size=vocab_size,
        hidden_size=TEXT_DIM,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
        # Large weights: the embeddings of two words would otherwise hardly differ.
        initializer_range=0.3,
    )
    return Qwen2_5_VLTextModel(config).eval()


def _byt5() -> dict[str, Any]:
    from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

    tokenizer = ByT5Tokenizer()
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=GLYPH_DIM,
        d_kv=8,
        d_ff=40,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return {"text_encoder_2": T5EncoderModel(config).eval(), "tokenizer_2": tokenizer}


def _siglip() -> dict[str, Any]:
    from transformers import SiglipVisionConfig, SiglipVisionModel
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    config = SiglipVisionConfig(
        hidden_size=IMAGE_DIM,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    processor = SiglipImageProcessorPil(
        size={"height": 28, "width": 28}, image_mean=[0.5, 0.4, 0.5], image_std=[0.5, 0.5, 0.6]
    )
    return {"image_encoder": SiglipVisionModel(config).eval(), "feature_extractor": processor}


def random_transformer(
    *,
    starts_from_image: bool = False,
    num_layers: int = 2,
    num_heads: int = 2,
    axis_channels: tuple[int, int, int] = (4, 6, 6),
    patch: tuple[int, int] = (1, 1),
    use_meanflow: bool = False,
) -> Any:
    """patch: frames, and height and width, of a token."""
    import torch
    from diffusers import HunyuanVideo15Transformer3DModel

    model = HunyuanVideo15Transformer3DModel(
        in_channels=2 * CHANNELS + 1,
        out_channels=CHANNELS,
        num_attention_heads=num_heads,
        attention_head_dim=sum(axis_channels),
        num_layers=num_layers,
        num_refiner_layers=2,
        patch_size=patch[1],
        patch_size_t=patch[0],
        text_embed_dim=TEXT_DIM,
        text_embed_2_dim=GLYPH_DIM,
        image_embed_dim=IMAGE_DIM,
        rope_axes_dim=axis_channels,
        target_size=TARGET_SIZE,
        task_type="i2v" if starts_from_image else "t2v",
        use_meanflow=use_meanflow,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one and small modulations would hide a part that is left out.
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if ".linear" in name or "time_embed" in name:
                parameter.mul_(2.0)
            if "context_embedder_2" in name or "image_embedder" in name:
                parameter.mul_(2.0)
    return model.eval()


def _vae() -> Any:
    from diffusers import AutoencoderKLHunyuanVideo15

    return AutoencoderKLHunyuanVideo15(
        latent_channels=CHANNELS,
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
        scaling_factor=0.8,
    ).eval()
