"""CLIP text encoder (Radford et al. 2021, arXiv:2103.00020), for one pooled vector per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.text_encoders.interface import EncoderCut
from diffusion_runtime.text_encoders.loading import check_model_type, check_vocabulary, load_encoder, load_tokenizer
from diffusion_runtime.text_encoders.tokenized import tokenize

if TYPE_CHECKING:
    from transformers import CLIPTextModel, PreTrainedTokenizerFast


class CLIPPooledEncoder:
    """Encoder to the state of a prompt's end token. max_tokens: capacity, two special tokens included."""

    library = "transformers"

    def __init__(self, model: CLIPTextModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens: int = model.config.max_position_embeddings
        self.implementation = str(model.config._attn_implementation)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> tuple[torch.Tensor, EncoderCut]:
        """Encode to [batch, dim] and report truncation. In a causal model padding after the end has no effect."""
        rows = [tokenize(self.tokenizer, prompt, self.max_tokens) for prompt in prompts]
        padding = self.tokenizer.pad_token_id
        ids = torch.full((len(rows), max(len(row.ids) for row in rows)), 0 if padding is None else padding)
        for index, row in enumerate(rows):
            ids[index, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.long)
        pooled: torch.Tensor = self.model(ids.to(self.model.device)).pooler_output
        return pooled, EncoderCut("CLIP", tuple(row.num_cut_tokens for row in rows), self.max_tokens)


def load_clip(
    folder: AnyFolder,
    device: torch.device,
    dtype: torch.dtype,
    *,
    encoder: str = "text_encoder_2",
    tokenizer: str = "tokenizer_2",
) -> CLIPPooledEncoder:
    """Load CLIP from two components of a model folder, from safetensors and without a network.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / encoder, ("clip_text_model", "clip"))
    # Imported late: transformers takes seconds.
    from transformers.models.clip.modeling_clip import CLIPTextModel
    from transformers.models.clip.tokenization_clip import CLIPTokenizer

    words = load_tokenizer(folder / tokenizer, CLIPTokenizer)
    model = load_encoder(folder / encoder, CLIPTextModel, device, dtype)
    check_vocabulary(folder / tokenizer, len(words), model.config.vocab_size)
    return CLIPPooledEncoder(model, words)
