"""Text encoding for several processes: rank 0 encodes and broadcasts, the others receive.

An encoder may be larger than the transformer (UMT5-XXL takes 11 GB), and its result is a few megabytes: the other ranks
save its memory and the time to read it, and all are conditioned on the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from diffusion_runtime.parallel.world import World
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.text_encoders.interface import Conditions, EncoderCut, TextEncoder, TextStream


class SharedTextEncoder(TextEncoder):
    """Text encoder shared by several processes. encoder: loaded on rank 0, None on the others."""

    def __init__(self, encoder: TextEncoder | None, world: World) -> None:
        self._encoder = encoder
        self._world = world
        header = json.loads(world.from_first(lambda: json.dumps(self._describe_encoder())))
        self.max_tokens = header["max_tokens"]
        self.library = header["library"]
        self.implementation = header["implementation"]
        self.chosen = header["chosen"]

    def of_pictures(self, paths: Sequence[str]) -> SharedTextEncoder:
        return SharedTextEncoder(None if self._encoder is None else self._encoder.of_pictures(paths), self._world)

    def of_request(self, request: GenerationRequest) -> SharedTextEncoder:
        return SharedTextEncoder(None if self._encoder is None else self._encoder.of_request(request), self._world)

    def of_negative(self) -> SharedTextEncoder:
        """Return the encoder of negative prompts; every process learns from rank 0 whether it is another one."""
        own = None if self._encoder is None else self._encoder.of_negative()
        is_other = json.loads(self._world.from_first(lambda: json.dumps(own is not self._encoder)))
        return SharedTextEncoder(own, self._world) if is_other else self

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode on rank 0. Shapes go through the run store first, then each tensor in one broadcast."""
        encoded: list[Conditions] = []

        def encode() -> str:
            assert self._encoder is not None
            encoded.append(self._encoder.encode(prompts))
            return json.dumps(_describe(encoded[0]))

        header = json.loads(self._world.from_first(encode))
        sent = [_tensors_of(conditions) for conditions in encoded]
        tensors = []
        for index, (shape, dtype) in enumerate(header["tensors"]):
            if sent:
                tensor = sent[0][index].to(self._world.device).contiguous()
            else:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._world.device)
            tensors.append(self._world.broadcast(tensor))
        return _conditions(header, tensors)

    def _describe_encoder(self) -> dict[str, Any]:
        assert self._encoder is not None
        encoder = self._encoder
        return {
            "max_tokens": encoder.max_tokens,
            "library": encoder.library,
            "implementation": encoder.implementation,
            "chosen": encoder.chosen,
        }


def _tensors_of(conditions: Conditions) -> list[torch.Tensor]:
    pooled = [] if conditions.pooled is None else [conditions.pooled]
    return [conditions.embeddings, *pooled, *(stream.embeddings for stream in conditions.further)]


def _describe(conditions: Conditions) -> dict[str, Any]:
    tensors = _tensors_of(conditions)
    return {
        "tensors": [(list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors],
        "lengths": conditions.lengths,
        "picture_places": conditions.picture_places,
        "picture_ranges": conditions.picture_ranges,
        "unknown_words": conditions.unknown_words,
        "known_words": conditions.known_words,
        "num_cut_tokens": conditions.num_cut_tokens,
        "has_pooled": conditions.pooled is not None,
        "further_lengths": [stream.lengths for stream in conditions.further],
        "encoder": conditions.encoder,
        "seconds": conditions.seconds,
        "further_cuts": [(cut.encoder, cut.num_tokens, cut.max_tokens) for cut in conditions.further_cuts],
    }


def _conditions(header: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Conditions:
    waiting = iter(tensors)
    embeddings = next(waiting)
    pooled = next(waiting) if header["has_pooled"] else None
    return Conditions(
        embeddings,
        tuple(header["lengths"]),
        tuple(tuple(words) for words in header["unknown_words"]),
        tuple(header["num_cut_tokens"]),
        pooled,
        tuple(TextStream(next(waiting), tuple(lengths)) for lengths in header["further_lengths"]),
        header["encoder"],
        tuple(EncoderCut(name, tuple(counts), room) for name, counts, room in header["further_cuts"]),
        picture_places=tuple(header["picture_places"]),
        picture_ranges=tuple((start, stop) for start, stop in header["picture_ranges"]),
        seconds=tuple(header["seconds"]),
        known_words=tuple(header["known_words"]),
    )
