"""Server process: the application under uvicorn, with logs, draining on SIGTERM, and a time limit for headers.

`python -m diffusion_runtime.serving.server FOLDER` serves what the settings in it say, which `serve` writes where its
own process has imported torch to read its flags.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import signal
import socket
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from diffusion_runtime.config import LoraConfig
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, MissingPackageError
from diffusion_runtime.serving.app import build_app
from diffusion_runtime.serving.dispatcher import Dispatcher
from diffusion_runtime.serving.engine_process import LocalEngines
from diffusion_runtime.serving.engines import Engines
from diffusion_runtime.serving.files import ResultFiles
from diffusion_runtime.serving.jobs import Jobs
from diffusion_runtime.serving.log_records import log_to_stderr
from diffusion_runtime.serving.metrics import Metrics
from diffusion_runtime.serving.on_ray.authentication import check_cluster
from diffusion_runtime.serving.settings import Access, Limits, ServerSettings
from diffusion_runtime.untrusted.json_text import read_json_file

_logger = logging.getLogger("diffusion_runtime.serving")
# What a client's headers may take, and how long answers that are under way have once the server ends.
_HEADER_SECONDS = 30.0
_LEAVE_SECONDS = 5
_MAX_CONNECTIONS = 1000
_LOOK_SECONDS = 0.2


def serve(settings: ServerSettings, config: Mapping[str, Any], log_format: str | None = None) -> int:
    """Serve until a signal ends it, and return the exit code. config: the fields of RuntimeConfig, as JSON.

    Raises ConfigError for a storage or an address that cannot be used.
    """
    log_to_stderr(log_format)
    # Other machines may write into it.
    settings = dataclasses.replace(settings, storage=settings.storage.absolute())
    files = ResultFiles(settings.storage)
    try:
        jobs = Jobs(settings.storage / "jobs.sqlite3")
    except sqlite3.Error as error:
        raise ConfigError(
            f"--storage {settings.storage}: {error}; another server may be using it: give each its own"
        ) from error
    given = {**_pinned(config, settings.loras), "names": _public_names(settings, config)}
    dispatcher = Dispatcher(settings, _engines(settings, given), given, jobs, files, Metrics())
    listener = _listen(settings)
    app = build_app(dispatcher)
    server = _Server(
        uvicorn.Config(
            app,
            http=_BoundedHeaders,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_graceful_shutdown=_LEAVE_SECONDS,
        ),
        dispatcher,
    )
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    _logger.info("listening on %s", address, extra={"address": address})
    try:
        asyncio.run(server.run_until_over(listener))
    finally:
        jobs.close()
    return 0 if dispatcher.engines.failure is None else int(dispatcher.engines.failure["exit_code"])


def _engines(settings: ServerSettings, given: Mapping[str, Any]) -> Engines:
    """Return the place where the engines run. Raises ConfigError and MissingPackageError."""
    if settings.ray is None:
        return LocalEngines()
    check_cluster(settings.ray)
    try:
        from diffusion_runtime.serving.on_ray.engines import RayEngines
    except ImportError as error:
        raise MissingPackageError(f"--ray needs {error.name}: pip install 'diffusion-runtime[ray]'") from error
    return RayEngines(settings, given)


class _Server(uvicorn.Server):
    """uvicorn's server, which drains at the first signal and ends at the second one."""

    def __init__(self, config: uvicorn.Config, dispatcher: Dispatcher) -> None:
        super().__init__(config)
        self._dispatcher = dispatcher
        self._drain: asyncio.Task[None] | None = None

    async def run_until_over(self, listener: socket.socket) -> None:
        watch = asyncio.create_task(self._end_without_model())
        try:
            await self.serve(sockets=[listener])
        finally:
            watch.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain is not None or sig == signal.SIGINT:
            super().handle_exit(sig, frame)
            return
        _logger.info("draining: no more jobs are taken")
        self._drain = asyncio.get_event_loop().create_task(self._end_drained())

    async def _end_drained(self) -> None:
        await self._dispatcher.drain()
        self.should_exit = True

    async def _end_without_model(self) -> None:
        """End the server when its model cannot be loaded, with the reason."""
        while self._dispatcher.engines.failure is None:
            await asyncio.sleep(_LOOK_SECONDS)
        _logger.error("the model cannot be loaded: %s", self._dispatcher.engines.failure["message"])
        self.should_exit = True


class _BoundedHeaders(H11Protocol):
    """uvicorn's protocol, with a time limit for the headers of a request: clients that send a byte now and then would
    hold connections for ever."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._arm()
        else:
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(_HEADER_SECONDS, self.transport.close)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _listen(settings: ServerSettings) -> socket.socket:
    """Return a socket that listens. Raises ConfigError for an address that cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host {settings.host} --port {settings.port}: {error.strerror or error}") from error
    return listener


def _pinned(config: Mapping[str, Any], loras: Mapping[str, LoraConfig]) -> dict[str, Any]:
    """Return what engines are given of the model: files of the hub by their commit of now, so that all replicas, and
    those that start later, have the same. Raises ModelLoadError."""
    from diffusion_runtime.models.lora_sources import at_commit
    from diffusion_runtime.models.model_sources import current_commit

    offline = bool(config.get("offline"))

    def plain(lora: LoraConfig) -> dict[str, Any]:
        return dataclasses.asdict(at_commit(lora, offline=offline))

    changes: dict[str, Any] = {"lora": [plain(LoraConfig.parse(lora)) for lora in config.get("lora") or ()]}
    if (commit := current_commit(config["model_path"], config.get("revision"), offline=offline)) is not None:
        changes["revision"] = commit
    return {"config": {**config, **changes}, "loras": {name: plain(lora) for name, lora in loras.items()}}


def _public_names(settings: ServerSettings, config: Mapping[str, Any]) -> dict[str, str]:
    """Return a public name of every path of this machine that recipes and reports would hold."""
    given = [(lora.path, name) for name, lora in settings.loras.items()]
    given += [(lora["path"], Path(lora["path"]).name) for lora in config.get("lora") or ()]
    for name, value in config.items():
        if name.endswith("_path") and isinstance(value, str):
            given.append((value, settings.name if name == "model_path" else Path(value).name))
    # Names of what is in the package or on the hub are public already.
    return {path: name for path, name in reversed(given) if os.sep in path and Path(path).exists()}


def settings_to_dict(settings: ServerSettings) -> dict[str, Any]:
    """Return plain values that `settings_from_dict` reads back."""
    return {**dataclasses.asdict(settings), "storage": str(settings.storage)}


def settings_from_dict(values: Mapping[str, Any]) -> ServerSettings:
    loras = {name: LoraConfig.parse(each) for name, each in values["loras"].items()}
    access = {name: tuple(each) for name, each in values["access"].items()}
    return ServerSettings(
        **{
            **values,
            "storage": Path(values["storage"]),
            "replicas": tuple(values["replicas"]),
            "limits": Limits(**values["limits"]),
            "access": Access(**access),
            "loras": loras,
        }
    )


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0])
    given = read_json_file(folder / "settings.json")
    shutil.rmtree(folder)
    try:
        return serve(settings_from_dict(given["settings"]), given["config"], given["log_format"])
    except DiffusionRuntimeError as error:
        _logger.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
