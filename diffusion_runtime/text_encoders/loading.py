"""Loads transformers encoders and tokenizers from a folder: safetensors and json alone, without a network or a progress
bar."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diffusion_runtime.errors import ModelLoadError, first_line, shown
from diffusion_runtime.layers.weight_range import first_unusable
from diffusion_runtime.memory.waiting_weights import nothing_like
from diffusion_runtime.untrusted.component_sizes import check_sizes
from diffusion_runtime.untrusted.json_text import read_json_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Context manager: transformers logs errors alone; afterwards the previous verbosity is restored."""
    from transformers.utils import logging as typed_logging

    logging: Any = typed_logging  # Some of its functions have no annotations.
    verbosity, had_progress_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bars:
            logging.enable_progress_bar()


_VARIANT_FILE = re.compile(r"model\.([^.-]+)\.safetensors|model\.safetensors\.index\.([^.]+)\.json")


def check_model_type(folder: Path, expected: Sequence[str]) -> str:
    """Return the model type in config.json of an encoder's folder. Raises ModelLoadError when it is none of the
    expected ones."""
    config_file = folder / "config.json"
    kind = _read_config(folder).get("model_type")
    if kind not in expected:
        wanted = " or ".join(repr(name) for name in expected)
        raise ModelLoadError(f"{config_file}: model_type: expected {wanted}, got {shown(kind)}; this is not supported")
    return str(kind)


def _read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of an encoder's folder. Raises ModelLoadError."""
    path = folder / "config.json"
    values = read_json_file(path, error=ModelLoadError, advice="the model folder is incomplete", allow_constants=True)
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: expected a json object with keys, got {shown(values)}")
    return values


