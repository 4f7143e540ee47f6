"""benchmarks/parity_gpu.py: 8-bit products are judged over many prompts, from bfloat16; one clip's figures stay."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tables import table

from benchmarks import parity_gpu
from benchmarks.parity_gpu import OWN_ERROR, REFERENCE, ROWS, Made, Row, chosen_rows, missed, over_prompts
from diffusion_runtime.report.attention_report import AttentionReport

ROW = {row.name: row for row in ROWS}
FP8, GRAPHS = ROW["fp8"], ROW["fp8 graphs"]


@pytest.mark.slow
def test_the_rows_in_8_bits_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(parity_gpu.NUM_PROMPTS, "cpu", 2)
    path = tmp_path / "parity.json"
    monkeypatch.setattr(sys, "argv", ["parity_gpu", "--device", "cpu", "--only", "fp8", "--output", str(path)])
    parity_gpu.main()
    result = json.loads(path.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [OWN_ERROR, "bf16 auto", "fp8", "fp8 graphs"]
    assert result["prompts"] == {"num_prompts": 2, "height": 64, "width": 64, "num_inference_steps": 6}
    prompts = rows["fp8"]["prompts"]
    assert prompts["beside"] == "bf16 auto"
    first, second = prompts["psnr_db"]
    assert first != second
    assert prompts["mean_psnr_db"] == pytest.approx((first + second) / 2)
    # Roundings of 8 bits, and neither another clip nor the same one.
    assert all(20 < decibels < 60 for decibels in prompts["psnr_db"])
    # The one prompt, from the reference.
    assert rows["fp8"]["psnr_db"] not in prompts["psnr_db"]
    assert len(rows["fp8"]["distances"]) == parity_gpu.SMALL["num_inference_steps"]
    assert rows["bf16 auto"]["prompts"] is None


def clip(decibels: float) -> numpy.ndarray:
    """A frame of one grey that is so far from black."""
    return numpy.full((1, 1, 1, 3), 255 * 10 ** (-decibels / 20))


BLACK = numpy.zeros((1, 1, 1, 3))


def made(decibels: Sequence[float], frames: numpy.ndarray = BLACK) -> Made:
    return Made((torch.zeros(1),), frames, AttentionReport(()), tuple(clip(each) for each in decibels))


def reasons(row: Row, decibels: Sequence[float], others: Sequence[float] | None = None) -> list[str]:
    """others: those of the same row without graphs."""
    black = Made((torch.zeros(1),), BLACK, AttentionReport(()), (BLACK,) * len(decibels))
    before = {REFERENCE.name: black, "bf16 auto": black, "fp8": made(decibels if others is None else others)}
    mine = made(decibels)
    figures: dict[str, Any] = {
        "largest_distance": 0.5,
        "last_distance": 0.5,
        "psnr_db": 20.1,
        "prompts": over_prompts(mine, black),
    }
    return missed(row, mine, figures, before)


JUDGED: dict[str, tuple[tuple[float, ...], list[str]]] = {
    "one prompt is far off": ((20, 38, 40, 42), []),
    "the mean": ((15, 15, 31, 31, 31), ["24.6 dB from bf16 auto in the mean of 5 prompts are not above 30"]),
    "the median": ((25, 25, 25, 60, 60), ["25.0 dB from bf16 auto in the median of 5 prompts are not above 30"]),
    "both": (
        (20, 20, 20),
        [f"20.0 dB from bf16 auto in the {kind} of 3 prompts are not above 30" for kind in ("mean", "median")],
    ),
}


@table(("decibels", "expected"), JUDGED.values(), JUDGED)
def test_mean_and_median_of_many_prompts_are_judged(decibels: tuple[float, ...], expected: list[str]) -> None:
    """And the one prompt, of 20.1 dB, is not."""
    assert reasons(FP8, decibels) == expected


def test_replayed_prompts_are_those_without_graphs_to_the_bit() -> None:
    found = reasons(GRAPHS, (40, 40, 40), (40, 41, 42))
    assert "the frames of prompt 2 are not those of fp8" in found
    assert not any("frames" in reason for reason in reasons(GRAPHS, (40, 40, 40)))


def test_rows_come_with_those_that_judge_them() -> None:
    assert [row.name for row in chosen_rows("fp8 graphs")] == [OWN_ERROR, "bf16 auto", "fp8", "fp8 graphs"]
    assert chosen_rows("") == ROWS
