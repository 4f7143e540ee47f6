"""Text encoders whose weights are copied to the device when a prompt is encoded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder


class _WaitingTextEncoder(TextEncoder):
    """A text encoder that is on the device only while it encodes."""

    def __init__(self, encoder: TextEncoder) -> None:
        self.max_tokens = encoder.max_tokens
        self.library = encoder.library
        self.implementation = encoder.implementation
        self.chosen = encoder.chosen

    @abstractmethod
    def brought(self) -> TextEncoder:
        """Bring the encoder to the device and return it."""

    def of_pictures(self, paths: Sequence[str]) -> TextEncoder:
        return _OfPictures(self, lambda encoder: encoder.of_pictures(paths))

    def of_request(self, request: GenerationRequest) -> TextEncoder:
        return _OfPictures(self, lambda encoder: encoder.of_request(request))

    def encode(self, prompts: Sequence[str]) -> Conditions:
        return self.brought().encode(prompts)


class _OfPictures(_WaitingTextEncoder):
    """`whole` for prompts about pictures. about: gives its encoder of those. is_negative: for the negative ones."""

    def __init__(
        self, whole: _WaitingTextEncoder, about: Callable[[TextEncoder], TextEncoder], *, is_negative: bool = False
    ) -> None:
        super().__init__(whole)
        self._whole = whole
        self._about = about
        self._is_negative = is_negative

    def brought(self) -> TextEncoder:
        encoder = self._about(self._whole.brought())
        return encoder.of_negative() if self._is_negative else encoder

    def of_negative(self) -> TextEncoder:
        encoder = self.brought()
        return self if encoder.of_negative() is encoder else _OfPictures(self._whole, self._about, is_negative=True)


class OffloadedTextEncoder(_WaitingTextEncoder):
    """Text encoder on the CPU. bring: called before each use, brings the weights of `encoder` to the device."""

    def __init__(self, encoder: TextEncoder, bring: Callable[[], object]) -> None:
        super().__init__(encoder)
        self._encoder = encoder
        self._bring = bring

    def brought(self) -> TextEncoder:
        self._bring()
        return self._encoder


class ReloadedTextEncoder(_WaitingTextEncoder):
    """Text encoder that is freed and loaded again. load: loads the encoder, now and whenever a prompt is encoded after
    `leave`. bring: called before each use, makes room for it and calls `enter`."""

    def __init__(self, load: Callable[[], TextEncoder], bring: Callable[[], object]) -> None:
        self._load = load
        self._bring = bring
        encoder = load()
        self._encoder: TextEncoder | None = encoder
        super().__init__(encoder)

    @property
    def is_on_device(self) -> bool:
        return self._encoder is not None

    def enter(self) -> None:
        """Load the encoder if it is not loaded."""
        if self._encoder is None:
            self._encoder = self._load()

    def leave(self) -> None:
        """Free its memory."""
        self._encoder = None

    def brought(self) -> TextEncoder:
        self._bring()
        assert self._encoder is not None
        return self._encoder


def modules_of(encoder: object) -> list[nn.Module]:
    """Return the modules that hold the weights of an encoder, its own or those of the encoders it consists of."""
    values = (value for each in encoders_of(encoder) for value in vars(each).values())
    return list(dict.fromkeys(value for value in values if isinstance(value, nn.Module)))


def encoders_of(encoder: object) -> Iterator[object]:
    """Yield the encoder, and those that it consists of."""
    yield encoder
    for value in vars(encoder).values():
        is_encoder = isinstance(value, TextEncoder) or type(value).__module__.startswith(__package__)
        if is_encoder and not isinstance(value, nn.Module):
            yield from encoders_of(value)
