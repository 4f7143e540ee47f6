"""Text encoder of Krea 2: hidden states of several layers of Qwen3-VL, side by side, for Qwen-Image's template.

In training the padding stood between the prompt and the end of the template. It has no position and nothing attends to
it, so that prompts without any give the same states.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.krea2.config import read_text_layers, read_transformer_config
from diffusion_runtime.models.qwen_image.family import MAX_TOKENS, TEMPLATE
from diffusion_runtime.text_encoders.language_model import LanguageModelEncoder
from diffusion_runtime.text_encoders.language_model_loading import load_qwen3_vl
from diffusion_runtime.text_encoders.tokenized import TokenizedPrompt, tokenize


class Krea2TextEncoder(LanguageModelEncoder):
    """Encoder of the prompt as a user's message. layers: of the model whose outputs are read, counted from 1."""

    layers: tuple[int, ...] = ()

    def hidden_states(self, **inputs: Any) -> torch.Tensor:
        """Return the states of all `layers`, [batch, tokens, layers * dim]."""
        states = self.model(**inputs, output_hidden_states=True).hidden_states
        return torch.cat([states[layer] for layer in self.layers], dim=-1)

    def tokenized(self, prompt: str) -> TokenizedPrompt:
        """Tokenize a prompt in its template, whose end stays where the prompt is too long."""
        before, after = self.template.before, self.tokenizer(self.template.after)["input_ids"]
        room = self.max_tokens + self.template.num_cropped - len(after)
        row = tokenize(self.tokenizer, before + prompt, room, len(before))
        return dataclasses.replace(row, ids=(*row.ids, *after))


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> Krea2TextEncoder:
    """Load `text_encoder/` and `tokenizer/` of a model folder, without the layers after the last that is read. Raises
    ModelLoadError also where the encoder is not of the transformer's width."""
    layers = read_text_layers(folder)
    model, tokenizer = load_qwen3_vl(folder, device, dtype, num_layers=max(layers))
    width, expected = int(model.config.hidden_size), read_transformer_config(folder).text.dim
    if width != expected:
        raise ModelLoadError(
            f"{folder / 'text_encoder'}: its layers make {width} numbers per token, and the transformer takes "
            f"text_hidden_dim, {expected}; the two are not of the same model"
        )
    # The output of the last layer is read as that of the others, before a norm.
    model.norm = torch.nn.Identity()
    encoder = Krea2TextEncoder(model, tokenizer, TEMPLATE, max_tokens=MAX_TOKENS, num_layers_left_out=0)
    encoder.layers = layers
    return encoder
