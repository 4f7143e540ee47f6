"""The page of a server in a real browser, by what a person does; and its files as they are sent."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest
from headless_browser import Page, browser_page, find_browser
from PIL import Image
from running_server import SMALL, RunningServer, finished, running_server

# Of all files that are sent.
MOST_BYTES = 90_000
HTML = "a <img src=x onerror=alert(1)> red circle"
KEY = "key-1"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    found = find_browser()
    if found is None:
        pytest.skip("no chromium was found on PATH")
    with browser_page(found, tmp_path_factory.mktemp("profile")) as page:
        yield page


def opened(browser: Page, server: RunningServer, view: str = "", width: int = 1280) -> Page:
    """The page once its form is there, with nothing kept from an earlier test."""
    browser.events.clear()
    browser.open(f"{server.address}/{view}", width, 900)
    browser.wait("document.querySelector('main h1') !== null")
    return browser


def button(text: str) -> str:
    return f"[...document.querySelectorAll('main button')].find(each => each.textContent === {json.dumps(text)})"


def put(page: Page, selector: str, value: str) -> None:
    """Set a field as a person's input does."""
    assert (
        page.read(
            f"(() => {{ const each = document.querySelector({json.dumps(selector)}); each.value = {json.dumps(value)};"
            "each.dispatchEvent(new Event('input')); each.dispatchEvent(new Event('change')); return each.value })()"
        )
        == value
    ), selector


def check_nothing_else(page: Page, server: RunningServer) -> None:
    """No error in the console, and no request to another place."""
    page.read("1")
    assert page.errors == []
    assert page.urls
    assert all(url.startswith((server.address, "data:", "blob:")) for url in page.urls), page.urls


def small(page: Page, prompt: str = HTML, steps: int = 2) -> None:
    put(page, "[name=width]", "64")
    put(page, "[name=height]", "64")
    put(page, "[name=num_frames]", "5")
    put(page, "[name=num_inference_steps]", str(steps))
    put(page, "[name=prompt]", prompt)


def test_its_files_are_small_its_own_and_kept_by_their_digest(server: RunningServer) -> None:
    with server.client() as http:
        index = http.get("/")
        assert index.headers["content-type"].startswith("text/html")
        policy = index.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert http.get("/", headers={"if-none-match": index.headers["etag"]}).status_code == 304
        names = set(re.findall(r'(?:src|href)="(page/[^"]+)"', index.text))
        sizes, seen = len(index.content), set()
        while names:
            name = names.pop()
            seen.add(name)
            file = http.get(f"/{name}")
            assert file.status_code == 200, name
            assert file.headers["content-type"].split(";")[0] in ("text/javascript", "text/css")
            assert "immutable" in file.headers["cache-control"]
            sizes += len(file.content)
            imported = re.findall(r'from "\./(\w+\.js)"', file.text)
            names |= {f"{name.rsplit('/', 1)[0]}/{each}" for each in imported} - seen
        assert len(seen) >= 12
        assert sizes < MOST_BYTES
        # Files of another version are never mixed with these.
        other = re.sub(r"page/\w+/", "page/0123456789abcdef/", sorted(seen)[0])
        assert http.get(f"/{other}").status_code == 404
        assert http.get("/page/x/..%2fassets.py").status_code == 404


