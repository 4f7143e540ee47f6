"""The documentation builds as a site, with warnings as errors: links, headings, and every docstring of the API."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason="pip install -e '.[docs]'")
    words = ("-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "doctrees")
    done = subprocess.run(
        [sys.executable, *words, ROOT / "docs", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reference = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    for name in ("load_pipeline", "attention.attention", "TokenLayout", "comparison.compare.compare", "ConfigError"):
        assert f'.{name}"' in reference, name
    # A description of an argument is an item of a list, whether it had a line of its own or not.
    assert "<li><p><code" in reference
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert index.count("caption-text") >= 6
