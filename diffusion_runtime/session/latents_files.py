"""Latents of the items of a batch, in files beside theirs: where they are asked for, and where an item fails behind its
denoising."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.session.failures import Failure

if TYPE_CHECKING:
    from diffusion_runtime.generation.saved_latents import SavedLatents


class LatentsFiles:
    """The latents of one item after the other; `keep` is a hook of the pipeline (Hooks.keep). is_asked: whether they
    are written before the item is decoded, and stay. is_first: whether this process writes.

    path: of the item's file, None where there is none.
    """

    def __init__(self, *, is_asked: bool, is_first: bool) -> None:
        self._is_asked = is_asked
        self._is_first = is_first
        self._target: Path | None = None
        self._kept: SavedLatents | None = None
        self.path: Path | None = None

    def begin(self, target: Path | None) -> None:
        """Begin an item whose file is to be `target`, None for one that is not made."""
        self._target, self._kept, self.path = target, None, None

    def keep(self, _request_index: int, saved: SavedLatents) -> None:
        """Take what an item's denoising has left. Raises OutputError where it cannot be written."""
        if self._is_first:
            self._kept = saved.on_cpu()
            if self._is_asked:
                self._write()

    def name_after(self, path: Path) -> None:
        """Give the latents the name of the item's file, which may have a number."""
        from diffusion_runtime.generation.saved_latents import latents_path
        from diffusion_runtime.media.publish import take_name

        if self.path is not None and take_name(self.path, wanted := latents_path(path)):
            self.path = wanted

    def after(self, failure: Failure) -> Failure:
        """Write what a failed item's denoising has left, and return the failure with the command that goes on."""
        try:
            return (
                dataclasses.replace(failure, message=f"{failure.message}; {self.way_on}") if self._write() else failure
            )
        except DiffusionRuntimeError as error:
            return dataclasses.replace(failure, message=f"{failure.message}; its latents were not kept: {error}")

    def are_rescued(self) -> bool:
        """Write what an item's denoising has left where the run ends, and return whether there is a file."""
        try:
            return self._write()
        except DiffusionRuntimeError:
            return False

    @property
    def way_on(self) -> str:
        """The command that goes on from the file."""
        return f"`diffusion-runtime finish {shlex.quote(str(self.path))}` goes on from its latents"

    def _write(self) -> bool:
        """Write what was kept, over a file of the same item; False where nothing was kept. Raises OutputError."""
        from diffusion_runtime.generation.saved_latents import write_latents

        if self._kept is None or self._target is None:
            return False
        self.path = write_latents(self._kept, self._target, self.path)
        return True
