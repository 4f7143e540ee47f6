"""The interface of a text encoder, and the conditions it returns."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F

from diffusion_runtime.request.generation_request import GenerationRequest, image_paths
from diffusion_runtime.text_encoders.unknown_words import Vocabulary, quoted_prompt, unknown_words_remark


@dataclass(frozen=True)
class TextStream:
    """One encoder's tokens of several prompts.

    embeddings: [batch, max_tokens, dim]; valid tokens first, zero past each prompt's length. lengths: the number of
    valid tokens of each prompt.
    """

    embeddings: torch.Tensor
    lengths: tuple[int, ...]

    def take(self, indices: Sequence[int]) -> Self:
        """Return the prompts at these positions; a position may come more than once."""
        lengths = tuple(self.lengths[index] for index in indices)
        return dataclasses.replace(self, embeddings=self.embeddings[list(indices)], lengths=lengths)

    def joined(self, other: Self) -> Self:
        """Return these prompts followed by those of `other`, padded to the longer ones."""
        most = max(self.embeddings.shape[1], other.embeddings.shape[1])
        padded = [F.pad(each.embeddings, (0, 0, 0, most - each.embeddings.shape[1])) for each in (self, other)]
        return dataclasses.replace(self, embeddings=torch.cat(padded), lengths=self.lengths + other.lengths)

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        return dataclasses.replace(self, embeddings=self.embeddings.to(device, dtype))

    def zeroed(self) -> Self:
        """Return as many tokens, all zero."""
        return dataclasses.replace(self, embeddings=torch.zeros_like(self.embeddings))


@dataclass(frozen=True)
class EncoderCut:
    """Truncation by one encoder. encoder: its name for users. num_tokens: for each prompt, how many tokens were cut
    off. max_tokens: its capacity for one prompt."""

    encoder: str
    num_tokens: tuple[int, ...]
    max_tokens: int

    def take(self, indices: Sequence[int]) -> Self:
        """Return the cut of the prompts at these positions."""
        return dataclasses.replace(self, num_tokens=tuple(self.num_tokens[index] for index in indices))


@dataclass(frozen=True)
class Conditions:
    """Encoded prompts, in the order in which they were given.

    embeddings: [batch, max_tokens, dim] on the encoder's device and in its dtype; zero past each prompt's length.
    lengths: the number of valid tokens of each prompt. unknown_words: for each prompt the words its tokenizer does not
    know; the model cannot tell them apart. known_words: all that a tokenizer of whole words knows, where a prompt has
    another one; empty otherwise. num_cut_tokens: for each prompt how many tokens were cut off because it was too long.
    pooled: one vector per prompt, [batch, dim], of models that take one. further: the tokens of the encoders
    after the first, in the family's own order. encoder: the name of the first encoder, for a remark that must name
    which of several it is about. further_cuts: truncation by the encoders after the first. picture_places: for a prompt
    about pictures whose own tokens are left out, how many tokens precede each; the same for every prompt.
    picture_ranges: for a prompt about pictures whose own tokens are there, the first token of each with its marks and
    the one behind its last; the same for every prompt. seconds: of each prompt the length of a video of it, from models
    that predict one. known_words: all that a tokenizer of whole words knows, where a prompt has another one; empty
    otherwise.
    """

    embeddings: torch.Tensor
    lengths: tuple[int, ...]
    unknown_words: tuple[tuple[str, ...], ...]
    num_cut_tokens: tuple[int, ...]
    pooled: torch.Tensor | None = None
    further: tuple[TextStream, ...] = ()
    encoder: str | None = None
    further_cuts: tuple[EncoderCut, ...] = ()
    picture_places: tuple[int, ...] = ()
    picture_ranges: tuple[tuple[int, int], ...] = ()
    seconds: tuple[float, ...] = ()
    known_words: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        embeddings: torch.Tensor,
        lengths: Sequence[int] | None = None,
        *,
        pooled: torch.Tensor | None = None,
        further: Sequence[TextStream] = (),
        picture_places: Sequence[int] = (),
    ) -> Self:
        """Build conditions from given embeddings, without remarks. lengths: None for no padding."""
        batch, num_tokens = embeddings.shape[:2]
        known = (num_tokens,) * batch if lengths is None else tuple(lengths)
        nothing: tuple[tuple[str, ...], ...] = ((),) * batch
        places = tuple(picture_places)
        return cls(embeddings, known, nothing, (0,) * batch, pooled, tuple(further), picture_places=places)

    def joined(self, other: Self) -> Self:
        """Return these prompts followed by those of `other`, padded to the longer ones."""
        assert len(self.further) == len(other.further), "the conditions are of one model"
        first = TextStream(self.embeddings, self.lengths).joined(TextStream(other.embeddings, other.lengths))
        cuts = zip(self.further_cuts, other.further_cuts, strict=True)
        return dataclasses.replace(
            self,
            embeddings=first.embeddings,
            lengths=first.lengths,
            unknown_words=self.unknown_words + other.unknown_words,
            num_cut_tokens=self.num_cut_tokens + other.num_cut_tokens,
            pooled=None if self.pooled is None or other.pooled is None else torch.cat([self.pooled, other.pooled]),
            further=tuple(one.joined(another) for one, another in zip(self.further, other.further, strict=True)),
            further_cuts=tuple(
                dataclasses.replace(one, num_tokens=one.num_tokens + another.num_tokens) for one, another in cuts
            ),
            seconds=self.seconds + other.seconds,
            known_words=self.known_words or other.known_words,
        )

    def remarks(self, index: int, prompt: str, vocabulary: Vocabulary | None = None) -> tuple[str, ...]:
        """Return one sentence for each part of the prompt at `index` that the model cannot read. prompt: its text,
        quoted in the sentences. vocabulary: of the model, None where it is not closed."""
        quoted, remarks = quoted_prompt(prompt), []
        if remark := unknown_words_remark(prompt, self.unknown_words[index], self.known_words, vocabulary):
            remarks.append(remark)
        if self.num_cut_tokens[index]:
            count, room = self.num_cut_tokens[index], self.embeddings.shape[1]
            whom = "" if self.encoder is None else f" for {self.encoder}"
            remarks.append(f"prompt {quoted}: too long{whom}, the last {count} tokens past {room} are cut off")
        for cut in self.further_cuts:
            if cut.num_tokens[index]:
                remarks.append(
                    f"prompt {quoted}: too long for {cut.encoder}, the last {cut.num_tokens[index]} tokens past "
                    f"{cut.max_tokens} are cut off there"
                )
        return tuple(remarks)

    def take(self, indices: Sequence[int]) -> Self:
        """Return the prompts at these positions; a position may come more than once."""
        return dataclasses.replace(
            self,
            embeddings=self.embeddings[list(indices)],
            lengths=tuple(self.lengths[index] for index in indices),
            unknown_words=tuple(self.unknown_words[index] for index in indices),
            num_cut_tokens=tuple(self.num_cut_tokens[index] for index in indices),
            pooled=None if self.pooled is None else self.pooled[list(indices)],
            further=tuple(stream.take(indices) for stream in self.further),
            further_cuts=tuple(cut.take(indices) for cut in self.further_cuts),
            seconds=tuple(self.seconds[index] for index in indices if self.seconds),
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the same prompts on the device and in the dtype of a model."""
        return dataclasses.replace(
            self,
            embeddings=self.embeddings.to(device, dtype),
            pooled=None if self.pooled is None else self.pooled.to(device, dtype),
            further=tuple(stream.to(device, dtype) for stream in self.further),
        )

    def zeroed(self) -> Self:
        """Return as many tokens and pooled vectors, all zero."""
        return dataclasses.replace(
            self,
            embeddings=torch.zeros_like(self.embeddings),
            pooled=None if self.pooled is None else torch.zeros_like(self.pooled),
            further=tuple(stream.zeroed() for stream in self.further),
        )


class TextEncoder(ABC):
    """A tokenizer and an encoder, loaded and on their device.

    max_tokens: capacity for one prompt, its end token included. library, implementation: of its attention, for the
    report; the runtime does not count it. chosen: the choice that selected it, empty for the library's own
    (attention_choice.py).
    """

    max_tokens: int
    library: str
    implementation: str
    chosen: str = ""

    def of_pictures(self, paths: Sequence[str]) -> TextEncoder:  # noqa: ARG002
        """Return the encoder of prompts about these images, in their order, in a model that reads them with the prompt;
        itself in others."""
        return self

    def of_request(self, request: GenerationRequest) -> TextEncoder:
        """Return the encoder of the prompts of requests with the images of this resolved one."""
        return self.of_pictures(image_paths(request, "image_path"))

    def of_negative(self) -> TextEncoder:
        """Return the encoder of the negative prompts that go with this one, in a model whose negative prompts are about
        other pictures; itself in others."""
        return self

    @abstractmethod
    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode one or more prompts; an empty prompt is allowed (a negative prompt often is)."""
