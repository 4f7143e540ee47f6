"""The table of features that do not go together, and the order of a request's rules."""

from __future__ import annotations

import re
import runpy
import string
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from diffusion_runtime import GenerationRequest, RuntimeConfig
from diffusion_runtime.denoising import registry
from diffusion_runtime.errors import RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.media import images
from diffusion_runtime.request.generation_request import REQUEST_FIELDS
from diffusion_runtime.rules.combinations import Combination, combinations
from diffusion_runtime.rules.features import ChosenRequest, ChosenRuntime
from diffusion_runtime.rules.request_rules import RequestRules
from tests.tiny_models import TINY_SIZES, write_tiny_wan

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "diffusion_runtime"
SIZES = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 4}


def rules_of(model: str) -> RequestRules:
    rules = inspect_pipeline(RuntimeConfig(model, device="cpu")).rules
    assert isinstance(rules, RequestRules)
    return rules


@pytest.fixture(scope="module")
def chosen() -> tuple[ChosenRequest, ChosenRuntime]:
    rules = rules_of("shapes")
    settings = rules.settings(rules.resolve(GenerationRequest("a red circle", **SIZES)))
    return ChosenRequest(settings), ChosenRuntime(RuntimeConfig())


def test_every_row_names_features_and_values_there_are(chosen: tuple[ChosenRequest, ChosenRuntime]) -> None:
    request, runtime = chosen
    for about, rows in combinations().items():
        for row in rows:
            facts = request if about == "requests" else runtime
            names = {name.split(".")[0] for _, name, _, _ in string.Formatter().parse(row.says) if name}
            assert names <= set(facts.values()), row
            assert [about == "elsewhere", bool(row.at)] != [True, False], row
            for feature in () if row.at else row.pair:
                known = REQUEST_FIELDS if about == "requests" else RuntimeConfig.__dataclass_fields__
                assert feature.strip("`") in (known if feature[0] == "`" else facts.features), row
            if about == "requests":
                assert not row.is_chosen(request), row


def test_rows_of_other_modules_say_what_these_say() -> None:
    for rows in combinations().values():
        for row in rows:
            if row.at:
                assert said_in((PACKAGE / row.at).read_text(), row), row


def said_in(source: str, row: Combination) -> bool:
    """Whether a module asks for the row, or raises its words: in one text or in several that stand side by side."""
    if f"refusal({', '.join(map(repr, row.pair))}".replace("'", '"') in source:
        return True
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    return all(part.strip() in joined for part in row.says.split("..."))


def test_the_page_is_the_table() -> None:
    written = runpy.run_path(str(ROOT / "scripts" / "write_combinations.py"))["page_text"]()
    assert (ROOT / "docs" / "combinations.md").read_text() == written, "python scripts/write_combinations.py"


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        ("shapes", {"step_cache": "magcache:file=a", "progressive_resolution": "dct"}, "magcache is calibrated at one"),
        ("shapes-causal", {"step_cache": "none"}, "step_cache: this model makes a video chunk by chunk"),
        ("shapes-causal", {"cfg_gate": 0.5}, "cfg_gate: this model makes a video chunk by chunk"),
        ("shapes-causal", {"chunk_schedule": "rolling", "sampler": "unipc"}, "expected sampler dmd, got unipc"),
    ],
)
def test_a_pair_of_a_request_is_refused_in_the_words_of_its_row(
    model: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        rules_of(model).resolve(GenerationRequest("a red circle", **values))


def test_a_request_is_resolved_in_one_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four requests were made on the way to one, and its image was decoded twice."""
    counts = Counter[str]()

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **values: Any) -> Any:
            counts[name] += 1
            return original(*args, **values)

        monkeypatch.setattr(owner, name, call)

    path = tmp_path / "first.png"
    Image.fromarray(numpy.zeros((TINY_SIZES["height"], TINY_SIZES["width"], 3), numpy.uint8)).save(path)
    rules = rules_of(str(write_tiny_wan(tmp_path / "wan", takes_image=True)))
    asked = GenerationRequest("a", **TINY_SIZES, num_inference_steps=12, image_path=str(path), step_cache="easycache")
    counted(registry, "build_sampler")
    counted(images, "_read")
    counted(GenerationRequest, "__post_init__")
    resolved = rules.resolve(asked)
    rules.unused(resolved)
    assert counts == {"build_sampler": 1, "_read": 1, "__post_init__": 2}
    assert resolved.step_cache != asked.step_cache
