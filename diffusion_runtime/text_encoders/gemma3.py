"""Gemma 3 text encoder (Gemma Team 2025, arXiv:2503.19786): the hidden states of every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.text_encoders.loading import check_model_type, check_vocabulary, load_encoder, load_tokenizer
from diffusion_runtime.text_encoders.tokenized import TokenizedPrompt, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The whole model with its vision half, or the language model alone.
_WHOLE, _TEXT_ALONE = "gemma3", "gemma3_text"


class Gemma3Encoder:
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


def load_gemma3(folder: AnyFolder, device: torch.device, dtype: torch.dtype, *, max_tokens: int) -> Gemma3Encoder:
    """Load `text_encoder/` and `tokenizer/` of a model folder, from safetensors and without a network.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    kind = check_model_type(folder / "text_encoder", (_WHOLE, _TEXT_ALONE))
    # Imported late: transformers takes seconds.
    from transformers.models.gemma3 import modeling_gemma3 as modeling

    tokenizer = load_tokenizer(folder / "tokenizer")
    if kind == _WHOLE:
        # Vision and output layers stay on the CPU.
        model = load_encoder(
            folder / "text_encoder",
            modeling.Gemma3ForConditionalGeneration,
            device,
            dtype,
            part=lambda whole: whole.model.language_model,
        )
    else:
        model = load_encoder(folder / "text_encoder", modeling.Gemma3TextModel, device, dtype)
    check_vocabulary(folder / "tokenizer", len(tokenizer), model.config.vocab_size)
    return Gemma3Encoder(model, tokenizer, max_tokens)
