"""ComfyUI's own templates (comfyui-workflow-templates-json, MIT): translated, and taken by their models' rules."""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from PIL import Image
from sample_media import make_media

from diffusion_runtime import GenerationRequest, RuntimeConfig
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.loading import prepare
from diffusion_runtime.rules.guidance import Guidance
from diffusion_runtime.workflows.coverage import cover
from diffusion_runtime.workflows.graph import Graph, Link, Node
from diffusion_runtime.workflows.reading import read_workflow
from diffusion_runtime.workflows.translation import Refusal, Translation, translate

# The least share of uses that is translated.
LEAST_SHARE = 0.8
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


@pytest.fixture(scope="module")
def upsampler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny upsampler of LTX-2's latents, for the rules of a second stage."""
    folder = tmp_path_factory.mktemp("upsampler") / "latent_upsampler"
    LTX2LatentUpsamplerModel(in_channels=128, mid_channels=32, num_blocks_per_stage=1).save_pretrained(folder)
    return str(folder)


@functools.cache
def rules_of(model: str, options: str) -> Any:
    config = RuntimeConfig(model_path=model, device="cpu", offline=True, **json.loads(options))
    return prepare(config, is_dry_run=True).rules


def resolved_of(found: Translation, upsampler: str) -> Guidance:
    """Return the guidance of a workflow's request as the rules of its model resolve it, second stage and all."""
    # Its files are not here.
    runtime = {key: value for key, value in found.runtime.items() if key not in ("like", "models_dir")}
    if "upsampler_path" in found.files:
        runtime["upsampler_path"] = upsampler
    request = {key: value for key, value in found.request.items() if value is not None}
    rules = rules_of(found.model.name, json.dumps(runtime, sort_keys=True))
    settings = rules.settings(rules.resolve(GenerationRequest(**request)))
    assert len(settings.second_levels) == len(found.request.get("second_stage_sigmas", ()))
    return settings.guidance


def test_the_rules_of_each_model_take_what_is_translated(templates: Path, tmp_path: Path, upsampler: str) -> None:
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
        try:
            guidance = resolved_of(found, upsampler)
        except DiffusionRuntimeError as error:
            refused[row.name] = str(error)
            continue
        # No guidance but what the workflow has.
        assert (guidance.terms is None or guidance.is_guided, guidance.further_branches) == (True, ()), row.name
    assert refused.keys() == REFUSED.keys(), refused
    assert all(REFUSED[name] in reason for name, reason in refused.items()), refused


def test_skipped_layers_of_two_stages_are_refused(templates: Path) -> None:
    nodes = dict(read_workflow(str(templates / "video_ltx2_t2v_distilled.json")).nodes)
    for key, each in tuple(nodes.items()):
        if each.kind == "CFGGuider":
            values = {"double_layers": "5", "single_layers": "", "start_percent": 0, "end_percent": 1}
            nodes[f"s{key}"] = Node(f"s{key}", "SkipLayerGuidanceDiT", "", {**values, "model": each.inputs["model"]})
            nodes[key] = dataclasses.replace(each, inputs={**each.inputs, "model": Link(f"s{key}", 0), "cfg": 3.0})
    found = translate(Graph(nodes))
    assert isinstance(found, Refusal)
    assert "skipped layers beside a second stage" in found.message()
