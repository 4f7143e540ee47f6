"""The parts of the `shapes` model, untrained: a Wan in miniature that diffusers' own WanPipeline loads.

Transformer 7.0 M parameters (the real Wan block, 6 layers, 4 heads of 64), VAE 8x in space and 4x in time, UMT5 of two
layers with a word-level tokenizer built from the captions' own vocabulary.
"""

from __future__ import annotations

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


def build_vae(latents_mean: list[float] | None = None, latents_std: list[float] | None = None) -> AutoencoderKLWan:
    """The VAE: a wide encoder (never used when generating) and a decoder that two CPU cores run in seconds."""
    return AutoencoderKLWan(
        base_dim=24,
        decoder_base_dim=16,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
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


def build_transformer() -> WanTransformer3DModel:
    """The transformer, its output projection zeroed so that training starts from a prediction of zero."""
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=64,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=256,
        ffn_dim=1024,
        num_layers=6,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    torch.nn.init.zeros_(transformer.proj_out.weight)
    torch.nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def build_tokenizer(*, streams: bool = False) -> PreTrainedTokenizerFast:
    """Lower case, split at spaces and punctuation, one token a word, `</s>` at the end; unknown words are `<unk>`.

    streams: with the words of endless motions behind the others.
    """
    words = [PAD, EOS, UNKNOWN, *all_words(), *(stream_words() if streams else ())]
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


def build_text_encoder(vocab_size: int) -> UMT5EncoderModel:
    """UMT5 in miniature, trained from scratch together with the transformer."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocab_size,
            d_model=TEXT_DIM,
            d_kv=32,
            d_ff=256,
            num_layers=2,
            num_heads=4,
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
    """Prompt embeddings [B, length, 128] of padded ids [B, L <= length], zero past each prompt, as WanPipeline does."""
    mask = token_ids != 0
    hidden = text_encoder(token_ids, mask.long()).last_hidden_state * mask[..., None]
    return torch.nn.functional.pad(hidden, (0, 0, 0, length - hidden.shape[1]))