def test_a_person_makes_a_video_and_sees_what_ran(browser: Page, server: RunningServer) -> None:
    page = opened(browser, server)
    small(page)
    page.read(f"{button('Make the video')}.click()")
    # Prompts that are HTML are text. Jobs of other tests are on the page too.
    titled = f"each.querySelector('h2').textContent === {json.dumps(HTML)}"
    card = f"[...document.querySelectorAll('.card')].find(each => {titled})"
    page.wait(f"({card}?.querySelector('video')?.readyState ?? 0) >= 1")
    assert page.read("document.querySelectorAll('main img[src=x]').length") == 0
    page.read(f"{card}.querySelector('a').click()")
    page.wait("document.querySelector('.report table') !== null")
    rows = page.read("[...document.querySelectorAll('.report tbody tr')].map(each => each.textContent)")
    assert any("self" in row and "torch_sdpa" in row and "platform" in row for row in rows), rows
    assert page.read("document.querySelectorAll('.report .bars > div').length") >= 3
    # Settings of a file of ours come back, whatever the form has.
    page.read("location.hash = '#make'")
    page.wait("document.querySelector('[name=width]') !== null")
    put(page, "[name=width]", "128")
    page.read(
        "(async () => { const jobs = await (await fetch('v1/videos?limit=1')).json();"
        "const content = await (await fetch(`v1/videos/${jobs.data[0].id}/content`)).blob();"
        "const transfer = new DataTransfer(); transfer.items.add(new File([content], 'clip.mp4'));"
        "document.querySelector('form').dispatchEvent(new DragEvent('drop', "
        "{ dataTransfer: transfer, bubbles: true, cancelable: true })) })()"
    )
    page.wait("document.querySelector('[name=width]').value === '64'")
    assert page.read("document.querySelector('[name=prompt]').value") == HTML
    check_nothing_else(page, server)


def test_a_job_goes_on_over_a_reload_and_is_cancelled(browser: Page, server: RunningServer) -> None:
    page = opened(browser, server)
    small(page, "a ring", steps=200)
    put(page, "[name=width]", "128")
    put(page, "[name=num_frames]", "29")
    page.read(f"{button('Make the video')}.click()")
    page.wait("document.querySelector('.card progress:not([hidden])')?.value >= 2")
    page.call("Page.reload")
    page.wait("/step [1-9]/.test(document.querySelector('.card .state')?.textContent ?? '')")
    # The draft is that of before.
    assert page.read("document.querySelector('[name=num_inference_steps]').value") == "200"
    page.read(f"{button('Cancel')}.click()")
    page.wait("document.querySelector('.card .state').textContent === 'cancelled'")
    check_nothing_else(page, server)


def test_the_table_follows_what_is_chosen(browser: Page, server: RunningServer) -> None:
    page = opened(browser, server, "#attention")
    page.wait("document.querySelector('.map') !== null")
    unusable = page.read(
        "[...document.querySelectorAll('[name=backend-self] option:disabled')].map(e => e.textContent)"
    )
    assert any(text.startswith("fa4 (runs on cuda") for text in unusable), unusable
    put(page, "[name=backend-self]", "video_sparse_attn")
    put(page, "[name='backend-self.sparsity']", "0.7")
    page.wait("/video_sparse_attn.*0.7/.test(document.querySelector('.report table').textContent)")
    left, top, width, height = page.read(
        "(() => { const map = document.querySelector('.map'); map.scrollIntoView({ block: 'center' });"
        "const box = map.getBoundingClientRect(); return [box.left, box.top, box.width, box.height] })()"
    )
    page.drag((left + 0.05 * width, top + 0.1 * height), (left + 0.2 * width, top + 0.45 * height))
    page.wait("document.querySelector('[name=steps-0]') !== null")
    assert page.read("document.querySelector('[name=layers-0]').value") == "0-2"
    page.wait("/schedule\\[0\\]/.test(document.querySelector('.report table').textContent)")
    # Make sends it.
    assert "1 rule" in page.read(
        "(location.hash = '#make', new Promise(done => setTimeout(() => "
        "done(document.querySelector('form').textContent), 200)))"
    )
    check_nothing_else(page, server)


