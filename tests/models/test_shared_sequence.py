"""Whole transformers with text beside the grid, over a sequence that two real processes share: as one process alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models.shared_sequence_worker import GUIDED, IN_A_RING
from tables import table
from warm_python import run_worker

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What each process measured."""
    folder = tmp_path_factory.mktemp("world")
    run_worker(ROOT / "tests/models/shared_sequence_worker.py", folder)
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2)]


NAMES = [
    "flux1",
    "flux2",
    "qwen_image",
    "z_image",
    "krea2",
    "anima",
    "moss_image",
    "wan_vace",
    "wan_animate_2",
    "scail_2",
    "minimax_h3",
]


@table("name", NAMES)
def test_two_processes_equal_one(measured: list[dict[str, float]], name: str) -> None:
    for kind in ("ulysses", "ring") if name in IN_A_RING else ("ulysses",):
        assert max(of_process[f"{name}, {kind}"] for of_process in measured) < 1e-5, kind


def test_two_processes_with_a_prefix_cache_equal_one(measured: list[dict[str, float]]) -> None:
    """By heads: every process caches all of them and attends with its own."""
    for name in ("flux2 cached", "qwen_image_21"):
        assert max(of_process[f"{name}, ulysses"] for of_process in measured) < 1e-5


def test_two_processes_guided_within_attention_equal_one(measured: list[dict[str, float]]) -> None:
    """Every process holds both texts, and combines its own tokens."""
    for name in GUIDED:
        assert max(of_process[f"{name}, guided, ulysses"] for of_process in measured) < 1e-5, name
        assert min(of_process[f"{name}, guided, of not"] for of_process in measured) > 1e-3, name
    assert max(of_process[f"{GUIDED[0]}, guided, ring"] for of_process in measured) < 1e-5


def test_two_processes_with_gates_of_text_and_sound_equal_one(measured: list[dict[str, float]]) -> None:
    """MiniMax-H3 by Video Sparse Attention: every process holds the whole text, and gates go by heads."""
    assert max(of_process["fasth3, ulysses"] for of_process in measured) < 1e-5


@table(
    "name",
    ["flux1 to edit", "flux1 fill", "flux2 to edit", "flux3 to edit", "qwen_image to edit", "qwen_image at zero"],
)
def test_two_processes_with_images_equal_one(measured: list[dict[str, float]], name: str) -> None:
    """Every process holds all tokens of the images."""
    for of_process in measured:
        assert of_process[f"{name}, ulysses"] < 1e-5
        assert name not in IN_A_RING or of_process[f"{name}, ring"] < 1e-5
