"""Host: an actor in one bundle of a gang, which starts one rank of the engine there; replica: the gang of hosts.

The rank is a process of its own, as on one machine (`engine_process`), so that what ends it does not end the actor,
and nothing of Ray is in it.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.media.publish import publish_bytes
from diffusion_runtime.serving.engine_process import EngineProcess
from diffusion_runtime.serving.engines import EngineLost, Refused
from diffusion_runtime.serving.files import ID, INPUTS, RESULTS
from diffusion_runtime.serving.input_images import names_files
from diffusion_runtime.untrusted.files import read_file
from diffusion_runtime.untrusted.json_text import parse_json

# In the server's storage, with a text that only this server wrote: a host that reads it shares the storage.
PROBE = ".cluster-probe"
# A server that has not been heard of for so long is gone; its replica is free for the next one.
GONE_SECONDS = 15.0
MAX_FILE = 2**30
# What is kept of an engine for a server that comes later.
_KEPT = ("hello", "loading", "warmed", "ready", "load_failed")
_LOOK_SECONDS = 0.2


class Host:
    """The asynchronous actor of one rank. Messages and answers are texts of JSON."""

    def __init__(self) -> None:
        self._kept: dict[str, str] = {}
        self._lines: asyncio.Queue[str] | None = None
        self._running: set[str] = set()
        # Names of the files that came with what runs.
        self._came: tuple[str, ...] = ()
        self._code: int | None = None
        self._heard = time.monotonic()

    def place(self) -> tuple[str, int]:
        """Return this node's address and a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return get_node_ip_address(), int(probe.getsockname()[1])

    async def start(self, given: str, rank: int, world_size: int, address: str, port: int) -> None:
        """Start the rank. given: its `config.json`, with `probe`, what the server wrote into PROBE of its storage."""
        values = parse_json(given)
        self._storage = self._server_storage = Path(values["storage"])
        self.is_shared = _reads(self._storage / PROBE, values.pop("probe"))
        if not self.is_shared:
            self._own = tempfile.TemporaryDirectory(prefix="diffusion-runtime-")
            self._storage = Path(self._own.name)
        for name in (RESULTS, INPUTS):
            (self._storage / name).mkdir(exist_ok=True)
        environment = {}
        if world_size > 1:
            # One device per host, so that each rank is alone on what it sees of its machine.
            numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            environment = {name: str(value) for name, value in numbers.items()}
            environment |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        self._engine = EngineProcess({**values, "storage": str(self._storage)}, self._take, environment)
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        self._code = await self._engine.run()
        self._kept.pop("ready", None)
        self._pass_on({"type": "ended", "code": self._code})

    def _take(self, message: dict[str, Any]) -> None:
        if message["type"] == "done":
            self._running.clear()
            self._remove(self._came)
        self._pass_on(message)

    def _pass_on(self, message: Mapping[str, Any]) -> None:
        text = json.dumps(message)
        if message["type"] in _KEPT:
            self._kept[message["type"]] = text
        if self._lines is not None:
            self._lines.put_nowait(text)

    def exit_code(self) -> int | None:
        """Return the exit code of the rank, None while it runs."""
        return self._code

    def seconds_unheard(self) -> float:
        """Return the seconds since a server was heard of."""
        return time.monotonic() - self._heard

    def alive(self) -> None:
        """Note that the server is there."""
        self._heard = time.monotonic()

    async def attach(self) -> AsyncIterator[str]:
        """Yield what the engine says to a server, from what it has said of its model on. The server before it is no
        longer told of anything, and its jobs are cancelled."""
        self.alive()
        await self._stop_running()
        lines = self._lines = asyncio.Queue()
        yield json.dumps({"type": "attached", "is_shared": self.is_shared})
        for text in tuple(self._kept.values()):
            yield text
        if self._code is not None:
            lines.put_nowait(json.dumps({"type": "ended", "code": self._code}))
        while self._lines is lines:
            try:
                yield await asyncio.wait_for(lines.get(), 1.0)
            except TimeoutError:
                if self.seconds_unheard() > GONE_SECONDS:
                    return

    async def _stop_running(self) -> None:
        """Have the engine stop what a server that is gone asked for."""
        for job in tuple(self._running):
            self._engine.send("cancel", job=job)
        while self._running and self._code is None:
            await asyncio.sleep(_LOOK_SECONDS)

    async def send(self, text: str, files: Mapping[str, bytes]) -> None:
        """Pass one message on to the engine. files: inputs of its jobs, where the storage is not shared."""
        self.alive()
        message = parse_json(text)
        kind = message.pop("type")
        if kind == "run":
            self._put(files)
            self._came = tuple(files)
            message["works"] = [self._here(work) for work in message["works"]]
            self._running = {work["job"] for work in message["works"]}
            if message.get("profile") is not None and not self.is_shared:
                error = "a profile is written into a storage that server and replicas share, which this one is not"
                self._pass_on({"type": "profiled", "id": message["profile"]["id"], "error": error})
                message["profile"] = None
        elif kind == "fork":
            message["work"] = self._here(message["work"])
            self._running.add(message["work"]["job"])
        try:
            self._engine.send(kind, **message)
        except EngineLost:
            self._pass_on({"type": "ended", "code": 1})

    async def ask(self, kind: str, text: str, files: Mapping[str, bytes]) -> str:
        """Return the engine's answer as JSON: `answer`, `error` of a refusal, or `lost`."""
        self.alive()
        self._put(files)
        work = parse_json(text)
        work["requests"] = [self._here({"request": each})["request"] for each in work["requests"]]
        try:
            return json.dumps({"answer": await self._engine.ask(kind, work)})
        except Refused as error:
            return json.dumps({"error": dict(error.details)})
        except EngineLost:
            return json.dumps({"lost": True})
        finally:
            self._remove(files)

    def take_files(self, job: str, stem: str) -> dict[str, bytes]:
        """Return the files of a result by their names, and remove them here."""
        assert ID.fullmatch(job)
        assert stem.startswith(job)
        found = {}
        for path in (self._storage / RESULTS).glob(f"{stem}*"):
            found[path.name] = read_file(path, max_bytes=MAX_FILE)
            path.unlink()
        return found

    def kill(self) -> None:
        """End the rank. Nobody is told any more that it is ready: a server that leases this replica before Serve has
        replaced it would lose a job to it."""
        self._kept.pop("ready", None)
        self._engine.kill()

    def _put(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            assert re.fullmatch(r"(video|img)_[0-9a-f]{32}-[a-z_]+-\d+\.[a-z0-9]{3,4}", name)
            publish_bytes(self._storage / INPUTS / name, content)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self._storage / INPUTS / name).unlink(missing_ok=True)

    def _here(self, work: Mapping[str, Any]) -> dict[str, Any]:
        """Return a work with the files of the server's storage in the storage here. A path elsewhere stays as it is,
        and is refused by the engine."""

        def moved(value: Any) -> Any:
            if isinstance(value, list):
                return [moved(each) for each in value]
            is_path = isinstance(value, str) and Path(value).is_relative_to(self._server_storage)
            return str(self._storage / Path(value).relative_to(self._server_storage)) if is_path else value

        request = {name: moved(value) if names_files(name) else value for name, value in work["request"].items()}
        found = {**work, "request": request}
        if "target" in work:
            found["target"] = moved(work["target"])
        if "names" in work:
            found["names"] = {moved(path): name for path, name in work["names"].items()}
        return found


