"""Fixtures that many tests share: tiny model folders, written once a session."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import write_tiny_wan

# Tests must not reach the network, and an attention choice of whoever runs them must not leak in.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("DIFFUSION_ATTENTION_BACKEND", None)

# The files that take longest, in this order and before all others: a worker that takes a long one last ends alone.
# By seconds of CPU time; `scripts/check` keeps the order.
LONGEST = (
    "kernels/test_block_sparse_triton.py",
    "test_documentation_site.py",
    "cli/test_process_faults.py",
    "cli/test_several_processes.py",
    "test_embedded_model.py",
    "cli/test_doctor.py",
    "kernels/test_kmeans_triton.py",
    "parallel/test_exchanges.py",
    "cli/test_self_check.py",
    "parallel/test_world.py",
    "models/test_folder_layouts.py",
    "quality/test_auxiliary.py",
    "cli/test_processes.py",
    "cli/test_interruptions.py",
    "models/test_model_folder.py",
    "kernels/test_block_packing.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    missing = [str(path) for path in places if not path.is_file()]
    assert not missing, f"LONGEST names no file: {missing}"
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def tiny_wan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan folder (UniPC scheduler, the embedded model's VAE layout). Read only: tests share it."""
    return write_tiny_wan(tmp_path_factory.mktemp("models") / "tiny_wan")


@pytest.fixture(scope="session")
def tiny_wan_euler_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with a FlowMatchEulerDiscreteScheduler. Read only: tests share it."""
    return write_tiny_wan(tmp_path_factory.mktemp("models") / "tiny_wan_euler", scheduler="flow_match_euler")


@pytest.fixture
def tiny_wan_copy(tiny_wan_folder: Path, tmp_path: Path) -> Callable[[], Path]:
    """Call it for a copy of the tiny Wan folder that the test may damage."""

    def copy() -> Path:
        return Path(shutil.copytree(tiny_wan_folder, tmp_path / "damaged_wan"))

    return copy
