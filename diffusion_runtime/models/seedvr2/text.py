"""Text of SeedVR2: the one embedding that the models were trained with, which this package has; no prompt is read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.seedvr2.config import read_transformer_config
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.weights.tensor_files import SafetensorsFile

# From github.com/ByteDance-Seed/SeedVR, pos_emb.pt (Apache License 2.0): bfloat16 [58, 5120].
_PUBLISHED = Path(__file__).parents[2] / "assets" / "seedvr2_text.safetensors"
# A folder with a text of its own has it beside its json.
FILE_NAME = "text_embedding.safetensors"
_TENSOR = "positive"
NUM_TOKENS = 58


class SeedVR2Text(TextEncoder):
    """Encoder of any prompt to the one text. embedding: [tokens, dim]."""

    library = "torch"
    implementation = "one text of the package, no encoder"

    def __init__(self, embedding: torch.Tensor) -> None:
        self._embedding = embedding
        self.max_tokens = embedding.shape[0]

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Return the text for each prompt."""
        return Conditions.of(self._embedding.expand(len(prompts), -1, -1))


def text_path(folder: AnyFolder) -> Path:
    """Return the file of the text: the folder's own, or the package's."""
    own = folder / FILE_NAME
    return own if own.is_file() else _PUBLISHED


def load_text(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> SeedVR2Text:
    """Load the text of a folder. Raises ModelLoadError for a file that does not hold one of the transformer's width."""
    path, width = text_path(folder), read_transformer_config(folder).text_dim
    with closing(SafetensorsFile(path)) as file:
        head = file.heads.get(_TENSOR)
        if head is None or len(head.shape) != 2 or head.shape[1] != width:
            found = "no such tensor" if head is None else list(head.shape)
            raise ModelLoadError(f"{path}: tensor {_TENSOR!r}: expected [tokens, {width}], got {found}")
        return SeedVR2Text(file.read(_TENSOR).to(device, dtype))
