"""Transformers as their authors' files hold them, of random numbers: few columns, as rows are what moves.

The names are written out here, apart from those that the runtime reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import torch

from diffusion_runtime.weights.autoencoder_names import _causal_names, _latent_diffusion_names
from diffusion_runtime.weights.level_list_names import level_list_names, vocoder_names
from diffusion_runtime.weights.lora.names import LoraNames, Rows

Tensors = dict[str, torch.Tensor]
# diffusers' converters take this width for granted.
_FLUX_DIM = 3072


def _linear(name: str, rows: int, *, bias: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, 2)
    if bias:
        yield f"{name}.bias", (rows,)


def _flux1() -> Iterator[tuple[str, tuple[int, ...]]]:
    dim = _FLUX_DIM
    for name in (
        "img_in",
        "txt_in",
        *(f"{of}_in.{layer}_layer" for of in ("time", "vector", "guidance") for layer in ("in", "out")),
    ):
        yield from _linear(name, dim)
    for index in range(2):
        for stream in ("img", "txt"):
            block = f"double_blocks.{index}.{stream}"
            yield from _linear(f"{block}_mod.lin", 6 * dim)
            yield from _linear(f"{block}_attn.qkv", 3 * dim)
            yield from _linear(f"{block}_attn.proj", dim)
            yield f"{block}_attn.norm.query_norm.scale", (128,)
            yield f"{block}_attn.norm.key_norm.scale", (128,)
            yield from _linear(f"{block}_mlp.0", 4 * dim)
            yield from _linear(f"{block}_mlp.2", dim)
        block = f"single_blocks.{index}"
        yield from _linear(f"{block}.linear1", 7 * dim)
        yield from _linear(f"{block}.linear2", dim)
        yield from _linear(f"{block}.modulation.lin", 3 * dim)
        yield f"{block}.norm.query_norm.scale", (128,)
        yield f"{block}.norm.key_norm.scale", (128,)
    yield from _linear("final_layer.linear", 64)
    yield from _linear("final_layer.adaLN_modulation.1", 2 * dim)


def _wan() -> Iterator[tuple[str, tuple[int, ...]]]:
    dim = 8
    yield "patch_embedding.weight", (dim, 4, 1, 2, 2)
    yield "patch_embedding.bias", (dim,)
    for name in ("time_embedding.0", "time_embedding.2", "text_embedding.0", "text_embedding.2"):
        yield from _linear(name, dim)
    yield from _linear("time_projection.1", 6 * dim)
    for index in range(2):
        block = f"blocks.{index}"
        for attention in ("self_attn", "cross_attn"):
            for part in "qkvo":
                yield from _linear(f"{block}.{attention}.{part}", dim)
            yield f"{block}.{attention}.norm_q.weight", (dim,)
            yield f"{block}.{attention}.norm_k.weight", (dim,)
        yield from _linear(f"{block}.ffn.0", 16)
        yield from _linear(f"{block}.ffn.2", dim)
        yield f"{block}.norm3.weight", (dim,)
        yield f"{block}.norm3.bias", (dim,)
        yield f"{block}.modulation", (1, 6, dim)
    yield from _linear("head.head", 16)
    yield "head.modulation", (1, 2, dim)


def _wan_of_images() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Wan 2.1 I2V: a second cross-attention, and the way of CLIP's tokens into it."""
    yield from _wan()
    for index in range(2):
        block = f"blocks.{index}.cross_attn"
        yield from _linear(f"{block}.k_img", 8)
        yield from _linear(f"{block}.v_img", 8)
        yield f"{block}.norm_k_img.weight", (8,)
    for index in (0, 1, 3, 4):
        yield from _linear(f"img_emb.proj.{index}", 8)


def _wan_vace() -> Iterator[tuple[str, tuple[int, ...]]]:
    """VACE: control blocks as the others, the first of them with a projection before it, all with one behind."""
    yield from _wan()
    yield "vace_patch_embedding.weight", (8, 6, 1, 2, 2)
    yield "vace_patch_embedding.bias", (8,)
    for name, shape in _wan():
        if name.startswith("blocks."):
            yield f"vace_{name}", shape
    yield from _linear("vace_blocks.0.before_proj", 8)
    for index in range(2):
        yield from _linear(f"vace_blocks.{index}.after_proj", 8)


