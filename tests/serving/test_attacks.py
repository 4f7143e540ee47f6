"""Attacks on a running server: none reads, writes or connects outside, none is a 500, and it answers afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from PIL import Image, ImageCms
from running_server import SMALL, RunningServer, finished
from tables import table

from diffusion_runtime.errors import RequestError
from diffusion_runtime.serving import guard
from diffusion_runtime.serving import server as server_module
from diffusion_runtime.serving.api_errors import ApiError
from diffusion_runtime.serving.files import ResultFiles
from diffusion_runtime.serving.input_images import check_image
from diffusion_runtime.untrusted.image_urls import checked_address, data_of_url, is_public


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    """Where a server that follows a URL would be seen."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        yield listener


def files_of(server: RunningServer) -> list[str]:
    return sorted(path.name for folder in ("inputs", "results") for path in (server.storage / folder).iterdir())


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int) -> bytes:
    """A PNG that claims a size, and has no pixels."""

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def gif() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (4, 4)).save(content, "GIF")
    return content.getvalue()


SECRET = "/etc/passwd"
GET = [
    "/v1/videos/..%2f..%2f..%2fetc%2fpasswd/content",
    "/v1/videos/%2e%2e/%2e%2e/etc/passwd",
    "/v1/videos/..%5c..%5cetc/content",
    "/v1/videos/%2fetc%2fpasswd/content",
    "/v1/videos/video_%00/content",
    "/v1/videos/video_00000000000000000000000000000000%2f..%2f/content",
    "/v1/videos/~root/content",
    "/v1/videos/jobs.sqlite3/content",
    "/v1/videos/" + "a" * 8000,
    "/v1/images/..%2f..%2fetc%2fpasswd/content",
    "/v1/images/img_0/content?variant=../../etc/passwd",
    "/v1/videos?limit=1e9",
    "/v1/videos?limit=-1",
    "/v1/videos?limit=000001" + "0" * 6000,
    "/v1/videos?limit=%C2%B2",
    "/v1/videos?after=%27%3B%20DROP%20TABLE%20jobs%3B--",
    "/v1/videos?status=%27%20OR%201=1",
    "/v1/videos?order=DESC;",
    "/v1/models/../../etc/passwd",
    "//etc/passwd",
    "/docs",
    "/.git/config",
]
BODIES: list[dict[str, Any]] = [
    {"json": {"prompt": "x", "image_path": SECRET}},
    {"json": {"prompt": "x", "last_image_path": SECRET}},
    {"json": {"prompt": "x", "mask_path": SECRET}},
    {"json": {"prompt": "x", "audio_path": SECRET}},
    {"json": {"prompt": "x", "frame_conditions": f"0:{SECRET}"}},
    {"json": {"prompt": "x", "attention": SECRET}},
    {"json": {"prompt": "x", "attention": "/tmp/config.json"}},
    {"json": {"prompt": "x", "attention": "config.yaml"}},
    {"json": {"prompt": "x", "attention": f"mask_strategy_file_path={SECRET}"}},
    {
        "json": {
            "prompt": "x",
            "attention": {"default": {"backend": "sliding_tile_attn", "extra": {"mask_strategy_file_path": SECRET}}},
        }
    },
    {
        "json": {
            "prompt": "x",
            "attention": {"default.extra.mask_strategy_file_path": SECRET, "default.backend": "sliding_tile_attn"},
        }
    },
    {"json": {"prompt": "x", "step_cache": f"teacache:file={SECRET}"}},
    {"json": {"prompt": "x", "step_cache": f"magcache:threshold=0.1,file={SECRET}"}},
    {"json": {"prompt": "x", "lora": SECRET}},
    {"json": {"prompt": "x", "lora": [{"name": "../x.safetensors"}]}},
    {"json": {"prompt": "x", "preset": SECRET}},
    {"json": {"prompt": "x", "model": SECRET}},
    {"json": {"prompt": "x", "sampler": "os.system"}},
    {"json": {"prompt": "x", "attention": {"default": {"backend": "__import__('os')"}}}},
    {"json": {"prompt": "x", "output_path": "/tmp/out.mp4"}},
    {"content": b'{"prompt": "x\\ud800"}', "headers": {"content-type": "application/json"}},
    {"content": b'{"prompt": "x", "x\\ud800": 1}', "headers": {"content-type": "application/json"}},
    {"json": {"prompt": "\x00", "size": "\x00"}},
    {"json": {"prompt": "x", "height": 10**30}},
    {"content": b'{"prompt": "x", "width": 1e400}', "headers": {"content-type": "application/json"}},
    {"json": {"prompt": "x", "seconds": 1e18}},
    {"content": b'{"prompt": "x", "seed": 1' + b"0" * 400 + b"}", "headers": {"content-type": "application/json"}},
    # More memory than any machine of the tests has.
    {"json": {"prompt": "x", "size": "4096x4096", "num_frames": 1025, "num_inference_steps": 2}},
    {"json": {"prompt": "x", "sigmas": [0.5] * 5000}},
    {"content": b"[" * 100_000, "headers": {"content-type": "application/json"}},
    {"content": b'{"prompt": "x", "prompt": "y"}', "headers": {"content-type": "application/json"}},
    {"content": b"\xff\xfe{", "headers": {"content-type": "application/json"}},
    {"content": b"1" * 5000, "headers": {"content-type": "application/json"}},
    {"content": b"a" * (2**20 + 1), "headers": {"content-type": "application/json"}},
    {"content": (b"a" * 2**18 for _ in range(8)), "headers": {"content-type": "application/json"}},
    {"content": b"x", "headers": {"content-type": "text/plain"}},
    {"content": b"a=" + b"%41" * 2**18, "headers": {"content-type": "application/x-www-form-urlencoded"}},
    {"content": b"prompt=%ff", "headers": {"content-type": "application/x-www-form-urlencoded"}},
    {"content": b"a=1&" * 1000, "headers": {"content-type": "application/x-www-form-urlencoded"}},
    {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
    {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=y"}},
    {"data": {f"field{number}": "x" for number in range(10_000)}},
    {"data": {"prompt": "x", "attention" + "[a]" * 200: "x"}},
    {"data": {"prompt": "x", "lora[999999999]": "x"}},
    {"data": {"__class__": "x", "prompt": "x"}},
    {"data": {"prompt": "x"}, "files": {"input_reference": ("../../etc/cron.d/x", png(8, 8), "image/png")}},
    {"data": {"prompt": "x"}, "files": {"input_reference": ("x\r\nset-cookie: a=b.png", b"no image", "image/png")}},
    {"data": {"prompt": "x"}, "files": {"input_reference": ("x.png", png(60_000, 60_000), "image/png")}},
    {"data": {"prompt": "x"}, "files": {"input_reference": ("x.png", gif(), "image/png")}},
    {"data": {"prompt": "x"}, "files": {"input_reference": ("x.png", b"<svg/>", "image/png")}},
    {"data": {"prompt": "x"}, "files": [("input_reference", ("x.png", png(8, 8), "image/png"))] * 40},
    {"data": {"prompt": "x"}, "files": {"other": ("x.png", png(8, 8), "image/png")}},
    {"json": {"prompt": "x", "input_reference": {"image_url": "file:///etc/passwd"}}},
    {"json": {"prompt": "x", "input_reference": {"image_url": "data:image/png;base64,!!!"}}},
    {"json": {"prompt": "x", "input_reference": {"image_url": "data:image/png"}}},
    {"json": {"prompt": "x", "input_reference": {"image_url": "gopher://127.0.0.1/"}}},
]


def segment(marker: int, data: bytes = b"") -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(data) + 2) + data


def of_parts(*parts: bytes) -> bytes:
    """A PNG with these behind its header."""
    content = png(8, 8)
    return content[:33] + b"".join(parts) + content[33:]


JPEG = b"\xff\xd8\xff"
MANY_PARTS = {
    "chunks of text": of_parts(chunk(b"tEXt", b"a\0b") * 200_000),
    "pixels of nothing": of_parts(chunk(b"IDAT") * 200_000),
    "colour profiles": of_parts(chunk(b"iCCP", b"k\0\0" + zlib.compress(b"a" * 10**6)) * 20),
    "segments": JPEG[:2] + segment(0xE1) * 200_000,
    "fill bytes": JPEG + b"\xff" * 200_000,
    "bytes between segments": JPEG + bytes(200_000),
    "a head of 20 MB": JPEG[:2] + segment(0xE1, bytes(65_000)) * 320 + segment(0xDA) + b"\xff\xd9",
    "scans": JPEG[:2] + segment(0xDA) * 70,
}


@table("name", MANY_PARTS)
def test_an_image_of_many_parts_is_refused_before_a_decoder_passes_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("a decoder reads it"))
    with pytest.raises(RequestError, match=r"^image: the image has more parts than"):
        check_image("image", MANY_PARTS[name], 10**6)


