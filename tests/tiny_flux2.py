"""Tiny FLUX.2 folders with random weights, written by diffusers' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import WORDS

# 2 x 2 latents of 2 channels a token.
CHANNELS = 8
# Of the text encoders, three layers of which make the text.
HIDDEN, TEXT_DIM = 16, 48
# 4 x 6 tokens.
TINY_SIZES: dict[str, int] = {"height": 16, "width": 24}
MISTRAL_TOKENS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "<pad>")
# What stands in the published folder, without tools, pictures and answers: messages whose content is a list of parts.
MISTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "[SYSTEM_PROMPT]{{ message.content[0].text }}[/SYSTEM_PROMPT]{% else %}"
    "[INST]{% for part in message.content %}{{ part.text }}{% endfor %}[/INST]{% endif %}{% endfor %}"
)
QWEN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def write_tiny_flux2(folder: Path, *, padding_side: str = "left") -> Path:
    """As [dev]. Write a whole folder and return its path; its weights are the same always."""
    import torch
    from diffusers import Flux2Pipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder, tokenizer = tiny_mistral3(padding_side)
        parts = tiny_parts(guidance_embeds=True)
        pipeline = Flux2Pipeline(text_encoder=text_encoder, tokenizer=tokenizer, **parts)
    pipeline.save_pretrained(folder)
    return folder


def write_tiny_flux2_klein(folder: Path, *, is_distilled: bool = False, caches_references: bool = False) -> Path:
    """As [klein]. Write a whole folder and return its path; its weights are the same always. caches_references: as the
    one whose reference images are computed once."""
    import torch
    from diffusers import Flux2KleinKVPipeline, Flux2KleinPipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text_encoder, tokenizer = tiny_qwen3_of_many_layers()
        parts = tiny_parts(guidance_embeds=False)
        pipeline_class = Flux2KleinKVPipeline if caches_references else Flux2KleinPipeline
        pipeline = pipeline_class(text_encoder=text_encoder, tokenizer=tokenizer, is_distilled=is_distilled, **parts)
    pipeline.save_pretrained(folder)
    return folder


def tiny_parts(*, guidance_embeds: bool) -> dict[str, Any]:
    """Transformer, autoencoder and scheduler."""
    import torch
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformer = Flux2Transformer2DModel(
        in_channels=CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=TEXT_DIM,
        timestep_guidance_channels=32,
        axes_dims_rope=(2, 4, 6, 4),
        guidance_embeds=guidance_embeds,
    )
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=CHANNELS // 4,
        norm_num_groups=4,
        sample_size=32,
    )
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            # Norm weights of one would hide that one of them is left out.
            if "norm_" in name and parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        vae.bn.running_mean.normal_()
        vae.bn.running_var.uniform_(0.5, 3.0)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return {"transformer": transformer.eval(), "vae": vae.eval(), "scheduler": scheduler}


def tiny_mistral3(padding_side: str) -> tuple[Any, Any]:
    """Mistral Small 3 with its vision half, and its tokenizer with the chat format; 31 layers, of which 30 are read."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    tokenizer = tiny_mistral_tokenizer(padding_side)
    config = Mistral3Config(
        text_config={
            "model_type": "mistral",
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN,
            "intermediate_size": 24,
            "num_hidden_layers": 31,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 8,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "head_dim": 8,
        },
        image_token_index=MISTRAL_TOKENS.index("[IMG]"),
        tie_word_embeddings=False,
    )
    return lively(Mistral3ForConditionalGeneration(config)), tokenizer


def tiny_mistral_tokenizer(padding_side: str) -> Any:
    """Byte-level pieces, and a first token that every text gets."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=list(MISTRAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([*WORDS, *(f" {word}" for word in WORDS)] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        padding_side=padding_side,
    )
    tokenizer.chat_template = MISTRAL_CHAT
    return tokenizer


def tiny_qwen3_of_many_layers() -> tuple[Any, Any]:
    """Qwen3 and its tokenizer with the chat format; 28 layers, of which 27 are read."""
    from tiny_encoders import tiny_qwen_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tiny_qwen_tokenizer(("user", "assistant", "\n", "<think>", "</think>"))
    tokenizer.chat_template = QWEN_CHAT
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        bos_token_id=0,
        eos_token_id=0,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=28,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return lively(Qwen3ForCausalLM(config)), tokenizer


def lively(model: Any) -> Any:
    """A language model whose layers change what goes through them: as initialised they hardly do."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)
    return model.eval()


def change_json(path: Path, values: dict[str, Any]) -> None:
    """Give some keys of a json file other values."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
