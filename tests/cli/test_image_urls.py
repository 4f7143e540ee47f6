"""Images as data: URLs and at https: addresses: limits, hosts, redirects, and what a recipe holds of them."""

from __future__ import annotations

import base64
import functools
import io
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_support import Command
from PIL import Image
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest
from diffusion_runtime.errors import ForbiddenAddressError, RequestError
from diffusion_runtime.request.given_images import recorded_images
from diffusion_runtime.untrusted import image_urls
from diffusion_runtime.untrusted.image_urls import fetch_image

HOSTS = ("good.example", "*.sub.example")


def png(colour: str = "red") -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(content, "PNG")
    return content.getvalue()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


@pytest.fixture
def internet(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, bytes | str | int]], list[httpx.Request]]:
    """Give names addresses, and answers to requests by their Host and path: content, where to go or a status; what was
    sent is returned."""

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        address = "10.0.0.1" if host.startswith("inside") else "93.184.216.34"
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port))]

    def answered_by(answers: dict[str, bytes | str | int]) -> list[httpx.Request]:
        sent: list[httpx.Request] = []

        def answer(request: httpx.Request) -> httpx.Response:
            sent.append(request)
            found = answers[f"{request.headers['host']}{request.url.path}"]
            if isinstance(found, bytes):
                return httpx.Response(200, stream=httpx.ByteStream(found))
            return httpx.Response(found) if isinstance(found, int) else httpx.Response(302, headers={"location": found})

        client = functools.partial(httpx.Client, transport=httpx.MockTransport(answer))
        monkeypatch.setattr(httpx, "Client", client)
        return sent

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return answered_by


