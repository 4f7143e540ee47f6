"""Declaration of a request field: metadata of a dataclass field, from which flags, checks and model rules follow."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, ParamSpec, Protocol
from unicodedata import category

from diffusion_runtime.errors import RequestError, nearest, shown
from diffusion_runtime.request.given_images import as_image_paths, as_media_paths, check_given

# A panel of `generate --help`; the others are those of runtime options.
SIZE = "Size and steps"

# What a field's use may depend on within one generation (RequestField.used_with): guidance by a second branch; that or
# guidance within attention, which read the negative prompt; the latter alone; any guidance; guidance of some chunks
# alone; images; images at frames of their own; a video, not an image; noise levels that are still to be shifted.
GUIDANCE = "guidance"
NEGATIVE_TEXT = "negative text"
ATTENTION_GUIDANCE = "attention guidance"
ANY_GUIDANCE = "any guidance"
GUIDED_CHUNKS = "guided chunks"
IMAGES = "images"
PLACED_IMAGES = "images at frames"
VIDEO = "video"
SHIFT = "shift"

# Far beyond what any model makes; a number above is a typo, and its square has no room in memory.
MAX_COUNT = 1_000_000
# Explicit noise levels; schedules of more steps are spaced by a rule.
MAX_LEVELS = 1000
# What float32 holds without a loss, and half types do not overflow with at once.
MAX_SCALE = 1e6

# Why models refuse several fields.
NO_CHUNKS = "this model makes a clip at once, without a key-value cache; leave it out or use --model-path shapes-causal"
NO_UPSAMPLER = "a second stage needs an upsampler, a folder by --upsampler-path; leave it out"
NO_SPATIO_TEMPORAL = "this model takes no spatio-temporal guidance, as LTX-2.3 does; leave it out"
NO_SOUND = "this model does not make pictures and sound together; leave it out"
NO_PREDICTED_LENGTH = "this model chooses no length for a prompt, as LTX-2.5 does; leave it out"
NO_PROMPT = "this model reads no prompt, so that its attention has none to be guided by; leave it out"
NO_CONTROLNET = "this model has no ControlNet; leave it out"
NO_SEGMENTS = "this model makes a video at once, not in segments; leave it out"
NO_INITIAL = "this model starts from noise alone, beside the video of --video-path; leave it out"
NO_EXPERTS = "this model has one expert; leave it out"
NO_RIFLEX = "RIFLEx lowers a frequency of rotary positions that count frames, in clips made at once; leave it out"
NO_WINDOWS = "context windows are of clips of pictures alone that are made at once, without control; leave it out"
NO_RESTORATION = "this model restores no video, as `diffusion-runtime upscale` does with SeedVR2; leave it out"

# RequestField.pipeline_parameters of a field that diffusers' pipelines call by the same name.
OWN_NAME = ("{name}",)

_KEY = "diffusion_runtime.request_field"
_P = ParamSpec("_P")


class Check(Protocol):
    """The values that a field may have. metavar: of its flag; kind: the type of its text on the command line."""

    @property
    def metavar(self) -> str: ...

    @property
    def kind(self) -> type: ...

    def read(self, value: object) -> object:
        """Return what the request holds for the value of a flag or a file; one that cannot be read as it is."""

    def __call__(self, name: str, value: object) -> None:
        """Raises RequestError that names the field and says what was expected; value: anything but None."""


class AsGiven:
    """A check of values that a request holds as they are given."""

    def read(self, value: object) -> object:
        """Return the value unchanged."""
        return value


@dataclass(frozen=True)
class Text(AsGiven):
    """A text that UTF-8 can encode. needs_words: whether at least one word must stand in it."""

    needs_words: bool = False
    metavar: ClassVar[str] = "TEXT"
    kind: ClassVar[type] = str

    def __call__(self, name: str, value: object) -> None:
        if not isinstance(value, str):
            raise RequestError(f"{name}: expected a text, got {shown(value)}")
        if self.needs_words and not value.strip():
            raise RequestError(f"{name}: expected at least one word, got an empty {name}")
        if not is_unicode(value):
            raise RequestError(
                f"{name}: expected a text, got one with half of a character (a lone surrogate, or bytes that are "
                f"not UTF-8): {shown(value)}"
            )
        # No tokenizer was trained on them, and a terminal obeys them; spaces and line ends are for the tokenizer.
        place = next((at for at, each in enumerate(value) if category(each) == "Cc" and not each.isspace()), None)
        if place is not None:
            raise RequestError(
                f"{name}: expected a text, got a control character, {shown(value[place])} at {place}; take it out"
            )


@dataclass(frozen=True)
class ImageFile:
    """The path of an image, or with `several` a tuple of them; whether they can be read is the model's rules to
    check."""

    several: bool = False
    metavar: ClassVar[str] = "FILE"
    kind: ClassVar[type] = str

    def read(self, value: object) -> object:
        """Return paths as texts, with images that are values as files; of several, a tuple of them or the one."""
        value = as_image_paths(value)
        if self.several and isinstance(value, list | tuple):
            return value[0] if len(value) == 1 else tuple(value) or None
        return value

    def __call__(self, name: str, value: object) -> None:
        paths = value if self.several and isinstance(value, tuple) else (value,)
        for path in paths:
            if not isinstance(path, str) or not path:
                raise RequestError(f"{name}: expected the path of an image, got {shown(path)}")
            check_given(name, path)


@dataclass(frozen=True)
class MaskFile(ImageFile):
    """The path of an image, or of a video for models that take a control video."""


@dataclass(frozen=True)
class InputFile(AsGiven):
    """The path of a file; whether it can be read is the model's rules to check. noun: for messages."""

    noun: ClassVar[str]
    metavar: ClassVar[str] = "FILE"
    kind: ClassVar[type] = str

    def __call__(self, name: str, value: object) -> None:
        if not isinstance(value, str) or not value:
            raise RequestError(f"{name}: expected the path of {self.noun}, got {shown(value)}")


