"""CLIP's pooled vector against transformers' own, and the files its tokenizer is built of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_encoders import CLIP_TOKENS, tiny_clip

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.text_encoders.clip import load_clip
from diffusion_runtime.text_encoders.interface import EncoderCut

CPU = torch.device("cpu")
PROMPTS = ("a cat", "a red circle, and two blue squares " * 4, "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, tokenizer = tiny_clip()
    model.save_pretrained(tmp_path / "text_encoder_2")
    tokenizer.save_pretrained(tmp_path / "tokenizer_2")
    return tmp_path


def expected(folder: Path) -> torch.Tensor:
    model, tokenizer = tiny_clip()
    from transformers import CLIPTextModel

    model = CLIPTextModel.from_pretrained(folder / "text_encoder_2", dtype=torch.float32)
    tokens = tokenizer(
        list(PROMPTS), padding="max_length", max_length=CLIP_TOKENS, truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        pooled: torch.Tensor = model(tokens.input_ids).pooler_output
    return pooled


def test_the_pooled_vector_is_that_of_prompts_filled_up_with_padding(folder: Path) -> None:
    pooled, cut = load_clip(folder, CPU, torch.float32).encode(PROMPTS)
    assert (pooled - expected(folder)).abs().max() < 1e-5
    words = tiny_clip()[1]
    num_cut = len(words(PROMPTS[1], verbose=False).input_ids) - CLIP_TOKENS
    assert num_cut > 0
    assert cut == EncoderCut("CLIP", (0, num_cut, 0), CLIP_TOKENS)
    assert not torch.allclose(pooled[0], pooled[1])


def test_a_tokenizer_of_vocabulary_and_merges_is_the_same(folder: Path) -> None:
    whole = json.loads((folder / "tokenizer_2" / "tokenizer.json").read_text())
    (folder / "tokenizer_2" / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer_2/vocab.json is missing"):
        load_clip(folder, CPU, torch.float32)
    (folder / "tokenizer_2" / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    (folder / "tokenizer_2" / "merges.txt").write_text("#version: 0.2\n")
    pooled, _ = load_clip(folder, CPU, torch.float32).encode(PROMPTS)
    assert (pooled - expected(folder)).abs().max() < 1e-5


def test_a_tokenizer_of_another_model_is_named(folder: Path) -> None:
    path = folder / "text_encoder_2" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 4}))
    with pytest.raises(ModelLoadError):
        load_clip(folder, CPU, torch.float32)
