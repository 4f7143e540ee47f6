"""The one YAML parser: JSON's values, with comments, anchors and unquoted text; no tags.

Scalars without quotes are null, true and false in YAML 1.1's spellings, decimal numbers, else text: dates, binary,
octal and sexagesimal numbers stay text. Keys are text. Tags are refused.
"""

from __future__ import annotations

import math
import re
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
# What _Nodes.resolve calls scalars without quotes; the others are text.
_UNQUOTED = "unquoted"


def parse_yaml(text: str) -> Any:
    """Parse the value of a YAML text of one document; None for an empty one.

    Raises DocumentError with the line for syntax errors, tags, keys that are no text or given twice, aliases of what
    contains them, and anything past the limits.
    """
    try:
        loader: Any = _LimitedLoader(text)
        loader.get_event()
        node = None if loader.check_event(yaml.StreamEndEvent) else loader.compose_document()
        if not loader.check_event(yaml.StreamEndEvent):
            raise _refusal(loader.peek_event(), "a second document begins here, expected one")
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f" at line {error.problem_mark.line + 1}"
        raise DocumentError(f"{error.problem or error.context}{where}") from error
    except yaml.YAMLError as error:
        raise DocumentError(str(error).splitlines()[0]) from error
    value = _value(node)
    # Aliases nest deeper than the text does.
    check_depth(value)
    return value


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
    return _value(_PackagedLoader(path.read_text(encoding="utf-8")).get_single_node())


class _Nodes:
    """Loader that only tells scalars without quotes from others: `_value` makes the values of its nodes."""

    def resolve(self, kind: type[yaml.Node], _value: str | None, implicit: Any) -> str:
        return _UNQUOTED if kind is yaml.ScalarNode and implicit[0] else ""


class _PackagedLoader(_Nodes, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loader of files of this package, without limits."""


class _LimitedLoader(_Nodes, yaml.SafeLoader):
    """Loader that refuses tags, and counts events as the nodes are composed: depth, and values with those that aliases
    repeat."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_values = 0
        # Anchor -> values of its node, known once the node is complete.
        self._anchored: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = yaml.SafeLoader.peek_event(self)  # type: ignore[no-untyped-call]
        before = self._num_values
        if getattr(event, "tag", None) is not None:
            raise _refusal(event, f"the tag {shown(event.tag)}: tags are not read; put a text in quotes")
        if isinstance(parent, yaml.MappingNode) and index is None and not isinstance(event, yaml.ScalarEvent):
            raise _refusal(event, "a key that is no text")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchored:
                raise _refusal(event, f"the alias *{str(event.anchor)[:80]} is not defined before its use")
            self._count(event, self._anchored[event.anchor])
            return super().compose_node(parent, index)
        if isinstance(event, yaml.CollectionStartEvent) and self._depth == MAX_DEPTH:
            raise _refusal(event, f"it nests more than {MAX_DEPTH} levels deep")
        # An anchor may be given again.
        self.anchors.pop(event.anchor, None)
        self._anchored.pop(event.anchor, None)
        self._count(event, 1)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._anchored[event.anchor] = self._num_values - before
        return node

    def _count(self, event: yaml.Event, number: int) -> None:
        self._num_values += number
        if self._num_values > MAX_VALUES:
            raise _refusal(event, f"more than {MAX_VALUES} values, those that aliases repeat included")


def _refusal(where: Any, reason: str) -> DocumentError:
    """where: an event or a node."""
    return DocumentError(f"line {where.start_mark.line + 1}: {reason}")


def _value(node: yaml.Node | None) -> Any:
    """Return the value of a node. Raises DocumentError for keys given twice and for `<<` of anything but mappings."""
    if node is None:
        return None
    if isinstance(node, yaml.ScalarNode):
        return _plain_value(node.value) if node.tag == _UNQUOTED else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    values: dict[str, Any] = {}
    for key, item in node.value:
        if key.value in values:
            raise _refusal(key, f"key {shown(key.value)} is given twice")
        values[key.value] = _value(item)
        if key.value == _MERGE:
            values[_MERGE] = values[_MERGE] if isinstance(values[_MERGE], list) else [values[_MERGE]]
            if not all(isinstance(each, dict) for each in values[_MERGE]):
                raise _refusal(item, f"<<: expected a mapping to merge, got {shown(_value(item))}")
    # The mapping's own keys come first, then those of the first that is merged.
    for merged in values.pop(_MERGE, ()):
        values.update({key: value for key, value in merged.items() if key not in values})
    return values


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