def test_two_results_are_compared_under_one_clock(browser: Page, server: RunningServer) -> None:
    with server.client() as http:
        body = {"prompt": "a blue star", **SMALL, "num_frames": 25, "seed": 4, "return_latents": True}
        sparse = {"per_role": {"self": {"backend": "reference"}}}
        made = [http.post("/v1/videos", json=each).json()["id"] for each in (body, {**body, "attention": sparse})]
        assert [finished(http, each)["status"] for each in made] == ["completed"] * 2
    page = opened(browser, server, f"#compare/{','.join(made)}")
    page.wait("document.querySelectorAll('.clips video').length === 2")
    page.wait("[...document.querySelectorAll('.clips video')].every(each => each.readyState >= 2 && !each.seeking)")
    page.wait("document.querySelector('#divergence') !== null && document.querySelector('#quality') !== null")
    page.wait("document.getElementById('said').textContent === 'The comparison is complete.'")
    row = page.read("[...document.querySelectorAll('[aria-label=Quality] tbody tr')][1].textContent")
    # The reference backend computes the same to float32's rounding.
    assert re.search(r"0\.000none(100|[4-9]\d)\.\d(1\.000|0\.9[89]\d)\d+\.\d\d", row), row
    page.read("document.querySelector('.clock button').click()")
    page.wait("Number(document.querySelector('.clock input').value) >= 12")
    apart = page.read(
        "new Promise(done => setTimeout(() => { const [one, other] = document.querySelectorAll('.clips video');"
        "done(Math.abs(one.currentTime - other.currentTime)) }, 2500))"
    )
    # A clip begins again at its end, of which the two may be on different sides.
    assert min(apart, 25 / 12 - apart) <= 1 / 12
    check_nothing_else(page, server)


PLAYERS = "[...document.scripts].find(each => each.type === 'module').src.replace('main.js', 'players.js')"


def test_figures_of_likeness_are_those_of_the_pixels(browser: Page, server: RunningServer) -> None:
    generator = numpy.random.default_rng(0)
    one = generator.integers(0, 256, (24, 36, 3), dtype=numpy.uint8)
    other = numpy.clip(one.astype(int) + generator.integers(-40, 41, one.shape), 0, 255).astype(numpy.uint8)
    urls = []
    for pixels in (one, other):
        Image.fromarray(pixels).save(content := io.BytesIO(), "PNG")
        urls.append(f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}")
    page = opened(browser, server)
    found = page.read(f"import({PLAYERS}).then(({{ likeness }}) => likeness(...{json.dumps(urls)}, 1, 1))")
    apart = one.astype(float) - other
    assert found["psnr_db"] == pytest.approx(10 * math.log10(255**2 / (apart**2).mean()))
    assert found["difference"] == pytest.approx(numpy.abs(apart).mean())
    # [block, pixel] of luminance, of whole blocks of 8 x 8.
    x, y = (
        (each[:24, :32] @ [0.299, 0.587, 0.114]).reshape(3, 8, 4, 8).transpose(0, 2, 1, 3).reshape(-1, 64)
        for each in (one, other)
    )
    mean_x, mean_y = x.mean(1), y.mean(1)
    covariance = (x * y).mean(1) - mean_x * mean_y
    close = (2 * mean_x * mean_y + 6.5025) / (mean_x**2 + mean_y**2 + 6.5025)
    like = (2 * covariance + 58.5225) / (x.var(1) + y.var(1) + 58.5225)
    assert found["ssim"] == pytest.approx((close * like).mean())
    # Of two equal clips every frame is found, whatever else the machine does.
    with server.client() as http:
        made = finished(
            http, http.post("/v1/videos", json={"prompt": "a ring", **SMALL, "num_frames": 13}).json()["id"]
        )
    same = page.read(
        f"(async () => {{ const content = await (await fetch('v1/videos/{made['id']}/content')).blob();"
        f"const {{ likeness }} = await import({PLAYERS}); const all = [];"
        "const url = () => URL.createObjectURL(content);"
        "for (let at = 0; at < 6; at++) all.push(await likeness(url(), url(), 12, 13));"
        "return all })()"
    )
    assert same == [{"psnr_db": 100, "ssim": pytest.approx(1), "difference": 0}] * 6
    check_nothing_else(page, server)


