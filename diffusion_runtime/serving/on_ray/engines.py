"""Engines of a server as replicas of a Serve deployment: found again after a restart of the server, leased while they
are wanted, scaled by the leases."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import ConfigError, first_line
from diffusion_runtime.media.publish import publish_bytes, publish_text
from diffusion_runtime.serving.engines import BEAT_SECONDS, EngineLost, OnMessage, Refused, versions
from diffusion_runtime.serving.files import RESULTS, sync
from diffusion_runtime.serving.input_images import names_files
from diffusion_runtime.serving.on_ray.host import MAX_FILE, NAMESPACE, PROBE, Replica
from diffusion_runtime.serving.settings import ServerSettings
from diffusion_runtime.untrusted.files import read_file
from diffusion_runtime.untrusted.json_text import parse_json

_logger = logging.getLogger("diffusion_runtime.serving")
_DEPLOYMENT = "engine"
# Serve looks at a replica so often, and gives up on one that does not answer.
_HEALTH_SECONDS, _HEALTH_TIMEOUT_SECONDS = 2.0, 30.0
# Serve ends a replica that nobody leases after so long.
_DOWNSCALE_SECONDS = 5.0
_MAX_PROBE = 100
# States of an application that is used as it is.
_FOUND = (ApplicationStatus.RUNNING, ApplicationStatus.DEPLOYING, ApplicationStatus.UNHEALTHY)


class RayEngines:
    """One application of Serve. given: the config of the engines, in which `storage` is that of `settings`."""

    # 2.5 minutes at least: of a node that died, Serve offers the replicas for half a minute.
    max_starts = 10

    def __init__(self, settings: ServerSettings, given: Mapping[str, Any]) -> None:
        self._settings = settings
        self._given = given
        self._handle: Any = None
        self._name = ""

    async def connect(self) -> None:
        """Connect to the cluster, and find the replicas of an earlier server with this config or deploy them. Raises
        ConfigError."""
        try:
            await asyncio.to_thread(self._connect)
        except (ConnectionError, RayError, RayServeException, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"--ray {self._settings.ray}: {first_line(error)}; expected the address of a running cluster (`ray "
                "start --head`)"
            ) from error
        # Ray's own handlers write a stack trace, and then call these.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.getsignal(number))

    def _connect(self) -> None:
        settings = self._settings
        # Threads, not the main one: signals stay the server's.
        ray.init(
            address=settings.ray, namespace=NAMESPACE, log_to_driver=False, configure_logging=False,
            ignore_reinit_error=True,
        )  # fmt: skip
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.WARNING)
        config = RuntimeConfig.from_dict(self._given["config"])
        # A host's share is its bundle; how many replicas share a machine is the cluster's to say.
        given = {**self._given, "probe": self._probe(), "storage": str(settings.storage), "warm_up": False}
        given["preview"] = settings.preview
        text = json.dumps(given, sort_keys=True)
        fewest, most = settings.replicas
        resources = {"CPU": 1.0, **({} if config.device == "cpu" else {"GPU": 1.0})}
        if config.device == "auto" and not ray.cluster_resources().get("GPU"):
            resources.pop("GPU")
        owner = f"diffusion-runtime-{_digest(str(settings.storage))}-"
        scaling = [fewest, most, resources, config.parallel.num_processes, versions()]
        self._name = owner + _digest(text, json.dumps(scaling, sort_keys=True))
        serve.start(proxy_location="Disabled")
        found = {name: each.status for name, each in serve.status().applications.items()}
        for name in found:
            if name.startswith(owner) and (name != self._name or found[name] == ApplicationStatus.DEPLOY_FAILED):
                _logger.info("replicas of another config are removed")
                serve.delete(name)
        if found.get(self._name) in _FOUND:
            _logger.info("found the replicas of an earlier server")
        else:
            # Not until they are ready: for some of the replicas there may be no room yet.
            target = serve.RunTarget(self._application(text, resources, config), self._name, None)
            serve.run_many([target], wait_for_applications_running=False)
        # Serve makes a deployment a moment after its application, and refuses the handle of one until then.
        self._handle = serve.get_app_handle(self._name)

    def _application(self, given: str, resources: Mapping[str, float], config: RuntimeConfig) -> Any:
        fewest, most = self._settings.replicas
        scale: dict[str, Any] = {"num_replicas": fewest}
        if fewest != most:
            scale = {
                "autoscaling_config": {
                    "min_replicas": fewest,
                    "max_replicas": most,
                    "target_ongoing_requests": 1,
                    "upscale_delay_s": 0,
                    "downscale_delay_s": _DOWNSCALE_SECONDS,
                    "metrics_interval_s": 1.0,
                    "look_back_period_s": 2.0,
                }
            }
        deployment = serve.deployment(
            name=_DEPLOYMENT,
            # The hosts have the resources of the bundles; this actor does no work.
            ray_actor_options={"num_cpus": 0},
            placement_group_bundles=[dict(resources)] * config.parallel.num_processes,
            placement_group_strategy="PACK",
            max_ongoing_requests=1,
            health_check_period_s=_HEALTH_SECONDS,
            health_check_timeout_s=_HEALTH_TIMEOUT_SECONDS,
            graceful_shutdown_timeout_s=self._settings.limits.drain,
            graceful_shutdown_wait_loop_s=1.0,
            **scale,
        )(Replica)
        return deployment.bind(given, dict(resources))

    def _probe(self) -> str:
        """Return the text of a file in the storage by which a host finds out whether it has the same one."""
        path = self._settings.storage / PROBE
        if not path.is_file():
            publish_text(path, secrets.token_hex(16))
        return read_file(path, max_bytes=_MAX_PROBE).decode()

    def engine(self, index: int, given: Mapping[str, Any], on_message: OnMessage) -> RayEngine:  # noqa: ARG002
        """Return the lease of a replica, whichever is free; all were given the same config."""
        return RayEngine(self._handle, self._settings.storage, on_message)

    async def close(self) -> None:
        """Remove the replicas: a server that was ended in order needs none. One that is killed leaves them for the
        next."""
        if self._handle is not None:
            with contextlib.suppress(Exception):  # a cluster that is gone
                await asyncio.wait_for(asyncio.to_thread(serve.delete, self._name, False), BEAT_SECONDS * 2)
        await asyncio.to_thread(ray.shutdown)


class RayEngine:
    """The engine of one replica, leased. handle: of the deployment; storage: of the server."""

    def __init__(self, handle: Any, storage: Path, on_message: OnMessage) -> None:
        self._handle = handle
        self._storage = storage
        self._on_message = on_message
        self._host: Any = None
        self._is_shared = True
        self._released = asyncio.Event()
        self._calls: set[asyncio.Future[Any]] = set()

    async def run(self) -> int:
        """Lease a replica, pass on its engine's messages until it ends or is let go, and return its exit code."""
        lease = self._handle.options(stream=True).lease.remote()
        beat = asyncio.ensure_future(self._beat())
        work = asyncio.ensure_future(self._follow(lease))
        released = asyncio.ensure_future(self._released.wait())
        try:
            await asyncio.wait((work, released), return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else -9
        except (RayError, RayServeException, ConnectionError) as error:
            _logger.error("a replica is lost: %s", type(error).__name__)
            return 1
        finally:
            self._host = None
            for task in (beat, work, released, *self._calls):
                task.cancel()
            await asyncio.gather(beat, work, released, *self._calls, return_exceptions=True)
            lease.cancel()

    async def _follow(self, lease: Any) -> int:
        self._on_message({"type": "loading", "stage": "waiting for a replica of the cluster"})
        name = await anext(aiter(lease))
        self._host = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
        async for reference in self._host.attach.options(num_returns="streaming").remote():
            message = parse_json(await reference)
            if message["type"] == "attached":
                self._is_shared = message["is_shared"]
            elif message["type"] == "ended":
                return int(message["code"])
            else:
                if message["type"] == "finished" and not self._is_shared:
                    await self._fetch(message)
                self._on_message(message)
        return 1

    async def _beat(self) -> None:
        """Tell the host of this server, which it outlives; and the server that a replica is awaited."""
        while True:
            if self._host is None:
                self._on_message({"type": "alive"})
            else:
                self._call(self._host.alive.remote())
            await asyncio.sleep(BEAT_SECONDS)

    async def ask(self, kind: str, work: Mapping[str, Any]) -> Any:
        """Return the answer to a question. Raises Refused and EngineLost."""
        if self._host is None:
            raise EngineLost("the engine has ended")
        files = await asyncio.to_thread(self._inputs, work["requests"])
        try:
            answer = parse_json(await self._host.ask.remote(kind, json.dumps(work), files))
        except RayError as error:
            raise EngineLost("the engine ended") from error
        if "error" in answer:
            raise Refused(answer["error"])
        if "lost" in answer:
            raise EngineLost("the engine ended")
        return answer["answer"]

    def send(self, kind: str, /, **values: Any) -> None:
        """Send one message. Raises EngineLost."""
        if self._host is None:
            raise EngineLost("the engine has ended")
        files = self._inputs([work["request"] for work in values.get("works") or ()])
        self._call(self._host.send.remote(json.dumps({"type": kind, **values}), files))

    def kill(self) -> None:
        """End the engine; Serve makes another replica."""
        if self._host is not None:
            self._call(self._host.kill.remote())
        self._released.set()

    def release(self) -> None:
        """Give the replica back, which Serve ends once there are too many."""
        self._released.set()

    def _call(self, reference: Any) -> None:
        """Have a call end beside; that it fails is seen by the stream of messages."""

        async def ended() -> None:
            with contextlib.suppress(RayError):
                await reference

        task = asyncio.ensure_future(ended())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _inputs(self, requests: Any) -> dict[str, bytes]:
        """Return the input files of requests, where the replica does not share the storage."""
        if self._is_shared:
            return {}
        values = [value for request in requests for name, value in request.items() if names_files(name)]
        paths = [Path(path) for value in values for path in (value if isinstance(value, list) else [value]) if path]
        return {path.name: read_file(path, max_bytes=MAX_FILE) for path in paths}

    async def _fetch(self, message: Mapping[str, Any]) -> None:
        """Publish the files of a result, which came through the object store."""
        name = str(message["file"]["name"])
        files = await self._host.take_files.remote(message["job"], Path(name).stem)
        await asyncio.to_thread(self._publish, message["job"], files)

    def _publish(self, job: str, files: Mapping[str, bytes]) -> None:
        folder = self._storage / RESULTS
        for name, content in files.items():
            assert name.startswith(job)
            assert "/" not in name
            publish_bytes(folder / name, content)
            sync(folder / name)
        sync(folder)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
