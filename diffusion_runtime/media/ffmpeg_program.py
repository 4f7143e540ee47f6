"""Location of ffmpeg: the program of the package imageio-ffmpeg, or the error that names what needs it."""

from __future__ import annotations

from diffusion_runtime.errors import MissingPackageError, first_line

PACKAGE = "imageio-ffmpeg"
INSTALL = f"pip install {PACKAGE}"


def find_ffmpeg(what: str = "this", instead: str | None = None) -> str:
    """Find the program and return its path.

    what: what is read or written with it, for the message; instead: what to do without it. Raises MissingPackageError
    where the package is not installed, or has no program for this machine.
    """
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except ImportError as error:
        cause: Exception = error
        why, fix = f"the package {PACKAGE} is not installed", INSTALL
    except RuntimeError as error:
        # The source package, which pip takes where no wheel fits the machine, brings no program.
        cause = error
        why, fix = f"the package {PACKAGE} has none for this machine", first_line(error).rstrip(".")
    otherwise = "" if instead is None else f", or {instead}"
    raise MissingPackageError(f"{what} needs ffmpeg, and {why}; to fix it: {fix}{otherwise}") from cause


def has_ffmpeg() -> bool:
    """Return True if `find_ffmpeg` finds it."""
    try:
        find_ffmpeg()
    except MissingPackageError:
        return False
    return True
