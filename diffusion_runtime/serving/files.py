"""Files of a storage folder: results and inputs of jobs, by identifiers of our own alone."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Set
from pathlib import Path

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.media.publish import publish_bytes, remove_abandoned_files
from diffusion_runtime.untrusted.files import read_file

ID = re.compile(r"(video|img)_[0-9a-f]{32}")
# A path of this machine in a message: what stands before its last part is left out.
_PATH = re.compile(r"(?<![\w/:.])/(?:[^\s/:'\",;]+/)+")
_MAX_BYTES = 2**30
RESULTS, INPUTS = "results", "inputs"
VARIANTS = {
    "thumbnail": "-thumbnail.webp",
    "spritesheet": "-spritesheet.webp",
    "sidecar": ".json",
    "sound": ".wav",
    "latents": "-latents.bin",
}


class ResultFiles:
    """The folders `results` and `inputs` of a storage folder. Every name in them is a job's identifier and what it is
    of, so that no text of a client is ever part of a path."""

    def __init__(self, storage: Path) -> None:
        self.storage = storage
        self._results, self._inputs = storage / RESULTS, storage / INPUTS
        for folder in (self._results, self._inputs):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--storage {storage}: cannot be made: {error.strerror}") from error
            remove_abandoned_files(folder)

    def target(self, job_id: str, index: int | None = None) -> Path:
        """Return the path of a result: a video's, or an image's by its index."""
        assert ID.fullmatch(job_id)
        name = f"{job_id}.mp4" if index is None else f"{job_id}-{index}.png"
        return self._results / name

    def variant(self, job_id: str, variant: str) -> Path | None:
        """Return the path of what belongs to a video, None where there is none."""
        target = self.target(job_id)
        path = target if variant == "video" else target.with_name(f"{job_id}{VARIANTS[variant]}")
        # A link would be a way out of the folder.
        return path if path.is_file() and not path.is_symlink() else None

    def image(self, job_id: str, index: int) -> bytes | None:
        """Return the PNG of an image, None where there is none."""
        path = self.target(job_id, index)
        return read_file(path, max_bytes=_MAX_BYTES) if path.is_file() and not path.is_symlink() else None

    def input(self, job_id: str, name: str) -> Path:
        """Return the path of a file that came with a job. name: `image_path-0.png` and the like, of ours."""
        assert ID.fullmatch(job_id)
        assert re.fullmatch(r"[a-z_]+-\d+\.[a-z0-9]{3,4}", name)
        return self._inputs / f"{job_id}-{name}"

    def write_input(self, job_id: str, name: str, content: bytes) -> Path:
        """Write a file that came with a job; it is on the disk when this returns. Raises OutputError."""
        path = self.input(job_id, name)
        publish_bytes(path, content)
        sync(path)
        sync(self._inputs)
        return path

    def remove(self, job_id: str, *, keeps_inputs: bool = False) -> None:
        """Remove all files of a job. keeps_inputs: the engine may be about to read them."""
        assert ID.fullmatch(job_id)
        folders = (self._results,) if keeps_inputs else (self._results, self._inputs)
        for folder in folders:
            for path in (*folder.glob(f"{job_id}-*"), *folder.glob(f"{job_id}.*")):
                with contextlib.suppress(OSError):
                    path.unlink()

    def remove_inputs(self, job_id: str, *, is_over: bool) -> None:
        """Remove the inputs of a job that is over."""
        for path in self._inputs.glob(f"{job_id}-*") if is_over else ():
            with contextlib.suppress(OSError):
                path.unlink()

    def remove_unowned(self, job_ids: Set[str]) -> None:
        """Remove files of jobs that are not in the table: their process ended between the file and the row."""
        for folder in (self._results, self._inputs):
            for path in folder.iterdir():
                found = ID.match(path.name)
                if found is None or found.group() not in job_ids:
                    with contextlib.suppress(OSError):
                        path.unlink()

    def scrub(self, text: str) -> str:
        """Return a message without the folders of this machine."""
        # As it was given and in full; a name such as `st` is also a part of words.
        for folder in (self.storage, self.storage.resolve()):
            text = re.sub(rf"(?<![\w./-]){re.escape(str(folder))}(/|\b)", "", text)
        return _PATH.sub("", text)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
