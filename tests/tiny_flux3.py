"""Tiny FLUX.3 folders with random weights, of diffusers' and transformers' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_encoders import tiny_qwen_tokenizer
from tiny_flux2 import CHANNELS, HIDDEN, lively

# Of eight layers of the text encoder.
TEXT_DIM = 8 * HIDDEN
# 4 x 6 tokens.
TINY_SIZES: dict[str, int] = {"height": 16, "width": 24}
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_flux3(folder: Path, *, flow_map: bool = False) -> Path:
    """Write a whole folder and return its path; its weights are the same always. Its index is that of the ordinary
    pipeline which the modular one is opened as. flow_map: as the distilled one."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder, tokenizer = tiny_qwen3_vl_of_many_layers()
        parts = {
            "scheduler": FlowMatchEulerDiscreteScheduler(shift=6.93),
            "vae": tiny_autoencoder(),
            "text_encoder": text_encoder,
            "tokenizer": tokenizer,
            "transformer": tiny_transformer(flow_map=flow_map),
        }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    index = {name: ["diffusers", type(part).__name__] for name, part in parts.items()}
    index["text_encoder"] = ["transformers", "Qwen3VLForConditionalGeneration"]
    index["tokenizer"] = ["transformers", "Qwen3VLProcessor"]
    name = "Flux3DistilledPipeline" if flow_map else "Flux3Pipeline"
    (folder / "model_index.json").write_text(json.dumps({"_class_name": name, **index}))
    return folder


def tiny_transformer(*, flow_map: bool) -> Any:
    import torch
    from diffusers import Flux3Transformer2DModel

    model = Flux3Transformer2DModel(
        in_channels=CHANNELS,
        cond_in_channels=CHANNELS,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_DIM,
        timestep_channels=32,
        axes_dims_rope=(2, 4, 6, 4),
        flow_map=flow_map,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one would hide a norm that is left out; small projections a prompt that is.
            if "norm_" in name and parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() == 2:
                parameter.mul_(2.0)
    return model.eval()


def tiny_autoencoder() -> Any:
    import torch
    from diffusers import AutoencoderKLFlux2

    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=CHANNELS // 4,
        norm_num_groups=4,
        sample_size=32,
    )
    with torch.no_grad():
        vae.bn.running_mean.normal_()
        vae.bn.running_var.uniform_(0.5, 3.0)
    return vae.eval()


def tiny_qwen3_vl_of_many_layers() -> tuple[Any, Any]:
    """Qwen3-VL, vision half included, and its tokenizer with the chat format; 33 layers, of which 32 are read."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.tokenization_utils_base import AddedToken

    tokenizer = tiny_qwen_tokenizer(("user", "assistant", "\n"))
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer.add_tokens([AddedToken(token, special=True) for token in marks], special_tokens=True)
    tokenizer.chat_template = CHAT
    config = Qwen3VLConfig(
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        text_config={
            "vocab_size": len(tokenizer),
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_size": HIDDEN,
            "intermediate_size": 24,
            "num_hidden_layers": 33,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
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
    return lively(Qwen3VLForConditionalGeneration(config)), tokenizer
