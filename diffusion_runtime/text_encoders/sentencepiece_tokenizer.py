"""T5's tokenizer of a folder that has a spiece.model (SentencePiece) and no tokenizer.json, as many older ones do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_runtime.errors import ModelLoadError, first_line
from diffusion_runtime.untrusted.json_text import read_json_file
from diffusion_runtime.untrusted.sentencepiece_model import read_sentencepiece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILE = "spiece.model"
# Words that T5 was trained to fill gaps with, after those of the file.
_NUM_EXTRA = 100
_MAX_TOKENS = 512


def load_t5_sentencepiece(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer: words are split at blanks, begin with U+2581, and end with `</s>`. Raises ModelLoadError."""
    model = read_sentencepiece(folder / FILE)
    # Imported late, as transformers is.
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = [piece for piece, _ in model.pieces]
    missing = [name for name in ("<pad>", "</s>") if name not in names]
    if missing:
        raise ModelLoadError(
            f"{folder / FILE}: expected the piece {missing[0]!r} of T5's tokenizer, which is not there"
        )
    extra = [f"<extra_id_{index}>" for index in range(_NUM_EXTRA - 1, -1, -1)]
    try:
        tokenizer = Tokenizer(models.Unigram([*model.pieces, *((name, 0.0) for name in extra)], model.unknown_id))
        if model.charsmap:
            tokenizer.normalizer = normalizers.Precompiled(model.charsmap)
    except Exception as error:
        # The tokenizers library raises plain Exceptions for a damaged file.
        raise ModelLoadError(f"{folder / FILE}: the tokenizer cannot be made: {first_line(error)}") from error
    words = pre_tokenizers.Metaspace("\u2581", "always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    tokenizer.decoder = decoders.Metaspace("\u2581", "always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", names.index("</s>"))]
    )
    config = folder / "tokenizer_config.json"
    values = read_json_file(config, error=ModelLoadError) if config.is_file() else {}
    longest = values.get("model_max_length") if isinstance(values, dict) else None
    made_by: Any = PreTrainedTokenizerFast  # Its constructor has no annotations.
    made: PreTrainedTokenizerFast = made_by(
        tokenizer_object=tokenizer,
        unk_token=names[model.unknown_id],
        pad_token="<pad>",
        eos_token="</s>",
        model_max_length=longest if type(longest) is int and 0 < longest <= 1 << 20 else _MAX_TOKENS,
    )
    return made