def _ltx_video() -> Iterator[tuple[str, tuple[int, ...]]]:
    dim = 8
    for name in ("patchify_proj", "proj_out", "caption_projection.linear_1", "caption_projection.linear_2"):
        yield from _linear(name, dim)
    for layer in ("linear", "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2"):
        yield from _linear(f"adaln_single.{layer}", dim)
    yield "scale_shift_table", (2, dim)
    for index in range(2):
        block = f"transformer_blocks.{index}"
        for attention in ("attn1", "attn2"):
            for part in ("to_q", "to_k", "to_v", "to_out.0"):
                yield from _linear(f"{block}.{attention}.{part}", dim)
            yield f"{block}.{attention}.q_norm.weight", (dim,)
            yield f"{block}.{attention}.k_norm.weight", (dim,)
        yield from _linear(f"{block}.ff.net.0.proj", 4 * dim)
        yield from _linear(f"{block}.ff.net.2", dim)
        yield f"{block}.scale_shift_table", (6, dim)


def _qwen_image_21() -> Iterator[tuple[str, tuple[int, ...]]]:
    """As ComfyUI has it: gate and up projection are one."""
    dim = 8
    for name in (
        "img_in",
        "txt_in.in_layer",
        "txt_in.out_layer",
        "time_text_embed.timestep_embedder.linear_1",
        "time_text_embed.timestep_embedder.linear_2",
        "modulation.1",
        "norm_out.linear",
        "proj_out",
    ):
        yield from _linear(name, dim, bias=False)
    yield "txt_in.text_norm.weight", (dim,)
    for index in range(2):
        block = f"transformer_blocks.{index}"
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            yield from _linear(f"{block}.attn.{part}", dim, bias=False)
        yield f"{block}.attn.norm_q.weight", (4,)
        yield f"{block}.attn.norm_k.weight", (4,)
        yield from _linear(f"{block}.img_mlp.gate_up", 4 * dim, bias=False)
        yield from _linear(f"{block}.img_mlp.out", dim, bias=False)


def _z_image() -> Iterator[tuple[str, tuple[int, ...]]]:
    dim = 8
    for name in (
        "x_embedder",
        "cap_embedder.1",
        "t_embedder.mlp.0",
        "t_embedder.mlp.2",
        "final_layer.linear",
        "final_layer.adaLN_modulation.1",
    ):
        yield from _linear(name, dim)
    yield "cap_embedder.0.weight", (dim,)
    yield "x_pad_token", (1, dim)
    yield "cap_pad_token", (1, dim)
    yield "norm_final.weight", (dim,)
    for block in ("layers.0", "layers.1", "noise_refiner.0", "context_refiner.0"):
        yield from _linear(f"{block}.attention.qkv", 3 * dim, bias=False)
        yield from _linear(f"{block}.attention.out", dim, bias=False)
        yield f"{block}.attention.q_norm.weight", (dim,)
        yield f"{block}.attention.k_norm.weight", (dim,)
        for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
            yield f"{block}.{name}.weight", (dim,)
        for name in ("w1", "w2", "w3"):
            yield from _linear(f"{block}.feed_forward.{name}", 16, bias=False)
        if block != "context_refiner.0":
            yield from _linear(f"{block}.adaLN_modulation.0", 4 * dim)


def _krea2() -> Iterator[tuple[str, tuple[int, ...]]]:
    dim = 8
    for name in ("first", "last.linear", "tmlp.0", "tmlp.2", "tproj.1", "txtmlp.1", "txtmlp.3"):
        yield from _linear(name, dim)
    yield "txtmlp.0.scale", (dim,)
    yield "last.norm.scale", (dim,)
    yield "last.modulation.lin", (2, dim)
    yield "txtfusion.projector.weight", (1, 3)
    for block in ("blocks.0", "blocks.1", "txtfusion.layerwise_blocks.0", "txtfusion.refiner_blocks.0"):
        for name in (*(f"attn.{part}" for part in ("wq", "wo", "gate")), *(f"mlp.{part}" for part in ("gate", "up"))):
            yield from _linear(f"{block}.{name}", dim, bias=False)
        for name in ("attn.wk", "attn.wv", "mlp.down"):
            yield from _linear(f"{block}.{name}", 4, bias=False)
        for name in ("attn.qknorm.qnorm", "attn.qknorm.knorm", "prenorm", "postnorm"):
            yield f"{block}.{name}.scale", (4,)
        if block.startswith("blocks"):
            yield f"{block}.mod.lin", (6 * dim,)


