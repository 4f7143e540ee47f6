"""Tiny HunyuanVideo folders with random weights, written by diffusers' own classes and tokenizers made offline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tiny_encoders import HIDDEN, tiny_clip
from tiny_models import WORDS

from diffusion_runtime.models.hunyuan_video.text import IMAGE_TEMPLATE, TEMPLATE

# Sizes and frames of a clip that is quick on two cores: 3 x 4 x 6 latents, 3 x 2 x 3 tokens.
TINY_SIZES: dict[str, int] = {"height": 32, "width": 48, "num_frames": 9}
CHAT_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def write_tiny_hunyuan_video(
    folder: Path,
    *,
    has_guidance: bool = True,
    num_layers: int = 2,
    num_single_layers: int = 2,
    image_condition: str | None = None,
    picture_size: int = 56,
) -> Path:
    """Write a whole HunyuanVideo folder and return its path. About 1 MB; it depends on nothing but the arguments.

    picture_size: pixels of the picture that its language model sees, in patches of 14; diffusers' own template is made
    for the 336 of the published model.
    """
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideoImageToVideoPipeline, HunyuanVideoPipeline
    from transformers import CLIPImageProcessorPil
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    sees = image_condition is not None
    llama_tokens = llama_tokenizer(sees=sees)
    processor = (
        {"image_processor": CLIPImageProcessorPil(size={"shortest_edge": picture_size}, crop_size=picture_size)}
        if sees
        else {}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        clip, clip_tokens = tiny_clip()
        pipeline = (HunyuanVideoImageToVideoPipeline if sees else HunyuanVideoPipeline)(
            text_encoder=_llava(llama_tokens, picture_size) if sees else _llama(len(llama_tokens)),
            tokenizer=llama_tokens,
            text_encoder_2=clip,
            tokenizer_2=clip_tokens,
            transformer=random_transformer(
                has_guidance=has_guidance,
                num_layers=num_layers,
                num_single_layers=num_single_layers,
                image_condition=image_condition,
            ),
            vae=_vae(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
            **processor,
        )
    pipeline.save_pretrained(folder)
    return folder


def words_of(*texts: str) -> tuple[str, ...]:
    """Every word and sign of some texts, lower case, each once."""
    return tuple(dict.fromkeys(word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text.lower())))


def word_tokenizer(words: Iterable[str], special_tokens: Sequence[str], single: Sequence[str], **names: str) -> Any:
    """A whole-word tokenizer, lower case. special_tokens: first in the vocabulary, kept whole in a text. single: what
    one text becomes, `$A` standing for its tokens. names: such as pad_token."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*special_tokens, *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    used = [token for token in dict.fromkeys(single) if token != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(single), special_tokens=[(token, vocabulary[token]) for token in used]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", padding_side="right", **names)


def llama_tokenizer(*, sees: bool = False) -> Any:
    """The template's beginning is as many tokens as the real tokenizer makes of it: first tokens fill it up. sees: that
    of the models that start from an image."""
    template = IMAGE_TEMPLATE if sees else TEMPLATE
    special = ("<pad>", "<unk>", "<s>", *CHAT_TOKENS, *(("<image>", "\n\n") if sees else ()))
    # One word of the template is unknown: that is no matter of the user's.
    words = [word for word in words_of(re.sub(r"<\|?\w+\|?>", " ", template.before), *WORDS) if word != "theme"]
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "<|eot_id|>"}
    missing = template.num_cropped - len(word_tokenizer(words, special, ["$A"], **names)(template.before).input_ids)
    assert missing > 0
    return word_tokenizer(words, special, ["<s>"] * missing + ["$A"], **names)


def _llama(vocab_size: int) -> Any:
    from transformers import LlamaModel

    return LlamaModel(_llama_config(vocab_size)).eval()


def _llava(tokenizer: Any, picture_size: int) -> Any:
    """Of a picture of 56 x 56 it sees 16 tokens."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=picture_size,
        patch_size=14,
        projection_dim=16,
        initializer_range=0.3,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=_llama_config(len(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        image_seq_length=(picture_size // 14) ** 2,
    )
    return LlavaForConditionalGeneration(config).eval()


def _llama_config(vocab_size: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # Large weights: the embeddings of two words would otherwise hardly differ.
        initializer_range=0.3,
    )


def random_transformer(
    *,
    has_guidance: bool = True,
    num_layers: int = 2,
    num_single_layers: int = 2,
    num_heads: int = 2,
    axis_channels: tuple[int, int, int] = (4, 6, 6),
    patch: tuple[int, int] = (1, 2),
    image_condition: str | None = None,
) -> Any:
    """patch: frames, and height and width, of a token."""
    import torch
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        in_channels=33 if image_condition == "latent_concat" else 16,
        out_channels=16,
        image_condition_type=image_condition,
        num_attention_heads=num_heads,
        attention_head_dim=sum(axis_channels),
        num_layers=num_layers,
        num_single_layers=num_single_layers,
        num_refiner_layers=2,
        patch_size=patch[1],
        patch_size_t=patch[0],
        guidance_embeds=has_guidance,
        text_embed_dim=24,
        pooled_projection_dim=HIDDEN,
        rope_axes_dim=axis_channels,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one and small modulations would hide a part that is left out.
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if ".linear" in name or "time_text_embed" in name:
                parameter.mul_(2.0)
    return model.eval()


def _vae() -> Any:
    from diffusers import AutoencoderKLHunyuanVideo

    return AutoencoderKLHunyuanVideo(
        block_out_channels=(4, 8, 8, 8), layers_per_block=1, norm_num_groups=4, scaling_factor=0.6
    ).eval()
