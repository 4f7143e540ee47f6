"""Text of MiniMax-H3: a hidden state in the middle of Qwen3-VL-32B, of a prompt about the images or references of the
clip."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.media.media_files import media_file
from diffusion_runtime.models.minimax_h3.geometry import MiniMaxH3Geometry, read_geometry
from diffusion_runtime.models.minimax_h3.keyframes import keyframes_of
from diffusion_runtime.models.minimax_h3.references import (
    Preparations,
    presented,
    read_preparations,
    read_references,
)
from diffusion_runtime.models.reference_media import FIELD
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.language_model import PromptTemplate
from diffusion_runtime.text_encoders.language_model_loading import load_qwen3_vl
from diffusion_runtime.text_encoders.picture_language_model import PictureLanguageEncoder
from diffusion_runtime.text_encoders.picture_patches import PicturePatches
from diffusion_runtime.text_encoders.tokenized import TokenizedPrompt, tokenize

# Layers of the language model before the state that the transformer was trained with, of 64.
NUM_LAYERS = 50
# Tokens of a prompt. Its authors' pipeline has no limit.
MAX_TOKENS = 2048
# Before the picture of a number. The prompt has no template.
_LABEL = "<Picture {}>: "


class MiniMaxH3TextEncoder(PictureLanguageEncoder):
    """Encoder of a prompt after the images of the clip, at the clip's size, or after its references. model, tokenizer:
    of Qwen3-VL. geometry, preparations: sizes of references, and how the model sees them."""

    def __init__(self, model: Any, tokenizer: Any, geometry: MiniMaxH3Geometry, preparations: Preparations) -> None:
        super().__init__(
            model,
            tokenizer,
            preparations.images,
            PromptTemplate("", "", num_cropped=0),
            lambda size: size,
            label=_LABEL,
            max_tokens=MAX_TOKENS,
        )
        self._geometry = geometry
        self._preparations = preparations
        # What is before the prompt, tokenized one by one.
        self._texts: tuple[str, ...] = ()

    def of_request(self, request: GenerationRequest) -> TextEncoder:
        if request.references is None:
            images = keyframes_of(request)
            return self.of_images(images) if images else self
        read = read_references(self._geometry, request, sample_rate=None)
        files = [media_file(path, FIELD) for path in image_paths(request, FIELD)]
        shown = [(file, each.frames) for file, each in zip(files, read, strict=True)]
        return self._about(*presented(shown, self._preparations))

    def _about(self, texts: Sequence[str], pictures: Sequence[PicturePatches]) -> Self:
        other = copy.copy(self)
        other._texts, other._pictures = tuple(texts), list(pictures)
        return other

    def tokenized(self, prompts: Sequence[str]) -> list[TokenizedPrompt]:
        """Return the tokens of prompts, those of the texts before them included."""
        if not self._texts:
            return super().tokenized(prompts)
        settings: dict[str, Any] = {"add_special_tokens": False, "verbose": False}
        before = tuple(token for text in self._texts for token in self.tokenizer(text, **settings)["input_ids"])
        rows = [tokenize(self.tokenizer, prompt, self.max_tokens) for prompt in prompts]
        return [dataclasses.replace(row, ids=(*before, *row.ids)) for row in rows]

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode prompts. An empty prompt is a space: the transformer attends to one token or more."""
        return super().encode([prompt or " " for prompt in prompts])


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> MiniMaxH3TextEncoder:
    """Load the first layers of `text_encoder/` of a model folder with its vision half, and `tokenizer/` and the
    preprocessing of pictures in `processor/`. Raises ModelLoadError."""
    model, tokenizer = load_qwen3_vl(folder, device, dtype, sees=True, num_layers=NUM_LAYERS)
    # A state between two layers.
    model.language_model.norm = torch.nn.Identity()
    return MiniMaxH3TextEncoder(model, tokenizer, read_geometry(folder), read_preparations(folder))
