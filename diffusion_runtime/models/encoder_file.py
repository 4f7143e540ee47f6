"""Text encoders in one file, recognised from its head: which model, how large, how stored, and whether it carries a
tokenizer."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.errors import ModelLoadError, shown
from diffusion_runtime.models.published_folders import published_folders
from diffusion_runtime.text_encoders.file_tokenizer import (
    ARRAYS,
    FileTokenizer,
    from_metadata,
    from_spiece,
    from_tekken,
)
from diffusion_runtime.text_encoders.sentencepiece_tokenizer import NUM_EXTRA, NUM_EXTRA_OF_UMT5
from diffusion_runtime.untrusted.gguf_header import read_gguf_header
from diffusion_runtime.untrusted.sentencepiece_model import MAX_BYTES
from diffusion_runtime.weights.file_kinds import describe_file, kind_of
from diffusion_runtime.weights.gguf_encoder import GgufEncoderFile
from diffusion_runtime.weights.stored_tensors import stored_rows
from diffusion_runtime.weights.tensor_files import SafetensorsFile, TensorFile
from diffusion_runtime.weights.weight_files import GGUF, SAFETENSORS, TOKENIZER_TENSORS, refuse_unmarked

# The embeddings of tokens, [vocabulary, width], as every text encoder of transformers has them.
EMBEDDINGS = ("shared.weight", "token_embedding.weight", "embed_tokens.weight")
# Of llama.cpp's metadata: a file that has it has a whole tokenizer.
GGUF_TOKENIZER = "tokenizer.ggml.tokens"
_LAYER = re.compile(r"(?:^|\.)(?:layers|block)\.(\d{1,4})\.")
_PICTURES = re.compile(r"(^|\.)(visual|vision_tower|vision_model)\.")


@dataclass(frozen=True)
class EncoderFile:
    """A text encoder's file. title: what it holds, in words; model_types: of transformers, that it may be; shapes: of
    its weights, dequantised, by transformers' names. num_layers, hidden_size, vocab_size: of the language model, 0 for
    a vision half alone. has_vision: whether it reads pictures. formats: how weights are stored, the most first.
    tokenizer: where in the file one is, None for none. config: config.json of the published model of these sizes; of
    GGUF what the file itself says, where no published model has them; None where neither tells."""

    path: Path
    title: str
    model_types: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    num_layers: int
    hidden_size: int
    vocab_size: int
    has_vision: bool
    formats: tuple[str, ...]
    tokenizer: str | None
    config: Mapping[str, Any] | None


def describe_encoder_file(path: Path, prefix: str = "") -> EncoderFile:
    """Return what a safetensors or GGUF file holds of a text encoder, from its head and the marks beside weights.
    prefix: of the text encoder's tensors in a file of several parts (weights/file_parts.py).

    Raises ModelLoadError for a file that cannot be read, holds something else, or is quantised in a way that is not
    read.
    """
    with closing(open_encoder_file(path, prefix)) as file:
        rows = stored_rows([file])
        shapes = {name: several[0].shape for name, several in rows.items()}
        counted = Counter(each.kind if each.format is None else each.format.title for (each,) in rows.values())
        in_file = next((name for name in TOKENIZER_TENSORS if name in file.heads), None)
        if not isinstance(file, GgufEncoderFile):
            return _described(path, shapes, None, counted, in_file, {})
        tokenizer = GGUF_TOKENIZER if GGUF_TOKENIZER in file.values else None
        return _described(path, shapes, file.kind.model_types, counted, tokenizer, file.settings)


def open_encoder_file(path: Path, prefix: str = "", num_embeddings: int | None = None) -> TensorFile:
    """Open a text encoder's file. num_embeddings: of the model (GgufEncoderFile). Raises ModelLoadError."""
    if path.suffix == GGUF:
        return GgufEncoderFile(path, num_embeddings)
    if path.suffix not in SAFETENSORS:
        raise ModelLoadError(
            f"{path}: expected a .safetensors or .gguf file; a pickle can run code when it is opened, and is never read"
        )
    file = SafetensorsFile(path, prefix)
    try:
        refuse_unmarked(path, {name: head.kind for name, head in file.heads.items()})
    except ModelLoadError:
        file.close()
        raise
    return file


