"""Tiny Qwen-Image 2.1 folders with random weights, of diffusers' and transformers' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_encoders import HIDDEN, tiny_qwen_tokenizer

CHANNELS = 6
# 4 x 6 tokens.
TINY_SIZES: dict[str, int] = {"height": 64, "width": 96}
# The words of the pipeline's template, so that each is one token.
_TEMPLATE_WORDS = ("Comprehend and analyze the provided prompt.", "system", "user", "assistant", "\n")


def write_tiny_qwen_image_21(folder: Path, *, sample_sigmas: list[float] | None = None, sees: bool = False) -> Path:
    """Write a whole folder and return its path; its weights are the same always. The processor, which transformers
    makes of torchvision, is its tokenizer, and with sees its preprocessing of pictures. sample_sigmas: of a model that
    was distilled to them."""
    import torch
    from diffusers import AutoencoderKLQwenImage21, FlowMatchEulerDiscreteScheduler
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder, tokenizer = tiny_qwen3_vl()
        vae = AutoencoderKLQwenImage21(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=CHANNELS,
            dim_mult=[1, 1, 1, 2, 2],
            num_res_blocks=1,
            latents_mean=(0.3 * torch.randn(CHANNELS)).tolist(),
            latents_std=(0.5 + torch.rand(CHANNELS)).tolist(),
        )
        scheduler = FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        )
        parts = {
            "scheduler": scheduler,
            "vae": vae,
            "text_encoder": text_encoder,
            "processor": tokenizer,
            "transformer": tiny_transformer(),
        }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    index = {name: ["diffusers", type(part).__name__] for name, part in parts.items()}
    index["text_encoder"] = ["transformers", "Qwen3VLForConditionalGeneration"]
    index["processor"] = ["transformers", "Qwen3VLProcessor"]
    whole = {"_class_name": "QwenImage21Pipeline", **index, "sample_sigmas": sample_sigmas}
    (folder / "model_index.json").write_text(json.dumps(whole))
    if sees:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        Qwen2VLImageProcessorPil(patch_size=16).save_pretrained(folder / "processor")
    return folder


def tiny_qwen3_vl(corpus: tuple[str, ...] = _TEMPLATE_WORDS) -> tuple[Any, Any]:
    """Qwen3-VL, vision half included, and its tokenizer with the tokens that stand for pictures. corpus: of
    tiny_qwen_tokenizer."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.tokenization_utils_base import AddedToken

    tokenizer = tiny_qwen_tokenizer(corpus)
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
    tokenizer.add_tokens([AddedToken(token, special=True) for token in marks], special_tokens=True)
    config = Qwen3VLConfig(
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        text_config={
            "vocab_size": len(tokenizer),
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "deepstack_visual_indexes": [0],
        },
    )
    return Qwen3VLForConditionalGeneration(config).eval(), tokenizer


def tiny_transformer() -> Any:
    import torch
    from diffusers import QwenImage21Transformer2DModel

    model = QwenImage21Transformer2DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=HIDDEN,
        axes_dims_rope=(4, 6, 6),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one would hide a norm that is left out; small projections a prompt that is.
            if "norm" in name and parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() == 2:
                parameter.mul_(2.0)
    return model.eval()
