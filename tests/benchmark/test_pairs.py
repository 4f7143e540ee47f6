"""Files of pairs and their summary, of a run that ended early."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paired_quality import calls_of
from benchmarks.pairs import add_lines, add_options, grow, summary
from diffusion_runtime.report.attention_report import ReportRow

LINE = {"kind": "one_object", "right": {"a": True, "b": False}, "latent_relative_l2": 0.5, "psnr_db": 30.0}


def options(tmp_path: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(
        ["--pairs", str(tmp_path / "pairs.jsonl"), "--output", str(tmp_path / "out.json"), "--device", "cpu", *more],
        argparse.Namespace(world="shapes"),
    )


def never() -> Any:
    def make(prompts: object) -> list[dict[str, Any]]:
        raise AssertionError(f"the time is over, and {prompts} are made")

    return make


@pytest.mark.parametrize(
    ("more", "told"), [(("--seconds", "0"), "give it more --seconds"), (("--summarise",), "without --summarise")]
)
def test_a_run_without_a_pair_says_so(tmp_path: Path, more: tuple[str, ...], told: str) -> None:
    """In its document and by its exit code."""
    with pytest.raises(SystemExit, match=rf"no pair in .*pairs\.jsonl: .*{told}") as ended:
        grow(options(tmp_path, *more), {"schema": "a/1"}, never, started=0.0)
    assert isinstance(ended.value.code, str)
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["schema"], written["all"]) == ("a/1", {"num_prompts": 0})


def test_a_summary(tmp_path: Path) -> None:
    arguments = options(tmp_path, "--summarise")
    add_lines(arguments.pairs, [{"index": 0, **LINE}])
    grow(arguments, {}, never, started=0.0)
    found = json.loads(arguments.output.read_text())
    assert (found["all"]["num_prompts"], found["all"]["turned_wrong"], found["all"]["turned_right"]) == (1, 1, 0)
    assert summary([], ["one_object"]) == {"all": {"num_prompts": 0}}


def row(role: str, backend: str, implementation: str, count: int, layers: str) -> ReportRow:
    return ReportRow(role, backend, implementation, count, layers, "0-7", "cli", "chosen")


def test_calls_are_counted_by_who_computed_them() -> None:
    cross = row("cross", "torch_sdpa", "flash", 48, "0-5")
    judged = [row("self", "fp8_attn", "fp8 cudnn", 40, "0-4"), row("self", "fp8_attn", "fp8 cudnn", 8, "5"), cross]
    assert calls_of(judged, "fp8_attn") == {
        "self": {"fp8_attn (fp8 cudnn)": 48},
        "cross": {"torch_sdpa (flash)": 48},
    }
    mixed = [row("self", "torch_sdpa", "flash", 8, "5"), *judged]
    with pytest.raises(SystemExit, match=r"expected fp8_attn in every call .*, got self: torch_sdpa \(flash\) x 8"):
        calls_of(mixed, "fp8_attn")
    with pytest.raises(SystemExit, match="got no call"):
        calls_of([cross], "fp8_attn")
