"""The documentation builds as a site, with warnings as errors, and is searched and navigated in a browser."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from headless_browser import browser_page, find_browser

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason="pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("documentation")
    words = ("-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", folder / "doctrees")
    done = subprocess.run(
        [sys.executable, *words, ROOT / "docs", folder / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "site"


def test_the_site_has_the_api_and_the_sections(site: Path) -> None:
    reference = (site / "api.html").read_text(encoding="utf-8")
    for name in ("load_pipeline", "attention.attention", "TokenLayout", "comparison.compare.compare", "ConfigError"):
        assert f'.{name}"' in reference, name
    # A description of an argument is an item of a list, whether it had a line of its own or not.
    assert "<li><p><code" in reference
    index = (site / "index.html").read_text(encoding="utf-8")
    assert index.count("caption-text") >= 6


def test_pages_follow_each_other_in_the_order_of_the_index_and_are_searched(site: Path, tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium here")
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[[^\]]+\]\((\w+)\.md\)", text, flags=re.MULTILINE)
    with browser_page(browser, tmp_path / "profile") as page:
        page.open(site / "index.html", 1280, 900)
        # The name of the page that is shown, once it is whole; about:blank is no page.
        shown = "document.readyState === 'complete' && location.pathname.split('/').pop() === '{}.html'"
        page.wait(shown.format("index"))
        for name in listed:
            page.read("document.querySelector('a.next-page').click()")
            page.wait(shown.format(name))
        assert not page.read("document.querySelector('a.next-page') !== null")
        # The search reads excerpts of pages, which a page of file:// may not.
        assert page.errors == []
        page.read("document.querySelector('.sidebar-search').value = 'watchdog'")
        page.read("document.querySelector('.sidebar-search-container').submit()")
        page.wait("document.querySelectorAll('ul.search li a').length > 0")
        found = page.read(
            "[...document.querySelectorAll('ul.search li a')].map(link => link.pathname.split('/').pop())"
        )
        assert "scaling.html" in found
