"""CLIP score by a tiny random CLIP of transformers, beside transformers' own logits."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from tiny_encoders import CLIP_TOKENS, tiny_clip

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.quality.clip_score import ClipScore

PROMPT = "a red circle"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    path = tmp_path_factory.mktemp("clip")
    _, tokenizer = tiny_clip()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    text = CLIPTextConfig(vocab_size=len(tokenizer), max_position_embeddings=CLIP_TOKENS, **tokens, **sizes)
    vision = CLIPVisionConfig(image_size=28, patch_size=14, **sizes)
    torch.manual_seed(0)
    config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8)
    CLIPModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(path)
    return path


def test_the_score_is_the_cosine_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    frames = numpy.random.default_rng(0).integers(0, 256, (3, 40, 56, 3), numpy.uint8)
    model = CLIPModel.from_pretrained(folder).eval()
    inputs = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    pictures = CLIPImageProcessorPil.from_pretrained(folder)(list(frames), return_tensors="pt")
    with torch.inference_mode():
        logits = model(**inputs, **pictures).logits_per_image[:, 0]
    cosines = logits / model.logit_scale.exp().item()
    score = ClipScore(str(folder))
    assert score(frames, PROMPT) == pytest.approx(float(100 * cosines.clamp(min=0).mean()), rel=1e-3, abs=1e-4)
    # Some are above 0, so that the comparison says something.
    assert float(cosines.max()) > 0.001
    # Evenly spaced frames of a longer clip.
    assert score(numpy.repeat(frames[:1], 30, axis=0), PROMPT) == pytest.approx(score(frames[:1], PROMPT), abs=1e-4)


def test_what_is_no_clip_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"--clip-path: .* has no config\.json"):
        ClipScore(str(tmp_path))
    for name in ("config.json", "preprocessor_config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="pickled weights are not read"):
        ClipScore(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ModelLoadError, match="expected model_type 'clip'"):
        ClipScore(str(tmp_path))
