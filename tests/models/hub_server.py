"""A hub in miniature on this machine: answers as huggingface.co does for the models it is given.

Run as `python hub_server.py FOLDER`: every FOLDER/owner/name is a model, FOLDER/owner/name@v1 its revision v1. Prints
its address, then one line per request.
"""

from __future__ import annotations

import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def commit_of(revision: str) -> str:
    return COMMIT if revision == "main" else hashlib.sha1(revision.encode()).hexdigest()


class Hub(BaseHTTPRequestHandler):
    root = Path()
    # What was asked, and the files of models that nobody gets.
    requests: ClassVar[list[tuple[str, str]]] = []
    refused: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        print(format % args, flush=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        in_api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        model = self.root / "/".join(parts[:2])
        named = parts[3] if len(parts) > 3 else "main"
        revision = next((name for name in ("main", "v1") if named in (name, commit_of(name))), None)
        folder = model if revision == "main" else model.with_name(f"{model.name}@{revision}")
        self.requests.append((self.command, path))
        if not model.is_dir():
            self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, with_body)
        elif revision is None or not folder.is_dir():
            self._send(404, b'{"error": "Revision not found"}', {"X-Error-Code": "RevisionNotFound"}, with_body)
        elif in_api:
            self._send(200, json.dumps(self._listing(folder, parts, commit_of(revision))).encode(), {}, with_body)
        else:
            content = (folder / "/".join(parts[4:])).read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit_of(revision)}
            is_refused = "/".join(parts[4:]) in self.refused
            self._send(403 if is_refused else 200, b"" if is_refused else content, headers, with_body)

    def _listing(self, model: Path, parts: list[str], commit: str) -> object:
        files = [path for path in sorted(model.rglob("*")) if path.is_file()]
        if "tree" in parts:
            return [
                {
                    "type": "file",
                    "path": path.relative_to(model).as_posix(),
                    "size": path.stat().st_size,
                    "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
                }
                for path in files
            ]
        siblings = [{"rfilename": path.relative_to(model).as_posix(), "size": path.stat().st_size} for path in files]
        return {"id": "/".join(parts[:2]), "sha": commit, "private": False, "tags": [], "siblings": siblings}

    def _send(self, status: int, content: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)


if __name__ == "__main__":
    Hub.root = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
