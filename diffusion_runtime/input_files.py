"""Input files of a request: the digests that a recipe keeps of its images, and which of them have changed since."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.images import MAX_IMAGE_BYTES
from diffusion_runtime.request import IMAGE_FIELDS, GenerationRequest
from diffusion_runtime.untrusted.files import open_file


def input_digests(request: GenerationRequest) -> dict[str, str]:
    """SHA-256 of every image that a request names, in hexadecimal, by its field. Raises RequestError for a file that
    cannot be read."""
    paths = {name: getattr(request, name) for name in IMAGE_FIELDS}
    return {name: _digest(path, name) for name, path in paths.items() if path is not None}


def changed_inputs(recipe: Mapping[str, Any], requests: Iterable[GenerationRequest]) -> tuple[str, ...]:
    """The paths of images that were another file when a recipe was made, of those that the requests still name.

    recipe: it may say anything, or be of a version that kept no digests.
    """
    recorded, request = recipe.get("inputs"), recipe.get("request")
    if not isinstance(recorded, Mapping) or not isinstance(request, Mapping):
        return ()
    changed: dict[str, None] = {}
    for each in requests:
        kept = {name: request.get(name) for name in IMAGE_FIELDS if name in recorded}
        for name, digest in input_digests(each).items():
            path = getattr(each, name)
            if kept.get(name) == path and recorded[name] != digest:
                changed[path] = None
    return tuple(changed)


def _digest(path: str, field: str) -> str:
    digest = hashlib.sha256()
    with open_file(path, field, max_bytes=MAX_IMAGE_BYTES, error=RequestError) as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
