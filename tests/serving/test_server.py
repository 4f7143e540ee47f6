"""A running server with the embedded model: official clients, real files, killed processes."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import os
import runpy
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_support import command_process
from fenced_blocks import ROOT, blocks
from PIL import Image, ImageChops, ImageStat
from running_server import ADMIN, ORIGIN, SMALL, RunningServer, finished, is_running, running_server, wait_for

from diffusion_runtime import Client, GenerationRequest, load_pipeline
from diffusion_runtime.serving.client import ServerError

openai = pytest.importorskip("openai", reason="the official client: pip install 'diffusion-runtime[test]'")
# openai says so of every call of its videos, which OpenAI has shut down.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PROMPT = "a red circle moving left"
# As docs/serving.md writes it.
SERVER = "http://127.0.0.1:8000"
FLAGS = ("--height", "64", "--width", "64", "--num-frames", "5", "--num-inference-steps", "2")


@functools.cache
def pipeline_of(attention: str | None = None, lora: tuple[str, ...] = ()) -> Any:
    return load_pipeline(attention_override=None if attention is None else json.loads(attention), lora=lora)


def expected_sha256(
    folder: Path,
    prompt: str = PROMPT,
    attention: str | None = None,
    lora: tuple[str, ...] = (),
    preset: str | None = None,
    **fields: Any,
) -> str:
    """The bytes of the file that a warm pipeline makes alone."""
    pipeline = pipeline_of(attention, lora)
    values = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 2, **fields}
    media = pipeline(pipeline.resolve(GenerationRequest(prompt, **values), preset))
    path = folder / ("made.mp4" if media.num_frames > 1 else "made.png")
    return hashlib.sha256(media.save(path).read_bytes()).hexdigest()


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


@pytest.fixture
def official(server: RunningServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="-", max_retries=2) as client:
        yield client


def test_its_http_process_has_neither_torch_nor_numpy(server: RunningServer) -> None:
    """Weights, models and LoRA files are the engine's; the front only asks which commit of the hub they are."""
    assert server.process is not None
    mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
    # Ray itself imports numpy.
    names = ("/libtorch",) if server.is_on_ray else ("/libtorch", "/numpy/")
    assert [name for name in names if name in mapped] == []


