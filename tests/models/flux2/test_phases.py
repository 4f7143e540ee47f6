"""Attention chosen by phase where the keys of reference images are computed once, through the whole pipeline."""

from __future__ import annotations

import re
from pathlib import Path

import numpy
import pytest
from PIL import Image
from tiny_flux2 import TINY_SIZES, write_tiny_flux2_klein

from diffusion_runtime import GenerationRequest, RuntimeConfig, load_pipeline
from diffusion_runtime.cli.attention_flags import AttentionFlags, PhaseFlags
from diffusion_runtime.cli.tables import attention_table
from diffusion_runtime.errors import BackendUnavailableError, ConfigError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.explanation.text_map import schedule_map
from diffusion_runtime.loading import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_flux2_klein(tmp_path_factory.mktemp("models") / "klein-kv", caches_references=True)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pictures") / "picture.png"
    Image.fromarray(numpy.arange(64 * 64 * 3, dtype=numpy.uint8).reshape(64, 64, 3)).save(path)
    return str(path)


def request(picture: str | None) -> GenerationRequest:
    return GenerationRequest("a red circle", **TINY_SIZES, seed=5, num_inference_steps=3, image_path=picture)


def test_each_phase_runs_on_its_own_backend(folder: Path, picture: str) -> None:

    for flags, of_steps, of_prefill in (
        (AttentionFlags("torch_sdpa", prefill=PhaseFlags("reference")), "torch_sdpa", "reference"),
        (AttentionFlags("torch_sdpa", decode=PhaseFlags("reference")), "reference", "torch_sdpa"),
    ):
        pipeline = load_pipeline(str(folder), device="cpu", attention_override=flags.collect())
        report = pipeline(request(picture)).attention_report
        assert report is not None
        # 2 double-stream blocks and 2 of a single stream.
        assert {(row.phase, row.backend): (row.count, row.steps) for row in report.rows} == {
            ("denoise", of_steps): (3 * 4, "0-2"),
            ("commit", of_prefill): (4, ""),
        }
        assert [column.header for column in attention_table([report.to_dict()]).columns][:3] == [
            "role",
            "phase",
            "backend",
        ]
        # Without reference images nothing is computed before the steps.
        without = pipeline(request(None)).attention_report
        assert without is not None
        assert {(row.phase, row.backend) for row in without.rows} == {(None, of_steps)}


def test_explain_has_what_is_computed_once(folder: Path, picture: str) -> None:
    override = AttentionFlags(prefill=PhaseFlags("reference")).collect()
    prepared = prepare(RuntimeConfig(str(folder), device="cpu", attention_override=override), is_dry_run=True)
    explanation = explain(prepared, prepared.rules.resolve(request(picture), None))
    drawn = schedule_map(explanation.schedule)
    assert {(drawn.legend[row.letters[0]], drawn.legend[row.commit]) for row in drawn.rows} == {
        ("torch_sdpa", "reference")
    }
    found = {part.name: part.operations for part in explanation.parts}
    alone = {
        part.name: part.operations for part in explain(prepared, prepared.rules.resolve(request(None), None)).parts
    }
    assert "prefill" not in alone
    # What is planned for is a reference as large as the picture, 24 tokens: in 3 steps 24 tokens and 512 of the text
    # attend to as many more, in 4 layers of 48 channels, with two operations in each of two products.
    assert found["attention, self"] - alone["attention, self"] == 3 * 4 * 4 * 48 * (24 + 512) * 24
    # Beside the attention of the references alone, the prefill embeds them, modulates, and has the products of a step
    # that are not of the text.
    assert 4 * 4 * 48 * 24**2 < found["prefill"] < found["linear layers"] / 3


def test_what_no_phase_has_is_said_before_the_weights_load(folder: Path) -> None:
    for rule, told in (
        ({"chunks": "0", "backend": "reference"}, "makes an image at once and not chunk by chunk; leave out chunks"),
        ({"phase": "commit", "role": "self", "backend": "video_sparse_attn"}, "cannot do cached_keys"),
        ({"phase": "later", "backend": "reference"}, "expected denoise, commit, decode, prefill"),
    ):
        with pytest.raises((ConfigError, BackendUnavailableError), match=re.escape(told)):
            prepare(RuntimeConfig(str(folder), device="cpu", attention={"schedule": [rule]}), is_dry_run=True)
