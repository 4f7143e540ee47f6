"""What published folders say in their json, and folders of it."""

from __future__ import annotations

from pathlib import Path

from diffusion_runtime.models.published_folders import published_folders, write_folder

PUBLISHED = published_folders()


def write_published(folder: Path, name: str) -> Path:
    """The json of a published folder, without a weight; returns its path."""
    return write_folder(folder, PUBLISHED[name])