def test_the_official_client_makes_videos_with_the_bytes_of_generate(official: Any, tmp_path: Path) -> None:
    video = official.videos.create_and_poll(
        prompt=PROMPT, size="64x64", extra_body={"num_frames": 5, "num_inference_steps": 2, "seed": 7}
    )
    assert (video.status, video.progress, video.error) == ("completed", 100, None), video
    assert (video.size, video.object, video.model_extra["num_frames"]) == ("64x64", "video", 5)
    content = official.videos.download_content(video.id).read()
    assert hashlib.sha256(content).hexdigest() == video.model_extra["sha256"]
    done = command_process("generate", PROMPT, *FLAGS, "--seed", "7", "-o", "clip.mp4", "-q", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "clip.mp4").read_bytes() == content
    assert video.model_extra["sha256"] == expected_sha256(tmp_path, seed=7)
    assert video.model_extra["attention_report"]["num_calls"] > 0
    thumbnail = Image.open(io.BytesIO(official.videos.download_content(video.id, variant="thumbnail").read()))
    assert thumbnail.format == "WEBP"
    remix = official.videos.remix(video.id, prompt="a blue star")
    assert (remix.remixed_from_video_id, remix.prompt) == (video.id, "a blue star")
    remixed = official.videos.poll(remix.id)
    assert remixed.model_extra["sha256"] == expected_sha256(tmp_path, "a blue star", seed=7)
    deleted = official.videos.delete(video.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (video.id, "video.deleted", True)
    with pytest.raises(openai.NotFoundError):
        official.videos.retrieve(video.id)


def test_the_official_client_pages_cancels_and_reads_errors(official: Any, server: RunningServer) -> None:
    made = [
        official.videos.create(prompt=f"a ring {number}", size="64x64", extra_body={"num_frames": 5, "steps": 2})
        for number in range(3)
    ]
    listed = [video.id for video in official.videos.list(limit=2)]
    assert listed[:3] == [video.id for video in reversed(made)]
    assert len(set(listed)) == len(listed)
    assert official.videos.poll(made[0].id).status == "completed"
    long = official.videos.create(prompt="a ring", size="128x128", extra_body={"num_frames": 5, "steps": 200})
    with server.client() as http:
        http.post(f"/v1/videos/{long.id}/cancel")
    # What was cancelled ends the client's loop, whose states are OpenAI's.
    ended = official.videos.poll(long.id)
    assert (ended.status, ended.error.code) == ("failed", "cancelled")
    requests = len([each for each in server.logs if each.get("endpoint") == "/v1/videos"])
    with pytest.raises(openai.BadRequestError) as caught:
        official.videos.create(prompt="x", size="60x64")
    assert caught.value.code == "invalid_value"
    with pytest.raises(openai.BadRequestError) as caught:
        official.videos.create(prompt="x", extra_body={"attention": "fa", "num_frames": 5})
    assert (caught.value.code, caught.value.param) == ("backend_unavailable", "attention")
    assert caught.value.body["reasons"]
    # None was sent again by the client.
    assert len([each for each in server.logs if each.get("endpoint") == "/v1/videos"]) == requests + 2


def test_the_official_client_makes_and_streams_images(official: Any, tmp_path: Path) -> None:
    options = {"size": "64x64", "extra_body": {"num_inference_steps": 4, "seed": 3}}
    answer = official.images.generate(prompt=PROMPT, n=2, **options)
    digests = [hashlib.sha256(base64.b64decode(each.b64_json)).hexdigest() for each in answer.data]
    expected = [expected_sha256(tmp_path, num_frames=1, num_inference_steps=4, seed=seed) for seed in (3, 4)]
    assert digests == expected
    assert [each.model_extra["seed"] for each in answer.data] == [3, 4]
    events = list(
        official.images.generate(prompt=PROMPT, stream=True, partial_images=2, output_format="webp", **options)
    )
    assert [each.type for each in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    pictures = [Image.open(io.BytesIO(base64.b64decode(each.b64_json))) for each in events]
    assert {(picture.format, picture.size) for picture in pictures} == {("WEBP", (64, 64))}
    # WebP of quality 100 is without loss: the last one is the picture itself.
    png = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json)))
    assert pictures[-1].convert("RGB").tobytes() == png.tobytes()
    with pytest.raises(openai.BadRequestError) as caught:
        official.images.edit(prompt="x", image=("cat.png", base64.b64decode(answer.data[0].b64_json), "image/png"))
    assert caught.value.code == "unsupported_for_model"
    link = official.images.generate(prompt=PROMPT, response_format="url", **options).data[0].url
    assert hashlib.sha256(httpx.get(link, trust_env=False).content).hexdigest() == digests[0]


