"""Client of a server: videos and images from Python, without torch."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from diffusion_runtime.errors import DiffusionRuntimeError, MissingPackageError

if TYPE_CHECKING:
    import httpx

_POLL_SECONDS = 1.0


class ServerError(DiffusionRuntimeError):
    """An error that a server answered with. status: of HTTP; code, param: as docs/serving.md lists them."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(str(error.get("message", f"the server answered {status}")))
        self.status = status
        self.code = error.get("code")
        self.param = error.get("param")


class Client:
    """A connection to a server, which is a context manager. api_key: where the server asks for one. timeout: seconds
    for an answer; images take as long as they take.

        with Client("http://127.0.0.1:8000") as client:
            video = client.create_video("a fox running left in the snow", seed=7)
            client.download(client.wait(video["id"])["id"], "fox.mp4")

    Fields of requests are those of docs/serving.md, by name. Methods raise ServerError.
    """

    def __init__(self, url: str = "http://127.0.0.1:8000", *, api_key: str | None = None, timeout: float = 600) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingPackageError("Client needs httpx: pip install 'diffusion-runtime[serve]'") from error
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._http: httpx.Client = httpx.Client(base_url=url, headers=headers, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def create_video(
        self, prompt: str, *, image: bytes | None = None, idempotency_key: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Accept a video to be made; returns its object. image: the content of the one that it begins with."""
        headers = {} if idempotency_key is None else {"idempotency-key": idempotency_key}
        values = {"prompt": prompt, **fields}
        if image is not None:
            values["input_reference"] = {"image_url": f"data:;base64,{base64.b64encode(image).decode()}"}
        return self._json("POST", "/v1/videos", json=values, headers=headers)

    def get_video(self, video_id: str) -> dict[str, Any]:
        return self._json("GET", f"/v1/videos/{video_id}")

    def list_videos(self) -> Iterator[dict[str, Any]]:
        """Yield all videos, the newest first."""
        after: dict[str, str] = {}
        while True:
            page = self._json("GET", "/v1/videos", params={"limit": "100", **after})
            yield from page["data"]
            if not page["has_more"]:
                return
            after = {"after": page["last_id"]}

    def wait(self, video_id: str) -> dict[str, Any]:
        """Return a video once it is completed. Raises ServerError where it failed."""
        while True:
            response = self._send("GET", f"/v1/videos/{video_id}")
            video: dict[str, Any] = response.json()
            if video["status"] == "failed":
                raise ServerError(422, video["error"])
            if video["status"] == "completed":
                return video
            time.sleep(float(response.headers.get("openai-poll-after-ms", _POLL_SECONDS * 1000)) / 1000)

    def download(self, video_id: str, path: str | Path | None = None, *, variant: str = "video") -> bytes:
        """Return the content of a finished video, and write it to `path` where one is given."""
        content = self._send("GET", f"/v1/videos/{video_id}/content", params={"variant": variant}).content
        if path is not None:
            from diffusion_runtime.media.publish import publish_bytes

            publish_bytes(Path(path), content)
        return content

    def cancel_video(self, video_id: str) -> dict[str, Any]:
        return self._json("POST", f"/v1/videos/{video_id}/cancel")

    def delete_video(self, video_id: str) -> dict[str, Any]:
        return self._json("DELETE", f"/v1/videos/{video_id}")

    def generate_images(self, prompt: str, **fields: Any) -> list[bytes]:
        """Make images and return their contents."""
        answer = self._json("POST", "/v1/images/generations", json={"prompt": prompt, **fields})
        return [base64.b64decode(each["b64_json"]) for each in answer["data"]]

    def explain(self, **fields: Any) -> dict[str, Any]:
        """Return what a request would run and cost; nothing is made."""
        return self._json("POST", "/v1/explain", json=fields)

    def models(self) -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = self._json("GET", "/v1/models")["data"]
        return data

    def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        value: dict[str, Any] = self._send(method, path, **options).json()
        return value

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        import httpx

        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ServerError(0, {"message": f"the server cannot be reached: {error}"}) from error
        if response.is_success:
            return response
        try:
            found = response.json()["error"]
        except (ValueError, KeyError, TypeError):
            found = {}
        raise ServerError(response.status_code, found)
