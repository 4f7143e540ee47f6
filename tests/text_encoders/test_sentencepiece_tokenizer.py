"""T5's tokenizer out of a spiece.model: the ids of the tokenizer that it was made of, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from spiece_files import model_bytes, text_field
from tables import table
from tiny_encoders import tiny_t5

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.text_encoders.sentencepiece_tokenizer import load_t5_sentencepiece
from diffusion_runtime.text_encoders.t5 import load_t5
from diffusion_runtime.untrusted.sentencepiece_model import read_sentencepiece

TEXTS = ("a red circle moving left", "", "two objects: a  blue star, and a snark.", "x" * 40, "a \u2603 star")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole text encoder whose tokenizer is a spiece.model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, tokenizer = tiny_t5(64)
        # Published ones have rows for the words of gaps.
        model.resize_token_embeddings(len(tokenizer) + 128)
    model.save_pretrained(tmp_path / "text_encoder")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    vocabulary = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    (tmp_path / "spiece").mkdir()
    (tmp_path / "spiece" / "spiece.model").write_bytes(model_bytes([(piece, score) for piece, score in vocabulary]))
    return tmp_path


def test_the_ids_are_those_of_the_tokenizer_it_was_made_of(folder: Path) -> None:
    found, expected = load_t5_sentencepiece(folder / "spiece"), tiny_t5(64)[1]
    for text in TEXTS:
        assert found(text)["input_ids"] == expected(text)["input_ids"], text
    assert found.pad_token_id == 0
    assert found.unk_token_id == 2
    assert found.model_max_length == 512
    # Words for gaps stand behind the file's own pieces.
    assert found.convert_tokens_to_ids("<extra_id_99>") == len(expected)
    assert len(found) == len(expected) + 100


def test_a_folder_with_spiece_model_alone_encodes_alike(folder: Path) -> None:
    cpu, names = torch.device("cpu"), {"encoder": "text_encoder", "tokenizer": "tokenizer"}
    expected = load_t5(folder, cpu, torch.float32, max_tokens=32, **names).encode(TEXTS)
    (folder / "tokenizer" / "tokenizer.json").unlink()
    (folder / "spiece" / "spiece.model").rename(folder / "tokenizer" / "spiece.model")
    found = load_t5(folder, cpu, torch.float32, max_tokens=32, **names).encode(TEXTS)
    assert torch.equal(found.embeddings, expected.embeddings)
    assert found.unknown_words == expected.unknown_words != ((),) * len(TEXTS)


@table(
    ("content", "told"),
    [
        (b"", "0 pieces, and the unknown one is number 0"),
        (b"\x0a\xff\xff\xff\x7fabc", "field 1 reaches beyond the end"),
        (b"\x0a", "it ends within a number"),
        (b"\xff" * 12, "a number of more than 64 bits"),
        (b"not a protocol buffer at all", "no SentencePiece model, or a damaged one"),
        (model_bytes([("<pad>", 0.0)], kind=2), "expected a Unigram model, got one of type 2"),
        (model_bytes([("<pad>", 0.0)], unknown_id=7), "1 pieces, and the unknown one is number 7"),
        (text_field(1, text_field(1, b"\xff")), "no SentencePiece model, or a damaged one"),
    ],
)
def test_a_damaged_file_is_named(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(content)
    with pytest.raises(ModelLoadError, match=told) as caught:
        read_sentencepiece(tmp_path / "spiece.model")
    assert "spiece.model" in str(caught.value)


def test_a_tokenizer_that_is_not_t5s_is_named(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(model_bytes([("a", 0.0), ("b", 0.0), ("c", 0.0)]))
    with pytest.raises(ModelLoadError, match="expected the piece '<pad>' of T5's tokenizer"):
        load_t5_sentencepiece(tmp_path)
