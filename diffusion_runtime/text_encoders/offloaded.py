"""Text encoders whose weights come to the device when a prompt is encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder


class OffloadedTextEncoder(TextEncoder):
    """encoder: loaded on the CPU. bring: called before each use, brings its weights to the device."""

    def __init__(self, encoder: TextEncoder, bring: Callable[[], object]) -> None:
        self._encoder = encoder
        self._bring = bring
        self.max_tokens = encoder.max_tokens
        self.library = encoder.library
        self.implementation = encoder.implementation
        self.chosen = encoder.chosen

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """See TextEncoder.encode."""
        self._bring()
        return self._encoder.encode(prompts)


class ReloadedTextEncoder(TextEncoder):
    """load: loads the encoder, now and whenever a prompt is encoded after `leave`. bring: called before each use, makes
    room for it and calls `enter`."""

    def __init__(self, load: Callable[[], TextEncoder], bring: Callable[[], object]) -> None:
        self._load = load
        self._bring = bring
        encoder = load()
        self._encoder: TextEncoder | None = encoder
        self.max_tokens = encoder.max_tokens
        self.library = encoder.library
        self.implementation = encoder.implementation
        self.chosen = encoder.chosen

    @property
    def is_on_device(self) -> bool:
        return self._encoder is not None

    def enter(self) -> None:
        """Load it where it is not there."""
        if self._encoder is None:
            self._encoder = self._load()

    def leave(self) -> None:
        """Give its memory back."""
        self._encoder = None

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """See TextEncoder.encode."""
        self._bring()
        assert self._encoder is not None
        return self._encoder.encode(prompts)


def modules_of(encoder: object) -> list[nn.Module]:
    """The modules that hold the weights of an encoder, whether it has them itself or by the encoders it is made of."""
    values = (value for each in encoders_of(encoder) for value in vars(each).values())
    return list(dict.fromkeys(value for value in values if isinstance(value, nn.Module)))


def encoders_of(encoder: object) -> Iterator[object]:
    """The encoder, and those that it is made of."""
    yield encoder
    for value in vars(encoder).values():
        if type(value).__module__.startswith(__package__) and not isinstance(value, nn.Module):
            yield from encoders_of(value)
