"""Declaration of an option of RuntimeConfig: metadata of a dataclass field, from which the flags, checks and schema of
configs, resume, `--from`, `tune`, `bench generate` and the refusals of diffusers' own pipelines follow."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from diffusion_runtime.core.memory_size import parse_size
from diffusion_runtime.core.spellings import own_name, unknown_value
from diffusion_runtime.errors import ConfigError, nearest, shown

# Panels of `generate --help`; the last ones apart, as beside flags in pairs (--x/--no-x) the longest names do not fit
# into 80 columns.
WHAT = "What to make"
WHERE = "Where it runs"
PARTS = "Parts from elsewhere"
QUANTIZATION = "8-bit linear layers"
TENSOR = "Tensor parallel"

_KEY = "diffusion_runtime.runtime_option"
_NAME = {"type": "string", "minLength": 1}


class Check(Protocol):
    """The values that an option may have. kind: of its value on the command line."""

    @property
    def kind(self) -> Any: ...

    def __call__(self, name: str, value: Any) -> Any:
        """Return what the config holds for a value. Raises ConfigError that names the option and what was expected."""

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the value in a config file."""


@dataclass(frozen=True)
class OneOf:
    """One of several names. words: what a bare `off` and `on` of YAML, which are booleans, stand for. spelling: the
    kind of other projects' names that are accepted too."""

    names: Sequence[str]
    words: Sequence[str] = ()
    spelling: Literal["quantization"] | None = None
    kind: ClassVar[Any] = str

    def __call__(self, name: str, value: Any) -> Any:
        if isinstance(value, bool) and value < len(self.words):
            value = self.words[value]
        if self.spelling is not None:
            value = own_name(self.spelling, value, self.names)
        if value not in self.names:
            if self.spelling is not None:
                raise ConfigError(unknown_value(self.spelling, value, self.names))
            raise ConfigError(f"{name}: unknown value {shown(value)}.{nearest(value, self.names)}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"enum": [*self.names, *(bool(index) for index in range(len(self.words)))]}


@dataclass(frozen=True)
class Text:
    """A text that is not empty. expected: for the message. is_optional: whether None stands for no value; none_word:
    and so does `none`, as a flag beside a recipe that names one."""

    expected: str = "a text"
    pattern: str | None = None
    is_optional: bool = False
    none_word: bool = False
    kind: ClassVar[Any] = str

    def __call__(self, name: str, value: Any) -> Any:
        if (value is None and self.is_optional) or (self.none_word and value == "none"):
            return None
        is_text = isinstance(value, str) and value != ""
        if not is_text or (self.pattern is not None and not re.fullmatch(self.pattern, value)):
            raise ConfigError(f"{name}: expected {self.expected}, got {shown(value)}")
        return value

    def schema(self) -> dict[str, Any]:
        return _NAME if self.pattern is None else {"type": "string", "pattern": self.pattern}


@dataclass(frozen=True)
class Switch:
    """True or false; is_optional: or None."""

    is_optional: bool = False
    kind: ClassVar[Any] = bool

    def __call__(self, name: str, value: Any) -> Any:
        if not isinstance(value, bool) and not (self.is_optional and value is None):
            raise ConfigError(f"{name}: expected true or false, got {shown(value)}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": ["boolean", "null"] if self.is_optional else "boolean"}


@dataclass(frozen=True)
class Count:
    """A whole number of 1 or more, or None. what: for the message of one above `maximum`."""

    maximum: int
    what: str
    kind: ClassVar[Any] = int

    def __call__(self, name: str, value: Any) -> Any:
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name}: expected a whole number of 1 or more, got {shown(value)}")
        if value is not None and value > self.maximum:
            raise ConfigError(f"{name}: expected at most {self.maximum} {self.what}, got {shown(value)}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": ["integer", "null"], "minimum": 1, "maximum": self.maximum}


@dataclass(frozen=True)
class Number:
    """A number from `minimum` to `maximum`. what: for the message."""

    what: str
    minimum: float
    maximum: float
    kind: ClassVar[Any] = float

    def __call__(self, name: str, value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not self.minimum <= value <= self.maximum:
            raise ConfigError(
                f"{name}: expected {self.what} from {self.minimum:.0f} to {self.maximum:.0f}, got {shown(value)}"
            )
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "number", "minimum": self.minimum, "maximum": self.maximum}


@dataclass(frozen=True)
class Size:
    """An amount of memory, as text with a unit, or None."""

    kind: ClassVar[Any] = str

    def __call__(self, name: str, value: Any) -> Any:
        if value is not None:
            parse_size(value, name)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": r"^\s*[0-9]{1,12}(\.[0-9]{1,6})?\s*[kKmMgGtT][iI]?[bB]\s*$"}


@dataclass(frozen=True)
class Names:
    """Up to `maximum` names, or one of them. what: for the message."""

    what: str
    maximum: int
    kind: ClassVar[Any] = list[str]

    def __call__(self, name: str, value: Any) -> Any:
        names = (value,) if isinstance(value, str) else value
        is_list = isinstance(names, Sequence) and all(isinstance(each, str) and each for each in names)
        if not is_list or len(names) > self.maximum:
            raise ConfigError(f"{name}: expected up to {self.maximum} {self.what}, got {shown(value)}")
        return tuple(names)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [_NAME, {"type": "array", "items": _NAME, "maxItems": self.maximum}]}


