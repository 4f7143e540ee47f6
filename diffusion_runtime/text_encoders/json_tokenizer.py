"""Reads a tokenizer.json with the tokenizers library alone, and runs it as transformers' PreTrainedTokenizerFast does.

transformers is imported where tokenizer_config.json has settings that this one does not know: importing it takes a
second.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.untrusted.json_text import read_json_file
from diffusion_runtime.untrusted.known_settings import Allows, anything, are_known, either, is_positive

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_SPECIAL = ("eos_token", "pad_token", "unk_token")
_KNOWN: Mapping[str, Allows] = {
    **dict.fromkeys(_SPECIAL, _is_text),
    "backend": either("tokenizers"),
    "model_max_length": is_positive,
    "padding_side": either("right"),
    # The second is the class of that name since transformers 5, which writes it.
    "tokenizer_class": either("PreTrainedTokenizerFast", "TokenizersBackend"),
    # For decoding, and about how it was saved.
    "clean_up_tokenization_spaces": anything,
    "is_local": anything,
}


class JsonTokenizer:
    """The part of PreTrainedTokenizerFast that this runtime uses.

    model_max_length, eos_token_id, pad_token_id, unk_token_id: as there.
    """

    def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.model_max_length = settings.get("model_max_length")
        ids = {name: tokenizer.token_to_id(settings[name]) for name in _SPECIAL}
        self.eos_token_id, self.pad_token_id, self.unk_token_id = (ids[name] for name in _SPECIAL)

    @property
    def whole_words(self) -> tuple[str, ...]:
        """The vocabulary of a tokenizer with one token per word, without its special tokens; empty for subwords, of
        which none is a word to suggest."""
        if type(self._tokenizer.model).__name__ != "WordLevel":
            return ()
        special = {self.eos_token_id, self.pad_token_id, self.unk_token_id}
        # The library gives them in another order every time.
        return tuple(sorted(word for word, index in self._tokenizer.get_vocab().items() if index not in special))

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(
        self,
        text: str,
        *,
        truncation: bool = False,
        max_length: int | None = None,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        verbose: bool = False,  # noqa: ARG002 - it says nothing of its own
    ) -> dict[str, Any]:
        """Return `input_ids`, and `offset_mapping` where requested, of one text."""
        if truncation and max_length is not None:
            self._tokenizer.enable_truncation(max_length)
        else:
            self._tokenizer.no_truncation()
        found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        tokens: dict[str, Any] = {"input_ids": found.ids}
        return {**tokens, "offset_mapping": found.offsets} if return_offsets_mapping else tokens


def load_json_tokenizer(folder: Path) -> JsonTokenizer | None:
    """Load the tokenizer of a folder; None where it needs more than JsonTokenizer does, or cannot be read: transformers
    then loads it, or reports what is wrong."""
    from tokenizers import Tokenizer

    files = folder / "tokenizer_config.json", folder / "tokenizer.json"
    others = [path.name for path in folder.glob("*token*.json") if path not in files]
    if others or not all(path.is_file() for path in files):
        return None
    try:
        settings = read_json_file(files[0], error=ModelLoadError)
    except ModelLoadError:
        return None
    if not isinstance(settings, dict) or not are_known(settings, _KNOWN) or not settings.keys() >= set(_SPECIAL):
        return None
    try:
        tokenizer = Tokenizer.from_file(str(files[1]))
    except Exception:  # any exception: the tokenizers library raises plain ones
        return None
    # transformers would add them.
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    is_plain = tokenizer.truncation is None and tokenizer.padding is None
    return (
        JsonTokenizer(tokenizer, settings)
        if is_plain and special.issuperset(settings[key] for key in _SPECIAL)
        else None
    )
