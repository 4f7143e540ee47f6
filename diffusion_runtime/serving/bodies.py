"""Request bodies as one mapping: JSON, multipart forms with brackets (`attention[default][backend]`, `lora[]`), and
fields of a form that hold JSON."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from diffusion_runtime.errors import shown
from diffusion_runtime.serving.api_errors import ApiError, invalid
from diffusion_runtime.serving.body import Body
from diffusion_runtime.untrusted.document import DocumentError, check_depth
from diffusion_runtime.untrusted.json_text import parse_json

_MAX_FIELDS, _MAX_FILES, _MAX_VALUES = 500, 20, 10_000
_MAX_LIST, _LONG, _MAX_URLENCODED = 1000, 64 * 1024, 2**20
_KEY = re.compile(r"(\w+)((?:\[[^\[\]]*\])*)")
_PART = re.compile(r"\[([^\[\]]*)\]")
# Wrappers of other servers and clients, whose values stand beside the others; those at the top win.
_FLATTENED = ("video_params", "extra_params", "extra_body", "extra_json")


async def read_body(request: Request) -> Body:
    """Read the body of a request. Raises ApiError for one that cannot be read."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (not kind and "content-length" in request.headers):
        content = await request.body()
        if not content.strip():
            raise invalid(None, "the body: expected a JSON object, such as {}, got an empty one")
        try:
            # In a thread where it takes long: images of data: URLs are of megabytes.
            is_long = len(content) > _LONG
            values = await asyncio.to_thread(_values, content) if is_long else _values(content)
        except DocumentError as error:
            raise invalid(None, f"the body is not JSON: {error}") from error
        if not isinstance(values, Mapping):
            raise invalid(None, f"the body: expected an object, got {shown(values)}")
        return Body(flattened(values))
    if kind == "application/x-www-form-urlencoded":
        return Body(flattened(nested(await _urlencoded(request))), is_form=True)
    if kind != "multipart/form-data":
        raise ApiError(415, "unsupported_media_type", "expected application/json or multipart/form-data")
    try:
        # max_part_size: of a field that is no file; a data: URL is the longest.
        form = await request.form(max_files=_MAX_FILES, max_fields=_MAX_FIELDS, max_part_size=64 * 2**20)
    except (MultiPartException, AssertionError, ValueError, UnicodeDecodeError) as error:
        raise invalid(None, f"the form cannot be read: {str(error)[:200]}") from error
    except Exception as error:
        if type(error).__name__ == "HTTPException":
            raise invalid(None, f"the form cannot be read: {str(getattr(error, 'detail', ''))[:200]}") from error
        raise
    files: dict[str, list[bytes]] = {}
    pairs: list[tuple[str, str]] = []
    async with _closing(form):
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                files.setdefault(name.removesuffix("[]"), []).append(await value.read())
            else:
                pairs.append((name, value))
    return Body(flattened(nested(pairs)), files, is_form=True)


def _values(content: bytes) -> Any:
    return parse_json(content, max_values=_MAX_VALUES)


async def _urlencoded(request: Request) -> list[tuple[str, str]]:
    """Read the fields of a form without files. The parser of multipart forms would take a time that is quadratic in the
    length of a field."""
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > _MAX_URLENCODED:
            message = f"expected a form of at most {_MAX_URLENCODED} bytes; send JSON or multipart/form-data"
            raise ApiError(413, "request_too_large", message)
    try:
        return parse_qsl(content.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS)
    except ValueError as error:
        raise invalid(None, f"the form cannot be read: {str(error)[:200]}") from error


def nested(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the fields of a form as nested values. Raises ApiError for names that contradict each other."""
    values: dict[str, Any] = {}
    for name, text in pairs:
        found = _KEY.fullmatch(name)
        if found is None:
            raise invalid(name[:80], f"{shown(name)}: expected a field's name, with brackets for what is inside")
        path: list[str] = [found.group(1), *_PART.findall(found.group(2))]
        if len(path) > 16:
            raise invalid(path[0], f"{path[0]}: nests too deep")
        _put(values, path, _plain(text), path[0])
    return values


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with those inside of `extra_body` and the like beside the others."""
    flat: dict[str, Any] = {}
    for name in _FLATTENED:
        inner = values.get(name)
        if inner is not None and not isinstance(inner, Mapping):
            raise invalid(name, f"{name}: expected an object, got {shown(inner)}")
        flat |= dict(inner or {})
    return {**flat, **{name: value for name, value in values.items() if name not in _FLATTENED}}


def _put(values: dict[str, Any], path: list[str], value: Any, field_name: str) -> None:
    target: Any = values
    for position, key in enumerate(path):
        is_last = position == len(path) - 1
        # What comes next is a list where the key behind it is empty or a number.
        following: Any = None if is_last else [] if path[position + 1] in ("", "0") else {}
        if isinstance(target, list):
            index = len(target) if key == "" else int(key) if key.isdecimal() and len(key) < 5 else -1
            if not 0 <= index <= len(target) or index > _MAX_LIST:
                raise invalid(field_name, f"{field_name}: expected [] or the next index of a list, got [{key[:20]}]")
            if index == len(target):
                target.append(value if is_last else following)
            elif is_last:
                raise invalid(field_name, f"{field_name}: is given twice")
            target = target[index]
        elif isinstance(target, dict):
            if is_last:
                if key in target:
                    raise invalid(field_name, f"{field_name}: is given twice; a list is {field_name}[]")
                target[key] = value
            target = target.setdefault(key, following)
        else:
            raise invalid(field_name, f"{field_name}: is a value and holds values")


def _plain(text: str) -> Any:
    """Return a field's JSON object or list, else its text."""
    stripped = text.strip()
    if stripped[:1] not in ("{", "["):
        return text
    try:
        value = parse_json(stripped, max_values=_MAX_VALUES)
        check_depth(value)
    except DocumentError:
        # A prompt may begin with a bracket.
        return text
    return value


class _closing:
    """Asynchronous context manager: a form's files are closed."""

    def __init__(self, form: Any) -> None:
        self._form = form

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_: object) -> None:
        await self._form.close()
