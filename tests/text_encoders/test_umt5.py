"""The UMT5 text encoder on a real (tiny) model folder."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_folders import write_plain
from tiny_models import MAX_TEXT_TOKENS

import diffusion_runtime
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.models.text_encoder_weights import fill_text_encoder
from diffusion_runtime.text_encoders.interface import Conditions
from diffusion_runtime.text_encoders.json_tokenizer import load_json_tokenizer
from diffusion_runtime.text_encoders.loading import load_tokenizer
from diffusion_runtime.text_encoders.t5 import UMT5TextEncoder, load_umt5, umt5_library

SHAPES = Path(diffusion_runtime.__file__).parent / "assets" / "shapes"
PROMPTS = ["a red circle moving left", "", "Two objects: a blue STAR, and a green ring on a striped background"]


@pytest.fixture(scope="module")
def text_encoder(tiny_wan_folder: Path) -> UMT5TextEncoder:
    return load(tiny_wan_folder)


def damaged(copy: Callable[[], Path], name: str, content: bytes | None) -> Path:
    folder = copy()
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> UMT5TextEncoder:
    """As the runtime does."""
    fill = fill_text_encoder
    return load_umt5(folder, torch.device("cpu"), dtype, max_tokens=MAX_TEXT_TOKENS, fill=fill)


def load_with_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> UMT5TextEncoder:
    return load_umt5(folder, torch.device("cpu"), dtype, max_tokens=MAX_TEXT_TOKENS)


def test_embeddings_equal_diffusers(text_encoder: UMT5TextEncoder, tiny_wan_folder: Path) -> None:
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(tiny_wan_folder, transformer=None, vae=None)
    expected, _ = pipeline.encode_prompt(PROMPTS, do_classifier_free_guidance=False, max_sequence_length=24)
    found = text_encoder.encode(PROMPTS)
    assert found.embeddings.shape == (3, MAX_TEXT_TOKENS, 32)
    torch.testing.assert_close(found.embeddings, expected, atol=2e-6, rtol=1e-5)


def test_our_module_gives_the_bits_of_transformers(tiny_wan_folder: Path, tmp_path: Path) -> None:
    """Of the tiny folder and the embedded model, with padding and without; float16 is left to transformers."""
    long = [PROMPTS[0], "red " * 100]
    for folder in (tiny_wan_folder, write_plain(SHAPES, tmp_path / "shapes")):
        for dtype, library in ((torch.float32, "torch"), (torch.bfloat16, "torch"), (torch.float16, "transformers")):
            ours, theirs = load(folder, dtype), load_with_transformers(folder, dtype)
            assert (ours.library, theirs.library) == (library, "transformers")
            assert umt5_library(folder, dtype) == library
            for prompts in (PROMPTS, PROMPTS[:1], long):
                found, expected = ours.encode(prompts), theirs.encode(prompts)
                assert torch.equal(found.embeddings, expected.embeddings), (folder, dtype, prompts)
                assert dataclasses.replace(found, embeddings=expected.embeddings) == expected


def test_a_tokenizer_file_is_read_as_transformers_reads_it() -> None:
    ours, theirs = load_json_tokenizer(SHAPES / "tokenizer"), load_tokenizer(SHAPES / "tokenizer")
    assert ours is not None
    assert len(ours) == len(theirs)
    for name in ("model_max_length", "eos_token_id", "pad_token_id", "unk_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)
    draw = random.Random(0)
    parts = ["red ", "circle", "</s>", "<pad>", "<unk>", " ", "\u00e9", "\u2603", ",", "A", "\U0001f600", "\n"]
    options: list[dict[str, Any]] = [{}, {"truncation": True, "max_length": 5}, {"add_special_tokens": False}]
    for _ in range(100):
        text = "".join(draw.choice(parts) for _ in range(draw.randrange(20)))
        for option in options:
            found, expected = (each(text, return_offsets_mapping=True, **option) for each in (ours, theirs))
            assert found["input_ids"] == expected["input_ids"], (text, option)
            assert found["offset_mapping"] == expected["offset_mapping"], (text, option)


def test_what_only_transformers_knows_is_left_to_it(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = tiny_wan_copy()
    shutil.copytree(SHAPES / "tokenizer", folder / "tokenizer", dirs_exist_ok=True)
    config, tokens = folder / "text_encoder" / "config.json", folder / "tokenizer" / "tokenizer_config.json"
    for path, changed in ((config, {"feed_forward_proj": "relu"}), (config, {"newer": 1}), (config, {"num_heads": 0})):
        before = path.read_text()
        path.write_text(json.dumps(json.loads(before) | changed))
        assert umt5_library(folder, torch.float32) == "transformers", changed
        path.write_text(before)
    for changes in ({"padding_side": "left"}, {"extra_special_tokens": ["<x>"]}, {"eos_token": "<unheard of>"}):
        before = tokens.read_text()
        tokens.write_text(json.dumps(json.loads(before) | changes))
        assert load_json_tokenizer(folder / "tokenizer") is None, changes
        tokens.write_text(before)
    for name in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        tokens.write_text(json.dumps(json.loads(tokens.read_text()) | {"tokenizer_class": name}))
        assert load_json_tokenizer(folder / "tokenizer") is not None, name


def test_padding_is_zero_and_lengths_count_the_rest(text_encoder: UMT5TextEncoder) -> None:
    conditions = text_encoder.encode(PROMPTS)
    assert conditions.lengths[:2] == (6, 1)
    for row, length in zip(conditions.embeddings, conditions.lengths, strict=True):
        assert (row[:length].abs().amax(dim=-1) > 0).all()
        assert not row[length:].any()


def test_a_prompt_encodes_alike_alone_and_in_a_batch(text_encoder: UMT5TextEncoder) -> None:
    batch = text_encoder.encode(PROMPTS)
    for index, prompt in enumerate(PROMPTS):
        alone = text_encoder.encode([prompt]).embeddings
        torch.testing.assert_close(alone, batch.embeddings[index : index + 1], atol=2e-6, rtol=1e-5)


def test_unknown_words_are_named_once_in_order(text_encoder: UMT5TextEncoder) -> None:
    conditions = text_encoder.encode(["a Wibble, and a red wobble2 beside a Wibble", PROMPTS[0]])
    assert conditions.unknown_words == (("Wibble", "wobble2", "beside"), ())


def test_an_unknown_word_is_said_with_the_known_ones_that_are_spelled_most_like_it() -> None:
    text_encoder = load(SHAPES)
    prompts = ["a Cirle moving xyzzy", PROMPTS[0]]
    conditions = text_encoder.encode(prompts)
    expected = (
        "prompt 'a Cirle moving xyzzy': the model's tokenizer does not know 'Cirle' (nearest: 'circle'), 'xyzzy'; such "
        "words are drawn as nothing, or as anything"
    )
    assert conditions.remarks(0, prompts[0]) == (expected,)
    assert conditions.joined(text_encoder.encode(PROMPTS[:1])).take([1, 0]).remarks(1, prompts[0]) == (expected,)
    # Nothing is kept of the vocabulary where every word is known.
    assert text_encoder.encode(PROMPTS[:1]).known_words == ()


def test_a_remark_names_a_few_unknown_words_and_says_how_many_more_there_are(text_encoder: UMT5TextEncoder) -> None:
    long = "z" * 10_000
    conditions = text_encoder.encode([" ".join([long, *(f"cirle{index}" for index in range(2000))]), PROMPTS[0]])
    (remark, cut) = conditions.remarks(0, "x")
    assert "the last" in cut
    assert len(remark) < 600
    assert "zzzz..." in remark
    assert remark.count("(nearest: 'circle')") == 9
    assert "'cirle8' (nearest: 'circle') and 1991 more;" in remark
    assert conditions.remarks(1, PROMPTS[0]) == ()
    assert text_encoder.encode([" ".join(f"q{index}" for index in range(10))]).remarks(0, "x")[0].count("'q9';") == 1


def test_a_long_prompt_is_cut_and_says_by_how_much(text_encoder: UMT5TextEncoder) -> None:
    conditions = text_encoder.encode(["red " * 30, PROMPTS[0]])
    # 30 words and the end token do not fit in 24.
    assert conditions.num_cut_tokens == (7, 0)
    assert conditions.lengths[0] == MAX_TEXT_TOKENS
    end_token = text_encoder.tokenizer.eos_token_id
    assert text_encoder.tokenizer("red " * 30, truncation=True, max_length=24)["input_ids"][-1] == end_token


def test_take_picks_and_repeats_prompts(text_encoder: UMT5TextEncoder) -> None:
    conditions = text_encoder.encode(["a wibble", PROMPTS[0]])
    taken = conditions.take([1, 0, 1])
    assert isinstance(taken, Conditions)
    assert torch.equal(taken.embeddings[0], taken.embeddings[2])
    assert torch.equal(taken.embeddings[1], conditions.embeddings[0])
    assert taken.unknown_words == ((), ("wibble",), ())
    assert taken.lengths == (6, 3, 6)


def test_says_whose_attention_it_runs(text_encoder: UMT5TextEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sdpa` is true only if torch's own function is really called, once a layer."""
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention

    def counting(*arguments: object, **options: object) -> torch.Tensor:
        calls.append(1)
        return original(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    text_encoder.encode(PROMPTS)
    assert (text_encoder.library, text_encoder.implementation) == ("torch", "sdpa")
    assert len(calls) == 2


def test_half_precision_is_what_comes_out(tiny_wan_folder: Path) -> None:
    encoder = load(tiny_wan_folder, torch.bfloat16)
    assert encoder.encode(PROMPTS).embeddings.dtype == torch.bfloat16
    assert not any(parameter.requires_grad for parameter in encoder.model.parameters())


def test_loading_is_silent_and_reaches_no_network(
    tiny_wan_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    load(tiny_wan_folder).encode(["red " * 100])
    assert capfd.readouterr() == ("", "")


def test_a_word_with_one_unknown_character_is_named_whole(tiny_wan_copy: Callable[[], Path]) -> None:
    """Tokenizers of word pieces, such as the real UMT5's, do not know a part of a word only."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tiny_wan_copy()
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *"abcdeilr"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "tokenizer")
    conditions = load(folder).encode(["a red circle", "a bl\u00e9d, circle \u2603"])
    assert conditions.unknown_words == ((), ("bl\u00e9d", ",", "\u2603"))


@pytest.mark.parametrize("length", [None, 24, 4096])
def test_padding_is_the_transformers_and_not_the_tokenizers(
    tiny_wan_copy: Callable[[], Path], length: int | None
) -> None:
    """diffusers' pipeline fills up to 512 whatever model_max_length says; the transformer reads the padding."""
    from diffusers import WanPipeline

    folder = tiny_wan_copy()
    (folder / "generation.json").unlink()
    path = folder / "tokenizer" / "tokenizer_config.json"
    values = {**json.loads(path.read_text()), "model_max_length": length}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    encoder = family_for_folder(folder).describe(folder).load_text_encoder(torch.device("cpu"), torch.float32)
    found = encoder.encode(PROMPTS).embeddings
    assert encoder.max_tokens == found.shape[1] == 512
    pipeline = WanPipeline.from_pretrained(folder, transformer=None, vae=None)
    expected, _ = pipeline.encode_prompt(PROMPTS, do_classifier_free_guidance=False, max_sequence_length=512)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("text_encoder/config.json", None, "config.json"),
        ("text_encoder/config.json", b"{", "damaged"),
        ("text_encoder/config.json", b"[]", "expected a json object with keys"),
        ("text_encoder/config.json", b'{"model_type": "clip_text_model"}', "clip_text_model"),
        ("text_encoder/model.safetensors", None, "text_encoder"),
        ("text_encoder/model.safetensors", b"", "text_encoder"),
        ("text_encoder/model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "text_encoder"),
        ("tokenizer/tokenizer.json", None, "tokenizer.json"),
        ("tokenizer/tokenizer.json", b'{"version": "1.0", "tru', "tokenizer"),
        ("tokenizer/tokenizer.json", b"{}", "tokenizer"),
    ],
)
def test_a_damaged_folder_is_a_load_error(
    tiny_wan_copy: Callable[[], Path], name: str, content: bytes | None, told: str
) -> None:
    with pytest.raises(ModelLoadError, match=told):
        load(damaged(tiny_wan_copy, name, content))


def test_truncated_weights_are_a_load_error(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = tiny_wan_copy()
    weights = folder / "text_encoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match="text_encoder"):
        load(folder)


def test_missing_weights_are_named(tiny_wan_copy: Callable[[], Path], capfd: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_wan_copy()
    weights = folder / "text_encoder" / "model.safetensors"
    tensors = load_file(weights)
    name = "encoder.block.1.layer.0.SelfAttention.q.weight"
    del tensors[name]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=name):
        load(folder)
    assert capfd.readouterr() == ("", "")


def test_weights_of_another_shape_are_a_load_error(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = tiny_wan_copy()
    path = folder / "text_encoder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"d_ff": 80}))
    with pytest.raises(ModelLoadError, match="text_encoder"):
        load(folder)


def test_a_tokenizer_of_another_model_is_a_load_error(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = tiny_wan_copy()
    path = folder / "tokenizer" / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"]["vocab"] |= {f"word{index}": 100 + index for index in range(50)}
    path.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match="not of the same model"):
        load(folder)
