"""GGUF files of text encoders (llama.cpp's names), with the names, orders and numbers that transformers has.

llama.cpp's converter renames tensors, stores the rows of q and k of LLaMA and Mistral in the order of its rotary
embedding, adds 1 to the weights of Gemma 3's norms, cuts the rows off Gemma's embeddings that no text has, and splits a
vision half's q, k, v and its convolution over two frames. Each of these is undone here as a tensor is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.errors import ModelLoadError, shown, shown_name
from diffusion_runtime.kernels.gguf_blocks import PLAIN_KINDS
from diffusion_runtime.weights.gguf_file import GgufFile
from diffusion_runtime.weights.tensor_files import TensorHead
from diffusion_runtime.weights.tensor_part import Ranges
from diffusion_runtime.weights.weight_files import listed

# Of the half that reads pictures, in a file of its own.
VISION = "clip"
_LAYER, _BLOCK, _T5 = "model.layers.{}.", "visual.blocks.{}.", "encoder.block.{}.layer."
_LANGUAGE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": f"{_LAYER}input_layernorm",
    "blk.{}.attn_q_norm": f"{_LAYER}self_attn.q_norm",
    "blk.{}.attn_k_norm": f"{_LAYER}self_attn.k_norm",
    **{f"blk.{{}}.attn_{name}": f"{_LAYER}self_attn.{name}_proj" for name in "qkv"},
    "blk.{}.attn_output": f"{_LAYER}self_attn.o_proj",
    "blk.{}.ffn_norm": f"{_LAYER}post_attention_layernorm",
    **{f"blk.{{}}.ffn_{name}": f"{_LAYER}mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_GEMMA = {
    **_LANGUAGE,
    "blk.{}.post_attention_norm": f"{_LAYER}post_attention_layernorm",
    "blk.{}.ffn_norm": f"{_LAYER}pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": f"{_LAYER}post_feedforward_layernorm",
}
# A buffer of transformers, whose name ends there.
_SCALAR = "layer_scalar"
_GEMMA4 = {**_GEMMA, "blk.{}.layer_output_scale": f"{_LAYER}{_SCALAR}"}
_OF_T5 = {
    "token_embd": "shared",
    "enc.output_norm": "encoder.final_layer_norm",
    "enc.blk.{}.attn_norm": f"{_T5}0.layer_norm",
    **{f"enc.blk.{{}}.attn_{name}": f"{_T5}0.SelfAttention.{name}" for name in "qkvo"},
    "enc.blk.{}.attn_rel_b": f"{_T5}0.SelfAttention.relative_attention_bias",
    "enc.blk.{}.ffn_norm": f"{_T5}1.layer_norm",
    "enc.blk.{}.ffn_gate": f"{_T5}1.DenseReluDense.wi_0",
    "enc.blk.{}.ffn_up": f"{_T5}1.DenseReluDense.wi_1",
    "enc.blk.{}.ffn_down": f"{_T5}1.DenseReluDense.wo",
}
_PICTURES = {
    "v.patch_embd": "visual.patch_embed.proj",
    "v.blk.{}.ln1": f"{_BLOCK}norm1",
    "v.blk.{}.ln2": f"{_BLOCK}norm2",
    "v.blk.{}.attn_qkv": f"{_BLOCK}attn.qkv",
    "v.blk.{}.attn_out": f"{_BLOCK}attn.proj",
}
# By clip.projector_type.
_VISION_NAMES = {
    "qwen2.5vl_merger": {
        **_PICTURES,
        **{f"v.blk.{{}}.ffn_{name}": f"{_BLOCK}mlp.{name}_proj" for name in ("gate", "up", "down")},
        "v.post_ln": "visual.merger.ln_q",
        "mm.0": "visual.merger.mlp.0",
        "mm.2": "visual.merger.mlp.2",
    },
    "qwen3vl_merger": {
        **_PICTURES,
        "v.position_embd": "visual.pos_embed",
        "v.blk.{}.ffn_up": f"{_BLOCK}mlp.linear_fc1",
        "v.blk.{}.ffn_down": f"{_BLOCK}mlp.linear_fc2",
        "v.post_ln": "visual.merger.norm",
        "mm.0": "visual.merger.linear_fc1",
        "mm.2": "visual.merger.linear_fc2",
        # Counted by the layers that they follow in the file, by their own order in transformers.
        "v.deepstack.{}.norm": "visual.deepstack_merger_list.{}.norm",
        "v.deepstack.{}.fc1": "visual.deepstack_merger_list.{}.linear_fc1",
        "v.deepstack.{}.fc2": "visual.deepstack_merger_list.{}.linear_fc2",
    },
}
# Tensors that a text encoder does without: a decoder's, T5's.
_UNUSED = re.compile(r"dec\..*|output\.weight|v\.patch_embd\.weight\.1|v\.blk\.\d+\.attn_[qkv]\..*")
# Of metadata, behind the architecture's name -> of config.json.
_SETTINGS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
# The keys without `_swa` are of the layers that see everything; those have other frequencies (_FREQUENCIES).
_GEMMA4_SETTINGS = {
    **{theirs: ours for theirs, ours in _SETTINGS.items() if ours not in ("head_dim", "rope_theta")},
    "attention.key_length": "global_head_dim",
    "attention.key_length_swa": "head_dim",
}
# What the frequencies of Gemma 4's layers that see everything are divided by: a quarter of them turn.
_FREQUENCIES, _MAX_FREQUENCIES, _TURNING, _STILL = "rope_freqs.weight", 4096, 0.25, 1e30
_T5_SETTINGS = {
    "block_count": "num_layers",
    "embedding_length": "d_model",
    "feed_forward_length": "d_ff",
    "attention.head_count": "num_heads",
    "attention.key_length": "d_kv",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "attention.relative_buckets_count": "relative_attention_num_buckets",
}


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's architecture. model_types: of transformers; names: of tensors, `{}` for a layer -> transformers'.
    turns_some: whether a tensor says which frequencies of positions turn (_FREQUENCIES)."""

    model_types: tuple[str, ...]
    names: Mapping[str, str]
    settings: Mapping[str, str]
    permutes: bool = False
    adds_one: bool = False
    turns_some: bool = False


