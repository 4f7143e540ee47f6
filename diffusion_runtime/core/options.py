"""Typed options: text, JSON or YAML into the types that a dataclass declares, for attention backends; and for methods
that a request names with their options in one text, `method:key=value,...`."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from diffusion_runtime.errors import ConfigError, RequestError, nearest, shown
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.json_text import parse_json

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None, "null": None}


def parse_scalar(text: str) -> Any:
    """`-1`, `1e-3`, `[4,6,4]`, `true` as the values they look like; anything else stays text."""
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return parse_json(text)
    except DocumentError:
        return text


def parse_pairs(text: str) -> dict[str, Any]:
    """`key=value,...` as a mapping; commas inside brackets, braces and quotes belong to the value.

    Raises ConfigError for a part without `=` and for a key given twice.
    """
    pairs: dict[str, Any] = {}
    for part in _split_at_commas(text):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"expected key=value,... got {shown(part.strip())} in {shown(text)}")
        if key in pairs:
            raise ConfigError(f"{key[:80]} is given twice in {shown(text)}")
        pairs[key] = parse_scalar(value)
    return pairs


def _split_at_commas(text: str) -> list[str]:
    parts, depth, quote, start = [], 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [part for part in [*parts, text[start:]] if part.strip()]


def option_names(options_type: type) -> tuple[str, ...]:
    """Return the option keys a backend declares."""
    return tuple(item.name for item in dataclasses.fields(options_type))


def check_options(options_type: type, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`options` in the types that the dataclass `options_type` declares, each checked by itself.

    They may be a part of what a backend is given in the end, so rules between several are for `build_options`: an
    option that is refused alone and accepted with the others passes.

    Raises ConfigError that names `where`, the key and the nearest valid key, or the type that was expected.
    """
    checked = _coerce_options(options_type, options, where)
    error = _refusal(options_type, checked)
    if error is not None and any(_refusal(options_type, {key: value}) for key, value in checked.items()):
        raise ConfigError(f"{where}: {error}") from error
    return checked


def build_options(options_type: type, options: Mapping[str, Any], where: str) -> Any:
    """Build the complete set that a backend is given, as an instance of `options_type`.

    Raises ConfigError like check_options, and for values that contradict each other.
    """
    checked = _coerce_options(options_type, options, where)
    try:
        return options_type(**checked)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def removed_option(where: str, key: Any, options_types: Iterable[type]) -> ConfigError | None:
    """Return the error for a key in `REMOVED` of a type, a mapping from names that were options to what to do instead,
    or None where it stands in none."""
    for options_type in options_types:
        removed: Mapping[Any, str] = getattr(options_type, "REMOVED", {})
        if key in removed:
            return ConfigError(f"{where}: {key} is no option any more: {removed[key]}")
    return None


def unknown_option(where: str, key: Any, known: tuple[str, ...]) -> ConfigError:
    """Return the error for a key that is not among `known`."""
    hint = nearest(key, known) if known else " It has no options."
    return ConfigError(f"{where}: unknown option {shown(key)}.{hint}")


# The text that turns a method off, a preset's too.
NONE = "none"


@dataclass(frozen=True)
class MethodSettings:
    """A method with its complete options, an instance of `methods[method]`; a subclass per request field.

    field: the request field that holds the text. methods: the type of each method's options, the default first.
    """

    field: ClassVar[str]
    methods: ClassVar[Mapping[str, type]]

    method: str
    options: Any

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """`method`, or `method:key=value,...` with options that differ from the defaults; None for `none`.

        Raises RequestError for an unknown method or option, and a value that it cannot have.
        """
        method, _, rest = text.partition(":")
        method = method.strip()
        if method == NONE:
            if rest:
                raise RequestError(f"{cls.field}: none takes no options, got {shown(rest)}; leave them out")
            return None
        if method not in cls.methods:
            raise RequestError(f"{cls.field}: unknown value {shown(method)}.{nearest(method, (*cls.methods, NONE))}")
        where = f"{cls.field}: {method}"
        try:
            pairs = parse_pairs(rest)
        except ConfigError as error:
            raise RequestError(f"{where}: {error}") from error
        try:
            return cls(method, build_options(cls.methods[method], pairs, where))
        except ConfigError as error:
            raise RequestError(str(error)) from error

    @property
    def text(self) -> str:
        """Every option spelled out, as it stands in a recipe; `parse` reads it."""
        values = {item.name: getattr(self.options, item.name) for item in dataclasses.fields(self.options)}
        return f"{self.method}:{','.join(f'{name}={json.dumps(value)}' for name, value in values.items())}"


