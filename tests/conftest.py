"""Fixtures that many tests share: tiny model folders, written once a session."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import running_server
from tiny_models import write_tiny_wan

# Tests must not reach the network, and an attention choice of whoever runs them must not leak in.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("DIFFUSION_ATTENTION_BACKEND", None)

# The files that take longest, in this order and before all others: a worker that takes a long one last ends alone.
# By seconds with no compiled kernel kept from an earlier run; `scripts/check` keeps the order.
LONGEST = (
    "serving/test_server.py",
    "cli/test_several_processes.py",
    "models/test_offloading.py",
    "cli/test_process_faults.py",
    "attention/sparse/test_invariants.py",
    "attention/test_backends_flex.py",
    "kernels/test_fused_layers.py",
    "cli/test_processes.py",
    "cli/test_doctor.py",
    "batches/test_batch.py",
    "models/test_tensor_parallel.py",
    "parallel/test_exchanges.py",
    "test_embedded_model.py",
    "kernels/test_block_sparse_triton.py",
    "models/test_found_files.py",
    "test_documentation_site.py",
    "test_documented_python.py",
    "quality/test_shapes_checker.py",
    "diffusers_bridge/test_attach_compiled.py",
    "cli/test_published_dry_runs.py",
    "cli/test_compare.py",
    "cli/test_documented_commands.py",
    "diffusers_bridge/test_passthrough_table.py",
    "cli/test_interruptions.py",
    "models/test_folder_layouts.py",
    "models/test_model_folder.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--serve-with",
        default="",
        help="flags of every server of tests/serving, such as '--replicas 2' or '--replicas 2 --ray auto'",
    )


def pytest_configure(config: pytest.Config) -> None:
    running_server.SERVE_WITH[:] = config.getoption("--serve-with").split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    missing = [str(path) for path in places if not path.is_file()]
    assert not missing, f"LONGEST names no file: {missing}"
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Collect garbage less often, and not among what collecting the tests has imported, which stays: of 41 s of tests
    of the command line that was 6 s, and is 3."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000)


def pytest_unconfigure() -> None:
    """Bindings that count what they made say at the end that it leaked, where nobody collects it."""
    gc.unfreeze()


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
