"""Tiny text encoders with random weights and their tokenizers, made offline of the words in tiny_models.

The models are transformers' own classes, so that diffusers' pipelines take them.
"""

from __future__ import annotations

import json
from typing import Any

from tiny_models import WORDS

CLIP_TOKENS = 77
HIDDEN = 32


def tiny_clip() -> tuple[Any, Any]:
    """CLIP's text model and its tokenizer, in which every letter is a token."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    characters = [*"abcdefghijklmnopqrstuvwxyz0123456789,.:!?-'"]
    pieces = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{character}</w>" for character in characters)]
    tokenizer = CLIPTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], model_max_length=CLIP_TOKENS
    )
    config = CLIPTextConfig(
        vocab_size=len(pieces),
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModel(config).eval(), tokenizer


def tiny_t5(max_tokens: int) -> tuple[Any, Any]:
    """T5's encoder and its tokenizer, which knows whole words and letters."""
    from transformers import T5Config, T5EncoderModel, T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    pieces += [(f"\u2581{word}", -3.0) for word in WORDS]
    pieces += [(word, -8.0) for word in (*"abcdefghijklmnopqrstuvwxyz", ",", ".", ":")]
    tokenizer = T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=max_tokens)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=HIDDEN,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config).eval(), tokenizer


def tiny_qwen_tokenizer(corpus: tuple[str, ...] = ()) -> Any:
    """Qwen2's tokenizer, in which every word of WORDS and of the texts of `corpus` is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer
    from transformers.tokenization_utils_base import AddedToken

    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    rules = Qwen2Tokenizer().backend_tokenizer
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator([*corpus, *WORDS, *(f" {word}" for word in WORDS)] * 3, trainer)
    learned = json.loads(trained.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"], merges=[tuple(pair) for pair in learned["merges"]], model_max_length=2048
    )
    tokenizer.add_tokens([AddedToken(token, special=True) for token in special[1:]], special_tokens=True)
    return tokenizer


def tiny_qwen3() -> tuple[Any, Any]:
    """Qwen3 and its tokenizer with the chat format."""
    from transformers import Qwen3Config, Qwen3Model

    tokenizer = tiny_qwen_tokenizer(("user", "assistant", "\n"))
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        bos_token_id=0,
        eos_token_id=0,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return Qwen3Model(config).eval(), tokenizer


def tiny_qwen2_5_vl(corpus: tuple[str, ...] = (), *, sees: bool = False) -> tuple[Any, Any]:
    """Qwen2.5-VL, vision half included, and its tokenizer, in which every word of WORDS and every text of `corpus` that
    is a single word is a token, as are the words in its other texts. sees: with the tokens that stand for pictures."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.tokenization_utils_base import AddedToken

    tokenizer = tiny_qwen_tokenizer(corpus)
    ids = {}
    if sees:
        marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
        tokenizer.add_tokens([AddedToken(token, special=True) for token in marks], special_tokens=True)
        ids = {"image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>")}
    config = Qwen2_5_VLConfig(
        **ids,
        text_config={
            "vocab_size": len(tokenizer),
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "fullatt_block_indexes": [0],
        },
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval(), tokenizer