_T5_ARCHITECTURE = Architecture(("umt5", "t5"), _OF_T5, _T5_SETTINGS)
_LLAMA = Architecture(("llama", "mistral3", "llava"), _LANGUAGE, _SETTINGS, permutes=True)
ARCHITECTURES: Mapping[str, Architecture] = {
    "t5": _T5_ARCHITECTURE,
    "t5encoder": _T5_ARCHITECTURE,
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "qwen2vl": Architecture(("qwen2_5_vl", "qwen2_5_vl_text"), _LANGUAGE, _SETTINGS),
    "qwen3": Architecture(("qwen3",), _LANGUAGE, _SETTINGS),
    "qwen3vl": Architecture(("qwen3_vl",), _LANGUAGE, _SETTINGS),
    "gemma3": Architecture(("gemma3", "gemma3_text"), _GEMMA, _SETTINGS, adds_one=True),
    "gemma4": Architecture(("gemma4_unified", "gemma4_unified_text"), _GEMMA4, _GEMMA4_SETTINGS, turns_some=True),
    VISION: Architecture(("qwen2_5_vl", "qwen3_vl"), {}, {}),
}

# Bytes of a tensor as transformers has it, [rows, bytes], of those in the file.
_Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Source:
    """Tensors of the file that a tensor is made of, one after the other by rows. change: to all of its rows."""

    names: tuple[str, ...]
    change: _Change | None = None