def test_an_address_is_fetched_from_the_checked_address(
    internet: Callable[..., list[httpx.Request]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = internet(
        {
            "good.example/a.png": png(),
            "a.sub.example/moved": "https://good.example/a.png",
            "good.example/out": "https://bad.example/a.png",
            "good.example/inside": "https://inside.sub.example/",
            "good.example/plain": "http://good.example/a.png",
            "good.example/loop": "/loop",
            "good.example/none": 404,
            "good.example/large": b"\x89PNG\r\n\x1a\n" + bytes(image_urls.MAX_URL_BYTES),
        }
    )
    assert fetch_image("image_path", "https://a.sub.example/moved", HOSTS, "") == png()
    assert [(each.url.host, each.extensions["sni_hostname"]) for each in sent] == [
        ("93.184.216.34", "a.sub.example"),
        ("93.184.216.34", "good.example"),
    ]
    forbidden = {
        "https://good.example/out": "nothing is fetched from bad.example; allowed: good.example, ",
        "https://good.example/inside": "inside.sub.example is an address of this network",
        "https://good.example/plain": "expected https://HOST",
        "https://me:secret@good.example/a.png": r"expected https://HOST/\.\.\. without a user name",
        "https://sub.example/": "--allow-url sub.example allows it",
    }
    for url, said in forbidden.items():
        with pytest.raises(ForbiddenAddressError, match=said) as failure:
            fetch_image("image_path", url, HOSTS, "--allow-url {host} allows it")
        assert "secret" not in str(failure.value)
    for name, said in {"loop": "more than 3 redirects", "none": "answered 404", "large": "more than 20971520"}.items():
        with pytest.raises(RequestError, match=said):
            fetch_image("image_path", f"https://good.example/{name}", HOSTS, "")
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    sent.clear()
    with pytest.raises(ForbiddenAddressError, match=r"add good\.example to NO_PROXY"):
        fetch_image("image_path", "https://good.example/a.png", HOSTS, "")
    assert sent == []
    monkeypatch.setenv("no_proxy", "good.example")
    assert fetch_image("image_path", "https://good.example/a.png", HOSTS, "") == png()


def test_data_is_an_image_by_its_content() -> None:
    request = GenerationRequest(
        "a",
        image_path=(data_url(png(), "text/html"), "cat.png"),
        mask_path=data_url(png("white")),
        video_path=data_url(png()),
        frame_conditions=(f"8:{data_url(png())}@0.5",),
    )
    assert isinstance(request.image_path, tuple)
    assert request.mask_path is not None
    assert Path(request.image_path[0]).read_bytes() == png()
    assert Path(request.mask_path).read_bytes() == png("white")
    assert request.video_path == request.image_path[0]
    recorded = request.recorded()
    digest = f"data:sha256:{Path(request.image_path[0]).name}"
    assert recorded["image_path"] == [digest, "cat.png"]
    assert recorded["frame_conditions"] == [(8, digest, 0.5)]
    assert GenerationRequest.from_dict(request.to_dict()) == request
    for field in ("image_path", "mask_path", "video_path"):
        for text, said in {
            digest: f"{field}: the recipe was made with an image that was given as data",
            data_url(b"GIF89a"): f"{field}: expected a PNG, JPEG or WebP image",
            "data:image/png": f"{field}: a data: URL has a comma",
            "data:image/png;base64,!": f"{field}: the data: URL is not base64",
            "https://good.example/a.png": f"{field}: .*fetches an image from hosts of --allow-url",
            f"data:,{'x' * (2**20 + 1)}": f"{field}: the data: URL has 1048577 characters, at most 1048576 are taken",
            f"data:;base64,{'A' * (image_urls.MAX_URL_BYTES // 3 * 4 + 8)}": f"{field}: the data: URL has",
        }.items():
            with pytest.raises(RequestError, match=said):
                GenerationRequest("a", **{field: text})
    assert recorded_images("cat.png") == "cat.png"


def test_a_recipe_names_the_address_or_the_digest(
    internet: Callable[..., list[httpx.Request]], command: Command, tmp_path: Path
) -> None:
    folder = write_tiny_wan(tmp_path / "wan", vae="residual", takes_image=True)
    sent = internet({"good.example/new.png": png("blue")})
    Path("blue.png").write_bytes(png("blue"))
    url = "https://good.example/new.png"
    sizes = ("--height", "64", "--width", "64", "--num-frames", "5", "--num-inference-steps", "1")
    flags = ("generate", "a star", "--model-path", str(folder), *sizes)
    refused = command(*flags, "--image-path", url)
    assert refused.code == 2
    assert "--allow-url good.example allows it" in " ".join(refused.err.split())
    allowed = (*flags, "--allow-url", "good.example")
    assert command(*allowed, "--image-path", url, "-o", "url.npy").code == 0
    assert command(*flags, "--image-path", data_url(png("blue")), "-o", "data.npy").code == 0
    assert command(*flags, "--image-path", "blue.png", "-o", "file.npy").code == 0
    results = [Path(f"{name}.npy").read_bytes() for name in ("url", "data", "file")]
    assert results[0] == results[1] == results[2]
    recipes = {name: json.loads(Path(f"{name}.json").read_text())["recipe"] for name in ("url", "data", "file")}
    assert recipes["url"]["request"]["image_path"] == url
    digest = recipes["file"]["inputs"]["image_path"]
    assert recipes["data"]["request"]["image_path"] == f"data:sha256:{digest}"
    assert all(recipe["inputs"] == recipes["file"]["inputs"] for recipe in recipes.values())
    assert len(sent) == 1, "once per process"
    assert command("generate", "--from", "url.npy", "--dry-run").code == 2
    again = command("generate", "--from", "url.npy", "--allow-url", "good.example", "--dry-run")
    assert again.code == 0
    assert url in "".join(again.err.split())
    again = command("generate", "--from", "data.npy", "--dry-run")
    assert "give the image again, by the flag or key image_path" in " ".join(again.err.split())
    assert command("generate", "--from", "data.npy", "--dry-run", "--image-path", "blue.png").code == 0
    assert command(*flags, "--image-path", data_url(png("blue")), "-o", "data.npy", "--resume").out == ""
