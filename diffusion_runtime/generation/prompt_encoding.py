"""Prompt encoding of one batch: every distinct text once, sorted into guidance branches."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.core.kept_results import KeptResults
from diffusion_runtime.generation.input_files import input_digests
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.unknown_words import Vocabulary

logger = logging.getLogger("diffusion_runtime")
# In the report, in place of the kernel of an encoder that did not run.
KEPT = "encoded by an earlier request"
# Fields of a request that the encodings of its images do not depend on.
_NOT_OF_INPUTS = ("prompt", "negative_prompt", "seed")


@dataclass(frozen=True)
class EncodedPrompts:
    """conditions: by guidance branch. notes: for each request, remarks about its prompts. of_parts: conditions of each
    context window, or segment, where these have prompts of their own."""

    conditions: Mapping[str, Conditions]
    notes: tuple[tuple[str, ...], ...]
    of_parts: tuple[Mapping[str, Conditions], ...] = ()


def inputs_key(request: GenerationRequest) -> str:
    """Return what encodings of the images of a resolved request depend on: their files' contents, and every setting but
    prompts and seed."""
    values = {name: value for name, value in request.to_dict().items() if name not in _NOT_OF_INPUTS}
    return json.dumps([values, input_digests(request)], sort_keys=True)


def texts_of(batch: Sequence[GenerationRequest], *, reads_negative: bool) -> list[str]:
    """Return every distinct text of a batch once, prompts first, as one encoder gets them."""
    positive, negative = _prompts_of(batch, reads_negative=reads_negative)
    return list(dict.fromkeys(positive + negative))


def _prompts_of(batch: Sequence[GenerationRequest], *, reads_negative: bool) -> tuple[list[str], list[str]]:
    """Prompts and negative prompts, in the order of the requests; none of these where they are not read."""
    negative = [request.negative_prompt or "" for request in batch] if reads_negative else []
    return [request.prompt for request in batch], negative


def encode_prompts(
    text_encoder: TextEncoder,
    batch: Sequence[GenerationRequest],
    recorder: AttentionRecorder,
    device: torch.device,
    dtype: torch.dtype,
    kept: KeptResults,
    *,
    reads_negative: bool,
    has_zero_text: bool = False,
    vocabulary: Vocabulary | None = None,
) -> EncodedPrompts:
    """Encode every distinct text of the batch once, in one call; negative prompts in another where they are about other
    pictures. Texts that an earlier batch encoded together are not encoded again.

    batch: resolved requests, whose images are the same. device, dtype: of the conditions. kept: encodings of earlier
    batches. reads_negative: whether negative prompts are encoded as well. has_zero_text: whether zeros stand for what
    they are encoded to. vocabulary: of the model, where it is closed; what a negative prompt may name is not.
    """
    positive, negative = _prompts_of(batch, reads_negative=reads_negative)
    chosen_by = text_encoder.chosen
    whole, text_encoder = text_encoder, text_encoder.of_request(batch[0])
    of_negative = text_encoder.of_negative() if negative else text_encoder
    # A text that is a prompt and a negative prompt may stand for two, about other pictures.
    asked = [(text_encoder, text) for text in positive] + [(of_negative, text) for text in negative]
    texts = list(dict.fromkeys(asked))
    # What an encoder returns for a text depends by rounding on the texts beside it, so the key names all of them: a
    # request has the same bytes, whatever was made before it.
    # A shared or offloaded encoder is another one for each request, with or without pictures.
    has_pictures = text_encoder is not whole and bool(input_digests(batch[0]))
    pictures = inputs_key(batch[0]) if has_pictures else None
    encoded = []
    for role, encoder in enumerate(dict.fromkeys(encoder for encoder, _ in texts)):
        own = tuple(text for each, text in texts if each is encoder)
        encoded.append(kept.get((role, own, pictures), functools.partial(encoder.encode, own)))
    conditions = encoded[0][0] if len(encoded) == 1 else encoded[0][0].joined(encoded[1][0])
    implementation = KEPT if all(was_kept for _, was_kept in encoded) else text_encoder.implementation
    recorder.record_library("text_encoder", text_encoder.library, implementation, chosen_by)
    wanted, unwanted = asked[: len(positive)], asked[len(positive) :]
    remarks = {
        each: conditions.remarks(index, each[1], vocabulary if each in wanted else None)
        for index, each in enumerate(texts)
    }
    for remark in (remark for several in remarks.values() for remark in several):
        logger.warning(remark)
        recorder.note(remark)

    def chosen(of: Sequence[tuple[TextEncoder, str]]) -> Conditions:
        return conditions.take([texts.index(each) for each in of]).to(device, dtype)

    branches = {"cond": chosen(wanted)}
    if unwanted and has_zero_text:
        zeros = chosen(unwanted).zeroed()
        branches |= {"uncond": zeros, "both": branches["cond"].joined(zeros)}
    elif unwanted:
        branches |= {"uncond": chosen(unwanted), "both": chosen(asked)}
    pairs = zip(wanted, unwanted or wanted, strict=True)
    return EncodedPrompts(branches, tuple(tuple(dict.fromkeys(remarks[a] + remarks[b])) for a, b in pairs))
