"""Loads language models as text encoders: LLaMA (Touvron et al. 2023, arXiv:2302.13971; version 3: arXiv:2407.21783),
Mistral 3, Qwen2.5-VL, Qwen3, Qwen3-VL and Qwen3.5."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.text_encoders.language_model import LanguageModelEncoder, PromptTemplate, StackedStatesEncoder
from diffusion_runtime.text_encoders.loading import check_model_type, check_vocabulary, load_encoder, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# The language models that are loaded unchanged, by `model_type` of config.json.
LanguageModel: TypeAlias = Literal["llama", "qwen3"]


def load_language_model(
    kind: LanguageModel,
    folder: AnyFolder,
    device: torch.device,
    dtype: torch.dtype,
    template: PromptTemplate,
    *,
    max_tokens: int,
    num_layers_left_out: int,
) -> LanguageModelEncoder:
    """Load `text_encoder/` and `tokenizer/` of a model folder, from safetensors and without a network.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    model, tokenizer = _load(kind, folder, device, dtype)
    return LanguageModelEncoder(
        model, tokenizer, template, max_tokens=max_tokens, num_layers_left_out=num_layers_left_out
    )


# The placeholder token of a picture; text prompts have none.
_IMAGE_TOKEN = "[IMG]"


def mistral3_template(system_message: str) -> PromptTemplate:
    """Return Mistral's chat format (V7-Tekken), written here: a folder's own template is a program (Jinja)."""
    return PromptTemplate(f"<s>[SYSTEM_PROMPT]{system_message}[/SYSTEM_PROMPT][INST]", "[/INST]", num_cropped=0)


def load_mistral3(
    folder: AnyFolder,
    device: torch.device,
    dtype: torch.dtype,
    template: PromptTemplate,
    *,
    max_tokens: int,
    layers: tuple[int, ...],
) -> StackedStatesEncoder:
    """Load `text_encoder/` and `tokenizer/` of a model folder, from safetensors and without a network; the output layer
    and the layers after the last of `layers` are not read, and the vision half stays on the CPU and is dropped.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / "text_encoder", ("mistral3",))
    # Imported late: transformers takes seconds.
    from transformers.models.mistral3.modeling_mistral3 import Mistral3Model

    tokenizer = load_tokenizer(folder / "tokenizer")
    if "padding_side" not in tokenizer.init_kwargs:
        # The class that published folders name pads on that side by default, so their files do not set it.
        tokenizer.padding_side = "left"
    model = load_encoder(
        folder / "text_encoder",
        Mistral3Model,
        device,
        dtype,
        num_layers=max(layers),
        unread=("vision_tower.", "multi_modal_projector.", "language_model.norm."),
        part=lambda whole: whole.language_model,
    )
    check_vocabulary(folder / "tokenizer", len(tokenizer), model.config.vocab_size)
    return StackedStatesEncoder(
        model, tokenizer, template, layers=layers, max_tokens=max_tokens, removed=(_IMAGE_TOKEN,)
    )


# The whole model with its vision half, or the language model alone.
_WHOLE, _TEXT_ALONE = "qwen2_5_vl", "qwen2_5_vl_text"


def load_qwen2_5_vl(
    folder: AnyFolder,
    device: torch.device,
    dtype: torch.dtype,
    template: PromptTemplate,
    *,
    max_tokens: int,
    num_layers_left_out: int,
    encoder: type[LanguageModelEncoder] = LanguageModelEncoder,
) -> LanguageModelEncoder:
    """Load `text_encoder/` and `tokenizer/` of a model folder, from safetensors and without a network.

    Text has the same position on all three axes of the model, so that the language model alone computes the same as the
    whole one. Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    kind = check_model_type(folder / "text_encoder", (_WHOLE, _TEXT_ALONE))
    # Imported late: transformers takes seconds.
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

    tokenizer = load_tokenizer(folder / "tokenizer", Qwen2Tokenizer)
    if kind == _WHOLE:
        # Vision and output layers stay on the CPU.
        model = load_encoder(
            folder / "text_encoder",
            modeling.Qwen2_5_VLForConditionalGeneration,
            device,
            dtype,
            part=lambda whole: whole.model.language_model,
        )
    else:
        model = load_encoder(folder / "text_encoder", modeling.Qwen2_5_VLTextModel, device, dtype)
    check_vocabulary(folder / "tokenizer", len(tokenizer), model.config.vocab_size)
    return encoder(model, tokenizer, template, max_tokens=max_tokens, num_layers_left_out=num_layers_left_out)