class Replica:
    """The deployment: a gang of hosts, one per bundle of its placement group. given: as of Host.start. resources: of a
    host."""

    def __init__(self, given: str, resources: Mapping[str, float]) -> None:
        group = ray.util.get_current_placement_group()
        size = 1 if group is None else group.bundle_count
        name = f"diffusion-runtime-host-{secrets.token_hex(8)}"
        actor = ray.remote(Host)
        self._hosts = []
        for rank in range(size):
            strategy = PlacementGroupSchedulingStrategy(group, rank)
            options = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0)}
            host = actor.options(name=f"{name}-{rank}", namespace=NAMESPACE, scheduling_strategy=strategy, **options)
            self._hosts.append(host.remote())
        self._name = f"{name}-0"
        address, port = ray.get(self._hosts[0].place.remote())
        starts = [host.start.remote(given, rank, size, address, port) for rank, host in enumerate(self._hosts)]
        ray.get(starts)

    async def lease(self) -> AsyncIterator[str]:
        """Yield the name of the actor that speaks for the engine, and end once the server that asked is gone or the
        engine has ended. One lease at a time: it is what Serve scales by."""
        await self._hosts[0].alive.remote()
        yield self._name
        speaker = self._hosts[0]
        while await speaker.exit_code.remote() is None and await speaker.seconds_unheard.remote() < GONE_SECONDS:
            await asyncio.sleep(1.0)

    async def check_health(self) -> None:
        """Raises RuntimeError once a rank has ended: Serve then makes another replica."""
        codes = await asyncio.gather(*(host.exit_code.remote() for host in self._hosts))
        if any(code is not None for code in codes):
            raise RuntimeError(f"a rank of the engine has ended: {codes}")


# Of the actors that a server looks up by name.
NAMESPACE = "diffusion-runtime"


def _reads(path: Path, text: str) -> bool:
    """Return whether a file is here, and is the one that the server wrote."""
    try:
        return read_file(path, max_bytes=len(text) + 1).decode() == text
    except (DiffusionRuntimeError, ValueError):
        return False
