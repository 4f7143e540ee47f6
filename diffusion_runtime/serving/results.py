"""Results: a generation as files that a client may have, whole and on the disk before anybody hears of them."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_runtime.serving.files import sync
from diffusion_runtime.serving.pictures import write_pictures
from diffusion_runtime.untrusted.files import open_file

if TYPE_CHECKING:
    from diffusion_runtime.media import GeneratedMedia


def publish(
    media: GeneratedMedia,
    target: Path,
    names: Mapping[str, str],
    *,
    recipe: Mapping[str, Any] | None = None,
    has_pictures: bool = True,
) -> dict[str, Any]:
    """Write a file, its sidecar and the pictures of a video, and return what is to be known of them. names: public
    names of paths of this machine, of which none is in a file. recipe: added to the file's own. Raises OutputError."""
    started = time.perf_counter()
    public = dataclasses.replace(media, recipe={**public_values(media.recipe, names), **(recipe or {})})
    path = public.save(target)
    sizes = [path.stat().st_size, path.with_suffix(".json").stat().st_size]
    if media.num_frames > 1 and has_pictures:
        sizes += write_pictures(target, media)
    # The table may outlive the power where what it says is there does not.
    beside = (*target.parent.glob(f"{target.stem}-*"), path.with_suffix(".wav")) if has_pictures else ()
    for written in (path, path.with_suffix(".json"), *(each for each in beside if each.exists()), target.parent):
        sync(written)
    num_frames, height, width = media.frames.shape[:3]
    return {
        "file": {"name": path.name, "bytes": sizes[0], "sha256": file_sha256(path), "all_bytes": sum(sizes)},
        "num_frames": num_frames,
        "height": height,
        "width": width,
        "fps": media.fps,
        "has_sound": media.audio is not None,
        "timings": {**media.timings, "write": time.perf_counter() - started},
        "peak_memory": dict(media.peak_memory),
        "attention_report": public_values(media.attention_report.to_dict(), names),
    }


def public_values(value: Any, names: Mapping[str, str]) -> Any:
    """Return a copy of plain values with every text that is one of `names`, paths of this machine, as its public
    name."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, Mapping):
        return {key: public_values(inner, names) for key, inner in value.items()}
    return [public_values(inner, names) for inner in value] if isinstance(value, list | tuple) else value


def file_sha256(path: Path) -> str:
    """Return the digest of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
