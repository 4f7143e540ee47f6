"""Tokenizers out of text encoders' files: the ids of transformers' own tokenizers, for prompts that are awkward."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from spiece_files import model_bytes, text_field, varint
from tables import table
from tiny_encoders import tiny_qwen_tokenizer, tiny_t5

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.text_encoders.file_tokenizer import FileTokenizer, from_metadata, from_spiece, from_tekken
from diffusion_runtime.text_encoders.loading import load_tokenizer
from diffusion_runtime.text_encoders.tokenized import tokenize

PROMPTS = (
    "a red circle moving left",
    "",
    "  two   spaces, \t a tab and\u00a0one that does not break ",
    "lines\n\nof\r\ntext\n",
    "caf\u00e9, cafe\u0301, \u212b and \ufb01re",
    "\u8d64\u3044\u5186\u304c\u5de6\u306b\u52d5\u304f\u3002\ud55c\uad6d\uc5b4",
    "\U0001f469\u200d\U0001f680 \U0001f1eb\U0001f1f7 \u2603\ufe0f",
    "\u201cquotes\u201d 'and' \"more\" it's, they'LL don't",
    "control \x00\x07\x1b\u200b\u202e\ufeff characters",
    "12345 3.14e-10 1,000 x\u00b2",
    "<|im_start|>user\n<|im_end|> </s> <pad> <s> [INST] <bos> <unk> \u2581low \u2581\u2581",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "CamelCaseAndUPPERWords under_score/path\\to",
)
CORPUS = (*PROMPTS, *(f"{prompt} {prompt}" for prompt in PROMPTS), "a red circle a red circle  moving left\n\n\n")
# llama.cpp's types.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def metadata(model: str, tokens: list[str], types: list[int], **more: Any) -> dict[str, Any]:
    values = {"model": model, "tokens": tokens, "token_type": types, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def save(made: FileTokenizer, folder: Path) -> None:
    for name, content in made.files().items():
        (folder / name).write_text(content, encoding="utf-8")


def ids(made: Any, tmp_path: Path) -> list[list[int]]:
    """Of a tokenizer that went through its files."""
    tmp_path.mkdir(exist_ok=True)
    save(made, tmp_path)
    loaded = load_tokenizer(tmp_path)
    return [loaded(prompt)["input_ids"] for prompt in PROMPTS]


def test_qwens_pairs_of_bytes(tmp_path: Path) -> None:
    expected = tiny_qwen_tokenizer(CORPUS)
    learned = json.loads(expected.backend_tokenizer.to_str())
    special = {token["content"] for token in learned["added_tokens"]}
    by_id = dict(sorted((number, token) for token, number in expected.get_vocab().items()))
    tokens = [*by_id.values(), "[PAD0]"]
    types = [*(CONTROL if token in special else NORMAL for token in tokens[:-1]), UNUSED]
    merges = [" ".join(pair) for pair in learned["model"]["merges"]]
    values = metadata(
        "gpt2", tokens, types, pre="qwen2", merges=merges, padding_token_id=by_id_of(by_id, "<|endoftext|>")
    )
    made = from_metadata(values, "a.gguf")
    assert ids(made, tmp_path) == [expected(prompt)["input_ids"] for prompt in PROMPTS]
    assert load_tokenizer(tmp_path).pad_token == "<|endoftext|>"


def by_id_of(by_id: dict[int, str], token: str) -> int:
    return next(number for number, each in by_id.items() if each == token)


def unigram() -> tuple[Any, list[tuple[str, float]]]:
    """T5's tokenizer with pieces for letters of the prompts, and all of its pieces."""
    from transformers import T5TokenizerFast

    tokenizer = tiny_t5(512)[1]
    known = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    letters = sorted({letter for prompt in PROMPTS[:8] for letter in prompt if not letter.isspace()})
    pieces = [(piece, score) for piece, score in known]
    pieces += [(letter, -9.0) for letter in letters if letter not in {piece for piece, _ in pieces}]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512), pieces


