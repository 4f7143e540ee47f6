"""The one YAML parser: JSON's values, with comments, anchors and unquoted text; no tags.

Scalars without quotes are null, true and false in YAML 1.1's spellings, decimal numbers, else text: dates, binary,
octal and sexagesimal numbers stay text. Keys are text. Tags are refused.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from diffusion_runtime.errors import ConfigError, shown
from diffusion_runtime.untrusted.document import MAX_DEPTH, MAX_NUMBER_CHARACTERS, DocumentError, check_depth
from diffusion_runtime.untrusted.files import named, read_file

# Values of a document, those that aliases repeat counted each time. PyYAML reads some 10,000 of them per second.
MAX_VALUES = 20_000
MAX_YAML_BYTES = 1024 * 1024

_WORDS = {
    **dict.fromkeys(("", "~", "null"), None),
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
}
_WHOLE_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_MERGE = "<<"


@dataclass
class _Open:
    """A list or mapping that is being read. key: of the next value, None before a key. merged: values from `<<`, which
    the mapping's own keys override."""

    value: dict[str, Any] | list[Any]
    anchor: str | None
    num_values: int = 1
    key: str | None = None
    merged: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _Anchored:
    value: Any
    num_values: int


def parse_yaml(text: str) -> Any:
    """Parse the value of a YAML text of one document; None for an empty one.

    Raises DocumentError with the line for syntax errors, tags, keys that are no text or given twice, aliases of what
    contains them, and anything past the limits.
    """
    try:
        return _Builder().build(text)
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f" at line {error.problem_mark.line + 1}"
        raise DocumentError(f"{error.problem or error.context}{where}") from error
    except yaml.YAMLError as error:
        raise DocumentError(str(error).splitlines()[0]) from error


def yaml_document(value: dict[str, Any]) -> str:
    """YAML text that `parse_yaml` reads back as the same plain values; tuples become lists."""
    text: str = yaml.safe_dump(_lists(value), sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)
    return text


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


def read_yaml_file(path: str | Path, key: str = "") -> Any:
    """Read the value of the YAML file at `path`. key: the flag or key that named it.

    Raises ConfigError for what read_file and parse_yaml refuse.
    """
    content = read_file(path, key, max_bytes=MAX_YAML_BYTES)
    try:
        return parse_yaml(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named(key, path)} is not valid YAML: it is not UTF-8 text ({error.reason})") from error
    except DocumentError as error:
        raise ConfigError(f"{named(key, path)} is not valid YAML: {error}") from error


def read_packaged_yaml(path: Path) -> Any:
    """Read the value of a YAML file of this package, by libyaml where PyYAML has it: the files on published models take
    0.03 s in place of 0.2 (one core of an EPYC). Strangers' files go through Python's parser alone."""
    return _Builder(getattr(yaml, "CSafeLoader", yaml.SafeLoader)).build(path.read_text(encoding="utf-8"))


class _Builder:
    """Builds values from the parser's events, which come one by one whatever the depth."""

    def __init__(self, loader: Any = yaml.SafeLoader) -> None:
        self._loader = loader
        self._open: list[_Open] = []
        self._anchors: dict[str, _Anchored] = {}
        self._num_values = 0
        self._documents: list[Any] = []

    def build(self, text: str) -> Any:
        for event in yaml.parse(text, Loader=self._loader):
            try:
                self._take(event)
            except DocumentError as error:
                line = "" if event.start_mark is None else f"line {event.start_mark.line + 1}: "
                raise DocumentError(f"{line}{error}") from error
        value = self._documents[0] if self._documents else None
        # Aliases nest deeper than the text does.
        check_depth(value)
        return value

    def _take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.DocumentStartEvent) and self._documents:
            raise DocumentError("a second document begins here, expected one")
        tag: str | None = getattr(event, "tag", None)
        if tag is not None:
            raise DocumentError(f"the tag {shown(tag)}: tags are not read; put a text in quotes")
        if isinstance(event, yaml.ScalarEvent):
            self._take_scalar(event)
        elif isinstance(event, yaml.AliasEvent):
            name = str(event.anchor)
            found = self._anchors.get(name)
            if found is None:
                raise DocumentError(f"the alias *{name[:80]} is not defined before its use")
            self._put(found.value, found.num_values)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            if len(self._open) == MAX_DEPTH:
                raise DocumentError(f"it nests more than {MAX_DEPTH} levels deep")
            self._refuse_as_key()
            self._anchors.pop(str(event.anchor), None)
            self._open.append(_Open({} if isinstance(event, yaml.MappingStartEvent) else [], event.anchor))
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._close()

    def _take_scalar(self, event: yaml.ScalarEvent) -> None:
        holder = self._open[-1] if self._open else None
        if holder is not None and isinstance(holder.value, dict) and holder.key is None:
            if event.value in holder.value or (event.value == _MERGE and holder.merged):
                raise DocumentError(f"key {shown(event.value)} is given twice")
            holder.key = event.value
            self._count(1)
            return
        value = _plain_value(event.value) if event.implicit[0] else event.value
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchored(value, 1)
        self._put(value, 1)

    def _close(self) -> None:
        done = self._open.pop()
        if isinstance(done.value, dict):
            for merged in done.merged:
                # The mapping's own keys come first, then those of the first that is merged.
                done.value.update({key: value for key, value in merged.items() if key not in done.value})
        if done.anchor is not None:
            self._anchors[done.anchor] = _Anchored(done.value, done.num_values)
        self._put(done.value, done.num_values, counted=True)

    def _put(self, value: Any, num_values: int, *, counted: bool = False) -> None:
        """Add a complete value to the innermost open list or mapping. counted: whether its own values were counted as
        they came."""
        self._count(1 if counted else num_values)
        if not self._open:
            self._documents.append(value)
            return
        holder = self._open[-1]
        holder.num_values += num_values
        if isinstance(holder.value, list):
            holder.value.append(value)
            return
        self._refuse_as_key()
        assert holder.key is not None
        if holder.key == _MERGE:
            merged = value if isinstance(value, list) else [value]
            if not all(isinstance(item, dict) for item in merged):
                raise DocumentError(f"<<: expected a mapping to merge, got {shown(value)}")
            holder.merged = merged or [{}]
        else:
            holder.value[holder.key] = value
        holder.key = None

    def _refuse_as_key(self) -> None:
        holder = self._open[-1] if self._open else None
        if holder is not None and isinstance(holder.value, dict) and holder.key is None:
            raise DocumentError("a key that is no text")

    def _count(self, number: int) -> None:
        self._num_values += number
        if self._num_values > MAX_VALUES:
            raise DocumentError(f"more than {MAX_VALUES} values, those that aliases repeat included")


def _plain_value(text: str) -> Any:
    """Parse the value of a scalar without quotes."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if len(text) <= MAX_NUMBER_CHARACTERS:
        if _WHOLE_NUMBER.fullmatch(text):
            return int(text)
        if _NUMBER.fullmatch(text) and not math.isinf(number := float(text)):
            return number
    return text
