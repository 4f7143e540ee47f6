"""Tiny Wan folders with random weights, written by diffusers' own classes and a tokenizer made offline.

Small enough to generate in well under a second, standard enough that diffusers' WanPipeline loads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = tuple(
    "a an the red blue green yellow circle square triangle star ring moving left right up down still on plain "
    "striped background two objects and of same colour , .".split()
)
COMPONENTS = ("transformer", "transformer_2")
SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
MAX_TEXT_TOKENS = 24
IMAGE_DIM = 24

# Pixels and frames of a clip that is quick on two cores: 2 x 4 x 4 latents, 2 x 2 x 2 tokens.
TINY_SIZES: dict[str, int] = {"height": 32, "width": 32, "num_frames": 5}


def write_tiny_wan(
    folder: Path,
    *,
    scheduler: str = "unipc",
    vae: str = "patched",
    flow_shift: float = 3.0,
    num_layers: int = 2,
    boundary_ratio: float | None = None,
    takes_image: bool = False,
    condition: str = "",
    causal: Mapping[str, Any] | None = None,
) -> Path:
    """Write a whole Wan folder and return its path.

    scheduler: `unipc` or `flow_match_euler`. vae: `patched` (the embedded model's layout, quick), `plain` (as in
    Wan 2.1) or `residual` (as in Wan 2.2 TI2V). boundary_ratio: of a second transformer, None for one alone.
    takes_image: whether each token has a timestep, as in Wan 2.2 TI2V. condition: what stands beside the latents of an
    image-to-video model: "clip" (as in Wan 2.2 I2V), "clip and tokens" of an image encoder (as in Wan 2.1 I2V), or
    "clip and tokens of two images" (FLF2V); empty for text to video; "control" for VACE, whose control blocks read it.
    causal: what the config of a transformer says that makes videos chunk by chunk; None for one that makes them at
    once. The weights depend on nothing but the arguments. About 1 MB.
    """
    import torch
    from diffusers import WanImageToVideoPipeline, WanPipeline, WanVACEPipeline
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = {
            "tokenizer": tiny_tokenizer(),
            "text_encoder": tiny_text_encoder(),
            "transformer": _transformer(num_layers, condition),
            "vae": sensitive_to_images(tiny_vae(vae)) if condition else tiny_vae(vae),
            "scheduler": tiny_scheduler(scheduler, flow_shift),
            "transformer_2": None if boundary_ratio is None else _transformer(num_layers, condition),
        }
        made = WanImageToVideoPipeline if condition else WanPipeline
        encoder = _image_encoder() if "tokens" in condition else {}
        if condition == "control":
            pipeline = WanVACEPipeline(**parts, boundary_ratio=boundary_ratio)
        else:
            pipeline = made(**parts, **encoder, boundary_ratio=boundary_ratio, expand_timesteps=takes_image)
    pipeline.save_pretrained(folder)
    # Prompts of 512 tokens would take most of the time of a tiny model; diffusers tells image tokens from those of the
    # text by that number.
    max_text_tokens = 512 if "tokens" in condition else MAX_TEXT_TOKENS
    (folder / "generation.json").write_text(json.dumps({"max_text_tokens": max_text_tokens}))
    if causal is not None:
        _make_causal(folder, causal, COMPONENTS[: 1 if boundary_ratio is None else 2])
    return folder


def _make_causal(folder: Path, keys: Mapping[str, Any], components: Sequence[str]) -> None:
    """The same weights under the names that FastVideo gives causal models."""
    index = json.loads((folder / "model_index.json").read_text())
    for component in components:
        index[component] = ["diffusers", "CausalWanTransformer3DModel"]
        path = folder / component / "config.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "_class_name": "CausalWanTransformer3DModel", **keys})
        )
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "WanCausalDMDPipeline"}))


def tiny_tokenizer() -> Any:
    """A whole-word tokenizer over WORDS: lower case, `</s>` at the end, `<unk>` for every other word."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL_TOKENS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=MAX_TEXT_TOKENS,
    )


def tiny_text_encoder() -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    vocab_size = len(SPECIAL_TOKENS) + len(WORDS)
    config = UMT5Config(vocab_size=vocab_size, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return UMT5EncoderModel(config).eval()


def _image_encoder() -> dict[str, Any]:
    """5 tokens of an image."""
    from transformers import CLIPVisionConfig, CLIPVisionModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    config = CLIPVisionConfig(
        hidden_size=IMAGE_DIM,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return {"image_encoder": CLIPVisionModel(config).eval(), "image_processor": processor}


def _transformer(num_layers: int, condition: str = "") -> Any:
    import torch
    from diffusers import WanTransformer3DModel, WanVACETransformer3DModel

    is_controlled = condition == "control"
    made = WanVACETransformer3DModel if is_controlled else WanTransformer3DModel
    model = made(
        **({"vace_layers": [0, num_layers - 1], "vace_in_channels": 96} if is_controlled else {}),
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=36 if condition and not is_controlled else 16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=96,
        num_layers=num_layers,
        rope_max_seq_len=64,
        image_dim=IMAGE_DIM if "tokens" in condition else None,
        added_kv_proj_dim=64 if "tokens" in condition else None,
        pos_embed_seq_len=10 if "two images" in condition else None,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one and small cross-attentions would hide a norm or a prompt that is left out.
            if "norm" in name or "pos_embed" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if ".attn2.to_out" in name or name.startswith("proj_out"):
                parameter.mul_(3.0)
    return model.eval()


def sensitive_to_images(vae: Any) -> Any:
    """What a random encoder makes of an image is hardly more than its biases: without them, and far larger."""
    import torch

    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if name.startswith(("encoder.", "quant_conv.")):
                parameter.mul_(0.0 if name.endswith("bias") else 30.0 if "conv_out" in name else 1.0)
    return vae


def tiny_vae(kind: str) -> Any:
    import torch
    from diffusers import AutoencoderKLWan

    statistics = {
        "latents_mean": (0.3 * torch.randn(16)).tolist(),
        "latents_std": (0.5 + torch.rand(16)).tolist(),
    }
    if kind == "plain":
        return AutoencoderKLWan(base_dim=4, z_dim=16, num_res_blocks=1, **statistics).eval()
    residual = kind == "residual"
    return AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=16,
        dim_mult=[1, 2, 2, 2] if residual else [1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True] if residual else [True, True],
        patch_size=2,
        in_channels=12,
        out_channels=12,
        is_residual=residual,
        scale_factor_spatial=16 if residual else 8,
        scale_factor_temporal=4,
        **statistics,
    ).eval()


def tiny_scheduler(name: str, flow_shift: float) -> Any:
    from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    if name == "flow_match_euler":
        return FlowMatchEulerDiscreteScheduler(shift=flow_shift)
    if name == "dpmpp_2m":
        return DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
        )
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift)
