"""Row of a batch: its identifier, and the request that it describes, read as a request of the server is."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from diffusion_runtime.errors import RequestError, first_line, shown
from diffusion_runtime.media.clips import MAX_CLIP_BYTES
from diffusion_runtime.request.frame_conditions import FrameConditions
from diffusion_runtime.request.generation_request import INPUT_FIELDS, REQUEST_FIELDS
from diffusion_runtime.serving.api_errors import ApiError
from diffusion_runtime.serving.body import Body
from diffusion_runtime.serving.jobs import VIDEO
from diffusion_runtime.serving.request_fields import SPELLINGS, read_draft
from diffusion_runtime.serving.settings import Limits
from diffusion_runtime.untrusted.files import open_file, read_file
from diffusion_runtime.untrusted.image_urls import data_of_url
from diffusion_runtime.untrusted.json_text import parse_json

# A name that every file system takes, as it is and with an extension behind it; Windows keeps some for devices.
_ID = re.compile(r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)(?:\.|$))[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
# Other names of fields that hold a file.
_INPUT_NAMES = {"image": "image_path", "input_reference": "image_path", "mask": "mask_path"}
# Whoever has the rows has the machine: no bounds but those of a request itself.
_MANY = 2**62
_LIMITS = Limits(max_pixels=_MANY, max_frames=_MANY, max_steps=_MANY)
# Fields of the server's answer, of which a batch has none.
_OF_ANSWERS = ("return_report", "return_previews", "model", "n")


@dataclass(frozen=True)
class Source:
    """An input file of a row. name: in recipes; content: its path, or its bytes."""

    name: str
    content: Path | bytes

    @property
    def sha256(self) -> str:
        if isinstance(self.content, bytes):
            return hashlib.sha256(self.content).hexdigest()
        digest = hashlib.sha256()
        with open_file(self.content, "", max_bytes=MAX_CLIP_BYTES, error=RequestError) as file:
            while block := file.read(2**20):
                digest.update(block)
        return digest.hexdigest()

    def loaded(self) -> Source:
        """Return it with its bytes in place of a path, for another machine."""
        if isinstance(self.content, bytes):
            return self
        return Source(self.name, read_file(self.content, "", max_bytes=MAX_CLIP_BYTES, error=RequestError))


@dataclass(frozen=True)
class Row:
    """number: of its line, or of the row in a table, from 1. request: values of GenerationRequest without input files.
    inputs: those by field; frames: of images at frames, the frame and strength of each."""

    number: int
    id: str
    request: Mapping[str, Any]
    preset: str | None = None
    attention: Any = None
    loras: Sequence[Mapping[str, Any]] = ()
    inputs: Mapping[str, Sequence[Source]] | None = None
    frames: Sequence[tuple[Any, Any]] = ()

    @property
    def settings(self) -> str:
        """Return what decides whether it can run, and with which others: all but prompt and seed, as a text."""
        request = {name: value for name, value in self.request.items() if name not in ("prompt", "seed")}
        return json.dumps([request, self.preset, self.attention, list(self.loras), sorted(self.inputs or ())])

    def digest(self, model: str) -> str:
        """Return the digest of everything that decides its result. model: of the model and its options. Raises
        RequestError for an input file that cannot be read."""
        inputs = {name: [source.sha256 for source in each] for name, each in (self.inputs or {}).items()}
        values = [model, self.request, self.preset, self.attention, list(self.loras), inputs, list(self.frames)]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]

    def work(self, paths: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Return what an engine is asked to check. paths: of its input files by field."""
        filled: dict[str, Any] = {}
        for name, each in paths.items():
            if isinstance(REQUEST_FIELDS[name].check, FrameConditions):
                filled[name] = [[frame, path, at] for (frame, at), path in zip(self.frames, each, strict=True)]
            else:
                filled[name] = each[0] if len(each) == 1 else list(each)
        request = {**self.request, **filled}
        return {"requests": [request], "preset": self.preset, "attention": self.attention, "loras": list(self.loras)}


