"""The page of a comparison, in a real browser: one clock, keyboard, small screens, contrast, nothing from outside."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy
import pytest
from headless_browser import Page, browser_page, find_browser

from diffusion_runtime import GenerationRequest
from diffusion_runtime.comparison.page import encode_picture, render, write_page
from diffusion_runtime.comparison.result import Clip, Comparison, Row
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.page import assets as page_assets
from diffusion_runtime.report.attention_report import AttentionReport

FPS, NUM_FRAMES = 12, 25


def clip(prompt: str, number: int, *, num_frames: int = NUM_FRAMES) -> Clip:
    """A square that moves down."""
    frames = numpy.full((num_frames, 64, 64, 3), 40 * number, numpy.uint8)
    for index in range(num_frames):
        frames[index, 2 * index : 2 * index + 8, 10:20] = (255, 255, 0)
    picture, kind = encode_picture(GeneratedMedia(frames, FPS, {}, AttentionReport()))
    metrics = {} if number == 0 else {"psnr_db": 30.0 - number, "ssim": None, "lpips": None}
    distances = () if number == 0 else (0.01 * number, 0.2 * number)
    return Clip(
        prompt, 0, distances, None, metrics, {"denoise": 2.0 / (1 + number)}, picture=picture, picture_type=kind
    )


def comparison(prompt: str = "a yellow square", *, num_frames: int = NUM_FRAMES) -> Comparison:
    request = GenerationRequest(prompt, height=64, width=64, num_frames=num_frames, fps=FPS, num_inference_steps=2)
    rows = [
        Row(name, kind, "measured", 2, beside, runtime=RuntimeConfig(), request=request,
            clips=(clip(prompt, number, num_frames=num_frames), clip("another", number, num_frames=num_frames)))
        for number, (name, kind, beside) in enumerate(
            (("dense", "reference", None), ("sparse", "setting", None), ("dense, 1 steps", "fewer_steps", "sparse"))
        )
    ]  # fmt: skip
    failed = Row("broken", "setting", "failed", reason="it cannot run")
    return Comparison((*rows, failed), 0.1, "cpu", "0", {"ssim": "not installed"}, "float32", ("time: of one clip",))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    browser = find_browser()
    if browser is None:
        pytest.skip("no chromium was found on PATH")
    folder = tmp_path_factory.mktemp("page")
    write_page(comparison(), folder / "page.html")
    (folder / "profile").mkdir()
    with browser_page(browser, folder / "profile") as opened:
        opened.open(folder / "page.html", 1200, 1600)
        opened.wait("[...document.querySelectorAll('video')].every(v => v.readyState >= 2 && !v.seeking)")
        yield opened


# The frame that each clip shows, and the one that the clock names.
FRAMES = f"[...document.querySelectorAll('video')].map(v => Math.floor(v.currentTime * {FPS}))"
# Every clip is where the slider is: one seek follows the other.
SEEK = "document.querySelector('.clock input')"
PLAY = "document.querySelector('.clock button')"
SETTLED = (
    "[...document.querySelectorAll('video')].every("
    f"v => !v.seeking && Math.floor(v.currentTime * {FPS}) === Number({SEEK}.value))"
)
CLOCK = "document.querySelector('.clock output').textContent"


def test_keys_move_all_clips_together(page: Page) -> None:
    assert page.read("document.querySelectorAll('video').length") == 6
    for _ in range(3):
        page.press("ArrowRight", "ArrowRight", 39)
    page.press("ArrowLeft", "ArrowLeft", 37)
    page.wait(SETTLED)
    assert page.read(FRAMES) == [2] * 6
    assert page.read(CLOCK) == f"frame 3 of {NUM_FRAMES}"
    page.read(f"{SEEK}.value = 10; {SEEK}.dispatchEvent(new Event('input'))")
    page.wait(SETTLED)
    assert page.read(FRAMES) == [10] * 6
    # The pixels are those of the frame: the square has moved down.
    top = page.read(
        "(() => { const c = document.createElement('canvas'); c.width = c.height = 64; const d = c.getContext('2d');"
        "d.drawImage(document.querySelector('video'), 0, 0); const p = d.getImageData(15, 0, 1, 64).data;"
        "return [...Array(64).keys()].findIndex(y => p[4 * y] > 128) })()"
    )
    assert top == pytest.approx(20, abs=1)


def test_space_plays_and_pauses(page: Page) -> None:
    page.read(f"{SEEK}.value = 0; {SEEK}.dispatchEvent(new Event('input'))")
    page.press(" ", "Space", 32, " ")
    assert page.read(f"{PLAY}.textContent") == "Pause"
    page.wait(f"Number({SEEK}.value) >= 3 && [...document.querySelectorAll('video')].every(v => v.currentTime > 0.2)")
    page.press(" ", "Space", 32, " ")
    assert page.read(f"{PLAY}.textContent") == "Play"
    page.wait(SETTLED)
    assert len(set(page.read(FRAMES))) == 1
    # On the button, the key presses the button: once.
    page.read(f"{PLAY}.focus()")
    page.press(" ", "Space", 32, " ")
    assert page.read(f"{PLAY}.textContent") == "Pause"
    page.read(f"{PLAY}.click()")
    assert page.read("[...document.querySelectorAll('video')].every(v => v.paused)")


def test_it_fits_small_screens_and_can_be_read(page: Page) -> None:
    page.resize(360, 800)
    try:
        assert page.read("document.documentElement.scrollWidth") <= 360
        widths = page.read("[...document.querySelectorAll('video')].map(v => v.getBoundingClientRect().width)")
        assert min(widths) >= 140
        # Every figure of both tables is on the screen, beside its name.
        cells = page.read(
            "[...document.querySelectorAll('td')].map(t => [t.getBoundingClientRect().left, "
            "t.getBoundingClientRect().right, t.scrollWidth - t.clientWidth, t.dataset.name || ''])"
        )
        assert len(cells) > 10
        assert [cell for cell in cells if cell[0] < 0 or cell[1] > 360 or cell[2] > 1] == []
        assert {"PSNR, dB", "speed", "total, s"} <= {name for *_, name in cells}
        # Texts of the plots as they are drawn, which a plot scaled to the screen would shrink.
        assert page.read("Math.min(...[...document.querySelectorAll('svg')].map(s => s.getScreenCTM().a))") >= 0.9
    finally:
        page.resize(1200, 1600)
    # WCAG's contrast of text against what is behind it, the page's own white where nothing is.
    ratios = page.read(
        """(() => {
        const rgb = text => text.match(/[\\d.]+/g).map(Number);
        const linear = x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
        const light = c => { const [r, g, b] = c.map(x => linear(x / 255));
          return .2126 * r + .7152 * g + .0722 * b };
        // A letter of a plot lies on its dot.
        const behind = e => { if (e.closest('.dot')) return rgb(getComputedStyle(e.closest('.dot')).fill);
          for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
          if (c.length < 4 || c[3] > 0) return c } return [255, 255, 255] };
        const texts = document.querySelectorAll(
          'p, td span, th, h1, h2, h3, li, figcaption, .mark, button, output, small, svg text');
        const inkOf = e => getComputedStyle(e)[e instanceof SVGElement ? 'fill' : 'color'];
        return [...texts].map(e => {
          const [a, b] = [light(rgb(inkOf(e))), light(behind(e))].sort((x, y) => y - x);
          return (a + .05) / (b + .05) }) })()"""
    )
    assert len(ratios) > 30
    assert min(ratios) >= 4.5


def test_clips_grow_with_the_page(page: Page) -> None:
    page.resize(1280, 1600)
    widths = page.read("[...document.querySelectorAll('video')].map(v => v.getBoundingClientRect().width)")
    page.resize(1200, 1600)
    assert min(widths) >= 380


def test_a_ratio_says_of_how_many_clips_it_is() -> None:
    result = comparison()
    texts = [result.speed_text(row) for row in result.rows]
    assert texts == ["1.00x", "2.00x (2.00 to 2.00)", "3.00x (3.00 to 3.00)", "-"]
    one = dataclasses.replace(result, rows=[dataclasses.replace(row, clips=row.clips[:1]) for row in result.rows])
    assert one.speed_text(one.rows[1]) == "2.00x (from one clip)"


def test_nothing_comes_from_outside(page: Page) -> None:
    page.read("1")
    assert page.errors == []
    assert page.urls
    assert all(url.startswith(("data:", "file:")) for url in page.urls)
    assert page.read("document.querySelectorAll('svg').length") == 2
    # Columns of which no row has a figure are left out.
    columns = page.read("[...document.querySelectorAll('thead th')].map(each => each.textContent)")
    assert "PSNR, dB" in columns
    assert "SSIM" not in columns


# Of a page without clips, and of each row and clip beside its picture: style, script, figures.
PAGE_BYTES, ROW_BYTES, CLIP_BYTES = 42_000, 1_500, 700


def test_a_page_is_little_more_than_its_clips() -> None:
    """A clip of H.264 takes some 0.1 MB at the draft size, so four settings and four prompts stay far below 8 MB."""
    result = comparison()
    clips = [each for row in result.rows for each in row.clips]
    pictures = sum(4 * math.ceil(len(each.picture or b"") / 3) for each in clips)
    most = PAGE_BYTES + ROW_BYTES * len(result.rows) + CLIP_BYTES * len(clips) + pictures
    assert pictures < len(render(result).encode()) <= most


def test_every_ink_can_be_read_in_both_themes() -> None:
    """WCAG AA without a browser: letters in plots and texts against the page, of the style sheet's two themes."""
    style = (Path(page_assets.__file__).parent / "page.css").read_text()
    light_theme, dark_theme = re.findall(r":root \{([^}]*)\}", style)[:2]

    def light(ink: str) -> float:
        full = ink if len(ink) == 7 else "#" + "".join(2 * digit for digit in ink[1:])
        shares = [int(full[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one: str, other: str) -> float:
        low, high = sorted((light(one), light(other)))
        return (high + 0.05) / (low + 0.05)

    for theme in (light_theme, dark_theme):
        inks = dict(re.findall(r"--([\w]+): (#[0-9a-f]+)", theme))
        assert len(inks) == 17
        texts = {name: ink for name, ink in inks.items() if name not in ("back", "bar", "line", "on")}
        too_weak = [n for n, ink in texts.items() for b in ("back", "bar") if contrast(ink, inks[b]) < 4.5]
        marks = [name for name, ink in texts.items() if name[0] == "k" and contrast(ink, inks["on"]) < 4.5]
        assert (too_weak, marks) == ([], [])


def test_texts_of_strangers_are_text(tmp_path: Path) -> None:
    text = render(comparison("<script>alert(1)</script>"))
    assert "<script>alert" not in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "broken: failed: it cannot run" in text
    assert [row.first_step_text(0.5) for row in comparison().rows] == ["-", "none", "none", "-"]
    assert [row.first_step_text(0.3) for row in comparison().rows] == ["-", "none", "1", "-"]
    assert repr(comparison()) == "<Comparison: sparse, dense, 1 steps, broken beside dense, on cpu>"
    assert render(comparison(num_frames=1)).count("data:image/webp") == 6
    write_page(comparison(num_frames=1), tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
