"""Weight map: the tensors of a diffusers FLUX.3 checkpoint that make up each of ours, and names in LoRA files."""

from __future__ import annotations

from collections.abc import Iterator

from diffusion_runtime.models.flux3.config import Flux3TransformerConfig
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, Originals, block_names, swapped_halves
from diffusion_runtime.weights.lora.stream_names import embedder_names
from diffusion_runtime.weights.pieces import NamedPieces, linear_pieces, two_layer_pieces

# Our name of a kind of token -> diffusers'.
_KINDS = {"image": "image", "reference": "image_cond", "text": "txt"}


def transformer_pieces(config: Flux3TransformerConfig) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim = config.dim
    widths = {
        "image_embedding": ("x_embedders.image", dim, config.num_channels),
        "reference_embedding": ("x_embedders.image_cond", dim, config.num_channels),
        "text_embedding": ("context_embedder", dim, config.text_dim),
        "out_modulation.projection": ("norm_out.linear", 2 * dim, dim),
        "out": ("proj_out", config.num_channels, dim),
    }
    for kind, theirs in _KINDS.items():
        widths[f"{kind}_modulation.projection"] = f"early_stream_modulations.{theirs}.linear", 3 * dim, dim
        widths[f"joint_{kind}_modulation.projection"] = f"single_stream_modulations.{theirs}.linear", 3 * dim, dim
    for ours, (theirs, out_dim, in_dim) in widths.items():
        yield from linear_pieces(ours, [(theirs, out_dim)], in_dim, bias=False)
    embedders = {"timestep": "timestep_embedder"}
    if config.is_flow_map:
        embedders["next_timestep"] = "target_timestep_embedder"
    for name, theirs in embedders.items():
        yield from two_layer_pieces(f"condition_embedding.{name}", theirs, config.num_waves, dim, bias=False)
    lists = {
        "blocks": ("mode_blocks.image", config.num_double_layers),
        "reference_blocks": ("mode_blocks.image_cond", config.num_double_layers),
        "text_blocks": ("txt_mode_blocks", config.num_double_layers),
        "single_blocks": ("single_transformer_blocks", config.num_single_layers),
    }
    for ours, (theirs, count) in lists.items():
        for index in range(count):
            yield from _block(f"{ours}.{index}", f"{theirs}.{index}", config)


def _block(ours: str, theirs: str, config: Flux3TransformerConfig) -> Iterator[NamedPieces]:
    dim, ffn_dim = config.dim, config.ffn_dim
    inward = [(f"{theirs}.attn.{name}", dim) for name in ("to_q", "to_k", "to_v")]
    yield from linear_pieces(f"{ours}.qkv_up", [*inward, (f"{theirs}.ff.linear_in", 2 * ffn_dim)], dim, bias=False)
    for name in ("norm_q", "norm_k"):
        yield f"{ours}.{name}.weight", (Piece(f"{theirs}.attn.{name}.weight", (config.head_dim,)),)
    yield from linear_pieces(f"{ours}.out", [(f"{theirs}.attn.to_out.0", dim)], dim, bias=False)
    yield from linear_pieces(f"{ours}.down", [(f"{theirs}.ff.linear_out", dim)], ffn_dim, bias=False)


_BLOCK: Originals = {
    "q_proj": "attn.to_q",
    "k_proj": "attn.to_k",
    "v_proj": "attn.to_v",
    "attn_out": "attn.to_out.0",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
    "mlp_in": "ff.linear_in",
    "mlp_out": "ff.linear_out",
}
_EMBEDDER = "target_timestep_embedder"

LORA_NAMES = LoraNames(
    title="FLUX.3",
    originals={
        **block_names("content_mode_blocks.image.{}", "mode_blocks.image.{}", _BLOCK),
        **block_names("content_mode_blocks.image_cond.{}", "mode_blocks.image_cond.{}", _BLOCK),
        **block_names("txt_mode_blocks.{}", "txt_mode_blocks.{}", _BLOCK),
        **block_names("single_blocks.{}", "single_transformer_blocks.{}", _BLOCK),
        "emb_in.image": "x_embedders.image",
        "emb_in.image_cond": "x_embedders.image_cond",
        "txt_in": "context_embedder",
        **embedder_names("time_in", "timestep_embedder"),
        **embedder_names("ref_time_in", _EMBEDDER),
        **{
            f"{when}_stream_modulations.{kind}.lin": f"{when}_stream_modulations.{kind}.linear"
            for when in ("early", "single")
            for kind in _KINDS.values()
        },
        "final_layer.image.linear": "proj_out",
        "final_layer.image.adaLN_modulation.1": swapped_halves("norm_out.linear"),
    },
    absent={f"{_EMBEDDER}.linear_{index}": "the distilled FLUX.3 Image [klein]" for index in (1, 2)},
    widths=frozenset({3072}),
    num_blocks=frozenset({28}),
)
