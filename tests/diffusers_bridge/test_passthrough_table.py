"""The table of pipelines in docs/diffusers.md: every class is in it, and what it says of some is so."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tables import table

from diffusion_runtime.diffusers_bridge.pipeline_interface import PipelineInterface

SCRIPTS = Path(__file__).parents[2] / "scripts"
# What importing every pipeline says about packages that are not here.
pytestmark = pytest.mark.filterwarnings("ignore")
AGAIN = "run: python scripts/passthrough_table.py"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("passthrough_table")
        for name in ("passthrough_table", "passthrough_parts"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def rows(script: Any) -> dict[str, Any]:
    return {row.pipeline: row for row in script.rows_of(script.PAGE.read_text(encoding="utf-8"))}


def test_every_class_that_takes_a_prompt_is_in_the_table(script: Any, rows: dict[str, Any]) -> None:
    import diffusers
    from passthrough_parts import prompt_taking_classes

    known = prompt_taking_classes()
    assert f"diffusers {diffusers.__version__}, " in script.PAGE.read_text(encoding="utf-8"), AGAIN
    assert list(rows) == sorted(known), AGAIN
    for name, kind in known.items():
        runs = rows[name].runs
        # A refusal is the class's own, known without a component.
        assert runs.startswith("refused: ") == bool(PipelineInterface.of(kind).refusals()), (name, AGAIN)
        assert runs.startswith(("yes", "refused: ", "not shown: ", "no, and diffusers alone runs it: ")), name
        assert (runs == "yes") == bool(rows[name].reached) == bool(rows[name].sparse), name
    assert sum(row.runs == "yes" for row in rows.values()) >= 80


def test_the_sentences_of_the_table_are_those_of_its_rows(script: Any, rows: dict[str, Any]) -> None:
    import diffusers

    text = script.PAGE.read_text(encoding="utf-8").split(script.BEGIN)[1].split(script.END)[0]
    assert text.strip() == script.table_of(list(rows.values()), diffusers.__version__), AGAIN


def test_every_family_of_tiny_components_is_built(script: Any) -> None:
    from passthrough_parts import _FAMILIES, family_components

    for name in _FAMILIES:
        assert {"transformer", "vae", "scheduler", "text_encoder"} <= set(family_components(name)), name


# With a UNet, with a transformer whose grid is known, of a control video, one that no request can run, and one whose
# ControlNet holds modules of the transformer.
@table(
    "name",
    [
        "StableDiffusionPipeline",
        "LTXPipeline",
        "CogVideoXFunControlPipeline",
        "CycleDiffusionPipeline",
        "ZImageControlNetPipeline",
    ],
)
def test_a_row_is_what_the_passthrough_does(name: str, script: Any, rows: dict[str, Any]) -> None:
    assert script.make_row(name) == rows[name], AGAIN