def _anima() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Without the text conditioner, which diffusers' function does not know."""
    dim = 8
    for name in (
        *("net.x_embedder.proj.1", "net.t_embedder.1.linear_1", "net.t_embedder.1.linear_2"),
        *("net.final_layer.linear", "net.final_layer.adaln_modulation.1", "net.final_layer.adaln_modulation.2"),
    ):
        yield from _linear(name, dim, bias=False)
    yield "net.t_embedding_norm.weight", (dim,)
    for block in ("net.blocks.0", "net.blocks.11"):
        for name in (
            *(f"{of}_attn.{part}_proj" for of in ("self", "cross") for part in ("q", "k", "v", "output")),
            *(f"adaln_modulation_{of}.{index}" for of in ("self_attn", "cross_attn", "mlp") for index in (1, 2)),
            *("mlp.layer1", "mlp.layer2"),
        ):
            yield from _linear(f"{block}.{name}", dim, bias=False)
        for name in (f"{of}_attn.{part}_norm" for of in ("self", "cross") for part in "qk"):
            yield f"{block}.{name}.weight", (4,)


def _flux2() -> Iterator[tuple[str, tuple[int, ...]]]:
    dim = 8
    modulations = (
        "double_stream_modulation_img.lin",
        "double_stream_modulation_txt.lin",
        "single_stream_modulation.lin",
    )
    for name in (
        "img_in",
        "txt_in",
        *(f"{of}_in.{layer}_layer" for of in ("time", "guidance") for layer in ("in", "out")),
        *modulations,
        "final_layer.linear",
        "final_layer.adaLN_modulation.1",
    ):
        yield from _linear(name, 6 * dim, bias=False)
    for stream in ("img", "txt"):
        block = f"double_blocks.0.{stream}"
        yield from _linear(f"{block}_attn.qkv", 3 * dim, bias=False)
        yield from _linear(f"{block}_attn.proj", dim, bias=False)
        yield f"{block}_attn.norm.query_norm.scale", (4,)
        yield f"{block}_attn.norm.key_norm.scale", (4,)
        yield from _linear(f"{block}_mlp.0", 6 * dim, bias=False)
        yield from _linear(f"{block}_mlp.2", dim, bias=False)
    yield from _linear("single_blocks.0.linear1", 9 * dim, bias=False)
    yield from _linear("single_blocks.0.linear2", dim, bias=False)
    yield "single_blocks.0.norm.query_norm.scale", (4,)
    yield "single_blocks.0.norm.key_norm.scale", (4,)


def _flux3() -> Iterator[tuple[str, tuple[int, ...]]]:
    dim, kinds = 8, ("image", "image_cond", "txt")
    for name in (
        "emb_in.image",
        "emb_in.image_cond",
        "txt_in",
        *(f"{of}_in.{layer}_layer" for of in ("time", "ref_time") for layer in ("in", "out")),
        *(f"{when}_stream_modulations.{kind}.lin" for when in ("early", "single") for kind in kinds),
        "final_layer.image.linear",
        "final_layer.image.adaLN_modulation.1",
    ):
        yield from _linear(name, 6 * dim, bias=False)
    for block in (
        "content_mode_blocks.image.0",
        "content_mode_blocks.image_cond.1",
        "txt_mode_blocks.0",
        "single_blocks.1",
    ):
        for part in ("q_proj", "k_proj", "v_proj", "attn_out", "mlp_out"):
            yield from _linear(f"{block}.{part}", dim, bias=False)
        yield from _linear(f"{block}.mlp_in", 6 * dim, bias=False)
        yield f"{block}.norm.query_norm.scale", (4,)
        yield f"{block}.norm.key_norm.scale", (4,)


