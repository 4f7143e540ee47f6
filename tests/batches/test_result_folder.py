"""Folder of a batch's results: names, the manifest after any kill, one batch at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_media import make_media

from diffusion_runtime.batches.result_folder import MAX_FLAT, ResultFolder
from diffusion_runtime.batches.rows import Row
from diffusion_runtime.errors import ConfigError, OutputError, UsageError
from diffusion_runtime.serving.results import publish

ROW = Row(3, "star", {"prompt": "a star", "seed": 1})
DIGEST = "d" * 32


def opened(folder: Path, num_rows: int | None = 5, **options: Any) -> ResultFolder:
    result = ResultFolder(folder, "m", options.pop("file_format", None))
    try:
        result.begin(num_rows, resumes=options.pop("resumes", True))
    except BaseException:
        result.close()
        raise
    return result


def published(folder: ResultFolder, digest: str = DIGEST) -> Path:
    target = folder.target("star", 1)
    media = make_media(1, 8, 8)
    publish(media, target, {}, recipe={"batch_row": {"id": "star", "digest": digest}}, has_pictures=False)
    return target


def test_a_file_whose_line_is_lost_is_known_by_its_sidecar_and_a_torn_line_is_cut(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    target = published(folder)
    found = folder.found(ROW, DIGEST, target)
    assert found is not None
    assert folder.found(ROW, "e" * 32, target) is None
    folder.add(ROW, DIGEST, target, found)
    folder.add(Row(4, "b", {"prompt": "b", "seed": 1}), DIGEST, target, found)
    folder.close()
    manifest = tmp_path / "manifest.jsonl"
    first, second, end = manifest.read_text().split("\n")
    assert end == ""
    for torn in (len(second) // 2, len(second)):
        manifest.write_text(f"{first}\n{second[:torn]}")
        folder = opened(tmp_path)
        assert manifest.read_text() == first + "\n"
        assert folder.is_done(ROW, DIGEST)
        assert not folder.is_done(Row(4, "b", {"prompt": "b", "seed": 1}), DIGEST)
        folder.close()
    assert json.loads(first)["path"] == "star.png"
    target.write_bytes(b"another file")
    folder = opened(tmp_path)
    assert not folder.has_any, "a file of another size is made again"
    folder.close()


def test_results_of_many_rows_are_in_folders_of_two_levels_also_when_fewer_rows_follow(tmp_path: Path) -> None:
    for num_rows, name in ((MAX_FLAT, "flat"), (MAX_FLAT + 1, "many"), (None, "stream")):
        opened(tmp_path / name, num_rows).close()
        folder = opened(tmp_path / name, 1)
        parts = folder.target("star", 1).relative_to(tmp_path / name).parts
        assert len(parts) == (1 if name == "flat" else 3)
        assert parts[-1] == "star.png"
        folder.close()


def test_a_folder_is_one_batchs(tmp_path: Path) -> None:
    folder = opened(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"another batch writes into it"):
        opened(tmp_path / "a")
    folder.close()
    with pytest.raises(UsageError, match=r"holds a batch already: --resume goes on"):
        opened(tmp_path / "a", resumes=False)
    with pytest.raises(UsageError, match=r"was begun with --format left out"):
        opened(tmp_path / "a", file_format="gif")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "manifest.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"was not written by `batch`"):
        opened(tmp_path / "b")
    (tmp_path / "a" / "manifest.jsonl").write_text("{}\n")
    with pytest.raises(OutputError, match=r"manifest.jsonl:1: expected a line of a batch"):
        opened(tmp_path / "a")
    (tmp_path / "c").write_text("")
    with pytest.raises(ConfigError, match=r"expected a folder, and it is a file"):
        opened(tmp_path / "c")
