"""Output paths: folder, file name and format of results, checked before anything is loaded."""

from __future__ import annotations

import os
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion_runtime.errors import ConfigError, OutputError
from diffusion_runtime.request.generation_request import GenerationRequest

if TYPE_CHECKING:
    from diffusion_runtime.media.content_credentials import Signer

DEFAULT_FOLDER = "outputs"
# File names end at 255 bytes on every common file system; this leaves room for the seed, a number and the extension.
MAX_SLUG_BYTES = 80


@dataclass(frozen=True)
class Outputs:
    """folder: where results go; file: the one name that was asked for, None to name by prompt and seed;
    file_format: one of media.FORMATS, None for mp4 or, for one frame, png. signer: of the files' C2PA manifests."""

    folder: Path
    file: Path | None = None
    file_format: str | None = None
    signer: Signer | None = None

    @classmethod
    def parse(cls, output_path: str | None, file_format: str | None, signer: Signer | None = None) -> Outputs:
        """Raises ConfigError for an unknown format or extension, or two that contradict each other; MissingPackageError
        for one that this machine cannot write."""
        from diffusion_runtime.media import check_format, check_writable, format_of
        from diffusion_runtime.untrusted.files import check_place

        chosen = None if file_format is None else check_format(file_format)
        if chosen is not None:
            check_writable(chosen)
        if output_path is None:
            return cls(Path(DEFAULT_FOLDER), None, chosen, signer)
        path = check_place(output_path, "--output-path")
        if output_path.endswith(("/", os.sep)) or path.is_dir() or not path.suffix:
            return cls(path, None, chosen, signer)
        try:
            named = format_of(path)
        except ConfigError as error:
            raise ConfigError(f"--output-path: {error} For a folder of that name, end it with a slash.") from error
        if chosen is not None and chosen != named:
            raise ConfigError(f"--output-path {output_path} ends in .{named}, --format says {chosen}; use .{chosen}")
        check_writable(named)
        return cls(path.parent, path, named, signer)

    def format_for(self, request: GenerationRequest, *, has_sound: bool | None = None) -> str:
        """Return the format of a resolved request's file. has_sound: whether the model makes some; None if unknown.

        Raises ConfigError for a video in a format that holds one image, for the sound of a model that makes none, and
        for a format that cannot be signed;
        MissingPackageError for one that this machine cannot write.
        """
        from diffusion_runtime.media import check_format, check_writable
        from diffusion_runtime.media.content_credentials import check_signable

        default = "png" if request.num_frames == 1 else "mp4"
        multiple = request.interpolate or 1
        fps = None if request.fps is None else request.fps * multiple
        named = self.file_format or default
        chosen = check_format(named, request.num_frames, has_sound=has_sound, fps=fps, multiple=multiple)
        check_writable(chosen, request.num_frames)
        if self.signer is not None:
            check_signable(chosen)
        return chosen

    def target(self, request: GenerationRequest) -> Path:
        """Return the name that a resolved request's file gets when it is free."""
        if self.file is not None:
            return self.file
        return self.folder / f"{slug(request.prompt)}-seed{request.seed}.{self.format_for(request)}"

    def prepare(self) -> tuple[Path, ...]:
        """Make the folder and write a byte into it, so that a folder that cannot be written is known now.

        What processes that are gone left half written in it is removed.
        Returns the folders that were created, innermost first. Raises OutputError; what was created is gone then.
        """
        from diffusion_runtime.media.publish import remove_abandoned_files, temporary_file

        created: tuple[Path, ...] = ()
        try:
            created = make_folders(self.folder)
            remove_abandoned_files(self.folder)
            with temporary_file(self.folder) as probe:
                probe.write_bytes(b"0")
        except OSError as error:
            remove_empty(created)
            raise OutputError(
                f"cannot write into the output folder {self.folder}: {error.strerror or error}; "
                f"choose another with --output-path"
            ) from error
        return created

    def check_without_writing(self) -> None:
        """Check what `prepare` checks, as far as possible without writing to the disk. Raises OutputError."""
        existing = next(folder for folder in [self.folder, *self.folder.parents] if folder.exists())
        if not existing.is_dir():
            raise OutputError(f"cannot write into the output folder {self.folder}: {existing} is a file")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise OutputError(f"cannot write into the output folder {self.folder}: no right to write in {existing}")

    def predict(self, requests: list[GenerationRequest]) -> list[Path]:
        """Return the names that the files would get now, numbers included."""
        from diffusion_runtime.media import numbered

        taken: set[Path] = set()
        names = []
        for request in requests:
            number = 1
            while True:
                path = numbered(self.target(request), number)
                pair = {path, path.with_suffix(".json")}
                if not pair & taken and not any(name.exists() for name in pair):
                    break
                number += 1
            taken |= pair
            names.append(path)
        return names

    def explain_number(self, request: GenerationRequest, path: Path) -> str | None:
        """Which file of another run made `path` the name of a resolved request's file; None where none did."""
        target = self.target(request)
        if path == target:
            return None
        if target.exists():
            # Names of prompt and seed are numbered without a word.
            return None if self.file is None else f"{target} exists already; this one is {path.name}"
        for beside, what in ((target.with_suffix(".json"), "sidecar"), (target.with_suffix(".wav"), "sound")):
            if beside.exists():
                owners = [owner.name for owner in _files_of_name(target) if owner != beside]
                whose = f", the {what} of {', '.join(owners)}," if owners else ""
                return f"{beside}{whose} exists already, and {target.name} would share it; this one is {path.name}"
        return None


def _files_of_name(target: Path) -> list[Path]:
    """Results of the same name in other formats."""
    from diffusion_runtime.media import FORMATS, SOUND_FORMATS

    return [path for name in (*FORMATS, *SOUND_FORMATS) if (path := target.with_suffix(f".{name}")).exists()]


def prepare_result(path: Path, key: str) -> tuple[Path, ...]:
    """Prepare the place of a result before the work that makes it, and return the folders made for it, innermost first.
    key: the flag that named it. Raises OutputError for a place that cannot be written."""
    from diffusion_runtime.media.publish import cannot_write, check_target, temporary_file

    folder = check_target(path, key).parent
    created: tuple[Path, ...] = ()
    try:
        created = make_folders(folder)
        with temporary_file(folder) as probe:
            probe.write_bytes(b"0")
    except OSError as error:
        remove_empty(created)
        raise cannot_write(path, error, key) from error
    return created


def make_folders(folder: Path) -> tuple[Path, ...]:
    """Make the folder and those it is in; returns those that this call created, innermost first. Raises OSError; what
    was created is gone then."""
    created: list[Path] = []
    try:
        for each in reversed([folder, *folder.parents]):
            if each.is_dir():
                continue
            try:
                each.mkdir()
            except FileExistsError:
                # Another run was quicker.
                if not each.is_dir():
                    raise
            else:
                created.insert(0, each)
    except BaseException:
        remove_empty(created)
        raise
    return tuple(created)


def remove_empty(folders: list[Path] | tuple[Path, ...]) -> None:
    """Remove those of `folders`, innermost first, that hold nothing."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def slug(prompt: str) -> str:
    """`A red circle, moving left!` as `a-red-circle-moving-left`; letters of every script stay."""
    words = re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", prompt).lower())
    cut = "-".join(words).encode()[:MAX_SLUG_BYTES].decode(errors="ignore")
    return cut.strip("-") or "prompt"