@table("kind", ["PNG", "JPEG", "WEBP"])
def test_images_that_programs_write_are_taken(kind: str) -> None:
    content = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    options = {"progressive": True} if kind == "JPEG" else {}
    Image.effect_noise((600, 400), 90).save(content, kind, exif=exif, icc_profile=profile, **options)
    assert check_image("image", content.getvalue(), 600 * 400) in ("png", "jpg", "webp")
    with pytest.raises(RequestError, match="600 x 400 pixels"):
        check_image("image", content.getvalue(), 600 * 400 - 1)


def test_an_image_that_says_it_is_huge_is_not_called_damaged() -> None:
    content = io.BytesIO()
    Image.new("L", (1, 1)).save(content, "PNG")
    head = content.getvalue()[12:16] + (60_000).to_bytes(4, "big") * 2 + content.getvalue()[24:29]
    huge = content.getvalue()[:12] + head + zlib.crc32(head).to_bytes(4, "big") + content.getvalue()[33:]
    with pytest.raises(RequestError, match="image: the image has too many pixels, at most 100 are taken"):
        check_image("image", huge, 100)


def test_a_long_data_url_is_in_base64() -> None:
    with pytest.raises(RequestError, match="write it in base64"):
        data_of_url("image", "data:image/png," + "%41" * 2**19)
    assert len(data_of_url("image", "data:image/png;base64," + "QUFB" * 2**19)) == 3 * 2**19