def _hunyuan_video() -> Iterator[tuple[str, tuple[int, ...]]]:
    dim = _FLUX_DIM
    yield "img_in.proj.weight", (dim, 4, 1, 2, 2)
    yield "img_in.proj.bias", (dim,)
    for name in (
        "time_in.mlp.0",
        "time_in.mlp.2",
        "guidance_in.mlp.0",
        "guidance_in.mlp.2",
        "vector_in.in_layer",
        "vector_in.out_layer",
        "txt_in.input_embedder",
        "txt_in.t_embedder.mlp.0",
        "txt_in.t_embedder.mlp.2",
        "txt_in.c_embedder.linear_1",
        "txt_in.c_embedder.linear_2",
    ):
        yield from _linear(name, 8)
    block = "txt_in.individual_token_refiner.blocks.0"
    yield from _linear(f"{block}.self_attn_qkv", 24)
    for name in ("self_attn_proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1"):
        yield from _linear(f"{block}.{name}", 8)
    for name in ("norm1", "norm2"):
        yield f"{block}.{name}.weight", (8,)
        yield f"{block}.{name}.bias", (8,)
    for stream in ("img", "txt"):
        block = f"double_blocks.0.{stream}"
        yield from _linear(f"{block}_mod.linear", 6 * dim)
        yield from _linear(f"{block}_attn_qkv", 3 * dim)
        yield from _linear(f"{block}_attn_proj", dim)
        yield f"{block}_attn_q_norm.weight", (128,)
        yield f"{block}_attn_k_norm.weight", (128,)
        yield from _linear(f"{block}_mlp.fc1", 4 * dim)
        yield from _linear(f"{block}_mlp.fc2", dim)
    yield from _linear("single_blocks.0.linear1", 7 * dim)
    yield from _linear("single_blocks.0.linear2", dim)
    yield from _linear("single_blocks.0.modulation.linear", 3 * dim)
    yield "single_blocks.0.q_norm.weight", (128,)
    yield "single_blocks.0.k_norm.weight", (128,)
    yield from _linear("final_layer.linear", 64)
    yield from _linear("final_layer.adaLN_modulation.1", 2 * dim)


def _ltx2() -> Iterator[tuple[str, tuple[int, ...]]]:
    dim = 8
    embedders = (
        "adaln_single",
        "audio_adaln_single",
        "av_ca_video_scale_shift_adaln_single",
        "av_ca_a2v_gate_adaln_single",
        "av_ca_audio_scale_shift_adaln_single",
        "av_ca_v2a_gate_adaln_single",
    )
    for name in ("patchify_proj", "audio_patchify_proj", "proj_out", "audio_proj_out"):
        yield from _linear(name, dim)
    for name in embedders:
        for layer in ("linear", "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2"):
            yield from _linear(f"{name}.{layer}", dim)
    for name in ("caption_projection", "audio_caption_projection"):
        yield from _linear(f"{name}.linear_1", dim)
        yield from _linear(f"{name}.linear_2", dim)
    yield "scale_shift_table", (2, dim)
    yield "audio_scale_shift_table", (2, dim)
    yield from _linear("video_embeddings_connector.learnable_registers", dim)
    block = "transformer_blocks.0"
    for attention in ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn"):
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            yield from _linear(f"{block}.{attention}.{part}", dim)
        yield f"{block}.{attention}.q_norm.weight", (dim,)
        yield f"{block}.{attention}.k_norm.weight", (dim,)
    for ff in ("ff", "audio_ff"):
        yield from _linear(f"{block}.{ff}.net.0.proj", dim)
        yield from _linear(f"{block}.{ff}.net.2", dim)
    for name in (
        "scale_shift_table",
        "audio_scale_shift_table",
        "scale_shift_table_a2v_ca_video",
        "scale_shift_table_a2v_ca_audio",
    ):
        yield f"{block}.{name}", (5, dim)


# By the folder of the family, and what kind of its models where there are several: the tensors, and diffusers'
# function that converts them.
ORIGINALS: Mapping[str, tuple[Callable[[], Iterator[tuple[str, tuple[int, ...]]]], str]] = {
    "flux1": (_flux1, "convert_flux_transformer_checkpoint_to_diffusers"),
    "wan": (_wan, "convert_wan_transformer_to_diffusers"),
    "wan of images": (_wan_of_images, "convert_wan_transformer_to_diffusers"),
    "wan with control blocks": (_wan_vace, "convert_wan_transformer_to_diffusers"),
    "ltx_video": (_ltx_video, "convert_ltx_transformer_checkpoint_to_diffusers"),
    "qwen_image_21": (_qwen_image_21, "convert_qwen_image21_transformer_checkpoint_to_diffusers"),
    "z_image": (_z_image, "convert_z_image_transformer_checkpoint_to_diffusers"),
    "krea2": (_krea2, "convert_krea2_transformer_checkpoint_to_diffusers"),
    "anima": (_anima, "convert_cosmos_transformer_checkpoint_to_diffusers"),
    "flux2": (_flux2, "convert_flux2_transformer_checkpoint_to_diffusers"),
    "flux3": (_flux3, "convert_flux3_transformer_checkpoint_to_diffusers"),
    "hunyuan_video": (_hunyuan_video, "convert_hunyuan_video_transformer_to_diffusers"),
    "ltx2": (_ltx2, "convert_ltx2_transformer_to_diffusers"),
}


