"""The flags of `generate` about where results go, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OutputFlags:
    """The flags of `generate` about where results go and what is reported."""

    output_path: str | None = None
    file_format: str | None = None
    as_json: bool = False
    dry_run: bool = False
    resume: bool = False
    profile: str | None = None
    stream: str | None = None
    interactive: bool = False
    attention_plot: str | None = None
    plan_for: str | None = None