LIES: dict[str, Any] = {
    "wrong types": {"prompt": 5, "width": "<i>", "height": {"a": 1}, "num_frames": [1], "guidance_scale": 1e999},
    "unknown names": {"prompt": HTML, "evil<b>": 5, "__proto__": {"x": 1}, "constructor": 3, "seed": "<i>"},
    "huge": {"prompt": "a ring", "width": 1e300, "num_frames": 10**15, "seed": 10**30},
}
CHOICES = [{"per_role": 5}, {"schedule": {"a": 1}}, {"per_role": {"self": {"backend": ["x"], "extra": 5}}}, 5, [1]]


def test_a_file_that_lies_breaks_nothing(browser: Page, server: RunningServer) -> None:
    page = opened(browser, server)
    cases = [(request, None) for request in LIES.values()] + [({"prompt": "a ring"}, choice) for choice in CHOICES]
    for request, choice in cases:
        recipe = {
            "schema": "diffusion_runtime.recipe/1",
            "request": request,
            "runtime": {"attention": choice, "lora": 5},
        }
        text = json.dumps(recipe).replace("Infinity", "1e999")
        page.read(
            "(() => { document.querySelector('form [role=status]').textContent = '';"
            "const transfer = new DataTransfer();"
            f"transfer.items.add(new File([{json.dumps(text)}], 'a<b>.json')); document.querySelector('form')"
            ".dispatchEvent(new DragEvent('drop', { dataTransfer: transfer, bubbles: true, cancelable: true })) })()"
        )
        page.wait("document.querySelector('form [role=status]').textContent !== ''")
        told = page.read("document.querySelector('form [role=status]').textContent")
        assert told.startswith("The settings of a<b>.json are in the form"), told
        assert ("attention" in told) == (choice is not None), (told, choice)
        assert ("evil<b>" in told) == ("evil<b>" in request), told
        assert ("guidance_scale" in told) == ("guidance_scale" in request), told
        draft = json.loads(page.read("sessionStorage.getItem('diffusion-runtime draft')"))
        assert draft["attention"] is None
        assert draft["prompt"] == (request["prompt"] if request["prompt"] != 5 else "")
        page.read("location.hash = '#attention'")
        page.wait("document.querySelectorAll('.picker').length === 3")
        page.read("location.hash = '#make'")
        page.wait("document.querySelector('[name=prompt]') !== null")
    assert page.read("document.querySelectorAll('main i, main b b').length") == 0
    page.read("sessionStorage.clear()")
    # What the browser says of settings that the server refused to explain.
    page.read("1")
    assert {event["params"].get("entry", {}).get("url", "?").rsplit("/", 1)[-1] for event in page.errors} <= {"explain"}


def test_older_results_are_there_and_a_first_one_is_a_click(browser: Page, server: RunningServer) -> None:
    with server.client() as http:
        for seed in range(31):
            job = http.post("/v1/videos", json={"prompt": "a ring", **SMALL, "seed": seed}).json()
            http.post(f"/v1/videos/{job['id']}/cancel", json={})
        page = opened(browser, server)
        page.wait("document.querySelectorAll('.card').length === 30")
        page.read(f"{button('Older results')}.click()")
        page.wait("document.querySelectorAll('.card').length > 30")
        # It is there where nothing was made yet.
        page.read("document.querySelector('.empty button').click()")
        page.wait("document.querySelector('.card h2').textContent === 'a sailboat moving right on the sea at sunset'")
        made = http.get("/v1/videos?limit=1").json()["data"][0]
        http.delete(f"/v1/videos/{made['id']}")
        assert (made["settings"]["preset"], made["num_steps"]) == ("fast", 4)
    page.read("sessionStorage.clear()")


def test_the_keyboard_is_enough(browser: Page, server: RunningServer) -> None:
    page = opened(browser, server)
    page.read("document.body.focus()")
    for _ in range(40):
        page.press("Tab", "Tab", 9)
        if page.read("document.activeElement.name") == "prompt":
            break
    page.read("document.activeElement.select()")
    page.type("a green ring")
    for _ in range(40):
        page.press("Tab", "Tab", 9)
        if page.read("document.activeElement.getAttribute('aria-label')") == "less: Steps":
            break
    before = page.read("Number(document.querySelector('[name=num_inference_steps]').value)")
    page.press(" ", "Space", 32, " ")
    page.press(" ", "Space", 32, " ")
    # The form was drawn anew, and the button has the focus still.
    assert page.read("Number(document.querySelector('[name=num_inference_steps]').value)") == before - 2
    assert page.read("JSON.parse(sessionStorage.getItem('diffusion-runtime draft')).prompt") == "a green ring"
    assert page.read("document.querySelector('.skip').href").endswith("#main")