def load_encoder(
    folder: Path,
    model_class: type[PreTrainedModel],
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_layers: int | None = None,
    unread: tuple[str, ...] = (),
    part: Callable[[Any], Any] = lambda whole: whole,
) -> Any:
    """Load an encoder of that class, in eval mode and without gradients, from one file or shards, or a variant of
    either.

    device: the meta device to leave the weights unread: they wait (memory/waiting_weights.py), and tensors that no file
    holds are computed as usual. part: the part of the model that moves to the device; the rest is dropped. num_layers:
    how many layers of its language model are built and read, the first ones; None for all. unread: beginnings of the
    names of parts that the caller drops, and that files may lack. Files that flags name are read elsewhere, tensor by
    tensor, into what the meta device gives.

    Raises ModelLoadError when a file is missing or damaged, weights are missing, or there are no more than num_layers.
    """
    # With output_loading_info it returns a pair, contrary to its annotation.
    load: Any = model_class.from_pretrained
    check_sizes(_read_config(folder), folder / "config.json")
    try:
        with quiet_transformers():
            config = None if num_layers is None else _with_first_layers(folder, model_class, num_layers)
            if device.type == "meta":
                return part(_waiting(folder, model_class, dtype, config))
            model, loaded = load(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                variant=_variant(folder),
                local_files_only=True,
                output_loading_info=True,
            )
    except (ModelLoadError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # transformers, tokenizers and safetensors raise a dozen kinds between them, some of them plain Exceptions.
        raise ModelLoadError(f"{folder}: {model_class.__name__} cannot be loaded: {first_line(error)}") from error
    missing = sorted(name for name in loaded["missing_keys"] if not name.startswith(unread))
    if missing:
        names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ModelLoadError(f"{folder}: the weights of {model_class.__name__} are incomplete, missing: {names}")
    found = first_unusable(model)
    if found is not None:
        name, wrong = found
        raise ModelLoadError(
            f"{_file_of(folder, name)}: tensor {name} {wrong}. Copy or download the file again, or use dtype "
            "bfloat16 or float32"
        )
    return part(model.eval().requires_grad_(False)).to(device)


def encoder_class(class_name: str) -> Any:
    """Return a class of transformers. Raises ModelLoadError for one that it does not have."""
    import transformers

    found = getattr(transformers, class_name, None)
    if found is None:
        raise ModelLoadError(f"transformers {transformers.__version__} has no class {shown(class_name)}")
    return found


def encoder_of(
    folder: Path, model_class: Any, dtype: torch.dtype, state: Mapping[str, torch.Tensor]
) -> tuple[Any, list[str], list[str]]:
    """Build a model of a folder's config.json and give it numbers that its caller has read, by the names in files.
    Returns it with the names of tensors that are missing and of those that are unexpected."""
    config = model_class.config_class.from_pretrained(folder, local_files_only=True)
    if hasattr(config, "quantization_config"):
        # Of the files; these numbers are plain.
        del config.quantization_config
    model, loaded = model_class.from_pretrained(
        None, config=config, dtype=dtype, state_dict=dict(state), output_loading_info=True
    )
    return model, sorted(loaded["missing_keys"]), sorted(loaded["unexpected_keys"])


def _waiting(folder: Path, model_class: type[PreTrainedModel], dtype: torch.dtype, config: Any) -> Any:
    """Build a model whose weights wait. config: None for the folder's."""
    from transformers.initialization import no_init_weights

    build: Any = model_class
    if config is None:
        config_class: Any = model_class.config_class
        config = config_class.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"), no_init_weights():
        shapes = build(copy.deepcopy(config)).state_dict()
    # In place of a file's tensors, with the model's own names.
    state = {name: nothing_like(tensor, dtype) for name, tensor in shapes.items()}
    model = build.from_pretrained(None, config=config, dtype=dtype, state_dict=state)
    return model.eval().requires_grad_(False)


def _file_of(folder: Path, name: str) -> Path:
    """Return the file that holds a tensor; the folder where several may, because the model uses another name for it."""
    for index in folder.glob("model.safetensors.index*.json"):
        for tensor, file in read_json_file(index, error=ModelLoadError).get("weight_map", {}).items():
            if tensor.endswith(name) or name.endswith(tensor):
                return folder / str(file)
    files = list(folder.glob("model*.safetensors"))
    return files[0] if len(files) == 1 else folder


def _variant(folder: Path) -> str | None:
    """Return `fp16` and the like where weights exist only as a variant: float32 first, then bf16, then others."""
    names = [path.name for path in folder.iterdir()]
    if "model.safetensors" in names or "model.safetensors.index.json" in names:
        return None
    matches = (_VARIANT_FILE.fullmatch(name) for name in names)
    found = {match[1] or match[2] for match in matches if match}
    return min(found, key=lambda variant: ({"fp32": 0, "bf16": 1}.get(variant, 2), variant), default=None)


def _with_first_layers(folder: Path, model_class: type[PreTrainedModel], num_layers: int) -> Any:
    """Return the config of a folder, changed to the first layers of its language model."""
    config_class: Any = model_class.config_class
    config = config_class.from_pretrained(folder, local_files_only=True)
    text = config.get_text_config()
    if text.num_hidden_layers <= num_layers:
        raise ModelLoadError(
            f"{folder / 'config.json'}: num_hidden_layers: expected more than {num_layers}, got "
            f"{text.num_hidden_layers}; this is not the encoder that the transformer beside it was trained with"
        )
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = text.layer_types[:num_layers]
    return config


# Repositories of the hub that have the tokenizer of a text encoder, by `model_type` of its config.json.
_TOKENIZER_IDS = {
    "umt5": "google/umt5-xxl",
    "t5": "google/t5-v1_1-xxl",
    "clip_text_model": "openai/clip-vit-large-patch14",
    "qwen2_5_vl": "Qwen/Qwen2.5-VL-7B-Instruct",
    "qwen2_5_vl_text": "Qwen/Qwen2.5-VL-7B-Instruct",
    "qwen3": "Qwen/Qwen3-4B",
    "qwen3_vl": "Qwen/Qwen3-VL-8B-Instruct",
    "qwen3_5": "Qwen/Qwen3.5-9B",
    "qwen3_5_text": "Qwen/Qwen3.5-9B",
    "gemma3": "google/gemma-3-12b-it",
    "gemma4_unified": "google/gemma-4-12B-it",
    "mistral3": "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
}


def tokenizer_id(config: Mapping[str, Any]) -> str | None:
    """Return the repository of the hub that has the tokenizer of a text encoder with this config.json; None for one
    that is not known."""
    return _TOKENIZER_IDS.get(str(config.get("model_type")))


def tokenizer_id_beside(folder: Path) -> str | None:
    """Return tokenizer_id of the text encoder beside a tokenizer's folder."""
    config = folder.parent / folder.name.replace("tokenizer", "text_encoder").replace("processor", "text_encoder")
    return tokenizer_id(_read_config(config)) if (config / "config.json").is_file() else None


def load_tokenizer(
    folder: Path, built_by: type[PreTrainedTokenizerFast] | None = None, remedy: str = ""
) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder: its tokenizer.json, or else what `built_by` builds from vocab.json and
    merges.txt.

    remedy: what to do where a file is missing, one sentence. Raises ModelLoadError when it is missing or damaged.
    """
    from transformers import PreTrainedTokenizerFast

    files: tuple[str, ...] = ("tokenizer.json",)
    if built_by is not None and not (folder / "tokenizer.json").is_file():
        files = ("vocab.json", "merges.txt")
    for name in files:
        if not (folder / name).is_file():
            whose = tokenizer_id_beside(folder)
            of_hub = f"Its tokenizer is that of {whose}. " if whose else ""
            raise ModelLoadError(
                f"{folder / name} is missing; copy or download the whole folder. {of_hub}{remedy}".strip()
            )
    made_by = PreTrainedTokenizerFast if built_by is None or len(files) == 1 else built_by
    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerFast = made_by.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # The tokenizers library raises plain Exceptions for a damaged file.
        raise ModelLoadError(f"{folder}: the tokenizer cannot be loaded: {first_line(error)}") from error
    return tokenizer


def check_vocabulary(folder: Path, num_tokens: int, num_embeddings: int) -> None:
    """Check that the tokenizer of a folder, with `num_tokens`, has no token beyond its encoder's embeddings.

    Raises ModelLoadError.
    """
    if num_tokens > num_embeddings:
        raise ModelLoadError(
            f"{folder}: has {num_tokens} tokens, the text encoder beside it has {num_embeddings} embeddings; the "
            "two are not of the same model"
        )
