"""The parts of an embedded model, untrained: a Wan in miniature that diffusers' own WanPipeline loads.

A transformer of real Wan blocks with heads of 64, a VAE 8x in space and 4x in time, and UMT5 of two or three layers
with a word-level tokenizer built from the captions' own vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from diffusion_runtime.quality.shapes.captions import all_words, stream_words

MAX_PROMPT_TOKENS = 64
"""Length to which prompts are padded (zeros) before cross-attention; written into the tokenizer's configuration."""
LATENT_CHANNELS = 16
TEXT_DIM = 128
PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"


@dataclass(frozen=True)
class Sizes:
    """How wide and deep the parts are. The number of heads is even, so that two GPUs can share them."""

    num_layers: int = 6
    num_heads: int = 4
    ffn_dim: int = 1024
    text_dim: int = TEXT_DIM
    text_layers: int = 2
    text_ffn: int = 256
    encoder_base: int = 24
    decoder_base: int = 16
    vae_mult: tuple[int, ...] = (1, 2, 2)
    """Channels of the VAE's levels over the base, from pixels to latents."""


SHAPES_SIZES = Sizes()
EMOJI_SIZES = Sizes(
    num_layers=5,
    num_heads=6,
    ffn_dim=1024,
    text_dim=192,
    text_layers=3,
    text_ffn=384,
    encoder_base=24,
    # Decoding with 28 took as long on a CPU (2.36 s, 32: 2.45).
    decoder_base=32,
    # The deepest level is 1 % of the positions, so its width is nearly free.
    vae_mult=(1, 2, 4),
)


def build_vae(
    latents_mean: list[float] | None = None, latents_std: list[float] | None = None, sizes: Sizes = SHAPES_SIZES
) -> AutoencoderKLWan:
    """The VAE: a wide encoder (never used when generating) and a decoder that two CPU cores run in seconds."""
    return AutoencoderKLWan(
        base_dim=sizes.encoder_base,
        decoder_base_dim=sizes.decoder_base,
        z_dim=LATENT_CHANNELS,
        dim_mult=list(sizes.vae_mult),
        num_res_blocks=1,
        temperal_downsample=[True, True],
        patch_size=2,
        in_channels=12,
        out_channels=12,
        is_residual=False,
        scale_factor_spatial=8,
        scale_factor_temporal=4,
        latents_mean=latents_mean or [0.0] * LATENT_CHANNELS,
        latents_std=latents_std or [1.0] * LATENT_CHANNELS,
    )


def build_transformer(sizes: Sizes = SHAPES_SIZES) -> WanTransformer3DModel:
    """The transformer, its output projection zeroed so that training starts from a prediction of zero."""
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=sizes.num_heads,
        attention_head_dim=64,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=sizes.text_dim,
        freq_dim=256,
        ffn_dim=sizes.ffn_dim,
        num_layers=sizes.num_layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    torch.nn.init.zeros_(transformer.proj_out.weight)
    torch.nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def build_tokenizer(vocabulary: Sequence[str] | None = None, *, streams: bool = False) -> PreTrainedTokenizerFast:
    """Lower case, split at spaces and punctuation, one token a word, `</s>` at the end; unknown words are `<unk>`.

    vocabulary: the words; without it those of `shapes`. streams: with the words of endless motions behind the others.
    """
    known = all_words() if vocabulary is None else vocabulary
    words = [PAD, EOS, UNKNOWN, *known, *(stream_words() if streams else ())]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation(behavior="isolated")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, words.index(EOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=MAX_PROMPT_TOKENS,
        padding_side="right",
    )


def build_text_encoder(vocab_size: int, sizes: Sizes = SHAPES_SIZES) -> UMT5EncoderModel:
    """UMT5 in miniature, trained from scratch together with the transformer."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocab_size,
            d_model=sizes.text_dim,
            d_kv=32,
            d_ff=sizes.text_ffn,
            num_layers=sizes.text_layers,
            num_heads=sizes.text_dim // 32,
            relative_attention_num_buckets=32,
            relative_attention_max_distance=64,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            pad_token_id=0,
            eos_token_id=1,
            is_encoder_decoder=False,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


def embed_prompts(text_encoder: UMT5EncoderModel, token_ids: Tensor, length: int) -> Tensor:
    """Prompt embeddings [B, length, text_dim] of padded ids [B, L <= length], zero past each prompt as Wan's."""
    mask = token_ids != 0
    hidden = text_encoder(token_ids, mask.long()).last_hidden_state * mask[..., None]
    return torch.nn.functional.pad(hidden, (0, 0, 0, length - hidden.shape[1]))
