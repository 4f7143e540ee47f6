"""Tokenizers out of text encoders' files: SentencePiece models and Mistral's tekken.json, which ComfyUI keeps in
tensors, and llama.cpp's metadata (tokenizer.ggml.*). Each becomes a tokenizer.json, which loaders read like a folder's.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from diffusion_runtime.errors import ModelLoadError, first_line, shown
from diffusion_runtime.text_encoders.sentencepiece_tokenizer import NUM_EXTRA, t5_tokenizer
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.json_text import parse_json
from diffusion_runtime.untrusted.sentencepiece_model import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
    parse_sentencepiece,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# llama.cpp's metadata, of which whole arrays are read.
PREFIX = "tokenizer.ggml."
ARRAYS = tuple(f"{PREFIX}{name}" for name in ("tokens", "scores", "token_type", "merges", "precompiled_charsmap"))
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASES = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# By tokenizer.ggml.pre: how text is split before pairs are merged.
_SPLITS = {
    "qwen2": _CONTRACTIONS + r"\p{N}" + _REST,
    "llama-bpe": _CONTRACTIONS + r"\p{N}{1,3}" + _REST,
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{_CASES[0]}*{_CASES[1]}+|[^\r\n\p{{L}}\p{{N}}]?{_CASES[0]}+{_CASES[1]}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# Whose whole words are looked up before pairs are merged.
_WHOLE_WORDS = ("llama-bpe", "tekken")
_MAX_PATTERN = 2000
# The longest word of a published vocabulary has 256 letters, and all of Gemma's have 2 million.
_MAX_WORD, _MAX_LETTERS = 1024, 8_000_000
_MAX_SPECIAL = 100_000


@dataclass(frozen=True)
class FileTokenizer:
    """tokenizer: as the tokenizers library has it; settings: of its tokenizer_config.json."""

    tokenizer: Tokenizer
    settings: Mapping[str, Any]

    def files(self, settings: Mapping[str, Any] = MappingProxyType({})) -> dict[str, str]:
        """Return the texts of tokenizer.json and tokenizer_config.json. settings: of the model, which hold before
        these."""
        values = {"tokenizer_class": "PreTrainedTokenizerFast", **self.settings, **settings}
        return {"tokenizer.json": self.tokenizer.to_str(), "tokenizer_config.json": json.dumps(values)}


def from_spiece(content: bytes, where: str, num_extra: int = NUM_EXTRA) -> FileTokenizer:
    """Return T5's, UMT5's (Unigram) or Gemma's (BPE) tokenizer. content: a SentencePiece model; where: for messages;
    num_extra: as of t5_tokenizer. Raises ModelLoadError."""
    return _from_pieces(parse_sentencepiece(content, where, (UNIGRAM, BPE)), where, num_extra)


def from_tekken(content: bytes, where: str) -> FileTokenizer:
    """Return Mistral's tokenizer. content: a tekken.json. Raises ModelLoadError."""
    try:
        values = parse_json(content)
        config, special = values["config"], values["special_tokens"]
        num_special, size, pattern = (
            config[key] for key in ("default_num_special_tokens", "default_vocab_size", "pattern")
        )
        if not 0 <= num_special <= min(size, _MAX_SPECIAL):
            raise ValueError(f"{num_special} special tokens of {size}")
        vocabulary = values["vocab"][: size - num_special]
        words = [base64.b64decode(each["token_bytes"], validate=True) for each in vocabulary]
        names = {each["rank"]: each["token_str"] for each in special}
        marks = [names.get(index, f"<SPECIAL_{index}>") for index in range(num_special)]
        if not all(isinstance(each, str) for each in (pattern, *marks)) or len(pattern) > _MAX_PATTERN:
            raise ValueError("texts are expected for the pattern and the special tokens")
        if not words or not all(words) or len(set(words)) < len(words):
            raise ValueError("a word is empty, or there twice")
    except (DocumentError, ValueError, TypeError, KeyError, IndexError, AttributeError, binascii.Error) as error:
        raise ModelLoadError(f"{where}: no tekken.json, or a damaged one: {first_line(error)}") from error
    ranks = {word: rank for rank, word in enumerate(words)}
    merges = sorted(_halves(where, words, ranks, ranks.__getitem__), key=lambda each: each[0])
    ids = {mark: index for index, mark in enumerate(marks)} | {
        _printable(word): rank + num_special for word, rank in ranks.items()
    }
    made = _byte_pairs(where, ids, [tuple(map(_printable, pair)) for _, *pair in merges], pattern, whole_words=True)
    _add(made, marks, special=True)
    settings = {key: name for key, name in _NAMED.items() if name in marks}
    return FileTokenizer(made, settings | {"padding_side": "left"})