def test_t5s_pieces_out_of_a_tensor_and_out_of_metadata(tmp_path: Path) -> None:
    expected, pieces = unigram()
    wanted = [expected(prompt)["input_ids"] for prompt in PROMPTS]
    made = from_spiece(model_bytes(pieces), "tensor spiece_model", 300)
    assert ids(made, tmp_path / "spiece") == wanted
    # The words for gaps of UMT5, behind the model's own.
    assert made.tokenizer.token_to_id("<extra_id_299>") == len(pieces)
    types = [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * (len(pieces) - 3), UNUSED]
    tokens, scores = [*(piece for piece, _ in pieces), "[PAD9]"], [*(score for _, score in pieces), -10000.0]
    assert ids(from_metadata(metadata("t5", tokens, types, scores=scores), "a.gguf"), tmp_path / "gguf") == wanted


def test_what_no_piece_covers_becomes_bytes_where_the_model_has_them(tmp_path: Path) -> None:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"<0x{each:02X}>", -20.0) for each in range(256))]
    pieces += [("\u2581", -1.0), ("a", -2.0)]
    content = model_bytes(pieces) + text_field(2, varint(35 << 3) + varint(1) + varint(40 << 3) + varint(2))
    save(from_spiece(content, "a"), tmp_path)
    assert load_tokenizer(tmp_path)("a \u2603")["input_ids"] == [259, 260, 259, 3 + 0xE2, 3 + 0x98, 3 + 0x83, 1]


