"""Request body as plain values, wherever it came from: a form, JSON, or a row of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Body:
    """values: by field, plain values; is_form: texts of a form stand for numbers. files: contents by field, in their
    order."""

    values: Mapping[str, Any]
    files: Mapping[str, list[bytes]] = field(default_factory=dict)
    is_form: bool = False
