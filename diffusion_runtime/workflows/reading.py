"""Reader of workflow files: the editor's JSON, the API's, and both in the metadata of pictures and videos."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diffusion_runtime.errors import shown
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.files import named, read_file, user_path
from diffusion_runtime.untrusted.json_text import parse_json
from diffusion_runtime.untrusted.media_kinds import HEAD_BYTES, container_of
from diffusion_runtime.workflows.editor_format import read_editor_format
from diffusion_runtime.workflows.graph import MAX_NODES, Graph, Link, Node, WorkflowError
from diffusion_runtime.workflows.node_widgets import EDITOR_KINDS

# A picture or a video around a workflow; the text itself is a few hundred kilobytes.
_MAX_FILE_BYTES = 2**30
_MAX_TEXT_BYTES = 16 * 2**20
_MAX_VALUES = 500_000
# What decides where a JSON object ends, and how many of these are read in a file; a template has 20,000.
_MARK = re.compile(rb'[{}"\\]')
_MAX_MARKS = 4_000_000
# Of a PNG or WebP; a picture of 1 GB in parts of 8 KB has as many. Empty ones would be read for minutes.
_MAX_CHUNKS = 200_000
# Keys of metadata, the graph that ran first: its seeds and switches are those of the file.
_KEYS = (b"prompt", b"workflow")


def read_workflow(path: str, key: str = "--workflow") -> Graph:
    """Return the graph of a file. key: the flag that named it. Raises WorkflowError that names the file."""
    place = user_path(path, key, WorkflowError)
    content = read_file(place, key, max_bytes=_MAX_FILE_BYTES, error=WorkflowError)
    try:
        return _graph_of(_document(content))
    except (WorkflowError, DocumentError) as error:
        raise WorkflowError(f"{named(key, place)}: {error}") from error


def graph_of_document(document: Any) -> Graph:
    """Return the graph of a parsed workflow of either format. Raises WorkflowError."""
    return _graph_of(document)


def _graph_of(document: Any) -> Graph:
    if isinstance(document, Mapping) and isinstance(document.get("nodes"), list):
        return read_editor_format(document)
    if isinstance(document, Mapping) and isinstance(document.get("prompt"), Mapping):
        # As it is sent to the server.
        document = document["prompt"]
    if isinstance(document, Mapping) and document and all(_is_api_node(each) for each in document.values()):
        return _read_api_format(document)
    raise WorkflowError(
        "expected a workflow of ComfyUI: a mapping with `nodes` and `links`, or of ids with `class_type` and `inputs`; "
        f"got {shown(document)}"
    )


def _is_api_node(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("class_type"), str)


def _read_api_format(document: Mapping[str, Any]) -> Graph:
    if len(document) > MAX_NODES:
        raise WorkflowError(f"expected at most {MAX_NODES} nodes, got {len(document)}")
    nodes = {}
    for identity, raw in document.items():
        inputs = raw.get("inputs", {})
        if not isinstance(inputs, Mapping):
            raise WorkflowError(f"node {identity}: inputs: expected a mapping, got {shown(inputs)}")
        title = raw.get("_meta", {}).get("title", "") if isinstance(raw.get("_meta"), Mapping) else ""
        if raw["class_type"] in EDITOR_KINDS:
            continue
        nodes[identity] = Node(
            identity, raw["class_type"], str(title), {name: _linked(value) for name, value in inputs.items()}
        )
    return Graph(nodes)


def _linked(value: Any) -> Any:
    """Return the link that a list of an id and an output stands for; any other value as it is."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int:
        return Link(value[0], value[1])
    return value