def gemma() -> tuple[Any, list[tuple[str, float, int]]]:
    """GemmaTokenizer with learned pairs and lines that are found first, and its pieces with scores and types."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import GemmaTokenizer

    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, max_token_length=12)
    trained.train_from_iterator(CORPUS, trainer)
    learned = json.loads(trained.to_str())["model"]
    named, lines = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], ["\n\n", "\u2581\u2581\u2581"]
    letters = sorted(set(learned["vocab"]) - {"".join(pair) for pair in learned["merges"]} - set(lines))
    words = ["".join(pair) for pair in learned["merges"] if "".join(pair) not in lines]
    tokens = [*named, *lines, *(f"<0x{each:02X}>" for each in range(256)), *letters, *dict.fromkeys(words)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(pair) for pair in learned["merges"] if "".join(pair) in vocabulary and "".join(pair) not in lines]
    merges = [pair for pair in merges if set(pair) <= set(vocabulary)]
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=merges)
    tokenizer.add_tokens([AddedToken(each, normalized=True, special=False) for each in lines])
    rank = {"".join(pair): index for index, pair in reversed(list(enumerate(merges)))}
    types = [*[CONTROL] * 3, UNKNOWN, CONTROL, *[USER_DEFINED] * len(lines), *[BYTE] * 256]
    types += [NORMAL] * (len(tokens) - len(types))
    return tokenizer, [
        (token, -float(rank.get(token, len(merges))), kind) for token, kind in zip(tokens, types, strict=True)
    ]


def test_gemmas_pieces_out_of_a_tensor_and_out_of_metadata(tmp_path: Path) -> None:
    expected, pieces = gemma()
    wanted = [[expected.bos_token_id, *expected(prompt, add_special_tokens=False)["input_ids"]] for prompt in PROMPTS]
    content = b"".join(
        text_field(1, text_field(1, name.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + varint(kind))
        for name, score, kind in pieces
    )
    content += text_field(2, b"\x18\x02" + varint(35 << 3) + varint(1) + varint(40 << 3) + varint(3))
    assert ids(from_spiece(content, "tensor spiece_model"), tmp_path / "spiece") == wanted
    tokens, scores, types = (list(each) for each in zip(*pieces, strict=True))
    made = from_metadata(metadata("llama", tokens, types, scores=scores), "a.gguf")
    assert ids(made, tmp_path / "gguf") == wanted
    # Gemma 4's has pairs instead of scores, and names no unknown piece.
    pairs = [" ".join(pair) for pair in json.loads(expected.backend_tokenizer.to_str())["model"]["merges"]]
    types[tokens.index("<unk>")] = CONTROL
    made = from_metadata(metadata("gemma4", tokens, types, merges=pairs), "a.gguf")
    assert ids(made, tmp_path / "gemma4") == wanted


def tekken() -> dict[str, Any]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    words = [bytes([each]) for each in range(256)]
    learned = sorted(trained.get_vocab().items(), key=lambda each: each[1])
    words += [word for token, _ in learned if len(word := bytes(byte_of[letter] for letter in token)) > 1]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
    return {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            "default_num_special_tokens": 10,
            "default_vocab_size": 10 + len(words),
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
            for rank, word in enumerate([*words, b"too many"])
        ],
        "special_tokens": [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(special)],
    }


def test_mistrals_ranks(tmp_path: Path) -> None:
    from transformers.integrations.mistral.tokenizer import MistralConverter

    (tmp_path / "tekken.json").write_text(json.dumps(tekken()))
    expected = MistralConverter(str(tmp_path / "tekken.json")).converted()
    found = ids(from_tekken((tmp_path / "tekken.json").read_bytes(), "tensor tekken_model"), tmp_path / "made")
    assert found == [expected.encode(prompt).ids for prompt in PROMPTS]
    loaded = load_tokenizer(tmp_path / "made")
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.padding_side) == (5, 1, "left")


def changed(**values: Any) -> dict[str, Any]:
    base = metadata("gpt2", ["a", "b", "ab"], [1, 1, 1], pre="qwen2", merges=["a b"])
    return {**base, **{f"tokenizer.ggml.{key}": value for key, value in values.items()}}


def of_tekken(**values: Any) -> bytes:
    whole = tekken()
    return json.dumps({**whole, "config": {**whole["config"], **values}}).encode()


@table(
    "made, told",
    [
        (lambda: from_metadata(changed(model=7), "f"), r"key 'tokenizer.ggml.model': expected str, got 7"),
        (lambda: from_metadata(changed(model="bert"), "f"), r"expected t5, llama, gemma4, or gpt2 .* got 'bert'"),
        (lambda: from_metadata(changed(pre="poro"), "f"), r"got 'gpt2' and 'poro'"),
        (lambda: from_metadata(changed(tokens=["a", "a", "b"]), "f"), r"tokens': expected texts, each once"),
        (lambda: from_metadata(changed(token_type=[1]), "f"), r"token_type': expected 3 numbers, got 1"),
        (lambda: from_metadata(changed(merges=["a b c"]), "f"), r"merges': expected two words each"),
        (lambda: from_metadata(changed(merges=["a z"]), "f"), r"the tokenizer cannot be made"),
        (lambda: from_metadata(changed(model="t5", scores=[1.0]), "f"), r"scores': expected 3 numbers, got 1"),
        (
            lambda: from_metadata(changed(model="t5", scores=[1.0] * 3), "f"),
            r"unknown_token_id': expected int, got None",
        ),
        (lambda: from_spiece(b"\x0a\xff\xff\xff\x7fabc", "tensor spiece_model"), r"^tensor spiece_model: no Sentence"),
        (lambda: from_spiece(model_bytes([("a", 0.0)], kind=2, unknown_id=0), "f"), r"expected the piece '<bos>'"),
        (lambda: from_tekken(b"{", "tensor tekken_model"), r"^tensor tekken_model: no tekken.json"),
        (lambda: from_tekken(of_tekken(default_num_special_tokens=10**9), "f"), r"1000000000 special tokens of"),
        (lambda: from_tekken(of_tekken(pattern="("), "f"), r"the tokenizer cannot be made"),
        (lambda: from_tekken(of_tekken(pattern=3), "f"), r"texts are expected for the pattern"),
    ],
)
def test_what_is_no_tokenizer_is_named(made: Any, told: str) -> None:
    with pytest.raises(ModelLoadError, match=told):
        made()


def test_a_damaged_table_of_replacements_is_named(tmp_path: Path) -> None:
    """The tokenizers library panics over one, when it is used."""
    _, pieces = unigram()
    types = [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * (len(pieces) - 3)]
    values = metadata("t5", [each for each, _ in pieces], types, scores=[score for _, score in pieces])
    values["tokenizer.ggml.precompiled_charsmap"] = [*struct.pack("<I", 8), *b"\xff\xff\xff\x00" * 2, 0]
    save(from_metadata(values, "a.gguf"), tmp_path)
    with pytest.raises(ModelLoadError, match="the tokenizer is damaged"):
        tokenize(load_tokenizer(tmp_path), "h\u00e9llo", 64)
