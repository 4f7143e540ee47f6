"""The engine's connection to the server."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from diffusion_runtime.serving.engine_channel import SOCKET_FILE

ENGINE = """
import sys, time
from pathlib import Path
from diffusion_runtime.serving.engine_channel import Channel
Channel(Path(sys.argv[1])).send("ready")
time.sleep(60)
"""


def test_an_engine_ends_when_its_server_goes_with_messages_unread(tmp_path: Path) -> None:
    """The kernel then resets the connection, where it else closes it."""
    folder = tmp_path / "connection"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / SOCKET_FILE))
        server.listen()
        engine = subprocess.Popen((sys.executable, "-c", ENGINE, str(folder)))
        connection, _ = server.accept()
        connection.recv(1)
        connection.close()
        try:
            assert engine.wait(timeout=30) == 0
        finally:
            engine.kill()
            engine.wait()
    assert not folder.exists()
