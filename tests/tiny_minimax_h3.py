"""Tiny MiniMax-H3 folders with random weights, of diffusers' and transformers' own classes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from tiny_encoders import HIDDEN
from tiny_qwen_image_21 import tiny_qwen3_vl

CHANNELS, AUDIO_CHANNELS = 6, 5
# 7 latent frames of 2 x 3 tokens, and 37 moments of sound on each side.
TINY_SIZES: dict[str, int] = {"height": 64, "width": 96, "num_frames": 22}
# Of what is given: a clip that takes its ratio from an image or a video, and an image that is referred to.
TINY_EDGES = {"canvas_short_edge": 64, "canvas_max_pixels": 64 * 96, "reference_image_short_edge": 96}


def write_tiny_minimax_h3(folder: Path, *, is_modular: bool = False) -> Path:
    """Write a whole folder and return its path; its weights are the same always. is_modular: with the index that
    published folders have; the other index says the same."""
    import torch
    from diffusers import MiniMaxH3Scheduler
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.tokenization_utils_base import AddedToken
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # More layers than are read.
        text_encoder, tokenizer = tiny_qwen3_vl(num_layers=51)
        tokenizer.add_tokens([AddedToken("<|video_pad|>", special=True)], special_tokens=True)
        text_encoder.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        text_encoder.config.video_token_id = tokenizer.convert_tokens_to_ids("<|video_pad|>")
        parts = {
            "scheduler": MiniMaxH3Scheduler(shift=12.0),
            "audio_scheduler": MiniMaxH3Scheduler(shift=3.0),
            "transformer": tiny_transformer(),
            "vae": _vae(),
            "audio_vae": _audio_vae(),
            "text_encoder": text_encoder,
            "tokenizer": tokenizer,
            "processor": Qwen2VLImageProcessorPil(patch_size=16),
        }
        parts["transformer_ref"] = tiny_transformer()
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    size = {"shortest_edge": 4096, "longest_edge": 25165824}
    patches = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    of_videos = {"size": size, **patches, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "processor" / "video_preprocessor_config.json").write_text(json.dumps(of_videos))
    names = {name: ["diffusers", type(part).__name__] for name, part in parts.items()}
    names["text_encoder"] = ["transformers", "Qwen3VLForConditionalGeneration"]
    names["tokenizer"] = ["transformers", "Qwen2TokenizerFast"]
    names["processor"] = ["transformers", "Qwen3VLProcessor"]
    index = {"_class_name": "MiniMaxH3Pipeline", **names, **TINY_EDGES}
    if is_modular:
        entries = {
            name: [*pair, {"pretrained_model_name_or_path": "ORG/NAME", "subfolder": name, "type_hint": pair}]
            for name, pair in names.items()
        }
        class_name = "MiniMaxH3ModularPipeline"
        index = {"_class_name": class_name, "_blocks_class_name": "MiniMaxH3Blocks", **entries, **TINY_EDGES}
    (folder / f"{'modular_' * is_modular}model_index.json").write_text(json.dumps(index))
    (folder / "generation.json").write_text(json.dumps({"num_frames": [22, 345]}))
    return folder


def _vae() -> Any:
    import torch
    from diffusers import AutoencoderKLMiniMaxH3

    return AutoencoderKLMiniMaxH3(
        latent_channels=CHANNELS,
        block_out_channels=(8, 8, 8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=2,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        decoder_num_register_tokens=2,
        latents_mean=(0.3 * torch.randn(CHANNELS)).tolist(),
        latents_std=(0.5 + torch.rand(CHANNELS)).tolist(),
    ).eval()


def _audio_vae() -> Any:
    import torch
    from diffusers import AutoencoderKLMiniMaxH3Audio

    with warnings.catch_warnings():
        # Of torch, about its weight norm.
        warnings.simplefilter("ignore", FutureWarning)
        return AutoencoderKLMiniMaxH3Audio(
            encoder_dim=4,
            encoder_rates=(10, 20),
            latent_dim=4 * AUDIO_CHANNELS,
            latent_channels=AUDIO_CHANNELS,
            num_attention_heads=2,
            decoder_dim=8,
            decoder_rates=(20, 10),
            decoder_kernel_sizes=(40, 20),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1, 3),),
            # 40 latents a second.
            sampling_rate=8000,
            latents_mean=(0.3 * torch.randn(AUDIO_CHANNELS)).tolist(),
            latents_std=(0.5 + torch.rand(AUDIO_CHANNELS)).tolist(),
        ).eval()


def tiny_transformer(**changes: Any) -> Any:
    """Heads that are together wider than a token, some of whose channels do not turn."""
    import torch
    from diffusers import MiniMaxH3Transformer3DModel

    settings: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "hidden_size": 24,
        "num_layers": 3,
        "num_refiner_layers": 2,
        "ffn_dim": 40,
        "in_channels": CHANNELS,
        "audio_in_channels": AUDIO_CHANNELS,
        "text_dim": HIDDEN,
        "freq_dim": 32,
        "time_embed_hidden_dim": 28,
        "time_embed_dim": 20,
        "rope_freq_dim": 2,
        **changes,
    }
    model = MiniMaxH3Transformer3DModel(**settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one, and small modulations, would hide a part that is left out.
            if "norm" in name and parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.dim() == 2:
                parameter.mul_(2.0)
    return model.eval()
