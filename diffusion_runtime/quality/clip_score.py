"""CLIP score: how well frames fit their prompt, by a CLIP model of transformers (Hessel et al., arXiv:2104.08718).

Read from a folder of safetensors; nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch

from diffusion_runtime.errors import ModelLoadError, first_line, shown
from diffusion_runtime.text_encoders.image_preparation import read_preparation
from diffusion_runtime.untrusted.json_text import read_json_file

# Of a clip, evenly spaced: neighbouring frames score the same.
MAX_FRAMES = 8
_FILES = ("config.json", "preprocessor_config.json", "tokenizer_config.json")


class ClipScore:
    """100 x the cosine of a frame's and the prompt's embeddings, at least 0, mean over up to MAX_FRAMES frames.

    folder: of a CLIP model as transformers writes it, with its tokenizer and preprocessor_config.json. device: where it
    runs. Raises ModelLoadError for a folder that holds none, and for weights other than safetensors.
    """

    def __init__(self, folder: str, device: str = "cpu") -> None:
        path = Path(folder)
        for name in _FILES:
            if not (path / name).is_file():
                raise ModelLoadError(
                    f"--clip-path: {path} has no {name}; give a folder of a CLIP model as transformers saves it, "
                    "such as a copy of openai/clip-vit-base-patch32"
                )
        if not any(path.glob("*.safetensors")):
            raise ModelLoadError(f"--clip-path: {path} has no .safetensors; pickled weights are not read")
        config: Any = read_json_file(path / "config.json", error=ModelLoadError)
        kind = config.get("model_type") if isinstance(config, dict) else None
        if kind != "clip":
            raise ModelLoadError(f"--clip-path: {path}: expected model_type 'clip' in config.json, got {shown(kind)}")
        self._preparation = read_preparation(path / "preprocessor_config.json")
        self._device = device
        self._model, self._tokenizer = _load(path)
        self._model = self._model.to(device)
        self._max_tokens = int(self._model.config.text_config.max_position_embeddings)
        self._texts: dict[str, torch.Tensor] = {}

    @torch.inference_mode()
    def __call__(self, frames: numpy.ndarray, prompt: str) -> float:
        """frames: uint8 [num_frames, height, width, 3]."""
        count = min(MAX_FRAMES, len(frames))
        indexes = numpy.linspace(0, len(frames) - 1, count).round().astype(int)
        pictures = torch.cat([self._preparation.prepare(torch.from_numpy(frames[index])) for index in indexes])
        seen = _unit(_embedding(self._model.get_image_features(pixel_values=pictures.to(self._device))))
        cosines = (seen * self._text(prompt)).sum(-1)
        return float(100 * cosines.clamp(min=0).mean())

    def _text(self, prompt: str) -> torch.Tensor:
        if prompt not in self._texts:
            tokens = self._tokenizer(prompt, return_tensors="pt", truncation=True, max_length=self._max_tokens)
            found = self._model.get_text_features(**tokens.to(self._device))
            self._texts[prompt] = _unit(_embedding(found))
        return self._texts[prompt]


def _load(path: Path) -> tuple[Any, Any]:
    from transformers import AutoTokenizer, CLIPModel

    try:
        model = CLIPModel.from_pretrained(path, local_files_only=True, use_safetensors=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelLoadError(f"--clip-path: {path} cannot be read as a CLIP model: {first_line(error)}") from error
    # Methods of nn.Module: transformers' wrappers have no signatures.
    return torch.nn.Module.eval(torch.nn.Module.to(model, torch.float32)), tokenizer


def _embedding(found: Any) -> torch.Tensor:
    # transformers 5 wraps the projected embedding in an output object.
    return found if isinstance(found, torch.Tensor) else found.pooler_output


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vectors.float(), dim=-1)
