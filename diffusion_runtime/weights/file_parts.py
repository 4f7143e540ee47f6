"""Parts of a file: which components a file of tensors holds, told by the prefixes of their names.

ComfyUI's checkpoints hold a transformer, its text encoders and its autoencoder in one file; most files hold one of
these. A reader of a component of such a file names its prefix, and sees the tensors behind it alone
(SafetensorsFile).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from diffusion_runtime.weights.file_kinds import FileKind, kind_of
from diffusion_runtime.weights.weight_files import OWN_NAMES, PREFIXES, without_prefix

# Longer ones first.
_CONTAINER = re.compile(
    "|".join(
        (
            *map(re.escape, PREFIXES),
            r"text_encoders\.[\w-]+\.(?:transformer\.)?",
            r"cond_stage_model\.(?:transformer\.)?",
            r"conditioner\.embedders\.\d+\.(?:transformer\.)?",
            *(re.escape(f"{name}.") for name in ("vae", "first_stage_model", "audio_vae", "vocoder")),
        )
    )
)
# Components whose prefix alone identifies them.
_BY_PREFIX = {
    "audio_vae.": FileKind("an autoencoder of sound", (), component="audio_vae"),
    "vocoder.": FileKind("a vocoder", (), component="vocoder"),
}
# Beside a transformer of LTX-2, with its prefix, and outside of it.
_CONNECTORS = OWN_NAMES["connectors"]
_CONNECTORS_KIND = FileKind("connectors from the text to the transformer", (), component="connectors")


@dataclass(frozen=True)
class FilePart:
    """prefix: of its tensors' names, empty for connectors and for what is left over; names: of these, without it. kind:
    None for a transformer, and for what is left over."""

    prefix: str
    names: tuple[str, ...]
    kind: FileKind | None

    @property
    def is_transformer(self) -> bool:
        return self.prefix in PREFIXES


def parts_of(names: Sequence[str]) -> tuple[FilePart, ...]:
    """The parts of a file that holds several components, in its order, with what is left over last; empty for a file
    that holds one. names: of all its tensors."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        container = _CONTAINER.match(name)
        found["" if container is None else container[0]].append(name)
    for prefix in [each for each in found if each and any(other.startswith(each) for other in found if other != each)]:
        # In addition to a text encoder's own tensors, such as a projection that nothing reads.
        found[""] += found.pop(prefix)
    if sum(bool(prefix) for prefix in found) < 2:
        return ()
    connectors = {name: None for name in names if _CONNECTORS.match(without_prefix(name))}
    own = {prefix: [name for name in found[prefix] if name not in connectors] for prefix in found}
    prefixes = [prefix for prefix in own if prefix]
    parts = [_part(prefix, own[prefix]) for prefix in prefixes]
    if connectors:
        parts.append(FilePart("", tuple(connectors), _CONNECTORS_KIND))
    return (*parts, _part("", own[""])) if own.get("") else tuple(parts)


def _part(prefix: str, names: Sequence[str]) -> FilePart:
    own = tuple(name.removeprefix(prefix) for name in names)
    return FilePart(
        prefix, own, _BY_PREFIX.get(prefix) or (kind_of(own) if prefix and prefix not in PREFIXES else None)
    )


def prefix_of_transformer(names: Sequence[str]) -> str:
    """The prefix of the transformer in a file of several components; empty for any other file."""
    return next((part.prefix for part in parts_of(names) if part.is_transformer), "")
