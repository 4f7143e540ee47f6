"""Input files of a request: the digests that a recipe keeps of its images, videos and calibration, and which have
changed since."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.clips import MAX_CLIP_BYTES
from diffusion_runtime.request.generation_request import INPUT_FIELDS, GenerationRequest, image_paths
from diffusion_runtime.request.given_images import recorded_images
from diffusion_runtime.request.step_cache_options import MagCacheOptions, StepCacheSettings, TeaCacheOptions
from diffusion_runtime.untrusted.files import open_file

# Of one file, or of several in their order.
Digests: TypeAlias = str | list[str]
_CACHE = "step_cache"
_FIELDS = (*INPUT_FIELDS, _CACHE)


def input_digests(request: GenerationRequest) -> dict[str, Digests]:
    """SHA-256 of every file that a request names, in hexadecimal, by its field. Raises RequestError for a file that
    cannot be read."""
    digests: dict[str, Digests] = {}
    for name in _FIELDS:
        found = [_digest(path, name) for path in _paths_in(request, name)]
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
        for name in _FIELDS
        for path, digest in zip(_recorded_paths(request, name), _listed(recorded.get(name)), strict=False)
        if isinstance(path, str)
    }
    changed: dict[str, None] = {}
    for each in requests:
        for name in _FIELDS:
            for path in _paths_in(each, name):
                recorded = recorded_images(path)
                if (name, recorded) in known and known[name, recorded] != _digest(path, name):
                    changed[recorded] = None
    return tuple(changed)


def _paths_in(request: GenerationRequest, name: str) -> Sequence[str]:
    """Return the paths that a field of a request names."""
    return _calibration(request.step_cache) if name == _CACHE else image_paths(request, name)


def _recorded_paths(request: Mapping[str, Any], name: str) -> list[Any]:
    """Return the paths of a recipe's field: one, several, or for images at frames lists of frame, path, strength."""
    if name == _CACHE:
        return _calibration(request.get(name))
    return [each[1] if isinstance(each, list) and len(each) == 3 else each for each in _listed(request.get(name))]


def _calibration(text: object) -> list[str]:
    """Return the file that the text of a step cache names, as a list; none for any other value."""
    try:
        settings = StepCacheSettings.parse(text) if isinstance(text, str) else None
    except RequestError:
        return []
    options = None if settings is None else settings.options
    return [options.file] if isinstance(options, MagCacheOptions | TeaCacheOptions) and options.file else []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _digest(path: str, field: str) -> str:
    digest = hashlib.sha256()
    with open_file(path, field, max_bytes=MAX_CLIP_BYTES, error=RequestError) as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