def test_content_has_ranges_and_is_refused_before_its_time(http: httpx.Client) -> None:
    created = http.post("/v1/videos", json={"prompt": PROMPT, "seed": 1, **SMALL, "num_inference_steps": 30}).json()
    early = http.get(f"/v1/videos/{created['id']}/content")
    assert (early.status_code, early.headers["x-should-retry"]) == (409, "false")
    assert early.json()["error"]["code"] == "video_not_ready"
    assert 50 <= int(http.get(f"/v1/videos/{created['id']}").headers["openai-poll-after-ms"]) <= 5000
    video = finished(http, created["id"])
    path = f"/v1/videos/{video['id']}/content"
    whole = http.get(path)
    part = http.get(path, headers={"range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, whole.content[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(whole.content)}"
    assert whole.headers["etag"] == f'"{video["sha256"]}"'
    behind = http.get(path, headers={"range": "bytes=99999999-"})
    assert (behind.status_code, behind.json()["error"]["code"]) == (416, "range_not_satisfiable")
    # What is no range, or none of bytes, is as if it were not there.
    for text in ("bytes=9-5", "bytes=a-b", "lines=0-1", "bytes=" + ",".join(["0-"] * 9000)):
        assert http.get(path, headers={"range": text}).content == whole.content, text[:20]
    sidecar = http.get(path, params={"variant": "sidecar"}).json()
    assert sidecar["recipe"]["request"]["seed"] == 1
    assert http.get(path, params={"variant": "sound"}).status_code == 404
    assert http.get(path, params={"variant": "../jobs"}).status_code == 400


def test_requests_choose_attention_and_run_together_with_the_bytes_of_single_runs(
    server: RunningServer, http: httpx.Client, tmp_path: Path
) -> None:
    schedule = {"default": "torch_sdpa", "schedule": [{"steps": "0", "backend": "reference"}]}
    long = http.post("/v1/videos", json={"prompt": "a ring", **SMALL, "num_inference_steps": 20}).json()
    bodies = [{"prompt": PROMPT, "seed": seed, **SMALL} for seed in (1, 2, 3)]
    chosen = {"prompt": PROMPT, "seed": 1, **SMALL, "attention": schedule}
    ids = [http.post("/v1/videos", json=body).json()["id"] for body in (*bodies, chosen)]
    videos = [finished(http, each) for each in ids]
    expected = [expected_sha256(tmp_path, seed=seed) for seed in (1, 2, 3)]
    assert [video["sha256"] for video in videos[:3]] == expected
    rows = {(row["backend"], row["source"]) for row in videos[3]["attention_report"]["rows"]}
    assert {backend for backend, _ in rows} == {"torch_sdpa", "reference"}, rows
    assert videos[3]["sha256"] == expected_sha256(tmp_path, attention=json.dumps(schedule), seed=1)
    # The next one has the server's choice again.
    again = finished(http, http.post("/v1/videos", json=bodies[0]).json()["id"])
    assert again["sha256"] == expected[0]
    assert finished(http, long["id"])["status"] == "completed"
    metrics = http.get("/metrics").text
    assert 'diffusion_runtime_batch_size_bucket{le="2.0"}' in metrics
    assert "diffusion_runtime_attention_calls_total{" in metrics
    assert "moving" not in metrics


def test_requests_choose_lora_files_by_name_and_presets_that_bring_one(http: httpx.Client, tmp_path: Path) -> None:
    few = {"prompt": PROMPT, "seed": 1, "size": "64x64", "num_frames": 5}
    bodies = [
        {**few, "num_inference_steps": 2},
        {**few, "num_inference_steps": 2, "lora": {"quick": 1.0}},
        {**few, "preset": "fast"},
        {**few, "num_inference_steps": 2, "lora": ["quick"]},
        {**few, "num_inference_steps": 2, "seed": 2},
    ]
    ids = [http.post("/v1/videos", json=body).json()["id"] for body in bodies]
    made = [finished(http, each)["sha256"] for each in ids]
    of_file, fast = {"lora": ("emoji-fast",), "seed": 1}, {"num_inference_steps": None, "preset": "fast"}
    assert made[0] == expected_sha256(tmp_path, seed=1)
    assert made[1] == made[3] == expected_sha256(tmp_path, **of_file)
    assert made[2] == expected_sha256(tmp_path, **of_file, **fast)
    assert made[4] == expected_sha256(tmp_path, seed=2)
    unknown = http.post("/v1/videos", json={**few, "lora": "slow"}).json()["error"]
    assert (unknown["param"], "quick" in unknown["message"]) == ("lora", True)
    # SGLang's routes, for the admin's key: the default of requests that name none.
    assert http.post("/v1/set_lora", json={"lora_nickname": "quick"}).json()["error"]["code"] == "admin_key_required"
    for wrong in ({"lora_nickname": "slow"}, {"lora_nickname": "quick", "lora_path": "/x"}, {"lora_nickname": []}):
        assert http.post("/v1/set_lora", json=wrong, headers=ADMIN).status_code == 400, wrong
    assert http.post("/v1/set_lora", json={"lora_nickname": "quick"}, headers=ADMIN).json()["status"] == "ok"
    assert http.get("/v1/list_loras").json()["active"] == [{"name": "quick", "scale": 1.0}]
    by_default, without = (http.post("/v1/videos", json={**bodies[0], **lora}).json() for lora in ({}, {"lora": []}))
    assert finished(http, by_default["id"])["sha256"] == made[1]
    assert finished(http, without["id"])["sha256"] == made[0]
    assert http.post("/v1/unmerge_lora_weights", headers=ADMIN).json()["active"] == []
    merged = http.post("/v1/merge_lora_weights", json={"strength": 0.5}, headers=ADMIN).json()
    assert merged["active"] == [{"name": "quick", "scale": 0.5}]
    http.post("/v1/unmerge_lora_weights", json={"target": "all"}, headers=ADMIN)
    assert http.get("/v1/list_loras").json()["active"] == []


def test_an_admin_records_the_next_batch(http: httpx.Client) -> None:
    assert http.post("/start_profile").status_code == 403
    first = http.post("/start_profile", headers=ADMIN).json()["id"]
    assert http.post("/stop_profile", headers=ADMIN).json() == {"id": first}
    trace = http.post("/start_profile", json={"num_steps": 1}, headers=ADMIN).json()["id"]
    waiting = http.get(f"/profiles/{trace}", headers=ADMIN)
    assert (waiting.status_code, waiting.json()["error"]["code"]) == (409, "profile_not_ready")
    finished(http, http.post("/v1/videos", json={"prompt": PROMPT, **SMALL}).json()["id"])
    wait_for(lambda: http.get(f"/profiles/{trace}", headers=ADMIN).status_code == 200)
    events = http.get(f"/profiles/{trace}", headers=ADMIN).json()["traceEvents"]
    assert any("attention" in event["name"] for event in events)
    assert http.get(f"/profiles/{first}", headers=ADMIN).status_code == 422
    assert http.get(f"/profiles/{trace}").status_code == 403


def test_an_idempotency_key_makes_one_job_of_two_requests(server: RunningServer, http: httpx.Client) -> None:
    body, headers = {"prompt": PROMPT, **SMALL}, {"idempotency-key": "order-1"}
    answers: list[dict[str, Any]] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(
                httpx.post(
                    f"{server.address}/v1/videos", json=body, headers=headers, trust_env=False, timeout=60
                ).json()
            )
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer["id"] for answer in answers}) == 1
    reused = http.post("/v1/videos", json={**body, "prompt": "another"}, headers=headers)
    assert (reused.status_code, reused.json()["error"]["code"]) == (409, "idempotency_key_reused")
    finished(http, answers[0]["id"])