class GgufEncoderFile(GgufFile):
    """A text encoder, or its vision half, in a GGUF file. num_embeddings: of the model; Gemma's file has fewer, and the
    others, which no text has, are zeros.

    Raises ModelLoadError for a file that is missing, damaged, of another architecture, or has tensors that would change
    the result and are not read.
    """

    def __init__(self, path: Path, num_embeddings: int | None = None) -> None:
        super().__init__(path)
        found = ARCHITECTURES.get(self.architecture)
        if found is None:
            self.close()
            raise ModelLoadError(
                f"{path}: key 'general.architecture': expected that of a text encoder ({listed(ARCHITECTURES)}), got "
                f"{shown(self.architecture)}"
            )
        self.kind = found
        self._sources: dict[str, _Source] = {}
        try:
            self.heads = self._renamed(num_embeddings)
        except ModelLoadError:
            self.close()
            raise

    @property
    def settings(self) -> dict[str, int | float]:
        """Settings of the model that the file has, by transformers' keys."""
        prefix = f"{self.architecture}."
        values = {ours: self.values.get(prefix + theirs) for theirs, ours in self.kind.settings.items()}
        return {key: value for key, value in values.items() if isinstance(value, int | float)}

    def read(self, name: str, rows: slice | None = None, columns: Ranges | None = None) -> torch.Tensor:
        source = self._sources[name]
        if source.change is None and len(source.names) == 1:
            return super().read(source.names[0], rows, columns)
        parts = [super(GgufEncoderFile, self).read(each) for each in source.names]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        whole = whole if source.change is None else source.change(whole)
        return whole if rows is None else whole[rows]

    def _renamed(self, num_embeddings: int | None) -> dict[str, TensorHead]:
        names = self.kind.names if self.architecture != VISION else self._vision_names()
        heads: dict[str, TensorHead] = {}
        strange = []
        deep = sorted({int(found[1]) for name in self._in_file if (found := re.match(r"v\.deepstack\.(\d+)\.", name))})
        for name, head in self._in_file.items():
            stem, _, leaf = name.rpartition(".")
            number = next(iter(re.findall(r"\.(\d+)\.", f"{stem}.")), "") if not stem.startswith("mm.") else ""
            pattern = re.sub(r"(?<=\.)\d+(?=\.)", "{}", stem, count=1) if number else stem
            if leaf in ("weight", "bias") and pattern in names:
                place = str(deep.index(int(number))) if stem.startswith("v.deepstack.") else number
                own = names[pattern].format(place)
                own = own if own.endswith(_SCALAR) else f"{own}.{leaf}"
                if self.kind is _T5_ARCHITECTURE and stem.endswith("ffn_up"):
                    own = own if f"{stem.removesuffix('up')}gate.weight" in self._in_file else own.replace("wi_1", "wi")
                heads[own], self._sources[own] = self._changed(name, stem, head, num_embeddings)
            elif _UNUSED.fullmatch(name) is None and not (self.kind.turns_some and self._is_known_turn(name)):
                strange.append(name)
        if self.architecture == VISION:
            heads |= self._fused()
        if strange:
            raise ModelLoadError(
                f"{self.path}: {len(strange)} tensors would change the result and are not read: "
                f"{listed([shown_name(name) for name in strange])}. Use a file without them, or one in safetensors"
            )
        return heads

    def _is_known_turn(self, name: str) -> bool:
        """Return whether a tensor holds the frequencies that transformers gives Gemma 4."""
        head = self._in_file[name]
        if name != _FREQUENCIES or head.kind != "F32" or math.prod(head.shape) > _MAX_FREQUENCIES:
            return False
        divisors = super().read(name).view(torch.float32).flatten()
        turning = int(len(divisors) * _TURNING)
        return bool((divisors[:turning] == 1).all()) and bool((divisors[turning:] >= _STILL).all())

    def _changed(
        self, name: str, stem: str, head: TensorHead, num_embeddings: int | None
    ) -> tuple[TensorHead, _Source]:
        """Return the head of a tensor as transformers has it, and how it is made."""
        if self.kind.adds_one and stem.endswith("norm"):
            if head.kind not in PLAIN_KINDS:
                raise ModelLoadError(f"{self.path}: tensor {shown_name(name)} is stored as {head.kind}, expected F32")
            dtype = PLAIN_KINDS[head.kind]
            return TensorHead(head.shape, "F32"), _Source(
                (name,), lambda rows: (rows.contiguous().view(dtype).float() - 1).view(torch.uint8)
            )
        if self.kind.permutes and stem.endswith((".attn_q", ".attn_k")):
            return head, _Source((name,), self._unpermuted(name, head))
        if self.kind.adds_one and stem == "token_embd" and num_embeddings is not None:
            missing = num_embeddings - head.shape[0]
            if 0 < missing <= 64:
                # Zero bytes are zeros in every type.
                return TensorHead((num_embeddings, *head.shape[1:]), head.kind), _Source(
                    (name,), lambda rows: torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
                )
        if name == "v.patch_embd.weight":
            return self._patches(name, head)
        return head, _Source((name,))

    def _unpermuted(self, name: str, head: TensorHead) -> _Change:
        key = "head_count" if ".attn_q." in name else "head_count_kv"
        number = self.values.get(f"{self.architecture}.attention.{key}")
        if type(number) is not int or number < 1 or head.shape[0] % (2 * number):
            raise ModelLoadError(
                f"{self.path}: key '{self.architecture}.attention.{key}': {shown(number)} does not fit tensor "
                f"{shown_name(name)} of {head.shape[0]} rows"
            )
        # The file has the halves of a head's rows by turns.
        order = torch.arange(head.shape[0]).view(number, -1, 2).transpose(1, 2).reshape(-1)
        return lambda rows: rows[order]

    def _patches(self, name: str, head: TensorHead) -> tuple[TensorHead, _Source]:
        """A convolution over two frames is stored as one per frame."""
        other = self._in_file.get(f"{name}.1")
        if other is None or other != head or head.kind not in PLAIN_KINDS or len(head.shape) != 4:
            raise ModelLoadError(f"{self.path}: tensors {name} and {name}.1: expected two convolutions of one shape")
        num_rows, num_channels, *sides = head.shape
        size = math.prod(sides) * PLAIN_KINDS[head.kind].itemsize

        def change(rows: torch.Tensor) -> torch.Tensor:
            frames = rows.view(2, num_rows, num_channels, size)
            return frames.permute(1, 2, 0, 3).reshape(num_rows, -1)

        return TensorHead((num_rows, num_channels, 2, *sides), head.kind), _Source((name, f"{name}.1"), change)

    def _fused(self) -> dict[str, TensorHead]:
        """q, k and v of each block of the vision half, which transformers has in one."""
        heads = {}
        for name in self._in_file:
            if (found := re.fullmatch(r"v\.blk\.(\d+)\.attn_q\.(weight|bias)", name)) is None:
                continue
            three = tuple(f"v.blk.{found[1]}.attn_{each}.{found[2]}" for each in "qkv")
            kinds = {self._in_file.get(each) for each in three}
            (head,) = kinds if len(kinds) == 1 else (None,)
            if head is None:
                raise ModelLoadError(f"{self.path}: tensors {listed(three)}: expected three of one shape and type")
            own = f"{_BLOCK.format(found[1])}attn.qkv.{found[2]}"
            heads[own] = TensorHead((3 * head.shape[0], *head.shape[1:]), head.kind)
            self._sources[own] = _Source(three)
        return heads

    def _vision_names(self) -> Mapping[str, str]:
        projector = self.values.get("clip.projector_type", self.values.get("clip.vision.projector_type"))
        names = _VISION_NAMES.get(projector) if isinstance(projector, str) else None
        if names is None:
            raise ModelLoadError(
                f"{self.path}: key 'clip.projector_type': expected {' or '.join(map(repr, _VISION_NAMES))}, got "
                f"{shown(projector)}: the vision half of another model"
            )
        return names


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file, of a text encoder by transformers' names. Raises ModelLoadError."""
    file = GgufFile(path)
    if file.architecture not in ARCHITECTURES:
        return file
    file.close()
    return GgufEncoderFile(path)


def differing_settings(file: GgufEncoderFile, config: Mapping[str, Any]) -> list[str]:
    """Return in words what a file says of its model otherwise than a config.json: other heads or frequencies fit the
    same tensors, and give other numbers."""
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    own = {**({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}), **text}
    return [
        f"{key} is {shown(value)}, here {shown(own[key])}"
        for key, value in file.settings.items()
        if type(own.get(key)) in (int, float) and not math.isclose(own[key], value, rel_tol=1e-6)
    ]
