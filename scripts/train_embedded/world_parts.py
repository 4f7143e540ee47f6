"""Protocols of what a world offers to the trainings: scenes drawn in batches, their captions, and a renderer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Scenes(Protocol):
    """A batch of scenes as tensors on one device; each attribute of objects is a field [B, 2] of its name."""

    def __len__(self) -> int: ...

    def attributes(self) -> Sequence[Any]:
        """Scenes that captions are written of, scene by scene."""


class CaptionedScene(Protocol):
    """Attributes that a caption says; each object has the attributes as fields, None where nothing is said."""

    @property
    def objects(self) -> tuple[Any, ...]: ...


class Captioned(Protocol):
    """A caption, what it says, and which of its words are about which object."""

    @property
    def text(self) -> str: ...

    @property
    def attributes(self) -> CaptionedScene: ...

    @property
    def spans(self) -> tuple[tuple[int, int], ...]: ...


Renderer = Callable[[Any, int, int], tuple[Tensor, Tensor]]
"""(scenes, frames, size) -> frames [B, T, size, size, 3] in 0 to 1 and each object's coverage [B, 2, T, size, size]."""
Sample = Callable[[int, torch.Generator, float], Any]
"""(count, generator, share of scenes with two objects) -> scenes."""
