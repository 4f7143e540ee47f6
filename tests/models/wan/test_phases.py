"""Attention chosen by phase and chunk of a causal video, through the whole pipeline."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from recorded_capture import RecordedCapture
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.attention import register_backend
from diffusion_runtime.attention.backends.reference import ReferenceBackend
from diffusion_runtime.attention.backends.registry import unregister_backend
from diffusion_runtime.cli.attention_flags import AttentionFlags, PhaseFlags
from diffusion_runtime.cli.report_remarks import remarks_of
from diffusion_runtime.cli.tables import attention_table
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.diffusers_bridge.passthrough_folder import AttentionChoice
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.explanation.text_map import schedule_map
from diffusion_runtime.loading import prepare

# 4 x 4 latents, chunks of 2 of 6 latent frames.
REQUEST = GenerationRequest("a red circle", height=32, width=32, num_frames=21, seed=4, chunk_frames=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_wan(tmp_path_factory.mktemp("wan") / "causal", causal={"num_frames_per_block": 2})


@pytest.fixture
def lossy() -> Iterator[str]:
    class Lossy(ReferenceBackend):
        name: ClassVar[str] = "lossy"
        error_bound: ClassVar[float | None] = 0.1

    register_backend(Lossy)
    yield "lossy"
    unregister_backend("lossy")


def test_each_phase_runs_on_its_own_backend(folder: Path) -> None:
    typed = AttentionFlags(
        "torch_sdpa",
        config='{"schedule": [{"chunks": "1-9", "phase": "prefill", "role": "cross", "backend": "torch_sdpa"}]}',
        prefill=PhaseFlags("reference"),
    ).collect()
    pipeline = load_pipeline(str(folder), device="cpu", attention_override=typed)
    media = pipeline(REQUEST)
    assert media.attention_report is not None
    rows = {(row.role, row.phase, row.backend): row for row in media.attention_report.rows}
    layers = pipeline.transformer.num_blocks
    assert {key: (row.count, row.steps) for key, row in rows.items()} == {
        ("self", "denoise", "torch_sdpa"): (3 * 4 * layers, "0-3"),
        ("cross", "denoise", "torch_sdpa"): (3 * 4 * layers, "0-3"),
        # The last layer leaves its keys and attends to nothing.
        ("self", "commit", "reference"): (2 * (layers - 1), ""),
        ("cross", "commit", "reference"): (layers - 1, ""),
        ("cross", "commit", "torch_sdpa"): (layers - 1, ""),
    }
    assert "commits, from cli: schedule[1] (steps all, layers all, phase commit)" in str(media.attention_report)
    table = attention_table([media.attention_report.to_dict()])
    assert [column.header for column in table.columns][:3] == ["role", "phase", "backend"]
    # What a recipe holds is read back as the same choices.
    described = prepare(RuntimeConfig(str(folder), device="cpu", attention_override=typed), is_dry_run=True).description
    recorded = described.to_dict()["runtime"]["attention_override"]
    again = prepare(RuntimeConfig(str(folder), device="cpu", attention_override=recorded), is_dry_run=True)
    assert again.description.to_dict()["attention"] == described.to_dict()["attention"]
    explanation = explain(again, again.rules.resolve(REQUEST, None))
    drawn = schedule_map(explanation.schedule)
    assert {(row.role, drawn.legend[row.letters[0]], drawn.legend[row.commit]) for row in drawn.rows} == {
        (role, "torch_sdpa", commit) for role in ("self", "cross") for commit in ("reference", "not run")
    }


def test_lossy_commits_are_warned_of_and_phases_need_a_cache(
    folder: Path, lossy: str, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings(model: str, attention: AttentionFlags) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "diffusion_runtime"):
            prepare(RuntimeConfig(model, device="cpu", attention_override=attention.collect()), is_dry_run=True)
        return [record.getMessage() for record in caplog.records if "every later chunk inherits" in record.getMessage()]

    for flags in (AttentionFlags(lossy), AttentionFlags(prefill=PhaseFlags(lossy))):
        assert [line.split()[2] for line in warnings(str(folder), flags)] == [lossy]
    assert not warnings(str(folder), AttentionFlags(decode=PhaseFlags(lossy)))
    for flags in (AttentionFlags(prefill=PhaseFlags("reference")), AttentionFlags(decode=PhaseFlags("reference"))):
        with pytest.raises(ConfigError, match=r"'shapes' \(wan\) has no key-value cache.*use --attention-backend"):
            warnings("shapes", flags)
        with pytest.raises(ConfigError, match=r"diffusers' own pipeline\) has no key-value cache"):
            AttentionChoice.of(RuntimeConfig("somewhere", attention_override=flags.collect()), {})


def test_fp8_keys_and_values(folder: Path) -> None:
    """Half the bytes of bfloat16 for a video that differs little, with and without CUDA graphs' recorded operators."""
    pipeline = load_pipeline(str(folder), device="cpu")
    request = dataclasses.replace(REQUEST, num_frames=45, kv_window=4, kv_sink=1, guidance_scale=3.0)
    made, saturated = [], {}
    for positions in ("absolute", "window"):
        wanted = dataclasses.replace(request, positions=positions)
        exact, found = pipeline(wanted), pipeline(dataclasses.replace(wanted, kv_cache_dtype="fp8_e4m3"))
        first = 1 + 4
        assert (exact.frames[:first] == found.frames[:first]).all()
        difference = abs(exact.frames.astype(int) - found.frames)
        assert 0 < difference.max() <= 12, difference.max()
        made.append((positions, found.frames))
        rows = [media.attention_report.cache for media in (exact, found)]
        assert [row.dtype for row in rows] == ["auto", "fp8_e4m3"]
        # Tiny layers: the mean of the keys is as large as one of 16 tokens.
        assert 0.25 < rows[1].num_bytes / rows[0].num_bytes < 0.3
        saturated[positions] = rows[1].num_saturated
        (line,) = (line for line in remarks_of([found.attention_report.to_dict()]) if "key-value" in line)
        assert line == str(rows[1])
        assert f"stored in fp8_e4m3 ({rows[1].num_saturated} numbers saturated)" in line
    pipeline.parts = dataclasses.replace(pipeline.parts, graphs=ForwardGraphs(RecordedCapture(), is_probed=False))
    replayed = pipeline(dataclasses.replace(request, kv_cache_dtype="fp8_e4m3"))
    assert replayed.attention_report.graphs.num_replayed > 0
    (eager,) = (frames for positions, frames in made if positions == "absolute")
    assert abs(replayed.frames.astype(int) - eager).max() <= 1
    # What is recorded is computed while it is, unlike in a CUDA graph's capture, and so is counted once more.
    assert replayed.attention_report.cache.num_saturated >= saturated["absolute"] > 0
