"""Replicas on a Ray cluster of three nodes of this machine, and one host without a cluster."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from ray_cluster import ENVIRONMENT, ray_cluster
from running_server import SMALL, finished, running_server, wait_for
from tables import table

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.batches.batch_job import BatchJob
from diffusion_runtime.batches.batch_run import run_job
from diffusion_runtime.batches.row_files import RowFile
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.serving.server import _engines as serving_engines
from diffusion_runtime.serving.settings import ServerSettings

pytest.importorskip("ray", reason="pip install 'diffusion-runtime[ray]'")
# Ray's own use of pydantic, when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
BODY = {"prompt": "a ring", "seed": 1, **SMALL}


def frames_of(content: bytes) -> str:
    """A digest of the frames of a video, which the recipe in the file is no part of."""
    command = ["ffmpeg", "-v", "error", "-i", "-", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    import imageio_ffmpeg

    command[0] = imageio_ffmpeg.get_ffmpeg_exe()
    return hashlib.sha256(subprocess.run(command, input=content, capture_output=True, check=True).stdout).hexdigest()


def expected(folder: Path, steps: int, **fields: Any) -> bytes:
    values = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": steps, "seed": 1, **fields}
    request = GenerationRequest("a ring", **values)
    pipeline = load_pipeline(device="cpu")
    return pipeline(pipeline.resolve(request)).save(folder / "clip.mp4").read_bytes()


def states(http: httpx.Client) -> list[str]:
    return [each["state"] for each in http.get("/health").json().get("replicas", ())]


@pytest.fixture
def on_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.ray
@pytest.mark.usefixtures("on_cluster")
def test_a_cluster_gives_the_bytes_of_one_process_while_its_nodes_die(tmp_path: Path) -> None:
    long = expected(tmp_path, 40)
    with ray_cluster(3) as cluster:
        words = ("--device", "cpu", "--ray", cluster.address, "--replicas", "2")
        with running_server(tmp_path / "storage", *words) as server, server.client() as http:
            wait_for(lambda: states(http) == ["ready", "ready"])
            # One of the two nodes besides the head has a replica at least.
            jobs = [http.post("/v1/videos", json={**BODY, "num_inference_steps": 40}).json()["id"] for _ in range(2)]
            wait_for(lambda: all(http.get(f"/v1/videos/{each}").json()["step"] for each in jobs))
            cluster.say("kill 0")
            cluster.say("kill 1")
            videos = [finished(http, each) for each in jobs]
            assert {video["sha256"] for video in videos} == {hashlib.sha256(long).hexdigest()}
            assert max(video["attempts"] for video in videos) == 2, videos


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("on_cluster")
def test_a_server_finds_its_replicas_again_and_a_gang_scales_to_zero(tmp_path: Path) -> None:
    # Two processes compute one branch of guidance each, which rounds as two passes do.
    quick, long = expected(tmp_path, 2, guidance_mode="two_pass"), expected(tmp_path, 40)
    with ray_cluster(2) as cluster:
        words = ("--device", "cpu", "--ray", cluster.address)
        with running_server(tmp_path / "storage", "--replicas", "1", *words) as server:
            with server.client() as http:
                waiting = http.post("/v1/videos", json={**BODY, "num_inference_steps": 40}).json()["id"]
                wait_for(lambda: http.get(f"/v1/videos/{waiting}").json()["step"])
            server.kill(signal.SIGKILL)
            server.start()
            with server.client() as http:
                assert finished(http, waiting)["sha256"] == hashlib.sha256(long).hexdigest()
                assert any("found the replicas of an earlier server" in str(each) for each in server.logs)
        gang = ("--replicas", "0..1", "--num-gpus", "2", "--idle", "1", *words)
        with running_server(tmp_path / "gang", *gang) as server, server.client() as http:
            wait_for(lambda: states(http) == ["off"])
            video = finished(http, http.post("/v1/videos", json=BODY).json()["id"])
            content = http.get(f"/v1/videos/{video['id']}/content").content
            assert hashlib.sha256(content).hexdigest() == video["sha256"]
            assert frames_of(content) == frames_of(quick)


def test_a_host_without_the_servers_storage_takes_and_gives_files_and_forgets_a_server_that_is_gone(
    tmp_path: Path,
) -> None:
    from diffusion_runtime.serving.on_ray.host import Host

    job, storage = f"video_{'0' * 32}", tmp_path / "elsewhere"
    config = {"model_path": "shapes", "device": "cpu"}
    given: dict[str, Any] = {"config": config, "loras": {}, "names": {}, "warm_up": False, "preview": "off"}
    given |= {"storage": str(storage), "probe": "another text"}

    async def say_alive(host: Host) -> None:
        # As a server does; the engine of a busy machine loads for longer than GONE_SECONDS.
        while True:
            host.alive()
            await asyncio.sleep(1.0)

    async def run() -> None:
        host = Host()
        await host.start(json.dumps(given), 0, 1, "", 0)
        assert not host.is_shared
        heard = asyncio.create_task(say_alive(host))
        messages = host.attach()

        async def until(kind: str) -> dict[str, Any]:
            async for text in messages:
                if (message := json.loads(text))["type"] == kind:
                    return dict(message)
            raise AssertionError(kind)

        assert (await until("hello"))["versions"]
        await until("ready")
        request = {"prompt": "a ring", "height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 2, "seed": 1}
        checked = json.loads(await host.ask("check", json.dumps({"requests": [request]}), {}))["answer"]["requests"][0]
        refused = json.loads(await host.ask("check", json.dumps({"requests": [{**request, "image_path": "/x"}]}), {}))
        assert "did not come with the request" in refused["error"]["message"]
        # A reference, which may be a video: it came, and is then the model's to refuse.
        sent = storage / "inputs" / f"{job}-references-0.mp4"
        with_reference = json.dumps({"requests": [{**request, "references": [str(sent)]}]})
        refused = json.loads(await host.ask("check", with_reference, {sent.name: b"a video"}))
        assert "references: this model takes no references" in refused["error"]["message"], refused
        work = {"job": job, "index": 0, "request": checked, "target": str(storage / "results" / f"{job}.mp4")}
        shared = {"previews": 0, "profile": {"id": "trace", "num_steps": 1, "target": "/x"}, "attention": None}
        message = {"type": "run", "works": [{**work, "names": {}}], "loras": None, "preset": None, **shared}
        await host.send(json.dumps(message), {f"{job}-image_path-0.png": png(tmp_path)})
        assert "share" in (await until("profiled"))["error"]
        found = await until("finished")
        files = host.take_files(job, job)
        assert hashlib.sha256(files[f"{job}.mp4"]).hexdigest() == found["file"]["sha256"]
        assert sorted(files) == sorted(
            f"{job}{end}" for end in (".json", ".mp4", "-thumbnail.webp", "-spritesheet.webp")
        )
        assert not storage.exists()
        await until("done")
        assert list((host._storage / "inputs").iterdir()) == []
        # Another server comes, while the job of the one before it runs: that is stopped.
        message["works"][0]["request"]["num_inference_steps"] = 200  # type: ignore[index]
        await host.send(json.dumps(message), {})
        messages = host.attach()
        began = time.monotonic()
        await until("ready")
        assert time.monotonic() - began < 60
        await host.send(json.dumps({**message, "works": []}), {})
        await until("done")
        host.kill()
        assert (await until("ended"))["code"] != 0
        assert host.exit_code() is not None
        # Whoever leases the replica before it is replaced is given no job to lose.
        said = [json.loads(text)["type"] async for text in _until_ended(host)]
        assert ("ready" in said, said[-1]) == (False, "ended"), said
        heard.cancel()
        host._own.cleanup()

    asyncio.run(run())


async def _until_ended(host: Any) -> AsyncIterator[str]:
    async for text in host.attach():
        yield text
        if json.loads(text)["type"] == "ended":
            return


def test_every_file_of_a_request_goes_to_a_host_that_does_not_share_the_storage(tmp_path: Path) -> None:
    from diffusion_runtime.serving.on_ray.engines import RayEngine

    names = ["image_path-0.png", "references-0.png", "references-1.mp4"]
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.write_bytes(path.name.encode())
    image, *references = map(str, paths)
    engine = RayEngine(None, tmp_path, print)
    engine._is_shared = False
    found = engine._inputs(
        [{"prompt": "/etc/passwd", "image_path": image, "mask_path": None, "references": references}]
    )
    assert found == {name: name.encode() for name in names}


def png(folder: Path) -> bytes:
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    return (folder / "a.png").read_bytes()


@table(
    "mode, address, message",
    [
        (None, "auto", "RAY_AUTH_MODE is not set, and whoever reaches a Ray cluster runs code on it; export RAY_AUTH"),
        ("", "10.0.0.1:6379", "RAY_AUTH_MODE is ''"),
        ("on", "auto", "RAY_AUTH_MODE is 'on'"),
        ("token", "ray://10.0.0.1:10001", "expected auto, local or HOST:PORT"),
        ("token", "", "expected auto, local or HOST:PORT"),
        ("token", "auto", None),
        ("disabled", "10.0.0.1:6379", None),
        (None, "local", None),
    ],
)
def test_a_cluster_is_used_with_authentication_that_somebody_chose(
    mode: str | None, address: str, message: str | None, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    rows = RowFile(str(tmp_path / "rows.jsonl"), "shapes")
    job = BatchJob(rows=rows, folder=tmp_path / "out", config={}, loras={}, ray=address)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_AUTH_MODE", raising=False)
        if mode is not None:
            patch.setenv("RAY_AUTH_MODE", mode)
        for use in (
            lambda: serving_engines(ServerSettings(storage=tmp_path, name="x", ray=address), {}),
            lambda: run_job(job),
        ):
            # The rows, which are wrong, are read after that.
            with pytest.raises(RequestError) if message is None else pytest.raises(ConfigError) as raised:
                use()
                raise RequestError("nothing was refused")
            assert message is None or message in str(raised.value)
            assert os.environ.get("RAY_AUTH_MODE") == mode
