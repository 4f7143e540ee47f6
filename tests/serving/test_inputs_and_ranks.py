"""Servers of other kinds: a model that takes images, and an engine of two processes."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image
from running_server import SMALL, finished, is_running, running_server, wait_for
from tiny_flux2 import write_tiny_flux2_klein
from tiny_scail_2 import write_tiny_scail_2

openai = pytest.importorskip("openai", reason="the official client: pip install 'diffusion-runtime[test]'")


def png(colour: str) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(content, "PNG")
    return content.getvalue()


def test_images_of_a_request_are_used_named_and_removed_without_a_path(tmp_path: Path) -> None:
    folder = write_tiny_flux2_klein(tmp_path / "tiny")
    form = {"prompt": "a cat", "size": "64x64", "seed": "3", "num_inference_steps": "2"}
    common = {"prompt": "a cat", "size": "64x64", "extra_body": {"seed": 3, "num_inference_steps": 2}}
    inputs = tmp_path / "storage" / "inputs"
    with (
        running_server(tmp_path / "storage", "--model-path", str(folder)) as server,
        server.client() as http,
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="-") as official,
    ):
        made = []
        several: Any = [("a.png", png("red"), "image/png"), ("b.png", png("blue"), "image/png")]
        for images in (("../../a.png", png("red"), "text/plain"), several):
            answer = official.images.edit(image=images, **common)
            assert str(tmp_path) not in answer.to_json()
            made.append(base64.b64decode(answer.data[0].b64_json))
        events = list(official.images.edit(image=several, stream=True, **common))
        assert [each.type for each in events] == ["image_edit.completed"]
        assert base64.b64decode(events[0].b64_json) == made[1]
        url = {"image_url": f"data:image/png;base64,{base64.b64encode(png('red')).decode()}"}
        again = http.post("/v1/images/edits", json={**form, "seed": 3, "image": url}).json()
        # What a file says is what its data: URL says.
        assert base64.b64decode(again["data"][0]["b64_json"]) == made[0] != made[1]
        recipe = json.loads(Image.open(io.BytesIO(made[1])).text["diffusion_runtime"])
        assert recipe["request"]["image_path"] == ["image_path-0.png", "image_path-1.png"]
        assert (recipe["model"]["path"], str(tmp_path) in json.dumps(recipe)) == ("tiny", False)
        damaged = http.post("/v1/images/edits", data=form, files={"image": ("a.png", png("red")[:60], "image/png")})
        assert (damaged.status_code, damaged.json()["error"]["param"]) == (400, "image")
        assert str(tmp_path) not in damaged.text
        assert list(inputs.iterdir()) == []


def _video(frames: Any, path: Path) -> bytes:
    """A file without loss."""
    size = f"{frames.shape[2]}x{frames.shape[1]}"
    command = ["ffmpeg", "-v", "error", "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", "16", "-i", "-"]
    subprocess.run([*command, "-c:v", "ffv1", "-pix_fmt", "bgr0", str(path)], input=frames.tobytes(), check=True)
    return path.read_bytes()


@pytest.mark.slow
def test_characters_with_their_masks_are_driven_by_a_video(tmp_path: Path) -> None:
    """SCAIL-2: the files come in their fields, and nothing of them stays; what lacks is named as a client sends it."""
    folder = write_tiny_scail_2(tmp_path / "tiny")
    frames = numpy.random.default_rng(0).integers(0, 256, (9, 64, 64, 3), dtype=numpy.uint8)
    masks = numpy.zeros_like(frames)
    masks[:, :, 32:] = (0, 0, 255)
    pictures = []
    for array in (frames[0], masks[0]):
        content = io.BytesIO()
        Image.fromarray(array).save(content, "PNG")
        pictures.append(content.getvalue())
    sent = {
        "input_reference": ("a.png", pictures[0], "image/png"),
        "image_mask": ("../b.png", pictures[1], "image/png"),
        "video": ("c.mkv", _video(frames, tmp_path / "c.mkv"), "video/x-matroska"),
        "mask": ("d.mkv", _video(masks, tmp_path / "d.mkv"), "video/x-matroska"),
    }
    form = {"prompt": "a cat", "size": "64x64", "seed": "3", "num_inference_steps": "1", "num_frames": "9"}
    fields = {
        "input_reference": "image_path",
        "image_mask": "image_mask_path",
        "video": "video_path",
        "mask": "mask_path",
    }
    with running_server(tmp_path / "storage", "--model-path", str(folder)) as server, server.client() as http:
        lacking = {name: file for name, file in sent.items() if name != "video"}
        refused = http.post("/v1/videos", data=form, files=lacking)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "video")
        assert "video_path" not in refused.text
        assert "--video-path" not in refused.text
        video = finished(http, http.post("/v1/videos", data=form, files=sent).json()["id"])
        assert video["status"] == "completed", video
        sidecar = http.get(f"/v1/videos/{video['id']}/content", params={"variant": "sidecar"}).json()
        assert sidecar["recipe"]["inputs"] == {
            fields[name]: hashlib.sha256(content).hexdigest() for name, (_, content, _) in sent.items()
        }
        assert list((tmp_path / "storage" / "inputs").iterdir()) == []


@pytest.mark.slow
def test_an_engine_of_two_processes_serves_and_ends_with_its_server(tmp_path: Path) -> None:
    with running_server(tmp_path / "storage", "--num-gpus", "2", "--device", "cpu") as server:
        with server.client() as http:
            body = {"prompt": "a ring", "seed": 1, **SMALL}
            first = finished(http, http.post("/v1/videos", json=body).json()["id"])
            assert first["status"] == "completed", first
            ranks = server.rank_pids()
            assert len(ranks) == 2
            # A rank that dies takes the others along, and the job is made by the next engine.
            waiting = http.post("/v1/videos", json={**body, "num_inference_steps": 30}).json()["id"]
            wait_for(lambda: http.get(f"/v1/videos/{waiting}").json()["step"])
            os.kill(ranks[1], signal.SIGKILL)
            made = finished(http, waiting)
            assert (made["status"], made["attempts"]) == ("completed", 2)
            wait_for(lambda: not any(is_running(pid) for pid in ranks))
            pids = server.engine_pids() + server.rank_pids()
        if not server.is_on_ray:
            server.kill()
            wait_for(lambda: not any(is_running(pid) for pid in pids))
