"""Text encoder of LongCat-Image: the last hidden states of Qwen2.5-VL for 512 tokens, padding included.

What stands between quotation marks is meant to be written in the image, and is tokenised character by character.
"""

from __future__ import annotations

import dataclasses
import re

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.text_encoders.language_model import LanguageModelEncoder, PromptTemplate
from diffusion_runtime.text_encoders.language_model_loading import load_qwen2_5_vl
from diffusion_runtime.text_encoders.tokenized import TokenizedPrompt, tokenize

# Nothing follows the prompt: the states of the authors' suffix are dropped, and a causal model looks at nothing after a
# token. What comes before is cropped as well, as many tokens as the tokenizer makes of it.
TEMPLATE = PromptTemplate(
    "<|im_start|>system\nAs an image captioning expert, generate a descriptive text prompt based on an image content, "
    "suitable for input to a text-to-image model.<|im_end|>\n<|im_start|>user\n",
    after="",
    num_cropped=0,
)
MAX_TOKENS = 512
_APOSTROPHE_IN_WORD = re.compile(r"[a-zA-Z]+'[a-zA-Z]+")
_QUOTATION = re.compile(r"""'[^']*'|"[^"]*"|‘[^‘’]*’|“[^“”]*”""")  # noqa: RUF001


def parts_of(prompt: str) -> list[str]:
    """Return the parts of a prompt that are tokenised apart: the texts between quotations, and every character of a
    quotation, its marks included."""
    # As long as the prompt, so that places are the same.
    marked = _APOSTROPHE_IN_WORD.sub(lambda word: word[0].replace("'", "_"), prompt)
    parts, end = [], 0
    for quotation in _QUOTATION.finditer(marked):
        parts += [prompt[end : quotation.start()], *prompt[quotation.start() : quotation.end()]]
        end = quotation.end()
    return [part for part in (*parts, prompt[end:]) if part]


class LongCatImageTextEncoder(LanguageModelEncoder):
    """Encoder of prompts with quotations."""

    keeps_padding = True

    def tokenized(self, prompt: str) -> TokenizedPrompt:
        rows = [tokenize(self.tokenizer, part, MAX_TOKENS) for part in parts_of(prompt)]
        ids = [token for row in rows for token in row.ids]
        unknown = dict.fromkeys(word for row in rows for word in row.unknown_words)
        num_cut = max(0, len(ids) - MAX_TOKENS) + sum(row.num_cut_tokens for row in rows)
        before = self.tokenizer(self.template.before)["input_ids"]
        return TokenizedPrompt((*before, *ids[:MAX_TOKENS]), tuple(unknown), num_cut)


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> LanguageModelEncoder:
    """Load `text_encoder/` and `tokenizer/` of a model folder. Raises ModelLoadError."""
    encoder = load_qwen2_5_vl(
        folder, device, dtype, TEMPLATE, max_tokens=MAX_TOKENS, num_layers_left_out=0, encoder=LongCatImageTextEncoder
    )
    num_cropped = len(encoder.tokenizer(TEMPLATE.before)["input_ids"])
    encoder.template = dataclasses.replace(TEMPLATE, num_cropped=num_cropped)
    return encoder