@dataclass(frozen=True)
class VideoFile(InputFile):
    """The path of a video, an animation or a still image."""

    noun: ClassVar[str] = "a video or an image"

    def read(self, value: object) -> object:
        """Return a path as it is, and an image that is a value as a file."""
        return as_image_paths(value)

    def __call__(self, name: str, value: object) -> None:
        super().__call__(name, value)
        check_given(name, str(value))


@dataclass(frozen=True)
class SoundFile(InputFile):
    """The path of a sound file, or of a video with sound."""

    noun: ClassVar[str] = "a sound file"


# Far more than any model takes.
MAX_REFERENCES = 100


@dataclass(frozen=True)
class MediaFiles(InputFile):
    """A tuple of paths of images, videos and sounds in an order that counts; the kind of each is found by its content,
    and what a model takes of them is its rules to check."""

    noun: ClassVar[str] = "an image, a video or a sound"

    def read(self, value: object) -> object:
        """Return paths as a tuple, of one path too, with media that are values as files; None for no path."""
        value = as_media_paths(value)
        return (
            (value,) if isinstance(value, str) else tuple(value) or None if isinstance(value, list | tuple) else value
        )

    def __call__(self, name: str, value: object) -> None:
        """Raises RequestError for what is no path, and for more files than any model takes."""
        paths = value if isinstance(value, tuple) else (value,)
        if len(paths) > MAX_REFERENCES:
            raise RequestError(f"{name}: expected at most {MAX_REFERENCES} files, got {len(paths)}")
        for path in paths:
            super().__call__(name, path)
            check_given(name, str(path))


@dataclass(frozen=True)
class Count(AsGiven):
    """A whole number from `minimum` to `maximum`."""

    minimum: int = 1
    maximum: int = MAX_COUNT
    metavar: ClassVar[str] = "N"
    kind: ClassVar[type] = int

    def __call__(self, name: str, value: object) -> None:
        if type(value) is not int or not self.minimum <= value <= self.maximum:
            is_range = self.maximum < MAX_COUNT
            among = f"from {self.minimum} to {self.maximum}" if is_range else f"of {self.minimum} or more"
            if type(value) is int and value > self.maximum and not is_range:
                among = f"of at most {self.maximum}"
            raise RequestError(f"{name}: expected a whole number {among}, got {shown(value)}")


@dataclass(frozen=True)
class SeedNumber(AsGiven):
    """A seed of a generator: a whole number of 63 bits."""

    metavar: ClassVar[str] = "N"
    kind: ClassVar[type] = int

    def __call__(self, name: str, value: object) -> None:
        if type(value) is not int or not 0 <= value < 2**63:
            raise RequestError(f"{name}: expected a whole number from 0 to 2**63 - 1, got {shown(value)}")


@dataclass(frozen=True)
class Number(AsGiven):
    """A number from `minimum` to `maximum`, both allowed; no NaN, no infinity."""

    minimum: float = 0.0
    maximum: float = MAX_SCALE
    metavar: ClassVar[str] = "X"
    kind: ClassVar[type] = float

    def __call__(self, name: str, value: object) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not self.minimum <= value <= self.maximum:  # type: ignore[operator]
            raise RequestError(
                f"{name}: expected a number from {self.minimum:g} to {self.maximum:g}, got {shown(value)}"
            )


