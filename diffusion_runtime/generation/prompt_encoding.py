"""Prompt encoding of one batch: every distinct text once, sorted into guidance branches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder

logger = logging.getLogger("diffusion_runtime")


@dataclass(frozen=True)
class EncodedPrompts:
    """conditions: by guidance branch. notes: for each request, remarks about its prompts."""

    conditions: Mapping[str, Conditions]
    notes: tuple[tuple[str, ...], ...]


def texts_of(batch: Sequence[GenerationRequest], *, is_guided: bool) -> list[str]:
    """Return every distinct text of a batch once, prompts first, as one encoder gets them."""
    positive, negative = _prompts_of(batch, is_guided=is_guided)
    return list(dict.fromkeys(positive + negative))


def _prompts_of(batch: Sequence[GenerationRequest], *, is_guided: bool) -> tuple[list[str], list[str]]:
    """Prompts and negative prompts, in the order of the requests; none of these without guidance."""
    negative = [request.negative_prompt or "" for request in batch] if is_guided else []
    return [request.prompt for request in batch], negative


def encode_prompts(
    text_encoder: TextEncoder,
    batch: Sequence[GenerationRequest],
    recorder: AttentionRecorder,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_guided: bool,
) -> EncodedPrompts:
    """Encode every distinct text of the batch once, in one call; negative prompts in another where they are about other
    pictures.

    batch: resolved requests, whose images are the same. device, dtype: of the conditions. is_guided: whether negative
    prompts are encoded as well.
    """
    positive, negative = _prompts_of(batch, is_guided=is_guided)
    chosen_by = text_encoder.chosen
    text_encoder = text_encoder.of_request(batch[0])
    of_negative = text_encoder.of_negative() if negative else text_encoder
    # A text that is a prompt and a negative prompt may stand for two, about other pictures.
    asked = [(text_encoder, text) for text in positive] + [(of_negative, text) for text in negative]
    texts = list(dict.fromkeys(asked))
    encoded = [
        encoder.encode([text for own, text in texts if own is encoder])
        for encoder in dict.fromkeys(encoder for encoder, _ in texts)
    ]
    conditions = encoded[0] if len(encoded) == 1 else encoded[0].joined(encoded[1])
    recorder.record_library("text_encoder", text_encoder.library, text_encoder.implementation, chosen_by)
    remarks = {each: conditions.remarks(index, each[1]) for index, each in enumerate(texts)}
    for remark in (remark for several in remarks.values() for remark in several):
        logger.warning(remark)

    def chosen(of: Sequence[tuple[TextEncoder, str]]) -> Conditions:
        return conditions.take([texts.index(each) for each in of]).to(device, dtype)

    wanted, unwanted = asked[: len(positive)], asked[len(positive) :]
    branches = {"cond": chosen(wanted)}
    if unwanted:
        branches |= {"uncond": chosen(unwanted), "both": chosen(asked)}
    pairs = zip(wanted, unwanted or wanted, strict=True)
    return EncodedPrompts(branches, tuple(tuple(dict.fromkeys(remarks[a] + remarks[b])) for a, b in pairs))
