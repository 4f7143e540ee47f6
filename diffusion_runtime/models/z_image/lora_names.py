"""Module names in LoRA files of Z-Image: the authors' names, and diffusers'."""

from __future__ import annotations

from diffusion_runtime.weights.lora.names import LoraNames, Originals, each

_BLOCKS = ("layers.{}", "noise_refiner.{}", "context_refiner.{}")
_SAME = (
    *(f"feed_forward.w{index}" for index in (1, 2, 3)),
    "attention_norm1",
    "attention_norm2",
    "ffn_norm1",
    "ffn_norm2",
    "adaLN_modulation.0",
)


def _block(name: str) -> Originals:
    attention = f"{name}.attention"
    return {
        f"{attention}.qkv": each(attention, ("to_q", "to_k", "to_v")),
        f"{attention}.out": f"{attention}.to_out.0",
        f"{attention}.q_norm": f"{attention}.norm_q",
        f"{attention}.k_norm": f"{attention}.norm_k",
    }


LORA_NAMES = LoraNames(
    title="Z-Image",
    same=(
        *(template for name in _BLOCKS for template in each(name, _SAME)),
        "t_embedder.mlp.0",
        "t_embedder.mlp.2",
        "cap_embedder.0",
        "cap_embedder.1",
        "x_pad_token",
        "cap_pad_token",
    ),
    originals={
        **{original: target for name in _BLOCKS for original, target in _block(name).items()},
        "x_embedder": "all_x_embedder.2-1",
        "final_layer.linear": "all_final_layer.2-1.linear",
        "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
    },
    widths=frozenset({3840}),
    num_blocks=frozenset({30}),
)