def test_events_begin_with_the_present_state_and_a_running_job_stops_within_steps(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, **SMALL, "size": "128x128", "num_inference_steps": 200}
    video_id = http.post("/v1/videos", json=body).json()["id"]
    names: list[str] = []
    steps: list[int] = []
    with http.stream("GET", f"/v1/videos/{video_id}/events") as stream:
        for line in stream.iter_lines():
            if line.startswith("event: "):
                names.append(line.removeprefix("event: "))
            elif line.startswith("data: ") and (step := json.loads(line.removeprefix("data: "))["step"]) is not None:
                steps.append(step)
                if len(steps) == 3:
                    http.post(f"/v1/videos/{video_id}/cancel")
    assert names[0] == "progress"
    assert names[-1] == "failed"
    begun = time.monotonic()
    quick = http.post("/v1/videos", json={"prompt": PROMPT, **SMALL, "seed": 5}).json()
    assert finished(http, quick["id"])["status"] == "completed"
    # 200 steps take a minute; the engine did not go on with them.
    assert max(steps) < 100
    assert time.monotonic() - begun < 60


def test_events_show_estimates_that_near_the_result(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["data"][0]["previews"] == "linear"
    body = {"prompt": "a red circle", "seed": 1, "size": "128x128", "num_frames": 5, "num_inference_steps": 6}
    video_id = http.post("/v1/videos", json={**body, "return_previews": True}).json()["id"]
    lines = http.get(f"/v1/videos/{video_id}/events").text.splitlines()
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    previews = [each for each in data if "b64_json" in each]
    assert [each["step"] for each in previews] == [2, 3, 4, 5]
    made = Image.open(io.BytesIO(http.get(f"/v1/videos/{video_id}/content?variant=thumbnail").content)).convert("RGB")
    errors = []
    for each in previews:
        picture = Image.open(io.BytesIO(base64.b64decode(each["b64_json"])))
        assert (picture.format, picture.size) == ("WEBP", (128, 128))
        errors.append(ImageStat.Stat(ImageChops.difference(picture.convert("RGB"), made)).rms)
    # Of 255, by channel.
    assert max(errors[-1]) < 40, errors
    assert sum(errors[-1]) < sum(errors[0]), errors


def test_pages_of_other_sites_may_not_call(http: httpx.Client) -> None:
    form = {"data": {"prompt": PROMPT}, "headers": {"origin": "https://evil.example"}}
    # A browser sends a form to any address, without asking first.
    refused = http.post("/v1/videos", **form)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
    allowed = http.options("/v1/videos", headers={**asked, "access-control-request-headers": "authorization"})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert http.options("/v1/videos", headers={**asked, "origin": "https://evil.example"}).status_code == 400
    for origin in (ORIGIN, str(http.base_url).rstrip("/")):
        assert http.get("/v1/models", headers={"origin": origin}).status_code == 200


def test_a_client_that_leaves_an_images_call_cancels_it(server: RunningServer, http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "size": "128x128", "num_inference_steps": 200}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.address}/v1/images/generations", json=body, timeout=1.0, trust_env=False)
    wait_for(lambda: 'cancelled_total{reason="client_left"} 1.0' in http.get("/metrics").text)
    wait_for(lambda: "diffusion_runtime_running 0.0" in http.get("/metrics").text)