VIEWS = ("#make", "#attention", "#compare", "#quality", "#machine")


def test_every_view_fits_a_phone_in_both_themes(browser: Page, server: RunningServer) -> None:
    script = importlib.util.find_spec("axe_core_python")
    axe = None if script is None else (Path(str(script.origin)).parent / "axe.min.js").read_text()
    found = {}
    for theme in ("light", "dark"):
        page = opened(browser, server, "#make", 360)
        page.prefer(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
        for view in VIEWS:
            page.read(f"location.hash = '{view}'")
            page.wait(f"document.querySelector('nav [aria-current]')?.hash === '{view}'")
            page.wait("document.querySelector('main [aria-busy=true]') === null")
            wide = page.read("document.documentElement.scrollWidth")
            wrong = [] if wide <= 360 else [f"{wide} pixels wide"]
            if axe is not None:
                page.read(f"{axe}; 0")
                wrong += page.read(
                    "axe.run(document).then(r => r.violations.map(v => `${v.id}: ${v.nodes[0].html.slice(0, 200)}`))"
                )
            found |= {(theme, view): wrong} if wrong else {}
        page.prefer(prefers_color_scheme="light")
        assert page.read("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert found == {}
    check_nothing_else(page, server)
    if axe is None:
        pytest.skip("axe-core-python is not installed: its rules were not checked, the widths were")


def test_a_stream_takes_prompts_and_forks_behind_a_key(browser: Page, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    flags = ("shapes-causal", "--api-key-file", str(tmp_path / "key"))
    with running_server(tmp_path / "storage", *flags) as server:
        browser.open(f"{server.address}/#streams", 1280, 900)
        browser.wait("document.querySelector('dialog[open]') !== null")
        browser.read("document.querySelector('#key').value = 'wrong'; document.querySelector('dialog button').click()")
        browser.wait("/not one/.test(document.querySelector('dialog[open]')?.textContent)")
        browser.read(f"document.querySelector('#key').value = '{KEY}'; document.querySelector('dialog button').click()")
        browser.wait("document.querySelector('main form') !== null")
        draft = {"prompt": "a red circle", "values": {"width": 64, "height": 64, "num_frames": 45}, "seed": "3"}
        browser.read(f"sessionStorage.setItem('diffusion-runtime draft', {json.dumps(json.dumps(draft))})")
        browser.call("Page.reload")
        browser.wait("document.querySelector('main form') !== null")
        browser.read(f"{button('Begin a stream')}.click()")
        browser.wait("document.querySelector('.prompts li') !== null")
        browser.read(
            "(() => { const next = document.querySelector('[name=next]'); next.value = 'a blue circle';"
            "next.form.requestSubmit() })()"
        )
        browser.wait("document.querySelectorAll('.prompts li').length === 2")
        browser.read(f"document.querySelector('[name=next]').value = 'a green star'; {button('Fork')}.click()")
        ends = "[...document.querySelectorAll('.card .state')].filter(e => /45 frames in/.test(e.textContent))"
        browser.wait(f"{ends}.length === 2")
        assert browser.read("document.querySelectorAll('.card canvas').length") == 2
        with server.client(headers={"authorization": f"Bearer {KEY}"}) as http:
            fork, stream = http.get("/v1/videos").json()["data"]
            switches = stream["settings"]["values"]["prompt_switches"]
            assert [text for _, text in switches] == ["a blue circle"]
            assert [text for _, text in fork["settings"]["values"]["prompt_switches"]][-1] == "a green star"
            assert fork["forked_from_video_id"] == stream["id"]
            # Its settings, with the prompts that came on the way, make it again.
            again = {"prompt": stream["prompt"], "seed": 3, **stream["settings"]["values"]}
            made = finished(http, http.post("/v1/videos", json=again).json()["id"])
            assert made["sha256"] == stream["sha256"]
            over = http.post(f"/v1/videos/{stream['id']}/prompt", json={"prompt": "a ring"})
            assert (over.status_code, over.json()["error"]["code"]) == (409, "stream_not_running")
            plain = http.post(f"/v1/videos/{made['id']}/fork", json={})
            assert (plain.status_code, plain.json()["error"]["code"]) == (409, "not_a_stream")
        # The console has what the browser says of the two answers of 401.
        assert {entry["params"]["entry"]["url"].rsplit("/", 1)[-1] for entry in browser.errors} <= {
            "models",
            "openapi.json",
        }


def test_jobs_of_images_are_seen_as_those_of_videos(server: RunningServer) -> None:
    with server.client() as http:
        body = {"prompt": "a blue star", "size": "64x64", "num_inference_steps": 2, "n": 2, "seed": 5, "wait": False}
        job = http.post("/v1/images/generations", json=body).json()
        assert (job["object"], job["num_images"], job["media_type"]) == ("image", 2, "image/png")
        assert http.get("/v1/images?limit=1").json()["data"][0]["id"] == job["id"]
        events = http.get(f"/v1/images/{job['id']}/events").text
        assert "event: completed" in events
        made = http.get(f"/v1/images/{job['id']}").json()
        assert (made["status"], made["attention_report"]["num_calls"] > 0) == ("completed", True)
        assert http.get(f"/v1/images/{job['id']}/content?variant=1").content.startswith(b"\x89PNG")
        both = http.post("/v1/images/generations", json={**body, "n": 1, "stream": True})
        assert (both.status_code, both.json()["error"]["param"]) == (400, "wait")
        assert http.delete(f"/v1/images/{job['id']}").json()["object"] == "image.deleted"
        assert http.get(f"/v1/images/{job['id']}").status_code == 404


def test_densities_and_latents_are_recorded_on_request(server: RunningServer) -> None:
    with server.client() as http:
        body = {"prompt": "a ring", **SMALL, "seed": 1}
        plain, recorded = (
            finished(http, http.post("/v1/videos", json={**body, **more}).json()["id"])
            for more in ({}, {"return_density": True, "return_latents": True})
        )
        assert plain["sha256"] == recorded["sha256"]
        assert (plain["recorded"], recorded["recorded"]) == ([], ["density", "latents"])
        assert plain["attention_report"]["density"] == []
        layers = recorded["attention_report"]["density"]
        assert {(each["role"], *each["steps"]) for each in layers} == {("self", 1.0, 1.0), ("cross", 1.0, 1.0)}
        answer = http.get(f"/v1/videos/{recorded['id']}/content?variant=latents")
        values = numpy.frombuffer(answer.content, "<f4")
        assert values[0] == 2
        levels = values[1:].reshape(2, -1)[:, 0]
        assert 1.0 >= levels[0] > levels[1] > 0
        samples = values[1:].reshape(2, -1)[:, 1:]
        # From noise to a picture: of a standard deviation of 1, then another.
        assert samples.shape[1] > 100
        assert numpy.abs(samples[0] - samples[1]).max() > 0.01
        assert http.get(f"/v1/videos/{plain['id']}/content?variant=latents").status_code == 410


def test_shipped_figures_are_those_that_were_measured_and_of_their_model_alone(server: RunningServer) -> None:
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("figures", root / "scripts" / "write_shipped_figures.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.TARGET.read_text(encoding="utf-8") == script.text(), "run scripts/write_files.py"
    figures = json.loads(script.text())
    assert (figures["model"], figures["rows"][0]["name"]) == ("shapes", "24 steps")
    with httpx.Client(base_url=server.address, trust_env=False) as http:
        assert http.get("/v1/figures").json() == {"rows": []}
