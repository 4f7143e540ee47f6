"""Input files of a request: the digests that a recipe keeps of its images and videos, and which have changed since."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.clips import MAX_CLIP_BYTES
from diffusion_runtime.request.generation_request import INPUT_FIELDS, GenerationRequest, image_paths
from diffusion_runtime.untrusted.files import open_file

# Of one file, or of several in their order.
Digests: TypeAlias = str | list[str]


def input_digests(request: GenerationRequest) -> dict[str, Digests]:
    """SHA-256 of every file that a request names, in hexadecimal, by its field. Raises RequestError for a file that
    cannot be read."""
    digests: dict[str, Digests] = {}
    for name in INPUT_FIELDS:
        found = [_digest(path, name) for path in image_paths(request, name)]
        if found:
            digests[name] = found[0] if len(found) == 1 else found
    return digests


def changed_inputs(recipe: Mapping[str, Any], requests: Iterable[GenerationRequest]) -> tuple[str, ...]:
    """Return the paths of inputs that were another file when a recipe was made, of those that the requests still name.

    recipe: it may hold anything, or be of a version that kept no digests.
    """
    recorded, request = recipe.get("inputs"), recipe.get("request")
    if not isinstance(recorded, Mapping) or not isinstance(request, Mapping):
        return ()
    known = {
        (name, path): digest
        for name in INPUT_FIELDS
        for path, digest in zip(_paths(request.get(name)), _listed(recorded.get(name)), strict=False)
        if isinstance(path, str)
    }
    changed: dict[str, None] = {}
    for each in requests:
        for name in INPUT_FIELDS:
            for path in image_paths(each, name):
                if (name, path) in known and known[name, path] != _digest(path, name):
                    changed[path] = None
    return tuple(changed)


def _paths(value: Any) -> list[Any]:
    """Return the paths of a recipe's field: one, several, or for images at frames lists of frame, path, strength."""
    return [each[1] if isinstance(each, list) and len(each) == 3 else each for each in _listed(value)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _digest(path: str, field: str) -> str:
    digest = hashlib.sha256()
    with open_file(path, field, max_bytes=MAX_CLIP_BYTES, error=RequestError) as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