def original_tensors(family: str) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in ORIGINALS[family][0]()}


def converted(family: str, tensors: Tensors) -> Tensors:
    """By diffusers."""
    from diffusers.loaders import single_file_utils

    result: Tensors = getattr(single_file_utils, ORIGINALS[family][1])(dict(tensors))
    return result


def as_authors(tensors: Tensors, names: LoraNames) -> Tensors:
    """A transformer by diffusers' names, as its authors call and fuse its modules; what they call alike stays. The
    runtime's table backwards: what it makes of the authors' names is compared with diffusers' converters (ORIGINALS).
    """
    made, rest = {}, dict(tensors)
    several = {theirs: (rows,) if isinstance(rows, str) else rows for theirs, rows in names.originals.items()}
    # What is fused comes first: some tables have names of the parts as well.
    for theirs, targets in sorted(several.items(), key=lambda each: -len(each[1])):
        parts = [Rows(each) if isinstance(each, str) else each for each in targets]
        pattern = re.escape(parts[0].module).replace(r"\{\}", r"(\d+)") + r"(\.weight|\.bias|)"
        for name in list(rest):
            found = re.fullmatch(pattern, name)
            block, leaf = (found[1] if found.re.groups > 1 else "", found[found.re.groups]) if found else ("", None)
            placed = [part.at(block) for part in parts]
            if leaf is None or not all(f"{part.module}{leaf}" in rest for part in placed):
                continue
            if sum(1 / part.of for part in placed) != len({part.module for part in placed}):
                # Some rows of a module, whose others have a name of their own.
                continue
            chunks = [rest[f"{part.module}{leaf}"].chunk(part.of)[part.index] for part in placed]
            made[f"{theirs.replace('{}', block)}{leaf}"] = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
            for module in {part.module for part in placed}:
                del rest[f"{module}{leaf}"]
    return made | rest


def as_ldm(tensors: Tensors, *, counts_backwards: bool = True) -> Tensors:
    """The names and shapes of ae.safetensors: attention is a convolution of one pixel there."""
    names = {
        theirs: ours for ours, theirs in _latent_diffusion_names(tensors, counts_backwards=counts_backwards).items()
    }
    return {
        names[name]: tensor[..., None, None].contiguous() if ".attentions." in name and tensor.dim() == 2 else tensor
        for name, tensor in tensors.items()
    }


def _renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    return {theirs: tensors[ours] for theirs, ours in names.items()}


# Of autoencoders and vocoders, by their class in diffusers; the others have diffusers' names in ComfyUI's files too.
AUTOENCODERS: Mapping[str, Callable[[Tensors], Tensors]] = {
    "AutoencoderKL": as_ldm,
    "AutoencoderKLFlux2": as_ldm,
    "AutoencoderKLHunyuanVideo15": lambda tensors: as_ldm(tensors, counts_backwards=False),
    **dict.fromkeys(
        ("AutoencoderKLWan", "AutoencoderKLQwenImage"), lambda tensors: _renamed(tensors, _causal_names(tensors))
    ),
    **dict.fromkeys(
        ("AutoencoderKLLTXVideo", "AutoencoderKLLTX2Video", "AutoencoderKLLTX2Audio"),
        lambda tensors: _renamed(tensors, level_list_names(tensors)),
    ),
    **dict.fromkeys(("LTX2Vocoder", "LTX2VocoderWithBWE"), lambda tensors: _renamed(tensors, vocoder_names(tensors))),
}


def encoder_as_comfyui(tensors: Tensors) -> Tensors:
    """A text or image encoder by transformers' names, as ComfyUI's files hold it: without the levels around a language
    model."""
    made = {}
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        name = re.sub(r"^(layers|embed_tokens|norm)\.", r"model.\1.", name)
        made[name] = tensor
    return made