@dataclass(frozen=True)
class Other:
    """A value with a reader of its own (as Check.__call__). Where it is no text, cli/config_schema.py has its schema,
    which names what only higher rows know."""

    read: Callable[[str, Any], Any]
    kind: ClassVar[Any] = str

    def __call__(self, name: str, value: Any) -> Any:
        return self.read(name, value)

    def schema(self) -> dict[str, Any]:
        return _NAME


@dataclass(frozen=True)
class Flag:
    """The flag of an option. help, metavar, panel: in `--help`. bench_help: in that of `bench generate`, whose result
    records the option; None for none there. order: of the flags of a panel; among equals, by declaration."""

    help: str
    metavar: str | None = None
    panel: str = WHERE
    bench_help: str | None = None
    order: int = 0


@dataclass(frozen=True)
class Refusal:
    """The message of a pipeline of diffusers' own that takes no other value of an option than the default and `takes`.
    says: with {name}, {flag} and {value} of the option. feature: its name in the table of combinations, empty for the
    option's own."""

    says: str
    feature: str = ""
    takes: tuple[object, ...] = ()


# No field of an effect has a default: adding an option means deciding all of that.
@dataclass(frozen=True)
class RuntimeOption:
    """The declaration of one option of RuntimeConfig.

    changes_output: whether frames made with another value are other frames, rounding included, so that `--resume` makes
    them again. recorded_as: the part of a recipe (`model`, `attention`) in which `--resume` compares what the option
    led to; None where it compares the option's own value.
    repeated_by_from: whether `--from` takes the value of a recipe; not so for what belongs to the machine.
    written_by_tune: whether the config that `tune` writes has it. is_weight_path: whether it names weights from
    elsewhere than the model's folder. default, check: of its values. flag: None where flags of their own lead to it.
    refusal: None where a pipeline of diffusers' own takes every value.
    """

    changes_output: bool
    recorded_as: str | None
    repeated_by_from: bool
    written_by_tune: bool
    is_weight_path: bool
    default: Any = None
    check: Check | None = None
    flag: Flag | None = None
    refusal: Refusal | None = None

    @property
    def kind(self) -> Any:
        """The type of the option's value on the command line."""
        return str if self.check is None else self.check.kind

    def is_refused(self, value: object) -> bool:
        """Return whether a pipeline of diffusers' own refuses a value."""
        return self.refusal is not None and value not in (self.default, *self.refusal.takes)


def option(
    effect: RuntimeOption, default: Any, check: Check | None, flag: Flag | None = None, refusal: Refusal | None = None
) -> Any:
    """Return the dataclass field of an option. effect: one of the constants below. default: a class is called for
    it."""
    made = dataclasses.replace(effect, default=default, check=check, flag=flag, refusal=refusal)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata={_KEY: made})
    return dataclasses.field(default=default, metadata={_KEY: made})


def options_of(config: type) -> dict[str, RuntimeOption]:
    """Return the declared options of a dataclass by their names. Raises KeyError for a field without."""
    return {field.name: field.metadata[_KEY] for field in dataclasses.fields(config)}


def check_options(config: Any, prefix: str = "") -> None:
    """Replace the value of every option of a frozen dataclass by what its check makes of it. Raises ConfigError that
    names the option behind `prefix`."""
    for name, declared in options_of(type(config)).items():
        if declared.check is not None:
            object.__setattr__(config, name, declared.check(f"{prefix}{name}", getattr(config, name)))


def flag_name(name: str) -> str:
    """Return `--vae-decode` for `vae_decode`."""
    return f"--{name.replace('_', '-')}"


def _effect(
    *,
    changes_output: bool,
    recorded_as: str | None = None,
    repeated_by_from: bool,
    written_by_tune: bool,
    is_weight_path: bool = False,
) -> RuntimeOption:
    return RuntimeOption(changes_output, recorded_as, repeated_by_from, written_by_tune, is_weight_path)


# What changes the frames, by its own value; the weights from elsewhere; what the recipe has as its model.
OUTPUT = _effect(changes_output=True, repeated_by_from=True, written_by_tune=True)
WEIGHTS = _effect(changes_output=True, repeated_by_from=True, written_by_tune=True, is_weight_path=True)
MODEL = _effect(changes_output=True, recorded_as="model", repeated_by_from=True, written_by_tune=True)
# `tune` writes the attention that it found.
ATTENTION = _effect(changes_output=True, recorded_as="attention", repeated_by_from=True, written_by_tune=False)
# Another machine may have another device and other packages; processes that share the work change nothing of it.
MACHINE = _effect(changes_output=False, repeated_by_from=False, written_by_tune=False)
# The same for what a tuned config records all the same: how it was measured.
SPEED = _effect(changes_output=False, repeated_by_from=False, written_by_tune=True)
