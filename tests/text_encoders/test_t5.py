"""T5 on real (tiny) folders: padding that is read, cuts that are told, and folders that are broken."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_encoders import HIDDEN, tiny_t5

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.text_encoders.t5 import T5TextEncoder, load_t5

PROMPTS = ["a red circle moving left", "", "two objects: a blue star, and a green ring"]
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t5")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, tokenizer = tiny_t5(MAX_TOKENS)
    model.save_pretrained(path / "text_encoder")
    tokenizer.save_pretrained(path / "tokenizer")
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Callable[[], Path]:
    """Call it for a copy that the test may damage."""
    return lambda: Path(shutil.copytree(folder, tmp_path / "damaged"))


def load(folder: Path, max_tokens: int = MAX_TOKENS, dtype: torch.dtype = torch.float32) -> T5TextEncoder:
    return load_t5(
        folder, torch.device("cpu"), dtype, max_tokens=max_tokens, encoder="text_encoder", tokenizer="tokenizer"
    )


def test_every_token_counts_and_padding_is_read(folder: Path) -> None:
    from transformers import T5EncoderModel, T5TokenizerFast

    found = load(folder).encode(PROMPTS)
    assert found.embeddings.shape == (3, MAX_TOKENS, HIDDEN)
    assert found.lengths == (MAX_TOKENS,) * 3
    tokenizer = T5TokenizerFast.from_pretrained(folder / "tokenizer")
    ids = tokenizer(PROMPTS, padding="max_length", max_length=MAX_TOKENS, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = T5EncoderModel.from_pretrained(folder / "text_encoder")(ids).last_hidden_state
    torch.testing.assert_close(found.embeddings, expected, atol=1e-6, rtol=1e-5)


def test_a_long_prompt_is_cut_and_a_strange_word_named(folder: Path) -> None:
    encoder = load(folder, max_tokens=8)
    assert encoder.max_tokens == 8
    conditions = encoder.encode(["red " * 9, "a r\u00e9d star"])
    assert conditions.num_cut_tokens == (2, 0)
    assert conditions.embeddings.shape[1] == 8
    assert conditions.unknown_words == ((), ("r\u00e9d",))


def test_no_longer_than_its_tokenizer_allows(folder: Path) -> None:
    assert load(folder, max_tokens=512).max_tokens == MAX_TOKENS


def test_half_precision_is_what_comes_out(folder: Path) -> None:
    encoder = load(folder, dtype=torch.bfloat16)
    assert encoder.encode(PROMPTS).embeddings.dtype == torch.bfloat16
    assert not any(parameter.requires_grad for parameter in encoder.model.parameters())


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("text_encoder/config.json", "config.json"),
        ("text_encoder/model.safetensors", "text_encoder"),
        ("tokenizer/tokenizer.json", "T5TokenizerFast.from_pretrained"),
    ],
)
def test_a_missing_file_is_named(copy: Callable[[], Path], name: str, told: str) -> None:
    damaged = copy()
    (damaged / name).unlink()
    with pytest.raises(ModelLoadError, match=told):
        load(damaged)


def test_another_model_is_named(copy: Callable[[], Path]) -> None:
    damaged = copy()
    path = damaged / "text_encoder" / "config.json"
    path.write_text(path.read_text().replace('"model_type": "t5"', '"model_type": "umt5"'))
    with pytest.raises(ModelLoadError, match="model_type: expected 't5', got 'umt5'"):
        load(damaged)
