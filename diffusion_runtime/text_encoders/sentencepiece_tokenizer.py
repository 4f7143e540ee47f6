"""T5's tokenizer of a folder that has a spiece.model (SentencePiece) and no tokenizer.json, as many older ones do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_runtime.errors import ModelLoadError, first_line
from diffusion_runtime.untrusted.json_text import read_json_file
from diffusion_runtime.untrusted.sentencepiece_model import SentencePieceModel, read_sentencepiece

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

FILE = "spiece.model"
# Words that T5 and UMT5 were trained to fill gaps with, after those of the file.
NUM_EXTRA, NUM_EXTRA_OF_UMT5 = 100, 300
_MAX_TOKENS = 512


def load_t5_sentencepiece(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer. Raises ModelLoadError."""
    model = read_sentencepiece(folder / FILE)
    tokenizer = t5_tokenizer(model, str(folder / FILE))
    # Imported late: transformers takes seconds.
    from transformers import PreTrainedTokenizerFast

    config = folder / "tokenizer_config.json"
    values = read_json_file(config, error=ModelLoadError) if config.is_file() else {}
    longest = values.get("model_max_length") if isinstance(values, dict) else None
    made_by: Any = PreTrainedTokenizerFast  # Its constructor has no annotations.
    made: PreTrainedTokenizerFast = made_by(
        tokenizer_object=tokenizer,
        unk_token=model.pieces[model.unknown_id][0],
        pad_token="<pad>",
        eos_token="</s>",
        model_max_length=longest if type(longest) is int and 0 < longest <= 1 << 20 else _MAX_TOKENS,
    )
    return made


def t5_tokenizer(model: SentencePieceModel, where: str, num_extra: int = NUM_EXTRA) -> Tokenizer:
    """Return the tokenizer of T5 or UMT5: words are split at blanks, begin with U+2581, and end with `</s>`. where: for
    messages; num_extra: words for gaps behind the model's. Raises ModelLoadError."""
    # Imported late, as transformers is.
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    names = [piece for piece, _ in model.pieces]
    missing = [name for name in ("<pad>", "</s>") if name not in names]
    if missing:
        raise ModelLoadError(f"{where}: expected the piece {missing[0]!r} of T5's tokenizer, which is not there")
    extra = [f"<extra_id_{index}>" for index in range(num_extra - 1, -1, -1)]
    extra = [] if extra[0] in names else extra
    try:
        pieces = [*model.pieces, *((name, 0.0) for name in extra)]
        tokenizer = Tokenizer(models.Unigram(pieces, model.unknown_id, byte_fallback=model.has_bytes))
        if model.charsmap:
            tokenizer.normalizer = normalizers.Precompiled(model.charsmap)
    except Exception as error:
        # The tokenizers library raises plain Exceptions for a damaged file.
        raise ModelLoadError(f"{where}: the tokenizer cannot be made: {first_line(error)}") from error
    words = pre_tokenizers.Metaspace("\u2581", "always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    tokenizer.decoder = decoders.Metaspace("\u2581", "always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", names.index("</s>"))]
    )
    return tokenizer