def load_qwen3_vl(
    folder: AnyFolder,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokenizer_in: str = "tokenizer",
    sees: bool = False,
    num_layers: int | None = None,
) -> tuple[Any, PreTrainedTokenizerFast]:
    """Load the language model of the Qwen3-VL in `text_encoder/` of a model folder, and its tokenizer, from safetensors
    and without a network. tokenizer_in: the folder that has it. sees: with its vision half, for prompts about pictures.
    num_layers: the first ones of the language model, None for all.

    Text has the same position on all three axes of the model, so that the language model alone computes the same as the
    whole one. Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / "text_encoder", ("qwen3_vl",))
    # Imported late: transformers takes seconds.
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration

    tokenizer = load_tokenizer(folder / tokenizer_in, Qwen2Tokenizer)
    # Vision and output layers stay on the CPU. Callers drop the last norm, which ComfyUI's files of fewer layers lack.
    model = load_encoder(
        folder / "text_encoder",
        Qwen3VLForConditionalGeneration,
        device,
        dtype,
        num_layers=num_layers,
        unread=("lm_head.", "model.language_model.norm."),
        part=lambda whole: whole.model if sees else whole.model.language_model,
    )
    check_vocabulary(folder / tokenizer_in, len(tokenizer), model.config.get_text_config().vocab_size)
    return model, tokenizer


def load_qwen3_5(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> tuple[Any, PreTrainedTokenizerFast]:
    """Load the language model of the Qwen3.5 in `text_encoder/` of a model folder, and its tokenizer, from safetensors
    and without a network. Most of its layers are linear attention (Gated DeltaNet, arXiv:2412.06464), which
    transformers computes.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    kind = check_model_type(folder / "text_encoder", ("qwen3_5", "qwen3_5_text"))
    # Imported late: transformers takes seconds.
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    tokenizer = load_tokenizer(folder / "tokenizer", Qwen2Tokenizer)
    if kind == "qwen3_5":
        # Vision and output layers stay on the CPU.
        model = load_encoder(
            folder / "text_encoder",
            modeling.Qwen3_5ForConditionalGeneration,
            device,
            dtype,
            unread=("lm_head.", "mtp."),
            part=lambda whole: whole.model.language_model,
        )
    else:
        model = load_encoder(folder / "text_encoder", modeling.Qwen3_5TextModel, device, dtype)
    check_vocabulary(folder / "tokenizer", len(tokenizer), model.config.vocab_size)
    return model, tokenizer


def load_stacked_qwen3(
    folder: AnyFolder,
    device: torch.device,
    dtype: torch.dtype,
    template: PromptTemplate,
    *,
    max_tokens: int,
    layers: tuple[int, ...],
) -> StackedStatesEncoder:
    """Load a language model like load_language_model, for transformers that read several layers; those after the last
    of them are not read.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    model, tokenizer = _load("qwen3", folder, device, dtype, num_layers=max(layers))
    return StackedStatesEncoder(model, tokenizer, template, layers=layers, max_tokens=max_tokens)


def _load(
    kind: LanguageModel, folder: AnyFolder, device: torch.device, dtype: torch.dtype, *, num_layers: int | None = None
) -> tuple[Any, PreTrainedTokenizerFast]:
    check_model_type(folder / "text_encoder", (kind,))
    model_class, built_by = _classes(kind)
    tokenizer = load_tokenizer(folder / "tokenizer", built_by)
    model = load_encoder(folder / "text_encoder", model_class, device, dtype, num_layers=num_layers)
    check_vocabulary(folder / "tokenizer", len(tokenizer), model.config.vocab_size)
    return model, tokenizer


def _classes(kind: LanguageModel) -> tuple[type[Any], type[PreTrainedTokenizerFast] | None]:
    """Return the transformers classes of the model, and of what builds its tokenizer where there is no tokenizer.json;
    None for no such builder."""
    # Imported late: transformers takes seconds.
    if kind == "llama":
        from transformers.models.llama.modeling_llama import LlamaModel

        return LlamaModel, None
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

    return Qwen3Model, Qwen2Tokenizer