# Of Mistral's and SentencePiece's special tokens.
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def from_metadata(values: Mapping[str, Any], where: str, num_extra: int = NUM_EXTRA) -> FileTokenizer:
    """Return the tokenizer of a GGUF file. values: its metadata, with whole ARRAYS. Raises ModelLoadError."""

    def value(key: str, kind: type, default: Any = None) -> Any:
        found = values.get(PREFIX + key, default)
        if not isinstance(found, kind):
            raise ModelLoadError(f"{where}: key '{PREFIX}{key}': expected {kind.__name__}, got {shown(found)}")
        return found

    model, tokens = value("model", str), value("tokens", list)
    types = value("token_type", list, [NORMAL] * len(tokens))
    if not tokens or not all(isinstance(token, str) for token in tokens) or len(set(tokens)) < len(tokens):
        raise ModelLoadError(f"{where}: key '{PREFIX}tokens': expected texts, each once")
    if len(types) != len(tokens) or not all(type(each) is int for each in types):
        raise ModelLoadError(f"{where}: key '{PREFIX}token_type': expected {len(tokens)} numbers, got {len(types)}")
    named = {
        ours: tokens[number]
        for ours, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("pad_token", "padding"),
            ("unk_token", "unknown"),
        )
        if type(number := values.get(f"{PREFIX}{key}_token_id")) is int and 0 <= number < len(tokens)
    }
    if model in ("t5", "llama"):
        scores = value("scores", list)
        if len(scores) != len(tokens) or not all(isinstance(each, float) for each in scores):
            raise ModelLoadError(f"{where}: key '{PREFIX}scores': expected {len(tokens)} numbers, got {len(scores)}")
        # Rows of the embeddings that no text has, at the end.
        while types and types[-1] == UNUSED:
            tokens, types, scores = tokens[:-1], types[:-1], scores[:-1]
        found = [index for index, each in enumerate(types) if each == 2]
        charsmap = bytes(each & 255 for each in value("precompiled_charsmap", list, []) if type(each) is int)
        pieces = SentencePieceModel(
            tuple(zip(tokens, scores, strict=True)),
            found[0] if found else value("unknown_token_id", int),
            charsmap,
            tuple(types),
            UNIGRAM if model == "t5" else BPE,
            BYTE in types,
        )
        if not 0 <= pieces.unknown_id < len(tokens):
            raise ModelLoadError(f"{where}: key '{PREFIX}unknown_token_id': {pieces.unknown_id} is no token's")
        return _from_pieces(pieces, where, num_extra)
    if model != "gemma4" and (model != "gpt2" or value("pre", str, "") not in _SPLITS):
        raise ModelLoadError(
            f"{where}: keys '{PREFIX}model' and '{PREFIX}pre': expected t5, llama, gemma4, or gpt2 with "
            f"{' or '.join(_SPLITS)}, got {shown(model)} and {shown(values.get(PREFIX + 'pre'))}; give a model folder "
            "that has its tokenizer"
        )
    merges = [tuple(each.split(" ")) if isinstance(each, str) else () for each in value("merges", list, [])]
    if not all(len(each) == 2 for each in merges):
        raise ModelLoadError(f"{where}: key '{PREFIX}merges': expected two words each")
    if model == "gemma4":
        if (unknown := named.get("unk_token", "<unk>")) not in tokens:
            raise ModelLoadError(f"{where}: key '{PREFIX}tokens': expected the piece {unknown!r} of Gemma's tokenizer")
        unscored = tuple((token, 0.0) for token in tokens)
        kinds = tuple(types), BPE, BYTE in types
        return _gemma(SentencePieceModel(unscored, tokens.index(unknown), b"", *kinds), where, merges)
    split = value("pre", str)
    ids = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    made = _byte_pairs(where, ids, merges, _SPLITS[split], whole_words=split in _WHOLE_WORDS, is_nfc=split == "qwen2")
    for kind in (CONTROL, USER_DEFINED):
        _add(made, [token for token, each in zip(tokens, types, strict=True) if each == kind], special=kind == CONTROL)
    if values.get(f"{PREFIX}add_bos_token") is True and "bos_token" in named:
        _begin_with(made, named["bos_token"], ids[named["bos_token"]])
    return FileTokenizer(made, named | ({"padding_side": "left"} if split == "tekken" else {}))


