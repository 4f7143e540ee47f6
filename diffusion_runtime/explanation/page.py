"""The explanation as one HTML page without outside resources."""

from __future__ import annotations

from pathlib import Path

from diffusion_runtime.explanation.explanation import Explanation
from diffusion_runtime.media.publish import publish_text
from diffusion_runtime.page.assets import single_page

# What the page does not show, and what names folders of this machine.
_LEFT_OUT = ("runtime", "weights", "weight_bytes", "planned_on", "libraries", "version", "made_with")


def write_page(explanation: Explanation, path: Path) -> None:
    """Write the whole page or none. Raises OutputError."""
    publish_text(path, render(explanation), "--html")


def render(explanation: Explanation) -> str:
    title = f"{explanation.description.config.model_path}: what would run"
    values = {name: value for name, value in explanation.to_dict().items() if name not in _LEFT_OUT}
    return single_page({**values, "title": title})
