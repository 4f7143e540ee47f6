"""Published models that workflows name by a file, and how ComfyUI samples them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from diffusion_runtime.denoising.named_schedules import NoiseTable
from diffusion_runtime.untrusted.yaml_text import read_packaged_yaml

_FILE = Path(__file__).with_name("known_models.yaml")
OWN, UNKNOWN = "own", "unknown"
CFG, OFFSET, EMBEDDED = "cfg", "offset", "embedded"


@dataclass(frozen=True)
class KnownModel:
    """A model by the name of its file, as known_models.yaml declares it. name: of the published model; sampling:
    ComfyUI's table of noise levels, or OWN or UNKNOWN; guidance: CFG, OFFSET or EMBEDDED."""

    name: str
    sampling: NoiseTable | str
    guidance: str = CFG
    frames: int = 1
    sound: bool = False
    audio_shift: float | None = None
    experts: bool = False
    sees: bool = False
    norm: bool = False
    second_text: str | None = None
    zeros: bool = False
    blocks: Mapping[str, int] = field(default_factory=dict)


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], KnownModel | None], ...]:
    found = []
    for entry in read_packaged_yaml(_FILE)["models"]:
        sampling = entry["sampling"]
        if isinstance(sampling, dict):
            sampling = of_mu(sampling["mu"]) if "mu" in sampling else NoiseTable(sampling["shift"], 1000)
        facts = {key: value for key, value in entry.items() if key not in ("file", "model", "sampling")}
        known = None if entry["model"] is None else KnownModel(entry["model"], sampling, **facts)
        found.append((re.compile(entry["file"]), known))
    return tuple(found)


def of_mu(mu: float) -> NoiseTable:
    """Return the table of ComfyUI's ModelSamplingFlux: its shift is e^mu."""
    return NoiseTable(math.exp(mu), 10_000)


def known_model(file: str) -> KnownModel | None:
    """Return the model that a file of this name is of; None for one that is not known."""
    name = PurePosixPath(file.replace("\\", "/")).name.lower()
    return next((known for pattern, known in _patterns() if pattern.search(name)), None)