def test_our_client_makes_waits_and_explains(server: RunningServer, tmp_path: Path) -> None:
    with Client(server.address) as client:
        assert client.models()[0]["id"] == "emoji"
        video = client.wait(client.create_video(PROMPT, seed=7, **SMALL)["id"])
        client.download(video["id"], tmp_path / "clip.mp4")
        assert hashlib.sha256((tmp_path / "clip.mp4").read_bytes()).hexdigest() == video["sha256"]
        assert next(client.list_videos())["id"] == video["id"]
        explained = client.explain(prompt=PROMPT, attention="torch_sdpa", **SMALL)
        assert explained["num_forwards"] > 0
        (image,) = client.generate_images(PROMPT, size="64x64", num_inference_steps=2)
        assert image.startswith(b"\x89PNG")
        with pytest.raises(ServerError, match="num_framez") as caught:
            client.create_video(PROMPT, num_framez=5)
        assert (caught.value.code, caught.value.status) == ("unknown_parameter", 400)
        sync = httpx.post(
            f"{server.address}/v1/videos/sync", json={"prompt": PROMPT, "seed": 7, **SMALL}, timeout=60, trust_env=False
        )
        assert hashlib.sha256(sync.content).hexdigest() == video["sha256"]
        assert json.loads(sync.headers["x-stage-durations"])["denoise"] > 0


def test_jobs_survive_the_death_of_the_engine_and_of_the_server(tmp_path: Path) -> None:
    body = {"prompt": PROMPT, "seed": 7, **SMALL, "num_inference_steps": 12}
    expected = expected_sha256(tmp_path, num_inference_steps=12, seed=7)
    # One engine, whatever --serve-with says, as in the next test.
    with running_server(tmp_path / "storage", "--replicas", "1") as server:
        with server.client() as http:
            ids = [http.post("/v1/videos", json=body).json()["id"] for _ in range(2)]
            waiting = http.post("/v1/videos", json={**body, "guidance_scale": 2.0}).json()["id"]
            wait_for(lambda: http.get(f"/v1/videos/{ids[0]}").json()["step"])
            engine = server.engine_pid()
            os.kill(engine, signal.SIGKILL)
            wait_for(lambda: http.get("/health").status_code == 503)
            assert http.post("/v1/videos", json=body).json()["error"]["code"] in ("loading", "engine_lost")
            first = finished(http, ids[0])
            assert (first["sha256"], first["attempts"]) == (expected, 2)
            wait_for(lambda: http.get(f"/v1/videos/{waiting}").json()["status"] != "queued")
        engine = server.engine_pid()
        server.kill()
        if server.is_on_ray:
            # It stays for the next server.
            assert is_running(engine)
        else:
            wait_for(lambda: not is_running(engine))
        server.start()
        with server.client() as http:
            # At once: what was accepted is there before the model is.
            assert http.get(f"/v1/videos/{ids[0]}").json()["sha256"] == expected
            assert [finished(http, each)["sha256"] for each in ids] == [expected] * 2
            assert finished(http, waiting)["status"] == "completed"
            content = http.get(f"/v1/videos/{ids[0]}/content").content
            assert hashlib.sha256(content).hexdigest() == expected
        assert not list((tmp_path / "storage").rglob("*.partial"))


