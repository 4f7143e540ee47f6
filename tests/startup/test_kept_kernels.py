"""FlashAttention-4's persistent cache is on, in this project's folder, by the time the package is imported."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion_runtime.startup.importing import import_failure
from diffusion_runtime.startup.kept_kernels import ENABLED_VARIABLE, FOLDER_VARIABLE, keep_flash_attention_kernels

# What the package reads when it is imported.
STAND_IN = f'import os\nfound = os.environ.get("{ENABLED_VARIABLE}"), os.environ.get("{FOLDER_VARIABLE}")\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache folder; the variables are restored."""
    for name in (ENABLED_VARIABLE, FOLDER_VARIABLE):
        # Set first, so that what the test sets is removed as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


def test_the_package_finds_its_cache_switched_on(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    assert import_failure.__wrapped__("flash_attn.cute", "found") is None
    enabled, folder = sys.modules["flash_attn.cute"].found
    assert enabled == "1"
    assert Path(folder).is_dir()
    assert cache in Path(folder).parents


def test_what_the_user_has_set_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLED_VARIABLE, "0")
    assert keep_flash_attention_kernels() is None
    assert os.environ[ENABLED_VARIABLE] == "0"
    assert FOLDER_VARIABLE not in os.environ
    assert not cache.exists()


def test_a_folder_that_cannot_be_used_is_left_out_with_a_line(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file in its place")
    with caplog.at_level(logging.WARNING, logger="diffusion_runtime"):
        assert keep_flash_attention_kernels() is None
    assert ENABLED_VARIABLE not in os.environ
    assert "each process compiles FlashAttention-4's kernels anew" in caplog.text
