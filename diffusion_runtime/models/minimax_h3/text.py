"""Text of MiniMax-H3: a hidden state in the middle of Qwen3-VL-32B, of a prompt about the images of the clip."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.models.minimax_h3.keyframes import keyframes_of
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.language_model import PromptTemplate
from diffusion_runtime.text_encoders.language_model_loading import load_qwen3_vl
from diffusion_runtime.text_encoders.picture_language_model import (
    PictureLanguageEncoder,
    read_preparation_of_pictures,
)

# Layers of the language model before the state that the transformer was trained with, of 64.
NUM_LAYERS = 50
# Tokens of a prompt. Its authors' pipeline has no limit.
MAX_TOKENS = 2048
# Before the picture of a number. The prompt has no template.
_LABEL = "<Picture {}>: "


class MiniMaxH3TextEncoder(PictureLanguageEncoder):
    """Encoder of a prompt after the images of the clip, at the clip's size."""

    def of_request(self, request: GenerationRequest) -> TextEncoder:
        images = keyframes_of(request)
        return self.of_images(images) if images else self

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode prompts. An empty prompt is a space: the transformer attends to one token or more."""
        return super().encode([prompt or " " for prompt in prompts])


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> MiniMaxH3TextEncoder:
    """Load the first layers of `text_encoder/` of a model folder with its vision half, and `tokenizer/` and the
    preprocessing of pictures in `processor/`. Raises ModelLoadError."""
    model, tokenizer = load_qwen3_vl(folder, device, dtype, sees=True, num_layers=NUM_LAYERS)
    # A state between two layers.
    model.language_model.norm = torch.nn.Identity()
    return MiniMaxH3TextEncoder(
        model,
        tokenizer,
        read_preparation_of_pictures(folder),
        PromptTemplate("", "", num_cropped=0),
        lambda size: size,
        label=_LABEL,
        max_tokens=MAX_TOKENS,
    )
