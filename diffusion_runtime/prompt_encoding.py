"""Prompt encoding of one batch: every distinct text once, sorted into guidance branches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.attention_report import AttentionRecorder
from diffusion_runtime.request import GenerationRequest, image_paths
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder

logger = logging.getLogger("diffusion_runtime")


@dataclass(frozen=True)
class EncodedPrompts:
    """conditions: by guidance branch. notes: for each request, remarks about its prompts."""

    conditions: Mapping[str, Conditions]
    notes: tuple[tuple[str, ...], ...]


def encode_prompts(
    text_encoder: TextEncoder,
    batch: Sequence[GenerationRequest],
    recorder: AttentionRecorder,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_guided: bool,
) -> EncodedPrompts:
    """Encode every distinct text of the batch once, in one call.

    batch: resolved requests, whose images are the same. device, dtype: of the conditions. is_guided: whether negative
    prompts are encoded as well.
    """
    positive = [request.prompt for request in batch]
    negative = [request.negative_prompt or "" for request in batch] if is_guided else []
    texts = list(dict.fromkeys([*positive, *negative]))
    chosen_by = text_encoder.chosen
    text_encoder = text_encoder.of_pictures(image_paths(batch[0], "image_path"))
    conditions = text_encoder.encode(texts)
    recorder.record_library("text_encoder", text_encoder.library, text_encoder.implementation, chosen_by)
    remarks = {text: conditions.remarks(index, text) for index, text in enumerate(texts)}
    for remark in (remark for several in remarks.values() for remark in several):
        logger.warning(remark)

    def chosen(of: Sequence[str]) -> Conditions:
        return conditions.take([texts.index(text) for text in of]).to(device, dtype)

    branches = {"cond": chosen(positive)}
    if negative:
        branches |= {"uncond": chosen(negative), "both": chosen([*positive, *negative])}
    pairs = zip(positive, negative or positive, strict=True)
    return EncodedPrompts(branches, tuple(tuple(dict.fromkeys(remarks[a] + remarks[b])) for a, b in pairs))
