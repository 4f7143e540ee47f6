"""ComfyUI's own templates (comfyui-workflow-templates-json, MIT): translated, and taken by their models' rules."""

from __future__ import annotations

import functools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sample_media import make_media

from diffusion_runtime import GenerationRequest, RuntimeConfig
from diffusion_runtime.loading import prepare
from diffusion_runtime.workflows.coverage import cover
from diffusion_runtime.workflows.reading import read_workflow
from diffusion_runtime.workflows.settings import with_node_values
from diffusion_runtime.workflows.translation import Refusal, Translation, translate

# The share of uses that is translated, and a little less: other versions have other templates.
LEAST_SHARE = 0.65
# What their models' rules refuse, with what is said: a prompt that the template leaves to the user, a height of 728.
REFUSED = {
    "video_minimax_h3_i2v_continuation": "expected at least one word",
    "image_minimax_h3_t2i": "expected a multiple of 32",
}


@pytest.fixture(scope="module")
def templates() -> Path:
    spec = find_spec("comfyui_workflow_templates_json")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "templates"


def test_most_uses_of_the_open_templates_are_translated(templates: Path) -> None:
    found = cover(str(templates))
    assert len(found.rows) > 100
    assert found.translated_uses >= LEAST_SHARE * found.uses, found.summary
    # Every other one says which nodes, or what of the file.
    assert [row.name for row in found.rows if row.reason == ""] == []


def test_an_image_in_part_beside_a_second_stage_is_refused_until_it_counts_in_full(templates: Path) -> None:
    graph = read_workflow(str(templates / "video_ltx2_3_i2v.json"))
    first = translate(graph)
    assert isinstance(first, Refusal)
    assert "an image with a strength of 0.7 beside a second stage: expected 1" in first.message()
    adding = [node.id for node in graph.nodes.values() if "strength" in node.inputs]
    full = translate(with_node_values(graph, [f"{node}.strength=1" for node in adding]))
    assert isinstance(full, Translation)
    assert full.request["image_path"] == "egyptian_queen.png"


@functools.cache
def rules_of(model: str, options: str) -> Any:
    config = RuntimeConfig(model_path=model, device="cpu", offline=True, **json.loads(options))
    return prepare(config, is_dry_run=True).rules


def refusal_of(found: Translation) -> str | None:
    """Return why the rules of a workflow's model refuse its request, None where they take it."""
    # Its files are not here; a second stage asks for one.
    runtime = {key: value for key, value in found.runtime.items() if key not in ("like", "models_dir")}
    request = {key: value for key, value in found.request.items() if value is not None}
    if "upsampler_path" in found.files:
        request = {key: value for key, value in request.items() if not key.startswith("second_stage_")}
    try:
        rules_of(found.model.name, json.dumps(runtime, sort_keys=True)).resolve(GenerationRequest(**request))
    except Exception as error:  # any exception: the test says which
        return f"{type(error).__name__}: {error}"
    return None


def test_the_rules_of_each_model_take_what_is_translated(templates: Path, tmp_path: Path) -> None:
    refused = {}
    for row in cover(str(templates)).rows:
        if row.reason is not None:
            continue
        graph, places = read_workflow(str(templates / f"{row.name}.json")), (tmp_path / row.name,)
        first = translate(graph, places)
        assert isinstance(first, Translation)
        # The templates' own pictures are not in the package: of the clip's sides.
        size = (first.request.get("width") or 640, first.request.get("height") or 384)
        for _, name in first.inputs:
            path = places[0] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix in (".mp4", ".webm"):
                make_media(9, height=size[1], width=size[0]).save(path.with_suffix(".mp4")).rename(path)
            else:
                Image.new("RGB", size, "red").save(path, format="PNG")
        found = translate(graph, places)
        assert isinstance(found, Translation)
        if (reason := refusal_of(found)) is not None:
            refused[row.name] = reason
    assert refused.keys() == REFUSED.keys(), refused
    assert all(REFUSED[name] in reason for name, reason in refused.items()), refused