def test_a_full_queue_answers_429_and_sigterm_drains(tmp_path: Path) -> None:
    keys, admins = tmp_path / "keys", tmp_path / "admins"
    keys.write_text("secret-1\nsecret-2\n")
    admins.write_text("admin-1\n")
    arguments = ["--api-key-file", str(keys), "--admin-key-file", str(admins), "--max-queue", "2"]
    # Of one such clip: the estimate of its bytes is below it, its files with their pictures are above.
    arguments += ["--max-batch-size", "1", "--max-storage", "14000", "--replicas", "1"]
    with running_server(tmp_path / "storage", *arguments) as server:
        with server.client() as anonymous:
            refused = anonymous.get("/v1/videos")
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert anonymous.get("/v1/videos", headers={"authorization": "Bearer secret-3"}).status_code == 401
            assert anonymous.get("/liveness").status_code == 200
        with server.client(headers={"authorization": "Bearer secret-2"}) as http:
            body = {"prompt": PROMPT, "seed": 1, **SMALL, "num_inference_steps": 20}
            running = http.post("/v1/videos", json=body).json()["id"]
            wait_for(lambda: http.get(f"/v1/videos/{running}").json()["status"] == "in_progress")
            quick = {**body, "num_inference_steps": 2}
            waiting = [http.post("/v1/videos", json=quick).json()["id"] for _ in range(2)]
            full = http.post("/v1/videos", json=body)
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            assert int(full.headers["retry-after"]) >= 1
            assert server.process is not None
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: http.get("/health").status_code == 503)
            draining = http.post("/v1/videos", json=body)
            assert (draining.status_code, draining.json()["error"]["code"]) == (503, "draining")
            assert server.process.wait(60) == 0
        server.start()
        with server.client(headers={"authorization": "Bearer secret-1"}) as http:
            # Another key's jobs are none of its own.
            assert http.get("/v1/videos").json()["data"] == []
            for method, path in (
                ("GET", ""),
                ("DELETE", ""),
                ("POST", "/cancel"),
                ("GET", "/content"),
                ("GET", "/events"),
            ):
                assert http.request(method, f"/v1/videos/{waiting[0]}{path}").status_code == 404, (method, path)
            server.wait_until_ready()
            big = http.post("/v1/videos", json={**body, "size": "128x128"})
            assert (big.status_code, big.json()["error"]["code"]) == (507, "storage_full")
        with server.client(headers=ADMIN) as http:
            assert {each["id"] for each in http.get("/v1/videos").json()["data"]} == {running, *waiting}
        with server.client(headers={"authorization": "bearer  secret-2"}) as http:
            # What ran was finished before the end, what waited was not begun.
            assert http.get(f"/v1/videos/{running}").json()["status"] == "completed"
            assert [finished(http, each)["attempts"] for each in waiting] == [1, 1]
            gone = http.get(f"/v1/videos/{running}/content")
            assert (gone.status_code, gone.json()["error"]["code"]) == (410, "expired")


def test_the_examples_of_the_page_run(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    of_page = [block for block in blocks("python", "sh") if block.document.name == "serving.md"]
    ran = 0
    for block in of_page:
        if block.language == "python":
            exec(compile(block.text.replace(SERVER, server.address), block.place, "exec"), {})
            assert Path("fox.mp4").read_bytes()[4:8] == b"ftyp"
            Path("fox.mp4").unlink()
            ran += 1
        for words in block.command_lines() if block.language == "sh" else ():
            if words[0] == "curl":
                command = [word.replace(SERVER, server.address) for word in words]
                answer = json.loads(subprocess.run([*command, "-s"], capture_output=True, check=True).stdout)
                assert answer["id"], answer
                ran += 1
    assert ran == 4
    assert "torch_sdpa" in capsys.readouterr().out


def test_the_committed_document_is_that_of_the_routes() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_openapi.py"))
    assert script["TARGET"].read_text(encoding="utf-8") == script["text"](), "python scripts/write_openapi.py"