@dataclass(frozen=True)
class Scales:
    """One number from 0 to MAX_SCALE, or several."""

    metavar: ClassVar[str] = "X,X,..."
    kind: ClassVar[type] = str

    def read(self, value: object) -> object:
        """Return numbers, or a text with commas between them, as a tuple; one of them as a number."""
        numbers = parse_levels(value)
        return numbers[0] if isinstance(numbers, tuple) and len(numbers) == 1 else numbers

    def __call__(self, name: str, value: object) -> None:
        numbers = value if isinstance(value, tuple) else (value,)
        if not numbers or not all(_is_number(number) and number >= 0 for number in numbers):
            raise RequestError(
                f"{name}: expected a number from 0 to {MAX_SCALE:g}, or several with commas between them, got "
                f"{shown(value)}"
            )


# One number for all attention roles, or one by role.
NumberByRole = float | tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class ByRole:
    """One number, or one by attention role: pairs of a role and a number; `default` is that of the roles that are not
    named. Whether the model has a role is its rules to check. number: the values."""

    number: Number
    metavar: ClassVar[str] = "X|ROLE=X"
    kind: ClassVar[type] = str

    def read(self, value: object) -> object:
        """Return a number, or a text, a mapping or a list of pairs as a tuple of pairs; another value as it is."""
        if isinstance(value, str) and "=" not in value:
            return _number_of(value)
        if isinstance(value, str):
            value = [each.strip().partition("=")[::2] for each in value.split(",")]
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, list | tuple) or not all(isinstance(each, list | tuple) for each in pairs):
            return value
        return tuple(tuple(_number_of(each) if at == 1 else each for at, each in enumerate(pair)) for pair in pairs)

    def __call__(self, name: str, value: object) -> None:
        if not isinstance(value, tuple):
            self.number(name, value)
            return
        if not 0 < len(value) <= MAX_LEVELS or any(len(pair) != 2 or not isinstance(pair[0], str) for pair in value):
            raise RequestError(
                f"{name}: expected a number, or numbers by attention role such as cross=5,default=3, got {shown(value)}"
            )
        roles = [role for role, _ in value]
        if len(set(roles)) < len(roles):
            twice = next(role for role in roles if roles.count(role) > 1)
            raise RequestError(
                f"{name}: expected each role once, got {shown(twice)} more than once; leave all but one out"
            )
        for role, number in value:
            self.number(f"{name}: {role}", number)


