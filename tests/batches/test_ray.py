"""`batch --ray` on a cluster of this machine: a node that dies, results by the object store, one machine's bytes."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_support import process_environment
from ray_cluster import ENVIRONMENT, ray_cluster
from sample_media import make_media

from diffusion_runtime.batches.ray_data import RowEngine, outcomes_of
from diffusion_runtime.batches.result_folder import ResultFolder
from diffusion_runtime.batches.rows import Row, row_to_json

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
SECONDS = 240.0
SMALL = {"prompt": "a red circle", "size": "64x64", "num_frames": 1, "num_inference_steps": 8}


def manifest(folder: Path) -> dict[str, str]:
    path = folder / "manifest.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = {(line := json.loads(text))["id"]: line["sha256"] for text in lines}
    assert len(found) == len(lines), "no row is twice in a manifest"
    return found


def batch(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = process_environment(**ENVIRONMENT)
    arguments = (sys.executable, "-m", "diffusion_runtime", "batch", "rows.jsonl", "--max-batch-size", "2", *words)
    return subprocess.Popen(arguments, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_batch_outlives_a_node_and_has_the_bytes_of_one_machine(tmp_path: Path) -> None:
    rows = [{"id": f"r{at}", **SMALL} for at in range(20)]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "x", "height": 1}])
    )
    with ray_cluster(2) as cluster:
        process = batch(tmp_path, "-o", "cluster", "--ray", cluster.address, "--replicas", "2")
        deadline = time.monotonic() + SECONDS
        while len(manifest(tmp_path / "cluster")) < 2 and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        cluster.say("kill 0")
        _, said = process.communicate(timeout=SECONDS)
        assert process.returncode == 5, said
        assert "1 rows failed, the first: rows.jsonl:21: height: expected" in " ".join(said.split())
    here = batch(tmp_path, "-o", "here")
    _, said = here.communicate(timeout=SECONDS)
    assert here.returncode == 5, said
    assert manifest(tmp_path / "cluster") == manifest(tmp_path / "here")
    assert sorted(manifest(tmp_path / "here")) == sorted(row["id"] for row in rows)


def test_results_come_through_the_object_store_where_the_folder_is_not_shared(tmp_path: Path) -> None:
    """An actor as Ray Data calls it, on a node that does not see the probe."""
    from diffusion_runtime.cli.serve import plain_config
    from diffusion_runtime.config import RuntimeConfig

    values = {
        "given": {"config": plain_config(RuntimeConfig()), "loras": {}},
        "model": "m",
        "max_batch_size": 2,
        "folder": str(tmp_path / "elsewhere"),
        "format": None,
        "is_nested": False,
        "probe": str(tmp_path / "elsewhere" / "probe"),
    }
    request: dict[str, Any] = {"prompt": "a red circle", "width": 64, "height": 64, "num_inference_steps": 2}
    row = Row(1, "still", {**request, "num_frames": 1, "seed": 1})
    clip = Row(2, "clip", {**request, "num_frames": 5, "seed": 1})
    content = base64.b64encode(make_media(1, 8, 8).to_bytes("png")).decode()
    image = json.dumps(
        {**json.loads(row_to_json(row)), "id": "image", "inputs": {"image_path": [["cat.png", content]]}}
    )
    engine = RowEngine(values)
    made = engine({"rows": [json.dumps([row_to_json(row), image, row_to_json(clip)])]})
    engine.close()
    assert not (tmp_path / "elsewhere").exists()
    folder = ResultFolder(tmp_path / "here", "m", None)
    outcomes = {each.row.id: each for each in outcomes_of(folder, {name: each[0] for name, each in made.items()})}
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == [
        "clip.json",
        "clip.mp4",
        "still.json",
        "still.png",
    ]
    for each in (row, clip):
        outcome = outcomes[each.id]
        assert outcome.target is not None
        assert outcome.result is not None
        found = folder.found(each, each.digest("m"), outcome.target)
        assert found is not None
        assert found["file"]["sha256"] == outcome.result["file"]["sha256"]
    failure = outcomes["image"].failure
    assert failure is not None
    assert "image" in failure["message"]
