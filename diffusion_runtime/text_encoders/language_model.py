"""Hidden states of a causal language model (LLM) as text embeddings, of one layer or several, with a prompt template
whose own first tokens are cropped.

For states of several layers, prompts are padded to one length or to a multiple of some, and the transformer attends to
the padding, as some were trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.tokenized import TokenizedPrompt, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class PromptTemplate:
    """Template around a prompt. before, after: its text around the prompt. num_cropped: tokens at the beginning, the
    tokenizer's own first one included, whose embeddings the transformer does not get."""

    before: str
    after: str
    num_cropped: int


class LanguageModelEncoder(TextEncoder):
    """The decoder layers of a transformers language model, or the first ones without its final norm.

    model: a bare decoder with `layers` and `norm`. num_layers_left_out: how many of the last ones are dropped, and the
    norm with them; 0 keeps both. max_tokens: of a prompt with the template's text after it. keeps_padding: whether
    every prompt is padded to max_tokens and the transformer attends to the padding, as it was trained.
    """

    library = "transformers"
    keeps_padding: ClassVar[bool] = False

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerFast,
        template: PromptTemplate,
        *,
        max_tokens: int,
        num_layers_left_out: int,
    ) -> None:
        if num_layers_left_out:
            # The layers after the one whose output is read: for a model of 32, a sixteenth of the time and the memory.
            model.layers = model.layers[: len(model.layers) - num_layers_left_out]
            model.norm = torch.nn.Identity()
        self.model = model
        self.tokenizer = tokenizer
        self.template = template
        self.max_tokens = max_tokens
        self.implementation = str(model.config._attn_implementation)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode prompts. Padding comes last and is masked; a causal model looks at nothing after a token, so padding
        to the longest prompt is enough where the padding is not kept."""
        template, rows = self.template, [self.tokenized(prompt) for prompt in prompts]
        room = self.max_tokens + template.num_cropped
        # At least one: a model without tokens of its own for the beginning has none of an empty prompt.
        num_tokens = room if self.keeps_padding else max(1, *(len(row.ids) for row in rows))
        ids = torch.full((len(rows), num_tokens), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.long)
            mask[index, : len(row.ids)] = 1
        device = self.model.device
        states = self.hidden_states(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
        hidden = states[:, template.num_cropped :]
        ends = [room if self.keeps_padding else len(row.ids) for row in rows]
        lengths = tuple(max(0, end - template.num_cropped) for end in ends)
        embeddings = torch.zeros_like(hidden)
        for index, length in enumerate(lengths):
            embeddings[index, :length] = hidden[index, :length]
        return Conditions(
            embeddings=embeddings,
            lengths=lengths,
            unknown_words=tuple(row.unknown_words for row in rows),
            num_cut_tokens=tuple(row.num_cut_tokens for row in rows),
        )

    def hidden_states(self, **inputs: Any) -> torch.Tensor:
        """Return what a transformer reads of every token, [batch, tokens, dim]. inputs: of the model."""
        states: torch.Tensor = self.model(**inputs).last_hidden_state
        return states

    def tokenized(self, prompt: str) -> TokenizedPrompt:
        """Tokenize a prompt in its template."""
        template, first = self.template, len(self.template.before)
        text, room = template.before + prompt + template.after, self.max_tokens + template.num_cropped
        return tokenize(self.tokenizer, text, room, first, first + len(prompt))


class StackedStatesEncoder(TextEncoder):
    """The first layers of a transformers decoder, without its final norm.

    model: a bare decoder, with as many layers as the last of `layers`. layers: the ones whose outputs are read, counted
    from 1. template: includes every special token, and nothing of it is cropped. removed: texts that are removed from
    prompts, such as the token for a picture. max_tokens: of a prompt with its template and padding. pad_multiple:
    prompts are padded to the next multiple of it, on the right and at position 1, as in training; None: to max_tokens,
    on the side that the tokenizer sets. The language model masks the padding.
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
        pad_multiple: int | None = None,
    ) -> None:
        assert template.num_cropped == 0
        model.norm = torch.nn.Identity()
        self.model = model
        self.tokenizer = tokenizer
        self.template = template
        self.layers = layers
        self.max_tokens = max_tokens
        self.removed = removed
        self.pad_multiple = pad_multiple
        self.implementation = str(model.config._attn_implementation)

    @property
    def dim(self) -> int:
        """Size of the embedding of a token."""
        return len(self.layers) * int(self.model.config.hidden_size)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode prompts, each with its padding."""
        rows = [self._tokenize(prompt) for prompt in prompts]
        lengths = tuple(self._padded(len(row.ids)) for row in rows)
        ids = torch.full((len(rows), max(lengths)), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        is_left = self.pad_multiple is None and self.tokenizer.padding_side == "left"
        for index, row in enumerate(rows):
            first = self.max_tokens - len(row.ids) if is_left else 0
            place = slice(first, first + len(row.ids))
            ids[index, place] = torch.tensor(row.ids, dtype=torch.long)
            mask[index, place] = 1
        device = self.model.device
        places = {}
        if self.pad_multiple is not None:
            places["position_ids"] = torch.arange(ids.shape[1]).where(mask > 0, 1).to(device)
        output = self.model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            use_cache=False,
            output_hidden_states=True,
            **places,
        )
        return Conditions(
            # The first hidden state is the input of the first layer.
            embeddings=torch.cat([output.hidden_states[layer] for layer in self.layers], dim=-1),
            lengths=lengths,
            unknown_words=tuple(row.unknown_words for row in rows),
            num_cut_tokens=tuple(row.num_cut_tokens for row in rows),
        )

    def _padded(self, num_tokens: int) -> int:
        """Return the number of tokens of a prompt with its padding."""
        if self.pad_multiple is None:
            return self.max_tokens
        return min(num_tokens + -num_tokens % self.pad_multiple, self.max_tokens)

    def _tokenize(self, prompt: str) -> TokenizedPrompt:
        for text in self.removed:
            prompt = prompt.replace(text, "")
        first, text = len(self.template.before), self.template.before + prompt + self.template.after
        stop = first + len(prompt)
        return tokenize(self.tokenizer, text, self.max_tokens, first, stop, add_special_tokens=False)