@table(
    ("storage", "message", "public"),
    [
        ("st", "the best/worst", "the best/worst"),
        ("st", "steps: st/results/a.png is missing", "steps: results/a.png is missing"),
        ("/tmp/jobs", "no /tmp/jobs/inputs/a.png, in '/etc/x'", "no inputs/a.png, in 'x'"),
        ("/tmp/jobs", "/tmp/jobs: is full", ": is full"),
    ],
)
def test_messages_lose_folders_and_keep_words(storage: str, message: str, public: str) -> None:
    files = ResultFiles.__new__(ResultFiles)
    files.storage = Path(storage)
    assert files.scrub(message) == public


def test_no_attack_is_a_500_or_leaves_a_trace_and_the_server_answers_afterwards(
    server: RunningServer, listener: socket.socket
) -> None:
    port = listener.getsockname()[1]
    urls = [
        f"http://127.0.0.1:{port}/",
        f"https://127.0.0.1:{port}/",
        f"https://localhost:{port}/",
        f"https://[::1]:{port}/",
        f"https://[::ffff:127.0.0.1]:{port}/",
        f"https://2130706433:{port}/",
        f"https://0x7f000001:{port}/",
        f"https://0177.0.0.1:{port}/",
        f"https://127.1:{port}/",
        f"https://0:{port}/",
        f"https://allowed.example@127.0.0.1:{port}/",
        f"https://127.0.0.1:{port}/#allowed.example",
        f"https://allowed.example.127.0.0.1.nip.io:{port}/",
        "https://169.254.169.254/latest/meta-data/",
        "https://[fe80::1]/",
    ]
    bodies = [*BODIES, *({"json": {"prompt": "x", "input_reference": {"image_url": url}}} for url in urls)]
    wrong = []
    before = files_of(server)
    with server.client() as http:
        for path in GET:
            # As it stands: a client would take the dots out.
            request = http.build_request("GET", "/")
            request.url = httpx.URL(server.address).copy_with(raw_path=path.encode())
            answer = http.send(request)
            if not 400 <= answer.status_code < 500 and answer.json().get("object") != "list":
                wrong.append((path, answer.status_code))
            if "root:" in answer.text:
                wrong.append((path, "read"))
        for body in bodies:
            answer = http.post("/v1/videos", **body)
            error = answer.json().get("error", {})
            if not 400 <= answer.status_code < 500 or not error.get("code"):
                wrong.append((str(body)[:100], answer.status_code, answer.text[:200]))
            if "root:" in answer.text or str(server.storage) in answer.text or "set-cookie" in answer.headers:
                wrong.append((str(body)[:100], answer.text[:200]))
        for method in ("PUT", "PATCH", "TRACE"):
            if http.request(method, "/v1/videos").status_code != 405:
                wrong.append((method,))
        rebound = http.get("/v1/videos", headers={"host": "evil.example"})
        if rebound.json()["error"]["code"] != "host_not_allowed" or "access-control-allow-origin" in rebound.headers:
            wrong.append(("host", rebound.text))
        forged = http.get("/liveness", headers={"x-request-id": "a b\tc"})
        if not forged.headers["x-request-id"].startswith("req_"):
            wrong.append(("request id", forged.headers))
        assert wrong == []
        with pytest.raises(TimeoutError):
            listener.accept()
        assert files_of(server) == before
        video = finished(http, http.post("/v1/videos", json={"prompt": "a ring", **SMALL}).json()["id"])
        assert video["status"] == "completed"
        # Whoever may write into the storage does not read other files through the server.
        for path in (server.storage / "results").glob(f"{video['id']}*"):
            path.unlink()
            path.symlink_to(SECRET)
        for variant in ("video", "thumbnail", "spritesheet", "sidecar", "sound", "latents"):
            answer = http.get(f"/v1/videos/{video['id']}/content", params={"variant": variant})
            assert answer.status_code in (404, 410), (variant, answer.status_code)
        assert http.delete(f"/v1/videos/{video['id']}").status_code == 200
        assert Path(SECRET).exists()


