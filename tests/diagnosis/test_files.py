"""The embedded model's files and the disk, whole and not."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from diffusion_runtime.diagnosis.embedded_model import check_model, model_problems
from diffusion_runtime.diagnosis.machine import DiskCheck, check_disk, disk_problems
from diffusion_runtime.models.model_sources import EMBEDDED_FOLDER
from diffusion_runtime.weights.tensor_files import SafetensorsFile

TRANSFORMER = Path("transformer") / "diffusion_pytorch_model.safetensors"


def test_the_embedded_model_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    # A choice that cannot run has nothing to do with the files.
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "fa3")
    check = check_model()
    assert check.error == ""
    assert check.num_parameters == 11_281_728
    assert check.num_bytes > check.num_parameters
    assert model_problems(check) == []


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED_FOLDER, tmp_path / "emoji"))


def test_a_truncated_file(copied: Path) -> None:
    path = copied / TRANSFORMER
    path.write_bytes(path.read_bytes()[:-100])
    check = check_model(copied)
    assert str(path) in check.error
    (problem,) = model_problems(check)
    assert problem.is_failure
    # Where the package was installed from is not known: a name alone would ask the package index.
    assert f"git checkout -- {copied}" in problem.fix
    assert "--force-reinstall" in problem.fix
    assert not problem.fix.endswith(" diffusion-runtime")


@pytest.mark.parametrize("component", ["text_encoder/model", "vae/diffusion_pytorch_model"])
def test_every_component_is_opened(component: str, copied: Path) -> None:
    (copied / f"{component}.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert component.partition("/")[0] in check_model(copied).error


def test_a_missing_tensor_and_one_that_is_not_finite(copied: Path) -> None:
    # With the marks of layers, where the model is in 8 bits.
    with closing(SafetensorsFile(copied / TRANSFORMER)) as file:
        metadata = dict(file.metadata)
    tensors = load_file(copied / TRANSFORMER)
    name = next(name for name in tensors if name.endswith("proj_out.weight"))
    save_file({key: value for key, value in tensors.items() if key != name}, copied / TRANSFORMER, metadata=metadata)
    assert name in check_model(copied).error
    save_file({**tensors, name: tensors[name] * float("nan")}, copied / TRANSFORMER, metadata=metadata)
    assert f"tensor {name} holds NaN" in check_model(copied).error


def test_room_for_results(tmp_path: Path) -> None:
    check = check_disk(tmp_path / "not" / "yet" / "there")
    assert check.error == ""
    assert check.free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = check_disk(tmp_path / "file" / "outputs")
    assert "file is a file" in check.error
    assert "--output-path" in disk_problems(check)[0].fix


def test_a_full_disk() -> None:
    assert disk_problems(DiskCheck("/outputs", 2**30)) == []
    (problem,) = disk_problems(DiskCheck("/outputs", 2**29))
    assert problem.what == "512 MiB are free where results go (/outputs)"
