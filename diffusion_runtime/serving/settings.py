"""Settings of a server: where it listens, who may use it, and the limits of what it takes."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diffusion_runtime.config import LoraConfig
from diffusion_runtime.errors import ConfigError, shown

KIB, MIB, GIB = 2**10, 2**20, 2**30
# Each has a connection to the HTTP process.
MAX_REPLICAS = 256
# How estimates are shown: the first that is to be had, a linear map of the latents, the decoder, not at all.
PREVIEWS = ("auto", "linear", "decode", "off")

_ABOVE_ZERO = (
    "request_timeout",
    "keep",
    "read_timeout",
    "hang_timeout",
    "max_body",
    "max_storage",
    "max_upload_pixels",
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on requests, the queue and the storage.

    max_pixels: width x height of a frame. max_batch_size: requests that run together, None for what
    `engines.batch_size` says. max_overtakes: how often a waiting job may be overtaken by jobs that join a batch.
    request_timeout: seconds that a job may run; queue_timeout: seconds that it may wait, 0 for any. max_body,
    max_storage: bytes. max_upload_pixels: of an image that is sent. keep: seconds that a finished job is kept. drain:
    seconds that running jobs have to finish after SIGTERM. read_timeout: seconds between two parts of a request.
    hang_timeout: seconds without progress of a batch after which its engine is replaced. idle: seconds without a job
    after which a replica above the fewest ends.
    """

    max_queue: int = 64
    max_queue_per_key: int = 16
    max_batch_size: int | None = None
    max_overtakes: int = 8
    request_timeout: float = 3600.0
    queue_timeout: float = 0.0
    max_pixels: int = 4096 * 4096
    max_frames: int = 1025
    max_steps: int = 200
    max_body: int = 64 * MIB
    max_upload_pixels: int = 40_000_000
    keep: float = 24 * 3600.0
    max_storage: int = 20 * GIB
    drain: float = 30.0
    read_timeout: float = 30.0
    hang_timeout: float = 900.0
    idle: float = 300.0

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_queue_per_key", "max_batch_size", "max_pixels", "max_frames", "max_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: expected 1 or more, got {value}")
        for name in ("max_overtakes", "queue_timeout", "drain", "idle"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        for name in _ABOVE_ZERO:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: expected more than 0, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Access:
    """Access rules. api_keys: one of them is needed where there are any, or one of admin_keys, which also see the jobs
    of other keys, and alone set LoRA files and record profiles. hosts: names by which the server may be called beside
    localhost and addresses. url_hosts: from which images may be fetched, exact names or `*.suffix`. origins: web sites
    whose pages may call the server."""

    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    url_hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for origin in self.origins:
            if not re.fullmatch(r"https?://[\w.-]+(:\d+)?|https?://\[[0-9a-f:]+\](:\d+)?", origin):
                raise ConfigError(f"allow_origin: expected https://HOST or https://HOST:PORT, got {shown(origin)}")

    def accepts(self, key: str) -> bool:
        """Return whether a key is one of the server's, in a time that does not depend on where they differ."""
        return _is_one_of(key, (*self.api_keys, *self.admin_keys))

    def is_admin(self, key: str) -> bool:
        """Return whether a key is one of the admin's."""
        return _is_one_of(key, self.admin_keys)

    def allows_origin(self, origin: str, host: str) -> bool:
        """Return whether a page of this origin may call: the server's own, or one that was named. Without this, any web
        site could send forms to a server of this machine, whose answers it may not read. host: the Host header."""
        return origin in self.origins or origin.partition("://")[2].lower() == host.strip().lower()

    def allows_host(self, header: str) -> bool:
        """Return whether a Host header names this server. A page of another site that resolves its own name to this
        machine (DNS rebinding) sends that name."""
        name = host_name(header)
        return name == "localhost" or is_address(name) or name in {host.lower() for host in self.hosts}


def _is_one_of(key: str, keys: Sequence[str]) -> bool:
    given = hashlib.sha256(key.encode()).digest()
    # All of them, whichever fits: a generator would stop at the first.
    matches = [hmac.compare_digest(given, hashlib.sha256(each.encode()).digest()) for each in keys]
    return any(matches)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Everything that a server is started with. name: of the model in requests and answers. loras: files that requests
    may name. warm_up: one generation is made before the first job. preview: how estimates are shown while a job runs,
    one of PREVIEWS. replicas: how many engines run, at least and at most. ray: the address of a Ray cluster on which
    they run, `auto` for one that is found; None for processes of this machine."""

    storage: Path
    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    limits: Limits = field(default_factory=Limits)
    access: Access = field(default_factory=Access)
    loras: Mapping[str, LoraConfig] = field(default_factory=dict)
    insecure: bool = False
    has_metrics: bool = True
    warm_up: bool = True
    preview: str = "auto"
    replicas: tuple[int, int] = (1, 1)
    ray: str | None = None

    def __post_init__(self) -> None:
        fewest, most = self.replicas
        if not 0 <= fewest <= most or not 1 <= most <= MAX_REPLICAS:
            raise ConfigError(f"replicas: expected N, or MIN..MAX with at most {MAX_REPLICAS}, got {fewest}..{most}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: expected 0 to 65535, got {self.port}")
        if self.preview not in PREVIEWS:
            raise ConfigError(f"preview: expected one of {', '.join(PREVIEWS)}, got {shown(self.preview)}")
        if not is_loopback(self.host) and not self.access.api_keys and not self.insecure:
            raise ConfigError(
                f"host: {self.host} is reached from other machines, and there is no key; give --api-key-file FILE or "
                "the variable DIFFUSION_RUNTIME_API_KEY, or --insecure"
            )


def host_name(header: str) -> str:
    """Return the name in a Host header, without its port, in lower case; nothing for what is neither."""
    found = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d{1,5})?", header.strip().lower())
    return "" if found is None else found.group(1) or found.group(2)


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
