"""Weight map: the tensors of a diffusers Anima folder that make up each of ours, and names in LoRA files.

Published checkpoints turn the channels of a head by halves: channel i with channel i + head_dim / 2. Here neighbours
turn together, so that these channels of q and k move next to each other as they are read.
"""

from __future__ import annotations

from collections.abc import Iterator

from diffusion_runtime.models.anima.conditioner import CONDITIONER, MODULES, MODULES_AROUND, conditioner_pieces
from diffusion_runtime.models.anima.config import AnimaTransformerConfig
from diffusion_runtime.weights.lora.names import LoraNames, Originals, block_names, each
from diffusion_runtime.weights.pieces import (
    CrossNames,
    NamedPieces,
    cross_attention_pieces,
    feed_forward_pieces,
    linear_pieces,
    norm_pieces,
    self_attention_pieces,
)


def transformer_pieces(config: AnimaTransformerConfig) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim = config.dim
    in_dim = config.patch_channels // config.num_channels * (config.num_channels + config.has_mask)
    yield from linear_pieces("patch_embedding", [("patch_embed.proj", dim)], in_dim, bias=False)
    yield from linear_pieces("timestep_up", [("time_embed.t_embedder.linear_1", dim)], dim, bias=False)
    yield from linear_pieces("timestep_down", [("time_embed.t_embedder.linear_2", 3 * dim)], dim, bias=False)
    yield from norm_pieces("timestep_norm", "time_embed.norm", dim)
    for index in range(config.num_layers):
        ours, theirs = f"blocks.{index}", f"transformer_blocks.{index}"
        for number, name in enumerate(("modulation", "cross_modulation", "ffn_modulation"), start=1):
            yield from _modulation(f"{ours}.{name}", f"{theirs}.norm{number}", config, 3)
        yield from self_attention_pieces(f"{ours}.self_attention", f"{theirs}.attn1", dim, dim, config.head_dim)
        names = CrossNames("to_q", "to_k", "to_v", "to_out.0", "norm_q", "norm_k")
        attention = f"{ours}.cross_attention", f"{theirs}.attn2"
        yield from cross_attention_pieces(*attention, dim, config.text_dim, config.head_dim, names)
        yield from feed_forward_pieces(f"{ours}.feed_forward", f"{theirs}.ff", dim, config.ffn_dim, bias=False)
    yield from _modulation("out_modulation", "norm_out", config, 2)
    yield from linear_pieces("out", [("proj_out", config.patch_channels)], dim, bias=False)
    yield from conditioner_pieces(config.conditioner)


def _modulation(ours: str, theirs: str, config: AnimaTransformerConfig, num_rows: int) -> Iterator[NamedPieces]:
    dim, narrow = config.dim, config.narrow_dim
    yield from linear_pieces(f"{ours}.narrow", [(f"{theirs}.linear_1", narrow)], dim, bias=False)
    yield from linear_pieces(f"{ours}.projection", [(f"{theirs}.linear_2", num_rows * dim)], narrow, bias=False)


def turning_head(config: AnimaTransformerConfig, name: str) -> int | None:
    """Return the channels of a head whose halves turn against each other in a checkpoint, for our parameter `name`."""
    if name.startswith("conditioner."):
        return config.conditioner.head_dim
    # A text has no positions, so the transformer's attention to it turns nothing.
    return None if ".cross_attention." in name else config.head_dim


def is_unread(name: str) -> bool:
    """Return whether a tensor of the authors' files is none of the model's: tables of positions, and numbers of its
    training."""
    return name.startswith(("pos_embedder.", "accum_")) or name.endswith("_extra_state")


_BLOCK: Originals = {
    **{f"self_attn.{name}_proj": f"attn1.to_{name}" for name in "qkv"},
    **{f"cross_attn.{name}_proj": f"attn2.to_{name}" for name in "qkv"},
    **{"self_attn.output_proj": "attn1.to_out.0", "cross_attn.output_proj": "attn2.to_out.0"},
    **{f"self_attn.{name}_norm": f"attn1.norm_{name}" for name in "qk"},
    **{f"cross_attn.{name}_norm": f"attn2.norm_{name}" for name in "qk"},
    **{"mlp.layer1": "ff.net.0.proj", "mlp.layer2": "ff.net.2"},
    **{f"adaln_modulation_self_attn.{index}": f"norm1.linear_{index}" for index in (1, 2)},
    **{f"adaln_modulation_cross_attn.{index}": f"norm2.linear_{index}" for index in (1, 2)},
    **{f"adaln_modulation_mlp.{index}": f"norm3.linear_{index}" for index in (1, 2)},
}
LORA_NAMES = LoraNames(
    title="Anima",
    same=each(f"{CONDITIONER}.blocks.{{}}", MODULES),
    originals={
        **block_names("blocks.{}", "transformer_blocks.{}", _BLOCK),
        **block_names("llm_adapter.blocks.{}", f"{CONDITIONER}.blocks.{{}}", {name: name for name in MODULES}),
        **{f"llm_adapter.{name}": f"{CONDITIONER}.{name}" for name in MODULES_AROUND},
        **{"x_embedder.proj.1": "patch_embed.proj", "t_embedding_norm": "time_embed.norm"},
        **{f"t_embedder.1.linear_{index}": f"time_embed.t_embedder.linear_{index}" for index in (1, 2)},
        **{f"final_layer.adaln_modulation.{index}": f"norm_out.linear_{index}" for index in (1, 2)},
        "final_layer.linear": "proj_out",
    },
    widths=frozenset({2048}),
    num_blocks=frozenset({28}),
)
