"""Coverage of a folder of workflows: which are translated, weighted by how often each is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from diffusion_runtime.errors import DiffusionRuntimeError, first_line
from diffusion_runtime.untrusted.files import user_path
from diffusion_runtime.untrusted.json_text import read_json_file
from diffusion_runtime.workflows.graph import WorkflowError
from diffusion_runtime.workflows.settings import read_translation
from diffusion_runtime.workflows.translation import Refusal

_INDEX = "index.json"
_CATEGORIES = ("Image", "Video")
_MAX_FILES = 5000


@dataclass(frozen=True)
class CoverageRow:
    """One workflow. reason: why it is refused, None where it is translated; lacks: the classes of its nodes that are
    not supported."""

    name: str
    uses: int
    model: str | None
    reason: str | None
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Coverage:
    folder: str
    rows: tuple[CoverageRow, ...]

    @property
    def uses(self) -> int:
        return sum(row.uses for row in self.rows)

    @property
    def translated_uses(self) -> int:
        return sum(row.uses for row in self.rows if row.reason is None)

    @property
    def summary(self) -> str:
        count = sum(row.reason is None for row in self.rows)
        share = self.translated_uses / self.uses if self.uses else 0.0
        return (
            f"{count} of {len(self.rows)} workflows are translated, {self.translated_uses} of {self.uses} uses "
            f"({share:.1%})"
        )

    def lacking(self) -> list[tuple[str, dict[str, int]]]:
        """Return each class of nodes that is not supported with the uses and number of workflows that have it."""
        uses, count = Counter[str](), Counter[str]()
        for row in self.rows:
            for kind in row.lacks:
                uses[kind] += row.uses
                count[kind] += 1
        return [(kind, {"uses": number, "workflows": count[kind]}) for kind, number in uses.most_common()]

    def to_dict(self) -> dict[str, Any]:
        return {
            "workflows": [asdict(row) for row in self.rows],
            "lacking": dict(self.lacking()),
            "uses": self.uses,
            "translated_uses": self.translated_uses,
        }


def cover(folder: str) -> Coverage:
    """Return the coverage of a folder's workflows, most used first. Where ComfyUI's index.json is there: of those that
    it lists as open, in its categories Image and Video; without it every .json counts once. Raises WorkflowError."""
    place = user_path(folder, "folder", WorkflowError)
    if not place.is_dir():
        raise WorkflowError(f"folder: {place}: expected a folder of workflow files")
    index = place / _INDEX
    names = (
        _listed(read_json_file(index, error=WorkflowError, allow_constants=True))
        if index.is_file()
        else {path.stem: 1 for path in sorted(place.glob("*.json"))}
    )
    if len(names) > _MAX_FILES:
        raise WorkflowError(f"folder: {place}: more than {_MAX_FILES} workflows")
    rows = [
        _row(name, uses, str(place / f"{name}.json"))
        for name, uses in sorted(names.items(), key=lambda each: (-each[1], each[0]))
        if (place / f"{name}.json").is_file()
    ]
    return Coverage(str(place), tuple(rows))


def _listed(index: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for category in index if isinstance(index, list) else []:
        if not isinstance(category, Mapping) or category.get("title") not in _CATEGORIES:
            continue
        templates = category.get("templates")
        for each in templates if isinstance(templates, list) else []:
            if isinstance(each, Mapping) and each.get("openSource") is True and isinstance(each.get("name"), str):
                uses = each.get("usage", 0)
                # A name leads to no other folder.
                if "/" not in each["name"] and "\\" not in each["name"]:
                    found[each["name"]] = uses if type(uses) is int and uses >= 0 else 0
    return found


def _row(name: str, uses: int, path: str) -> CoverageRow:
    try:
        translation = read_translation(path)
    except DiffusionRuntimeError as error:
        return CoverageRow(name, uses, None, first_line(error))
    if isinstance(translation, Refusal):
        reasons = translation.reasons
        text = "; ".join(f"{each.node}: {each.remark}" for each in reasons[:3])
        more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        kinds = tuple(sorted({each.node.kind for each in reasons}))
        return CoverageRow(name, uses, None, f"{text}{more}", kinds)
    return CoverageRow(name, uses, translation.model.name, None)
