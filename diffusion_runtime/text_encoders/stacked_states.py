"""Hidden states of several layers of a causal language model, concatenated, as text embeddings.

Prompts are padded to one length, and the transformer attends to the padding, as some were trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.language_model import PromptTemplate
from diffusion_runtime.text_encoders.tokenized import TokenizedPrompt, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class StackedStatesEncoder(TextEncoder):
    """The first layers of a transformers decoder, without its final norm.

    model: a bare decoder, with as many layers as the last of `layers`. layers: the ones whose outputs are read, counted
    from 1. template: includes every special token, and nothing of it is cropped. removed: texts that are removed from
    prompts, such as the token for a picture. max_tokens: of a prompt with its template and padding. Padding is on the
    side that the tokenizer sets; the language model masks it.
    """

    library = "transformers"

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerFast,
        template: PromptTemplate,
        *,
        layers: tuple[int, ...],
        max_tokens: int,
        removed: tuple[str, ...] = (),
    ) -> None:
        assert template.num_cropped == 0
        model.norm = torch.nn.Identity()
        self.model = model
        self.tokenizer = tokenizer
        self.template = template
        self.layers = layers
        self.max_tokens = max_tokens
        self.removed = removed
        self.implementation = str(model.config._attn_implementation)

    @property
    def dim(self) -> int:
        """Size of the embedding of a token."""
        return len(self.layers) * int(self.model.config.hidden_size)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode prompts, each padded to max_tokens."""
        rows = [self._tokenize(prompt) for prompt in prompts]
        ids = torch.full((len(rows), self.max_tokens), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            first = self.max_tokens - len(row.ids) if self.tokenizer.padding_side == "left" else 0
            place = slice(first, first + len(row.ids))
            ids[index, place] = torch.tensor(row.ids, dtype=torch.long)
            mask[index, place] = 1
        device = self.model.device
        output = self.model(
            input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False, output_hidden_states=True
        )
        return Conditions(
            # The first hidden state is the input of the first layer.
            embeddings=torch.cat([output.hidden_states[layer] for layer in self.layers], dim=-1),
            lengths=(self.max_tokens,) * len(rows),
            unknown_words=tuple(row.unknown_words for row in rows),
            num_cut_tokens=tuple(row.num_cut_tokens for row in rows),
        )

    def _tokenize(self, prompt: str) -> TokenizedPrompt:
        for text in self.removed:
            prompt = prompt.replace(text, "")
        first, text = len(self.template.before), self.template.before + prompt + self.template.after
        stop = first + len(prompt)
        return tokenize(self.tokenizer, text, self.max_tokens, first, stop, add_special_tokens=False)