def _number_of(value: object) -> object:
    """Return the number that a text says; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


@dataclass(frozen=True)
class Levels:
    """Noise levels of the steps: numbers above 0 and at most 1, each below the one before."""

    metavar: ClassVar[str] = "X,X,..."
    kind: ClassVar[type] = str

    def read(self, value: object) -> object:
        """Return what `parse_levels` reads."""
        return parse_levels(value)

    def __call__(self, name: str, value: object) -> None:
        if not isinstance(value, tuple) or not value or not all(map(_is_number, value)):
            raise RequestError(
                f"{name}: expected numbers with commas between them, such as 1,0.75,0.5,0.25, got {shown(value)}"
            )
        if len(value) > MAX_LEVELS:
            raise RequestError(f"{name}: expected at most {MAX_LEVELS} noise levels, got {len(value)}")
        for index, level in enumerate(value):
            if not 0 < level <= 1:
                last = " (the 0 behind the last step is added by itself)" if level == 0 else ""
                if level > 10:
                    last = " (timesteps of 1000 are noise levels times 1000)"
                raise RequestError(
                    f"{name}: expected noise levels above 0 and at most 1{last}, got {shown(level)} for step "
                    f"{index + 1}; such as 1,0.75,0.5,0.25"
                )
        for index, (above, below) in enumerate(itertools.pairwise(value)):
            if below >= above:
                raise RequestError(
                    f"{name}: expected noise levels that fall from step to step, got {below:g} for step {index + 2} "
                    f"after {above:g}; such as 1,0.75,0.5,0.25"
                )


def _whole_numbers(value: object) -> object:
    """Return a list of whole numbers, one, or a text with commas between them, as a tuple; another value as it is."""
    if isinstance(value, str):
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            return value
    return tuple(value) if isinstance(value, list) else (value,) if type(value) is int else value


@dataclass(frozen=True)
class Blocks:
    """Indices of transformer blocks, from 0; whether the model has them is its rules to check."""

    metavar: ClassVar[str] = "N,N,..."
    kind: ClassVar[type] = str

    def read(self, value: object) -> object:
        """Return a list of indices, one of them, or a text with commas between them, as a tuple."""
        return _whole_numbers(value)

    def __call__(self, name: str, value: object) -> None:
        numbers = value if isinstance(value, tuple) else ()
        if not numbers or any(type(each) is not int or not 0 <= each < MAX_COUNT for each in numbers):
            raise RequestError(
                f"{name}: expected indices of transformer blocks with commas between them, such as 28, got "
                f"{shown(value)}"
            )
        if len(numbers) > MAX_LEVELS or len(set(numbers)) < len(numbers):
            raise RequestError(f"{name}: expected each block once, got {shown(value)}")


@dataclass(frozen=True)
class Seeds:
    """Seeds in an order, one or several times the same."""

    metavar: ClassVar[str] = "N,N,..."
    kind: ClassVar[type] = str

    def read(self, value: object) -> object:
        """Return a list of seeds, one of them, or a text with commas between them, as a tuple."""
        return _whole_numbers(value)

    def __call__(self, name: str, value: object) -> None:
        numbers = value if isinstance(value, tuple) else ()
        if not 1 <= len(numbers) <= MAX_LEVELS:
            raise RequestError(f"{name}: expected seeds with commas between them, such as 7,9,7, got {shown(value)}")
        for each in numbers:
            SeedNumber()(name, each)


def parse_levels(value: object) -> object:
    """Return a list of noise levels, or a text with commas between them, as a tuple; anything else as it is, for Levels
    to refuse."""
    if isinstance(value, str):
        try:
            return tuple(float(part) for part in value.split(","))
        except ValueError:
            return value
    if isinstance(value, list | tuple):
        return tuple(float(part) if _is_number(part) else part for part in value)
    return value


def _is_number(value: object) -> bool:
    # A larger integer than a float holds is none of the numbers that are asked for here.
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_SCALE <= value <= MAX_SCALE


@dataclass(frozen=True)
class OneOf(AsGiven):
    """One of several names."""

    names: Collection[str]
    metavar: ClassVar[str] = "NAME"
    kind: ClassVar[type] = str

    def __call__(self, name: str, value: object) -> None:
        if not isinstance(value, str) or value not in self.names:
            raise RequestError(f"{name}: unknown value {shown(value)}.{nearest(value, self.names)}")


@dataclass(frozen=True)
class RequestField:
    """The declaration of one field of GenerationRequest beside its name and type.

    help: of its flag. check: of its values. default: of the request, dataclasses.MISSING where it must be given; None
    is filled from what the model says. is_filled: whether every model has to fill it; None may stay otherwise.
    flag: its name, None for `--name` with hyphens. panel: of its help.
    pipeline_parameters: what diffusers' pipelines call it, the first one they have counts; empty for none, OWN_NAME for
    the field's name.
    differs_in_batch: whether the requests of one batch may differ in it. repeatable: whether its flag may be given
    several times, once per prompt or to make each prompt with each.
    is_of_chunks: whether models that make videos chunk by chunk (Sampling.is_causal) use it, all of them.
    refusal: for a field that only some models use (RequestRules.model_fields): why another model refuses it and what to
    do; {product} stands for images or videos, {value} for what was asked. None for a field of every model. off: the
    value of such a field that asks for nothing, which every model takes.
    used_with: GUIDANCE, NEGATIVE_TEXT, ATTENTION_GUIDANCE, ANY_GUIDANCE, GUIDED_CHUNKS, IMAGES, VIDEO or SHIFT for a
    field that counts only then; a generation without it says that it was not used.
    """

    help: str
    check: Check
    default: object = None
    is_filled: bool = False
    panel: str = SIZE
    flag: str | None = None
    pipeline_parameters: tuple[str, ...] = ()
    differs_in_batch: bool = False
    repeatable: bool = False
    is_of_chunks: bool = False
    refusal: str | None = None
    off: object = None
    used_with: str | None = None

    def __post_init__(self) -> None:
        if self.is_of_chunks and self.refusal is None:
            object.__setattr__(self, "refusal", NO_CHUNKS)

    @property
    def may_stay_none(self) -> bool:
        """True where a request may leave it open although no model fills it."""
        return self.default is None and not self.is_filled

    def parameters(self, name: str) -> tuple[str, ...]:
        """Return what diffusers' pipelines call the field of this name."""
        return tuple(each.format(name=name) for each in self.pipeline_parameters)

    @staticmethod
    def of(metadata: Any) -> RequestField:
        """Return what `request_field` put into a dataclass field's metadata. Raises KeyError for a field without."""
        declared: RequestField = metadata[_KEY]
        return declared


def _as_dataclass_field(declare: Callable[_P, RequestField]) -> Callable[_P, Any]:
    """Return `declare` with a dataclass field for its result. Typed as Any, as dataclasses.field is for an unknown
    default."""

    def field(*args: _P.args, **values: _P.kwargs) -> Any:
        declared = declare(*args, **values)
        return dataclasses.field(default=declared.default, metadata={_KEY: declared})

    return field


# Declares a field of GenerationRequest; it takes what RequestField takes.
request_field = _as_dataclass_field(RequestField)


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: half of a character, from JSON or from bytes that are not UTF-8, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
