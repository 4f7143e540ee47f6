"""How an option of RuntimeConfig is declared: metadata of a dataclass field, which the flags, checks and schema of
configs, resume, `--from`, `tune` and `bench generate` read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

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

_KEY = "runtime_option"
_NAME = {"type": "string", "minLength": 1}


class Check(Protocol):
    """The values that an option may have."""

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
    """True or false."""

    def __call__(self, name: str, value: Any) -> Any:
        if not isinstance(value, bool):
            raise ConfigError(f"{name}: expected true or false, got {shown(value)}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Size:
    """An amount of memory, as text with a unit, or None."""

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
    """A value with a reader of its own, whose schema cli/config_schema.py has. read: as Check.__call__."""

    read: Callable[[str, Any], Any]

    def __call__(self, name: str, value: Any) -> Any:
        return self.read(name, value)

    def schema(self) -> dict[str, Any]:
        raise NotImplementedError("cli/config_schema.py has the schema of this option")


@dataclass(frozen=True)
class Flag:
    """The flag of an option. panel, metavar, help: in `--help`. bench_help: in that of `bench generate`, whose result
    records the option; None for none there. order: of the flags of a panel; among equals, by declaration."""

    help: str
    metavar: str | None = None
    panel: str = WHERE
    bench_help: str | None = None
    order: int = 0


# No field without a default but what `_effect` gives: whoever adds an option says all of that.
@dataclass(frozen=True)
class RuntimeOption:
    """The declaration of one option of RuntimeConfig.

    changes_output: whether frames made with another value are other frames, rounding included, so that `--resume` makes
    them anew. recorded_as: the part of a recipe (`model`, `attention`) in which `--resume` compares what the option led
    to; None where it compares the option's own value.
    repeated_by_from: whether `--from` takes the value of a recipe; not so for what belongs to the machine.
    written_by_tune: whether the config that `tune` writes has it. is_weight_path: whether it names weights from
    elsewhere than the model's folder. default, check: of its values. flag: None where flags of their own lead to it.
    diffusers_refusal: why diffusers' own pipeline takes no other value than the default and `diffusers_takes`, and what
    to leave out ({name}, {flag} and {value} are filled in); None where it takes all.
    """

    changes_output: bool
    recorded_as: str | None
    repeated_by_from: bool
    written_by_tune: bool
    is_weight_path: bool
    default: Any = None
    check: Check | None = None
    flag: Flag | None = None
    diffusers_refusal: str | None = None
    diffusers_takes: tuple[object, ...] = ()


def option(effect: RuntimeOption, default: Any, check: Check | None, flag: Flag | None = None, **declared: Any) -> Any:
    """The dataclass field of an option. effect: one of the constants below. default: a class is called for it.
    declared: further fields of RuntimeOption."""
    made = dataclasses.replace(effect, default=default, check=check, flag=flag, **declared)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata={_KEY: made})
    return dataclasses.field(default=default, metadata={_KEY: made})


def options_of(config: type) -> dict[str, RuntimeOption]:
    """The declared options of a dataclass by their names. Raises KeyError for a field without."""
    return {field.name: field.metadata[_KEY] for field in dataclasses.fields(config)}


def flag_of(field: dataclasses.Field[Any]) -> Flag | None:
    """The flag of a dataclass field that is an option, or has its flag alone as metadata (`with_flag`)."""
    declared = field.metadata.get(_KEY)
    return declared.flag if isinstance(declared, RuntimeOption) else declared


def with_flag(default: Any, help: str, metavar: str | None = None, panel: str = WHERE) -> Any:
    """The dataclass field of a value that is a part of an option and has a flag."""
    return dataclasses.field(default=default, metadata={_KEY: Flag(help, metavar, panel)})


def flag_name(name: str) -> str:
    """`--memory-limit` for `memory_limit`."""
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
# The same of what a tuned config says all the same: how it was measured.
SPEED = _effect(changes_output=False, repeated_by_from=False, written_by_tune=True)