def _document(content: bytes) -> Any:
    """Return the parsed document of a file. Raises WorkflowError for one that holds none."""
    container = container_of(content[:HEAD_BYTES])
    if container is None:
        return _parsed(content)
    texts = {".png": _png_texts, ".webp": _webp_texts}.get(container, _any_texts)
    found = dict(texts(content))
    # `prompt` has no value where a node's is not in it; `workflow` has all.
    for key in _KEYS:
        if (text := found.get(key)) is not None:
            return _parsed(text)
    raise WorkflowError("this file holds no workflow; ComfyUI writes one into files that it saves, and editors drop it")


def _parsed(text: bytes) -> Any:
    if len(text) > _MAX_TEXT_BYTES:
        raise WorkflowError(f"expected a workflow of at most {_MAX_TEXT_BYTES} bytes, got {len(text)}")
    return parse_json(text, allow_constants=True, max_values=_MAX_VALUES)


def _png_texts(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield a PNG's texts under the keys of workflows, the first of each: chunks tEXt, iTXt and zTXt."""
    at, wanted = 8, set(_KEYS)
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(content):
            return
        length, kind = struct.unpack(">I4s", content[at : at + 8])
        data = content[at + 8 : at + 8 + length]
        at += length + 12
        if kind == b"IEND":
            return
        key, _, rest = data.partition(b"\0")
        # Others are not inflated: a few bytes can stand for many.
        if kind not in (b"tEXt", b"zTXt", b"iTXt") or key not in wanted:
            continue
        wanted.remove(key)
        if kind == b"tEXt":
            yield key, rest
        elif kind == b"zTXt" and rest:
            yield key, _inflated(rest[1:])
        elif kind == b"iTXt" and len(rest) >= 2:
            packed, (_, _, text) = rest[0], [*rest[2:].split(b"\0", 2), b"", b""][:3]
            yield key, _inflated(text) if packed else text


def _inflated(data: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, _MAX_TEXT_BYTES + 1)
    except zlib.error as error:
        raise WorkflowError(f"its compressed text is damaged: {error}") from error


def _webp_texts(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the texts of a WebP: ComfyUI writes `prompt:...` and `workflow:...` as tags of its EXIF."""
    at = 12
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(content):
            return
        kind, length = struct.unpack("<4sI", content[at : at + 8])
        if kind == b"EXIF":
            yield from _any_texts(content[at + 8 : at + 8 + length])
            return
        at += 8 + length + (length & 1)


def _any_texts(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield JSON objects that stand behind their key anywhere in a container (the metadata of MP4, Matroska, FLAC)."""
    marks = _MAX_MARKS
    for key in _KEYS:
        at = -1
        # A key may be a word of the picture itself; more than a few such places are none.
        for _ in range(64):
            at = content.find(key, at + 1)
            if at < 0 or marks <= 0:
                break
            start = content.find(b"{", at, at + 64)
            if start < 0:
                continue
            text, read = _object_at(content, start, marks)
            if text is not None:
                marks -= read
                yield key, text
                break
            # It may have been long without a mark; sixteen such places are enough.
            marks -= max(read, _MAX_MARKS // 16)


def _object_at(content: bytes, start: int, most: int) -> tuple[bytes | None, int]:
    """Return the JSON object that begins at a place, by its brackets outside of texts, and how many brackets, quotes
    and backslashes were read for it; None without its end. most: of these that are read."""
    depth, in_text, escaped = 0, False, -1
    count = 0
    for count, found in enumerate(_MARK.finditer(content, start, start + _MAX_TEXT_BYTES), 1):
        at, mark = found.start(), found[0]
        if count > most:
            return None, most
        if at == escaped:
            continue
        if in_text:
            in_text = mark != b'"'
            escaped = at + 1 if mark == b"\\" else -1
        elif mark == b'"':
            in_text = True
        elif mark == b"{":
            depth += 1
        elif mark == b"}":
            depth -= 1
            if depth == 0:
                return content[start : at + 1], count
    return None, count


def folder_of(path: str) -> Path:
    """Return the folder that a workflow's file is in, as an absolute path."""
    return user_path(path, "--workflow", WorkflowError).absolute().parent
