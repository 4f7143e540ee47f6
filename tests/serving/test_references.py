"""References over HTTP: images, videos and sounds in their order, by their content, and no file of the server."""

from __future__ import annotations

from pathlib import Path

import pytest
from sound_files import write_wave
from tables import table

from diffusion_runtime.errors import RequestError
from diffusion_runtime.serving.api_errors import ApiError
from diffusion_runtime.serving.body import Body
from diffusion_runtime.serving.input_images import check_media, refuse_elsewhere
from diffusion_runtime.serving.jobs import IMAGE, VIDEO
from diffusion_runtime.serving.request_fields import read_draft
from diffusion_runtime.serving.settings import Limits

PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x02\x00\x00\x00\x90wS\xde\x00\x00\x00"
    b"\x0cIDATx\x9cc\xf8\xcf\xc0\x00\x00\x03\x01\x01\x00\xc9\xfe\x92\xef\x00\x00\x00\x00IEND\xaeB`\x82"
)
MP4 = b"\x00\x00\x00\x18ftypisom" + bytes(16)


def test_files_come_in_their_order() -> None:
    draft = read_draft(VIDEO, Body({"prompt": "a dog"}, {"references": [b"b", b"a", b"c"]}), "m", Limits())
    assert draft.images == {"references": [b"b", b"a", b"c"]}
    urls = ["data:video/mp4;base64,AAAA", "https://host/a.png"]
    body = Body({"prompt": "a dog", "references": [urls[0], {"image_url": urls[1]}]})
    assert read_draft(VIDEO, body, "m", Limits()).images == {"references": urls}


@table(
    ("kind", "values", "told"),
    [
        (VIDEO, {"references": "/etc/passwd"}, "references: expected the file, or .* data: or https://"),
        (VIDEO, {"references": [{"file_id": "x"}]}, "references: this server keeps no files"),
        (IMAGE, {"references": ["data:,x"]}, "unknown field 'references'"),
    ],
)
def test_what_a_client_may_not_send(kind: str, values: dict[str, object], told: str) -> None:
    with pytest.raises(ApiError, match=told):
        read_draft(kind, Body({"prompt": "a dog", **values}), "m", Limits())


def test_the_extension_follows_from_the_content(tmp_path: Path) -> None:
    sound = Path(write_wave(tmp_path / "a.wav")).read_bytes()
    assert [check_media("references", each, 100) for each in (PNG, MP4, sound)] == ["png", "mp4", "wav"]
    for content in (b"GIF89a" + bytes(20), b"#EXTM3U\nfile:///etc/passwd", b""):
        with pytest.raises(RequestError, match=r"references: expected an image .*, a video .* or a sound"):
            check_media("references", content, 100)
    with pytest.raises(RequestError, match="1 x 1 pixels, at most 0"):
        check_media("references", PNG, 0)


def test_an_engine_reads_no_reference_from_elsewhere(tmp_path: Path) -> None:
    own = str(tmp_path / "references-0.png")
    refuse_elsewhere({"references": [own]}, tmp_path)
    for value in (["/etc/passwd"], [own, "/etc/passwd"], "/etc/passwd"):
        with pytest.raises(RequestError, match="references: names a file that did not come with the request"):
            refuse_elsewhere({"references": value}, tmp_path)