RAW = {
    "half a request": b"POST /v1/videos HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
    "two lengths": b"POST /v1/videos HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
    "a huge length": b"POST /v1/videos HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2147483648\r\n\r\n",
    "a name and an address": b"GET /v1/models HTTP/1.1\r\nhost: localhost:80@evil.example\r\n\r\n",
    "a length and chunks": (
        b"POST /v1/videos HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
        b"0\r\n\r\nGET /liveness HTTP/1.1\r\nhost: localhost\r\n\r\n"
    ),
    "no host": b"GET /v1/videos HTTP/1.1\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a websocket": b"GET /v1/videos HTTP/1.0\r\nhost: evil\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    "endless headers": b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 20_000,
}


@table("name", RAW)
def test_broken_http_is_an_answer_or_a_closed_connection(name: str, server: RunningServer) -> None:
    url = httpx.URL(server.address)
    with socket.create_connection((url.host, url.port or 80), timeout=5) as connection:
        try:
            connection.sendall(RAW[name])
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while part := connection.recv(4096):
                answer += part
        except (ConnectionError, BrokenPipeError):
            answer = b""
    assert not answer or answer.split()[1][:1] == b"4", answer
    # What follows a refused request is not another one.
    assert answer.count(b"HTTP/1.1 ") <= 1, answer
    with server.client() as http:
        assert http.get("/liveness").status_code == 200