def flux1_as_authors(tensors: Tensors) -> Tensors:
    """A transformer by diffusers' names, as its authors' file holds it."""
    made: Tensors = {}

    def put(name: str, *theirs: str) -> None:
        for leaf in ("weight", "bias"):
            if f"{theirs[0]}.{leaf}" in tensors:
                made[f"{name}.{leaf}"] = torch.cat([tensors[f"{each}.{leaf}"] for each in theirs])

    embedders = {"time": "timestep", "vector": "text", "guidance": "guidance"}
    for theirs, ours in (("img_in", "x_embedder"), ("txt_in", "context_embedder"), ("final_layer.linear", "proj_out")):
        put(theirs, ours)
    for theirs, ours in embedders.items():
        put(f"{theirs}_in.in_layer", f"time_text_embed.{ours}_embedder.linear_1")
        put(f"{theirs}_in.out_layer", f"time_text_embed.{ours}_embedder.linear_2")
    for index in range(1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("transformer_blocks"))):
        for stream, norm, ff, qkv, out, added in (
            ("img", "norm1", "ff", ("to_q", "to_k", "to_v"), "to_out.0", ""),
            ("txt", "norm1_context", "ff_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "added_"),
        ):
            block, name = f"transformer_blocks.{index}", f"double_blocks.{index}.{stream}"
            put(f"{name}_mod.lin", f"{block}.{norm}.linear")
            put(f"{name}_attn.qkv", *(f"{block}.attn.{part}" for part in qkv))
            put(f"{name}_attn.proj", f"{block}.attn.{out}")
            put(f"{name}_mlp.0", f"{block}.{ff}.net.0.proj")
            put(f"{name}_mlp.2", f"{block}.{ff}.net.2")
            for part, key in (("query", "q"), ("key", "k")):
                made[f"{name}_attn.norm.{part}_norm.scale"] = tensors[f"{block}.attn.norm_{added}{key}.weight"]
    for index in range(1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("single"))):
        block, name = f"single_transformer_blocks.{index}", f"single_blocks.{index}"
        put(f"{name}.linear1", *(f"{block}.attn.{part}" for part in ("to_q", "to_k", "to_v")), f"{block}.proj_mlp")
        put(f"{name}.linear2", f"{block}.proj_out")
        put(f"{name}.modulation.lin", f"{block}.norm.linear")
        for part, key in (("query", "q"), ("key", "k")):
            made[f"{name}.norm.{part}_norm.scale"] = tensors[f"{block}.attn.norm_{key}.weight"]
    for leaf in ("weight", "bias"):
        scale, shift = tensors[f"norm_out.linear.{leaf}"].chunk(2)
        made[f"final_layer.adaLN_modulation.1.{leaf}"] = torch.cat([shift, scale])
    return made


# Of MiniMax-H3: diffusers' names of modules, and the authors', which all published single files have.
_MINIMAX_H3 = (
    ("token_refiner.refiner_blocks.", "token_refiner.blocks."),
    ("transformer_blocks.", "blocks."),
    ("time_embedder.linear_1.", "time_embedder.proj_in."),
    ("time_embedder.linear_2.", "time_embedder.proj_out."),
    ("audio_proj_in.", "audio_patch_proj."),
    ("audio_proj_out.", "final_layer.audio_out."),
    ("context_embedder.", "condition_proj."),
    ("norm_out.norm.", "final_layer.norm."),
    ("norm_out.linear.", "final_layer.adaln_proj.linear."),
    (".attn.norm_q.", ".attn.q_norm."),
    (".attn.norm_k.", ".attn.k_norm."),
    (".attn.to_out.0.", ".attn.out_proj."),
    (".ff.net.0.proj.", ".mlp.fc1."),
    (".ff.net.2.", ".mlp.fc2."),
)


def minimax_h3_as_authors(tensors: Tensors) -> Tensors:
    """A transformer by diffusers' names, as its authors' file holds it: q, k and v one after the other, and the gate
    before the value."""
    made: Tensors = {"rope.inv_freq": torch.ones(2)}
    for name, tensor in tensors.items():
        if ".attn.to_q." in name:
            parts = [tensors[name.replace("to_q", f"to_{each}")] for each in "qkv"]
            made[_of_minimax_h3(name).replace("to_q", "qkv_proj")] = torch.cat(parts)
        elif ".ff.net.0.proj." in name:
            made[_of_minimax_h3(name)] = torch.cat(tensor.chunk(2)[::-1])
        elif not any(part in name for part in (".attn.to_k.", ".attn.to_v.")):
            made[_of_minimax_h3(name)] = tensor
    return made


def _of_minimax_h3(name: str) -> str:
    for theirs, authors in (("proj_in.", "video_patch_proj."), ("proj_out.", "final_layer.video_out.")):
        if name.startswith(theirs):
            return name.replace(theirs, authors)
    for theirs, authors in _MINIMAX_H3:
        name = name.replace(theirs, authors)
    return name