def _from_pieces(model: SentencePieceModel, where: str, num_extra: int) -> FileTokenizer:
    if model.kind == UNIGRAM:
        settings = {"unk_token": model.pieces[model.unknown_id][0], "pad_token": "<pad>", "eos_token": "</s>"}
        return FileTokenizer(t5_tokenizer(model, where, num_extra), {**settings, "model_max_length": 512})
    return _gemma(model, where)


def _gemma(model: SentencePieceModel, where: str, given: Sequence[tuple[str, ...]] | None = None) -> FileTokenizer:
    """Gemma's: spaces are U+2581, pairs are merged in the order that is given, else by the scores of what they make,
    and user-defined pieces, such as lines of several line feeds, are found first."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    names = [piece for piece, _ in model.pieces]
    ids = {name: index for index, name in enumerate(names)}
    missing = [name for name in ("<bos>", "<eos>", "<pad>") if name not in ids]
    if missing or len(ids) < len(names):
        what = f"expected the piece {missing[0]!r} of Gemma's tokenizer" if missing else "a piece is there twice"
        raise ModelLoadError(f"{where}: {what}")
    scores = {name: score for (name, score), kind in zip(model.pieces, model.types, strict=True) if kind == NORMAL}
    pairs: Any = given
    if given is None:
        merges = sorted(_halves(where, scores, ids, scores.__getitem__), key=lambda each: -each[0])
        pairs = [(left, right) for _, left, right in merges]
    unknown = names[model.unknown_id]

    def build() -> Tokenizer:
        built = Tokenizer(models.BPE(ids, pairs, fuse_unk=True, unk_token=unknown, byte_fallback=model.has_bytes))
        built.normalizer = normalizers.Replace(" ", "\u2581")
        built.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        built.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        return built

    made = _made(build, where)
    of_type = [(name, kind) for name, kind in zip(names, model.types, strict=True)]
    _add(made, [name for name, kind in of_type if kind == CONTROL], special=True)
    made.add_tokens(
        [AddedToken(name, normalized=True, special=False) for name, kind in of_type if kind == USER_DEFINED]
    )
    _begin_with(made, "<bos>", ids["<bos>"])
    return FileTokenizer(
        made,
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": unknown,
            "padding_side": "left",
        },
    )


def _halves(
    where: str, words: Collection[Any], ids: Mapping[Any, int], value: Callable[[Any], float]
) -> list[tuple[Any, ...]]:
    """Return (value of the word, left, right) of every way to make a word of two others, by their ids. Raises
    ModelLoadError for words that are longer than a vocabulary's."""
    if max(map(len, words), default=0) > _MAX_WORD or sum(map(len, words)) > _MAX_LETTERS:
        raise ModelLoadError(f"{where}: expected words of up to {_MAX_WORD} letters, {_MAX_LETTERS} together")
    found: list[tuple[Any, ...]] = []
    for word in words:
        pairs = [(word[:at], word[at:]) for at in range(1, len(word)) if word[:at] in ids and word[at:] in ids]
        found += [(value(word), *pair) for pair in sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    return found


def _byte_pairs(
    where: str,
    ids: Mapping[str, int],
    merges: Sequence[tuple[str, ...]],
    pattern: str,
    *,
    whole_words: bool,
    is_nfc: bool = False,
) -> Tokenizer:
    """Return a tokenizer of bytes, as printable letters, that merges pairs in their order."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    def build() -> Tokenizer:
        pairs: Any = list(merges)
        built = Tokenizer(models.BPE(dict(ids), pairs, fuse_unk=False, ignore_merges=whole_words))
        if is_nfc:
            built.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        built.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        built.decoder = decoders.ByteLevel()
        built.post_processor = processors.ByteLevel(trim_offsets=False)
        return built

    return _made(build, where)


def _made(build: Callable[[], Tokenizer], where: str) -> Tokenizer:
    try:
        return build()
    except Exception as error:  # any exception: the tokenizers library raises plain ones
        raise ModelLoadError(f"{where}: the tokenizer cannot be made: {first_line(error)}") from error


def _add(tokenizer: Tokenizer, names: Sequence[str], *, special: bool) -> None:
    from tokenizers import AddedToken

    made = [AddedToken(name, normalized=False, special=special) for name in names]
    tokenizer.add_special_tokens(made) if special else tokenizer.add_tokens(made)


def _begin_with(tokenizer: Tokenizer, name: str, number: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(single=f"{name} $A", special_tokens=[(name, number)])


@functools.cache
def _letters() -> tuple[str, ...]:
    """Printable letters for bytes (GPT-2's): printable ones are themselves, the others follow from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return tuple(chr(each) if each in plain else chr(next(others)) for each in range(256))


def _printable(word: bytes) -> str:
    return "".join(_letters()[each] for each in word)
