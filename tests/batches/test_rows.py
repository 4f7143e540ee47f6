"""Rows of a batch: every field of a request, files below the rows' folder, and refusals that name the row."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from cli_support import REPOSITORY
from sample_media import make_media
from tables import table

from diffusion_runtime.batches.row_files import RowFile
from diffusion_runtime.batches.rows import read_row, row_from_json, row_to_json
from diffusion_runtime.errors import ConfigError, MissingPackageError, RequestError

STAR = {"id": "star", "prompt": "a star"}


def png(folder: Path, name: str = "cat.png") -> bytes:
    make_media(1, 8, 8).save(folder / name)
    return (folder / name).read_bytes()


def test_a_row_holds_any_field_and_draws_the_same_noise_in_every_run(tmp_path: Path) -> None:
    attention = {"default": {"backend": "sta"}}
    values = {**STAR, "size": "64x32", "steps": 2, "attention": attention, "lora": {"style": 0.5}, "preset": "fast"}
    row = read_row(values, 7, "shapes", tmp_path)
    seed = row.request["seed"]
    assert row.request == {"prompt": "a star", "width": 64, "height": 32, "num_inference_steps": 2, "seed": seed}
    assert (row.preset, row.attention, row.loras) == ("fast", attention, [{"name": "style", "scale": 0.5}])
    assert read_row(values, 8, "shapes", tmp_path).request["seed"] == seed
    assert read_row({**values, "seed": -1}, 8, "shapes", tmp_path).request["seed"] == seed
    assert read_row({**values, "id": 3}, 8, "shapes", tmp_path).request["seed"] != seed
    assert read_row({"prompt": "a star"}, 7, "shapes", tmp_path).id == "00000007"
    assert read_row({**values, "seed": 4}, 7, "shapes", tmp_path).settings == row.settings


def test_files_of_a_row_are_below_its_folder_or_in_it(tmp_path: Path) -> None:
    content = png(tmp_path)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    for given in ("cat.png", url, {"bytes": content, "path": None}):
        row = read_row({**STAR, "image": given, "frame_conditions": [[4, "cat.png", 0.5]]}, 1, "shapes", tmp_path)
        assert row.inputs is not None
        again = row_from_json(row_to_json(row))
        assert [source.content for source in again.inputs["image_path"]] == [content]
        assert again.digest("m") == row.digest("m")
        assert row.work({"image_path": ["a"], "frame_conditions": ["b"]})["requests"][0] == {
            **row.request,
            "image_path": "a",
            "frame_conditions": [[4, "b", 0.5]],
        }


def test_a_digest_is_of_everything_that_decides_the_result(tmp_path: Path) -> None:
    png(tmp_path)
    row = read_row({**STAR, "image": "cat.png"}, 1, "shapes", tmp_path)
    digests = {row.digest("m"), row.digest("other model")}
    for changes in ({"seed": 1}, {"attention": "sta"}, {"preset": "fast"}, {"steps": 3}, {"lora": ["a"]}):
        digests.add(read_row({**STAR, "image": "cat.png", **changes}, 1, "shapes", tmp_path).digest("m"))
    make_media(1, 8, 16).save(tmp_path / "cat.png")
    digests.add(row.digest("m"))
    assert len(digests) == 8
    assert dataclasses.replace(row, number=9).digest("m") in digests


@table(
    "values, message",
    [
        ({"hight": 64}, "unknown field 'hight'. Did you mean 'height'"),
        ({"prompt": " "}, "prompt: expected a text"),
        ({"id": "../x"}, "id: expected 1 to 100 letters"),
        ({"id": ".x"}, "id: expected 1 to 100 letters"),
        ({"id": "x."}, "id: expected 1 to 100 letters"),
        ({"id": "x" * 101}, "id: expected 1 to 100 letters"),
        ({"id": True}, "id: expected 1 to 100 letters"),
        ({"id": "con"}, "and no device of Windows, got 'con'"),
        ({"id": "Com1.png"}, "and no device of Windows, got 'Com1.png'"),
        ({"image": "../cat.png"}, "expected a path below the folder of the rows, got '../cat.png'"),
        ({"image": "/etc/passwd"}, "expected a path below the folder of the rows"),
        ({"image": "link.png"}, "expected a path below the folder of the rows"),
        ({"image": "none.png"}, "there is no file 'none.png'"),
        ({"image": "https://example.org/a.png"}, "a batch fetches nothing"),
        ({"image": "data:image/png;base64,*"}, "image: the data: URL is not base64"),
        ({"image": "a.png", "image_path": "a.png"}, "is another name of image_path"),
        ({"lora_path": "a"}, "a request names no file"),
        ({"step_cache": "magcache:file=a"}, "a request names no file"),
        ({"return_report": False}, "a row has one result and no answer"),
        ({"n": 2}, "a row has one result and no answer"),
        ({"num_inference_steps": "many"}, "num_inference_steps: expected a whole number"),
        ({"seed": -3}, "seed"),
    ],
)
def test_a_row_that_cannot_be_is_refused_with_its_number(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    png(folder, "a.png")
    png(tmp_path)
    (folder / "link.png").symlink_to(tmp_path / "cat.png")
    (folder / "rows.jsonl").write_text(f"\n{json.dumps({**STAR, **values})}\n")
    with pytest.raises(RequestError) as raised:
        list(RowFile(str(folder / "rows.jsonl"), "shapes").rows())
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"{folder}/rows.jsonl:2: ")


def test_a_table_holds_the_same_rows_as_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = png(tmp_path)
    rows: list[dict[str, Any]] = [{**STAR, "steps": 2, "image": "cat.png"}, {"id": "b", "prompt": "x", "steps": None}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    table, lines = (list(RowFile(str(tmp_path / f"rows.{kind}"), "shapes").rows()) for kind in ("parquet", "jsonl"))
    assert table == lines
    images = pyarrow.Table.from_pylist([{**STAR, "image": {"bytes": content, "path": "cat.png"}}])
    pyarrow.parquet.write_table(images, tmp_path / "images.parquet")
    (row,) = RowFile(str(tmp_path / "images.parquet"), "shapes").rows()
    assert row.inputs is not None
    assert row.inputs["image_path"][0].content == content
    times = pyarrow.Table.from_pylist([{**STAR, "attention": {"default": datetime.datetime(2026, 1, 1)}}])
    pyarrow.parquet.write_table(times, tmp_path / "times.parquet")
    with pytest.raises(RequestError, match=r"times.parquet:1: attention: expected values as JSON has them: .*datetime"):
        list(RowFile(str(tmp_path / "times.parquet"), "shapes").rows())
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"broken.parquet is no Parquet file"):
        list(RowFile(str(tmp_path / "broken.parquet"), "shapes").rows())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"diffusion-runtime\[parquet\]"):
        list(RowFile(str(tmp_path / "rows.parquet"), "shapes").rows())
    with pytest.raises(ConfigError, match=r"ends in .jsonl, .ndjson or .parquet, or -"):
        RowFile("rows.csv", "shapes")
    with pytest.raises(ConfigError, match=r"ROWS: .*/none.jsonl: no such file"):
        _ = RowFile(str(tmp_path / "none.jsonl"), "shapes").state


def test_the_driver_needs_neither_torch_nor_a_server() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'starlette', 'fastapi', 'ray', 'pyarrow')));"
        "import diffusion_runtime.batches.batch_run"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)
