"""Qwen2.5-VL as a text encoder: folders of the whole model and of the language model alone, and broken ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_encoders import HIDDEN, tiny_qwen2_5_vl

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.text_encoders.language_model import LanguageModelEncoder, PromptTemplate
from diffusion_runtime.text_encoders.language_model_loading import load_qwen2_5_vl

PROMPTS = ["a red circle moving left", "", "two objects: a blue star, and a green ring"]
TEMPLATE = PromptTemplate("<|im_start|>still<|im_end|>", "<|im_end|>", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2_5_vl")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, tokenizer = tiny_qwen2_5_vl()
    model.save_pretrained(path / "text_encoder")
    model.model.language_model.save_pretrained(path / "language_model")
    tokenizer.save_pretrained(path / "tokenizer")
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Callable[[], Path]:
    """Call it for a copy that the test may damage."""
    return lambda: Path(shutil.copytree(folder, tmp_path / "damaged"))


def load(folder: Path, num_layers_left_out: int = 0, max_tokens: int = 64) -> LanguageModelEncoder:
    return load_qwen2_5_vl(
        folder,
        torch.device("cpu"),
        torch.float32,
        TEMPLATE,
        max_tokens=max_tokens,
        num_layers_left_out=num_layers_left_out,
    )


@pytest.mark.parametrize("num_layers_left_out", [0, 2])
def test_states_are_the_whole_models(folder: Path, num_layers_left_out: int) -> None:
    """With padding on the left, as its tokenizer's users have it: a causal model with positions by token agrees."""
    from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

    found = load(folder, num_layers_left_out).encode(PROMPTS)
    tokenizer = Qwen2Tokenizer.from_pretrained(folder / "tokenizer", padding_side="left")
    given = tokenizer([TEMPLATE.before + p + TEMPLATE.after for p in PROMPTS], padding=True, return_tensors="pt")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder")
    with torch.no_grad():
        output = model(input_ids=given.input_ids, attention_mask=given.attention_mask, output_hidden_states=True)
    states = output.hidden_states[-(num_layers_left_out + 1)]
    for index, length in enumerate(found.lengths):
        expected = states[index][given.attention_mask[index].bool()][TEMPLATE.num_cropped :]
        assert len(expected) == length
        torch.testing.assert_close(found.embeddings[index, :length], expected, atol=2e-6, rtol=1e-5)
        assert not found.embeddings[index, length:].any()
    assert found.lengths[1] == 1


def test_the_language_model_alone_is_enough(folder: Path, copy: Callable[[], Path]) -> None:
    alone = copy()
    shutil.rmtree(alone / "text_encoder")
    (alone / "language_model").rename(alone / "text_encoder")
    assert torch.equal(load(alone).encode(PROMPTS).embeddings, load(folder).encode(PROMPTS).embeddings)


def test_a_tokenizer_of_words_and_merges_is_enough(folder: Path, copy: Callable[[], Path]) -> None:
    """As in published folders, which have no tokenizer.json, and their special tokens in tokenizer_config.json."""
    older = copy()
    path = older / "tokenizer" / "tokenizer.json"
    learned = json.loads(path.read_text())
    (older / "tokenizer" / "vocab.json").write_text(json.dumps(learned["model"]["vocab"]))
    merges = [" ".join(pair) for pair in learned["model"]["merges"]]
    (older / "tokenizer" / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    path.unlink()
    path = older / "tokenizer" / "tokenizer_config.json"
    special = {str(token["id"]): {**token} for token in learned["added_tokens"]}
    for token in special.values():
        del token["id"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens_decoder": special}))
    prompts = [*PROMPTS, "<|im_end|> and"]
    found, expected = load(older).encode(prompts), load(folder).encode(prompts)
    assert found.lengths == expected.lengths
    assert torch.equal(found.embeddings, expected.embeddings)


def test_vision_and_output_layers_stay_behind(folder: Path) -> None:
    model = load(folder).model
    assert type(model).__name__ == "Qwen2_5_VLTextModel"
    assert load(folder, 2).encode(["a"]).embeddings.shape == (1, 2, HIDDEN)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_long_prompt_is_cut_and_told(folder: Path) -> None:
    conditions = load(folder, max_tokens=6).encode(["red " * 9, "a star"])
    # Nine words, a space and the template's last token.
    assert conditions.num_cut_tokens == (5, 0)
    assert conditions.lengths == (6, 3)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("text_encoder/config.json", "config.json"),
        ("text_encoder/model.safetensors", "text_encoder"),
        ("tokenizer/tokenizer.json", "vocab.json is missing"),
    ],
)
def test_a_missing_file_is_named(copy: Callable[[], Path], name: str, told: str) -> None:
    damaged = copy()
    (damaged / name).unlink()
    with pytest.raises(ModelLoadError, match=told):
        load(damaged)


def test_another_model_is_named(copy: Callable[[], Path]) -> None:
    damaged = copy()
    (damaged / "text_encoder" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelLoadError, match="expected 'qwen2_5_vl' or 'qwen2_5_vl_text', got 'qwen3'"):
        load(damaged)
