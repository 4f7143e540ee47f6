"""GGUF files of text encoders as llama.cpp's converter writes them: names by the `gguf` package's own table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize

Tensors = dict[str, torch.Tensor]
_KEYS = {
    "hidden_size": "embedding_length", "d_model": "embedding_length", "num_hidden_layers": "block_count",
    "num_layers": "block_count", "intermediate_size": "feed_forward_length", "d_ff": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "d_kv": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "relative_attention_num_buckets": "attention.relative_buckets_count",
}  # fmt: skip


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k in the order of llama.cpp's rotary embedding for LLaMA and Mistral."""
    heads = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def language_tensors(arch: MODEL_ARCH, state: Mapping[str, torch.Tensor], config: Any) -> Iterator[tuple[str, Any]]:
    """A language model's tensors by llama.cpp's names. state: by transformers' names."""
    names = get_tensor_name_map(arch, 64)
    for name, tensor in state.items():
        if arch is MODEL_ARCH.T5ENCODER and name == "encoder.embed_tokens.weight":
            continue
        if name.endswith("layer_scalar"):
            name += ".weight"
        given = "model." + name.removeprefix("model.").removeprefix("language_model.") if "layers." in name else name
        found = names.get_name(given, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        if arch in (MODEL_ARCH.LLAMA, MODEL_ARCH.MISTRAL3) and ".attn_q." in found:
            tensor = permuted(tensor, config.num_attention_heads)
        if arch in (MODEL_ARCH.LLAMA, MODEL_ARCH.MISTRAL3) and ".attn_k." in found:
            tensor = permuted(tensor, config.num_key_value_heads)
        if arch is MODEL_ARCH.GEMMA3 and found.endswith("norm.weight"):
            tensor = tensor.float() + 1
        yield found, tensor


def vision_tensors(state: Mapping[str, torch.Tensor], deep: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The vision half of Qwen2.5-VL or Qwen3-VL. state: names that begin with `visual.`; deep: the layers whose states
    go into the language model."""
    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, 64)
    own = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
    for name, tensor in state.items():
        stem, _, leaf = name.rpartition(".")
        if name == "visual.patch_embed.proj.weight":
            yield "v.patch_embd.weight", tensor[:, :, 0]
            yield "v.patch_embd.weight.1", tensor[:, :, 1]
        elif ".deepstack_merger_list." in name:
            index, part = stem.split(".")[2:4]
            yield f"v.deepstack.{deep[int(index)]}.{own[part]}.{leaf}", tensor
        elif stem == "visual.patch_embed.proj":
            yield f"v.patch_embd.{leaf}", tensor
        elif stem.startswith("visual.merger.linear_fc"):
            yield f"mm.{'02'[stem.endswith('2')]}.{leaf}", tensor
        elif stem == "visual.merger.norm":
            yield f"v.post_ln.{leaf}", tensor
        elif ".attn.qkv" in stem and not deep:
            for each, part in zip("qkv", tensor.chunk(3), strict=True):
                found = names.get_name(name.replace("qkv", each), try_suffixes=(".weight", ".bias"))
                assert found is not None, name
                yield found, part
        else:
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            yield found, tensor


def random_q4_k(shape: torch.Size) -> numpy.ndarray[Any, Any]:
    """Blocks that the package reads and does not make: any bytes behind two float16 scales."""
    random = numpy.random.default_rng(len(shape))
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // 256, 144), dtype=numpy.uint8)
    scales = random.uniform(0.001, 0.01, (*blocks.shape[:-1], 2)).astype(numpy.float16)
    blocks[..., :4] = scales.view(numpy.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_encoder(
    path: Path,
    architecture: str,
    tensors: Iterator[tuple[str, torch.Tensor]],
    config: Any = None,
    kind_of: Callable[[str], str] = lambda _: "F32",
    more: Callable[[GGUFWriter], None] = lambda _: None,
) -> dict[str, torch.Tensor]:
    """Write a file; the float32 numbers that it holds, by its names. kind_of: the type of a matrix, of whole blocks."""
    writer = GGUFWriter(str(path), architecture)
    for key, theirs in _KEYS.items():
        value = getattr(config, key, None)
        if value is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{theirs}", value)
    more(writer)
    meant = {}
    for name, tensor in tensors:
        wanted = kind_of(name) if tensor.dim() >= 2 else "F32"
        kind = GGMLQuantizationType[wanted if tensor.shape[-1] % 32 == 0 or wanted in ("BF16", "F16") else "F32"]
        if kind is GGMLQuantizationType.Q4_K:
            data = random_q4_k(tensor.shape)
        else:
            data = quantize(tensor.detach().float().contiguous().numpy().astype(numpy.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        meant[name] = torch.from_numpy(dequantize(data, kind).reshape(tensor.shape).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def architecture_name(arch: MODEL_ARCH) -> str:
    return MODEL_ARCH_NAMES[arch]
