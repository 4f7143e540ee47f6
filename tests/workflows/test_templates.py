"""ComfyUI's own templates (comfyui-workflow-templates-json, MIT), where the package is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from diffusion_runtime.workflows.coverage import cover

# The share of uses that is translated, and a little less: other versions have other templates.
LEAST_SHARE = 0.75


@pytest.mark.skipif(
    find_spec("comfyui_workflow_templates_json") is None, reason="comfyui-workflow-templates-json is not installed"
)
def test_most_uses_of_the_open_templates_are_translated() -> None:
    spec = find_spec("comfyui_workflow_templates_json")
    assert spec is not None
    assert spec.origin is not None
    found = cover(str(Path(spec.origin).parent / "templates"))
    assert len(found.rows) > 100
    assert found.translated_uses >= LEAST_SHARE * found.uses, found.summary
    # Every other one says which nodes, or what of the file.
    assert [row.name for row in found.rows if row.reason == ""] == []