def read_row(values: Mapping[str, Any], number: int, model: str, folder: Path) -> Row:
    """Read one row. model: its name in requests. folder: below which its files are.

    Raises RequestError for a field that is unknown, wrong, or would be ignored.
    """
    given = {name: value for name, value in values.items() if value is not None}
    row_id = _id(given.pop("id", None), number)
    sources, frames = _inputs(given, folder)
    for name in _OF_ANSWERS:
        if name in given:
            raise RequestError(f"{name}: a row has one result and no answer; leave it out")
    # Of the row alone, so that a run that goes on, or another machine, draws the same noise.
    if given.get("seed") in (None, -1, "-1", ""):
        given["seed"] = int.from_bytes(hashlib.sha256(row_id.encode()).digest()[:4]) % 2**31
    try:
        draft = read_draft(VIDEO, Body(given), model, _LIMITS)
    except ApiError as error:
        raise RequestError(str(error)) from error
    row = Row(
        number, row_id, draft.requests[0], draft.preset, draft.attention, draft.loras or (), sources or None, frames
    )
    try:
        json.dumps(row.attention, allow_nan=False)
    except (TypeError, ValueError) as error:
        # Columns of a table hold times and bytes too.
        raise RequestError(f"attention: expected values as JSON has them: {first_line(error)}") from error
    return row


def _id(value: Any, number: int) -> str:
    if value is None:
        return f"{number:08d}"
    text = str(value) if type(value) is int else value
    if not isinstance(text, str) or not _ID.fullmatch(text) or text.endswith("."):
        raise RequestError(
            "id: expected 1 to 100 letters, digits, '-', '_' and '.', as it names a file, and no device of Windows, "
            f"got {shown(value)}"
        )
    return text


def _inputs(given: dict[str, Any], folder: Path) -> tuple[dict[str, list[Source]], list[tuple[Any, Any]]]:
    """Take the fields that hold files out of a row, and return them with the frames of images at frames."""
    sources: dict[str, list[Source]] = {}
    frames: list[tuple[Any, Any]] = []
    for name in tuple(given):
        own = SPELLINGS.get(name, name)
        own = _INPUT_NAMES.get(own, own)
        if own not in INPUT_FIELDS:
            continue
        if own in sources:
            raise RequestError(f"{name}: is another name of {own}, which is given too")
        value = given.pop(name)
        if isinstance(REQUEST_FIELDS[own].check, FrameConditions):
            read = REQUEST_FIELDS[own].check.read(value)
            REQUEST_FIELDS[own].check(own, read)
            assert isinstance(read, tuple)
            frames = [(frame, strength) for frame, _, strength in read]
            value = [path for _, path, _ in read]
        sources[own] = [_source(name, each, folder) for each in (value if isinstance(value, list) else [value])]
    return sources, frames


def _source(name: str, value: Any, folder: Path) -> Source:
    """Return an input file: bytes, a data: URL, or a path below the folder of the rows."""
    if isinstance(value, Mapping):
        # As tables of images hold them.
        value = value.get("bytes") or value.get("path") or value.get("image_url")
    if isinstance(value, str) and value.startswith("data:"):
        value = data_of_url(name, value)
    if isinstance(value, bytes):
        return Source(f"data:sha256:{hashlib.sha256(value).hexdigest()}", value)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name}: expected a path below the folder of the rows, or a data: URL, got {shown(value)}")
    if "://" in value:
        raise RequestError(f"{name}: a batch fetches nothing; download {shown(value)}, or give a data: URL")
    path = (folder / value).resolve()
    if PurePosixPath(value).is_absolute() or not path.is_relative_to(folder.resolve()):
        raise RequestError(f"{name}: expected a path below the folder of the rows, got {shown(value)}")
    if not path.is_file():
        raise RequestError(f"{name}: there is no file {shown(value)} below the folder of the rows")
    return Source(value, path)


def row_to_json(row: Row) -> str:
    """Return a row as a text, with the content of its input files, for another machine."""
    inputs = {
        name: [[source.name, base64.b64encode(source.loaded().content).decode()] for source in each]  # type: ignore[arg-type]
        for name, each in (row.inputs or {}).items()
    }
    return json.dumps({**dataclasses.asdict(dataclasses.replace(row, inputs=None)), "inputs": inputs})


def row_from_json(text: str) -> Row:
    """Return the row of a text that `row_to_json` made."""
    values = parse_json(text)
    inputs = {
        name: [Source(known, base64.b64decode(content)) for known, content in each]
        for name, each in values["inputs"].items()
    }
    return Row(**{**values, "inputs": inputs or None, "frames": [tuple(each) for each in values["frames"]]})
