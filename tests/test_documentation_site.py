"""The documentation builds as a site, with warnings as errors, and is searched and navigated in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from headless_browser import browser_page, find_browser
from warm_python import run_python

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason="pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("documentation")
    words = ("-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", folder / "doctrees")
    # It imports the whole package for the API reference.
    done = run_python(*words, ROOT / "docs", folder / "site", cwd=ROOT)
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
        page.wait("document.querySelector('a.next-page') !== null")
        # The browser's own command follows links: it answers when the next page has taken the place of this one.
        for name in listed:
            page.call("Page.navigate", url=page.read("document.querySelector('a.next-page').href"))
            page.wait("document.readyState === 'complete'")
            assert page.read("location.pathname").endswith(f"/{name}.html")
        assert not page.read("document.querySelector('a.next-page') !== null")
        # The search reads excerpts of pages, which a page of file:// may not.
        assert page.errors == []
        form = "document.querySelector('.sidebar-search-container')"
        page.call("Page.navigate", url=page.read(f"{form}.action + '?q=watchdog'"))
        page.wait("document.querySelectorAll('ul.search li a').length > 0")
        found = page.read(
            "[...document.querySelectorAll('ul.search li a')].map(link => link.pathname.split('/').pop())"
        )
        assert "scaling.html" in found
