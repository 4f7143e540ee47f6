"""Remarks on a request that its run would make too, known without weights: what has no effect, and unknown words."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion_runtime.quality.vocabularies import vocabulary_of

if TYPE_CHECKING:
    from diffusion_runtime.loading.description import PipelineDescription
    from diffusion_runtime.request.generation_request import GenerationRequest
    from diffusion_runtime.text_encoders.json_tokenizer import JsonTokenizer


def request_remarks(description: PipelineDescription, request: GenerationRequest) -> list[str]:
    """Return what a run would say of a request: options without effect, and words that its model does not know."""
    from diffusion_runtime.text_encoders.t5 import MAX_TOKENS, clean_prompt
    from diffusion_runtime.text_encoders.tokenized import tokenize
    from diffusion_runtime.text_encoders.unknown_words import unknown_words_remark

    remarks = list(description.rules.unused(request))
    if (tokenizer := _whole_word_tokenizer(description.model_folder / "tokenizer")) is not None:
        negative = request.negative_prompt if description.rules.is_guided(request) else None
        for prompt in filter(None, dict.fromkeys((request.prompt, negative))):
            unknown = tokenize(tokenizer, clean_prompt(prompt), MAX_TOKENS).unknown_words
            vocabulary = vocabulary_of(description.config.model_path) if prompt == request.prompt else None
            if remark := unknown_words_remark(prompt, unknown, tokenizer.whole_words, vocabulary):
                remarks.append(remark)
    return remarks


@functools.cache
def _whole_word_tokenizer(folder: Path) -> JsonTokenizer | None:
    """Return the tokenizer of an embedded model; None of others, which have a part for every word, and megabytes."""
    from diffusion_runtime.text_encoders.json_tokenizer import load_json_tokenizer

    file = folder / "tokenizer.json"
    tokenizer = load_json_tokenizer(folder) if file.is_file() and file.stat().st_size < 2**20 else None
    return tokenizer if tokenizer is not None and tokenizer.whole_words else None