@dataclass(frozen=True)
class MethodText:
    """The check of a request field that holds the text of `settings`."""

    settings: type[MethodSettings]
    metavar: str = "METHOD"
    kind: ClassVar[type] = str

    def read(self, value: object) -> object:
        """Return the value unchanged."""
        return value

    def __call__(self, name: str, value: object) -> None:
        if not isinstance(value, str):
            raise RequestError(
                f"{name}: expected one of {', '.join((*self.settings.methods, NONE))}, got {shown(value)}"
            )
        self.settings.parse(value)


def _refusal(options_type: type, options: Mapping[str, Any]) -> ValueError | None:
    """Return the error that the options' own rules raise for `options`, with defaults for the rest, or None."""
    try:
        options_type(**options)
    except ValueError as error:
        return error
    return None


def _coerce_options(options_type: type, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    hints = get_type_hints(options_type)
    checked = {}
    for key, value in options.items():
        if key not in hints:
            raise removed_option(where, key, (options_type,)) or unknown_option(where, key, option_names(options_type))
        try:
            checked[key] = _coerce(value, hints[key])
        except (TypeError, ValueError, OverflowError) as error:
            expected = _type_name(hints[key])
            raise ConfigError(f"{where}.{key}: expected {expected}, got {shown(value)}") from error
    return checked


def _coerce(value: Any, expected: Any) -> Any:
    """`value` as `expected`; ValueError or TypeError when it is not one."""
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _coerce_to_first(value, [argument for argument in arguments if argument is not type(None)])
    if origin is Literal:
        if value not in arguments:
            raise ValueError(value)
        return value
    if origin in (tuple, list):
        return _coerce_sequence(value, origin, arguments)
    if expected is bool:
        return _coerce_bool(value)
    if isinstance(value, bool):
        raise TypeError(value)
    if expected is float:
        if not math.isfinite(number := float(value)):
            raise ValueError(value)
        return number
    if expected is int:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if not isinstance(value, int | str):
            raise TypeError(value)
        return int(value)
    if not isinstance(value, expected):
        raise TypeError(value)
    return value


def _coerce_to_first(value: Any, alternatives: list[Any]) -> Any:
    for alternative in alternatives:
        try:
            return _coerce(value, alternative)
        except (TypeError, ValueError):
            continue
    raise ValueError(value)


def _coerce_bool(value: Any) -> bool:
    if isinstance(value, str):
        value = _WORDS.get(value.lower())
    if not isinstance(value, bool):
        raise TypeError(value)
    return value


def _coerce_sequence(value: Any, origin: type, arguments: tuple[Any, ...]) -> Any:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise TypeError(value)
    if origin is list or arguments[-1] is Ellipsis:
        return origin(_coerce(item, arguments[0]) for item in value)
    if len(value) != len(arguments):
        raise ValueError(value)
    return tuple(_coerce(item, argument) for item, argument in zip(value, arguments, strict=True))


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(hint))
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


Value = TypeVar("Value")


class FrozenMapping(Mapping[str, Value], Generic[Value]):
    """The items of `values` at construction, in their order; equal to any mapping with the same items."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> tuple[type[FrozenMapping[Value]], tuple[dict[str, Value]]]:
        return type(self), (dict(self._values),)

    def __repr__(self) -> str:
        return repr(self._values)
