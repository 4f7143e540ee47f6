"""Gemma 3 and Gemma 4 text encoders (Gemma Team 2025, arXiv:2503.19786): the hidden states of every layer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.text_encoders.loading import check_model_type, check_vocabulary, load_encoder, load_tokenizer
from diffusion_runtime.text_encoders.tokenized import TokenizedPrompt, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# By model type: where transformers has the class, its name, and whether it is the whole model with the halves that see
# and hear, of which the language model is used. Gemma 4 of 12 B is "unified".
_CLASSES = {
    "gemma3": ("gemma3", "Gemma3ForConditionalGeneration", True),
    "gemma3_text": ("gemma3", "Gemma3TextModel", False),
    "gemma4_unified": ("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", True),
    "gemma4_unified_text": ("gemma4_unified", "Gemma4UnifiedTextModel", False),
}


class GemmaEncoder:
    """Encoder that returns the states of every layer. max_tokens: capacity for one text, its first token included. dim:
    of a state; num_states: per token, the embedding and one per layer."""

    library = "transformers"

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerFast, max_tokens: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.dim: int = model.config.hidden_size
        self.num_states: int = model.config.num_hidden_layers + 1
        self.implementation = str(model.config._attn_implementation)

    @torch.inference_mode()
    def encode(self, text: str) -> tuple[torch.Tensor, TokenizedPrompt]:
        """Return the states of each token [tokens, dim, num_states], the last one through the final norm, and the
        tokens. Longer texts are truncated."""
        row = tokenize(self.tokenizer, text, self.max_tokens)
        ids = torch.tensor([row.ids], dtype=torch.long, device=self.model.device)
        output = self.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        return torch.stack(output.hidden_states, dim=-1)[0], row


def load_gemma(folder: AnyFolder, device: torch.device, dtype: torch.dtype, *, max_tokens: int) -> GemmaEncoder:
    """Load `text_encoder/` and `tokenizer/` of a model folder, from safetensors and without a network.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    module, name, is_whole = _CLASSES[check_model_type(folder / "text_encoder", tuple(_CLASSES))]
    # Imported late: transformers takes seconds.
    model_class = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    tokenizer = load_tokenizer(folder / "tokenizer")
    model = load_encoder(
        folder / "text_encoder",
        model_class,
        device,
        dtype,
        # What sees, what hears and the output layer stay on the CPU.
        part=(lambda whole: whole.model.language_model) if is_whole else lambda whole: whole,
    )
    check_vocabulary(folder / "tokenizer", len(tokenizer), model.config.vocab_size)
    return GemmaEncoder(model, tokenizer, max_tokens)