def tokenizer_in(path: Path, prefix: str, model_type: str) -> FileTokenizer | None:
    """Return the tokenizer that a text encoder's file carries; None for one without. prefix: as of
    describe_encoder_file. Raises ModelLoadError for a file that cannot be read, and for a tokenizer that is none."""
    num_extra = NUM_EXTRA_OF_UMT5 if model_type == "umt5" else NUM_EXTRA
    if path.suffix == GGUF:
        values = read_gguf_header(path, whole=ARRAYS).metadata
        return from_metadata(values, str(path), num_extra) if GGUF_TOKENIZER in values else None
    # Beside the parts of a file of several as well as among the encoder's own tensors.
    with closing(SafetensorsFile(path)) as file:
        for name, read in _TOKENIZERS.items():
            for stored_as in (f"{prefix}{name}", name):
                if stored_as in file.heads:
                    return read(_bytes_of(file, stored_as), f"{path}: tensor {stored_as}", num_extra)
    return None


# By the name of the tensor that holds one.
_TOKENIZERS: Mapping[str, Callable[[bytes, str, int], FileTokenizer]] = {
    "spiece_model": from_spiece,
    "tekken_model": lambda content, where, _: from_tekken(content, where),
}


def _bytes_of(file: SafetensorsFile, name: str) -> bytes:
    head = file.heads[name]
    number = math.prod(head.shape)
    if head.kind not in ("U8", "I8") or len(head.shape) != 1 or number > MAX_BYTES:
        raise ModelLoadError(
            f"{file.path}: tensor {name}: expected up to {MAX_BYTES} bytes, got {head.kind} {list(head.shape)}"
        )
    return file.read(name).numpy().tobytes()


def num_embeddings_of(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a text encoder's config.json says that it has embeddings of."""
    number = (config.get("text_config") or config).get("vocab_size")
    return number if type(number) is int else None


def num_layers_of(names: Iterable[str]) -> int:
    """Count the layers of the language model that tensors of these names are of."""
    found = (_LAYER.search(name) for name in names if not _PICTURES.search(name))
    return max((int(each[1]) for each in found if each), default=-1) + 1


def _described(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    declared: tuple[str, ...] | None,
    counted: Counter[str],
    tokenizer: str | None,
    settings: Mapping[str, int | float],
) -> EncoderFile:
    kind = kind_of(tuple(shapes))
    has_vision = any(_PICTURES.search(name) for name in shapes)
    sizes = (shape for name, shape in shapes.items() if name.endswith(EMBEDDINGS) and len(shape) == 2)
    vocabulary, width = next(sizes, (0, 0))
    if declared is not None and not vocabulary:
        title, types = "the vision half of a language model", declared
    elif kind is None or not kind.component.startswith("text_encoder"):
        raise ModelLoadError(f"{path}: holds {describe_file(shapes, tuple)}, expected a text encoder: use its own file")
    else:
        title = kind.title
        # With a vision half, or by the file's own word.
        types = tuple(each for each in kind.model_types if declared is None or each in declared)
        if kind.title == "Qwen3" and declared is None:
            types = ("qwen3_vl",) if has_vision else ("qwen3", "qwen3_vl")
    if not types:
        raise ModelLoadError(f"{path}: holds {title}, and says that it is {shown(declared)}: use another file")
    num_layers = num_layers_of(shapes)
    return EncoderFile(
        path,
        title,
        types,
        shapes,
        num_layers,
        width,
        vocabulary,
        has_vision,
        tuple(name for name, _ in counted.most_common()),
        tokenizer,
        _published_config(types, vocabulary, width, num_layers)
        or ({"model_type": types[0], **settings} if settings else None),
    )


def _published_config(types: tuple[str, ...], vocabulary: int, width: int, num_layers: int) -> Mapping[str, Any] | None:
    """Return config.json of a published text encoder of these sizes. A file may have the first of its layers alone, and
    of Gemma's embeddings the first 262144."""
    for model_type in types:
        for files in published_folders().values():
            for name, config in files.items():
                text = config.get("text_config") or config
                if (
                    name.startswith("text_encoder")
                    and config.get("model_type") == model_type
                    and text.get("d_model", text.get("hidden_size")) == width
                    and 0 <= text.get("vocab_size", 0) - vocabulary <= 64
                    and text.get("num_layers", text.get("num_hidden_layers", 0)) >= num_layers
                ):
                    return config
    return None