def test_a_body_that_drips_is_not_waited_for() -> None:
    async def receive() -> dict[str, Any]:
        clock[0] += 0.9
        return {"type": "http.request", "body": b"x", "more_body": True}

    clock = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        body = guard.BoundedBody(receive, 2**20, 30.0)

        async def read() -> None:
            while True:
                await body.receive()

        with pytest.raises(ApiError, match="in time"):
            asyncio.run(read())
    assert 30 <= clock[0] < 32


PRIVATE = [
    *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1"),
    *("255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
    *("2002:7f00:1::", "64:ff9b::7f00:1", "fe80::1%eth0", "198.18.0.1", "240.0.0.1"),
]


@table("address", PRIVATE)
def test_addresses_of_this_network_are_none_of_the_internet(address: str) -> None:
    assert not is_public(address)


# Of 127.0.0.1 and 169.254.169.254, as resolvers of some system read them.
SPELLINGS = [
    *("127.0.0.1", "127.1", "127.0.1", "0", "0.0.0.0", "2130706433", "0x7f000001", "0x7f.1", "0x7F.0.0.0x1"),
    *("017700000001", "0177.0.0.1", "00000177.1", "127.0.0.1.", "localhost", "LOCALHOST", "localhost."),
    *("[::1]", "[0:0:0:0:0:0:0:1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[2002:7f00:1::]"),
    *("\uff11\uff12\uff17.0.0.1", "127\u30020\u30020\u30021", "\u2460\u2461\u2466.0.0.1"),
    *("169.254.169.254", "2852039166", "0xa9fea9fe", "0xa9.0xfe.0xa9.0xfe", "0251.0376.0251.0376"),
    *("[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "[64:ff9b::a9fe:a9fe]", "[fe80::a9fe:a9fe]"),
]


@table("spelling", SPELLINGS)
def test_no_spelling_of_an_address_of_this_network_is_connected_to(spelling: str) -> None:
    """Though the owner of the server allows the host by exactly this name."""
    url = f"https://{spelling}/latest/meta-data/"
    with pytest.raises(RequestError, match=r"is an address of this network|is unknown|is no URL"):
        checked_address("image", url, (spelling.strip("[]").lower(),), "")


def test_headers_that_drip_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_HEADER_SECONDS", 0.3)

    async def run() -> None:
        config = uvicorn.Config(lambda *_: None, lifespan="off", log_config=None)
        config.load()
        loop = asyncio.get_running_loop()
        states: Any = uvicorn.server.ServerState()
        listening = await loop.create_server(
            lambda: server_module._BoundedHeaders(config, states, {}, loop), "127.0.0.1", 0
        )
        async with listening, asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
            with contextlib.suppress(ConnectionError):
                for byte in b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000:
                    writer.write(bytes((byte,)))
                    await writer.drain()
                    await asyncio.sleep(0.02)
                    if reader.at_eof():
                        break
                else:
                    raise AssertionError("the headers were waited for")
            writer.close()

    asyncio.run(run())


def test_addresses_are_checked_where_a_name_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        found = {"allowed.example": "93.184.216.34", "inside.example": "10.0.0.1"}[host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (found, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    hosts = ("allowed.example", "inside.example")
    assert checked_address("image", "https://allowed.example/x.png", hosts, "") == ("allowed.example", "93.184.216.34")
    for url in (
        "https://inside.example/",
        "https://other.example/",
        "http://allowed.example/",
        "https://a@allowed.example/",
    ):
        with pytest.raises(RequestError):
            checked_address("image", url, hosts, "")
    assert is_public("93.184.216.34")
    assert Path(SECRET).exists()
