"""Images in data: URLs, and at https: addresses of allowed hosts (protection against server-side request forgery)."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import socket
import time
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

from diffusion_runtime.errors import ForbiddenAddressError, RequestError, shown

if TYPE_CHECKING:
    import httpx

MAX_URL_BYTES = 20 * 2**20
_MAX_REDIRECTS = 3
_MAX_ADDRESS = 8192
# Without an answer or further bytes; and of one image in all.
_FETCH_SECONDS, _ALL_SECONDS = 10.0, 60.0
# Base64 has 4 characters for 3 bytes. Escapes are read one by one, while nothing else runs.
_MAX_DATA_CHARACTERS, _MAX_ESCAPED_CHARACTERS = MAX_URL_BYTES // 3 * 4 + 4, 2**20
# Format of Pillow, extension, and how its files begin.
_KINDS = (
    ("PNG", "png", lambda content: content.startswith(b"\x89PNG\r\n\x1a\n")),
    ("JPEG", "jpg", lambda content: content.startswith(b"\xff\xd8\xff")),
    ("WEBP", "webp", lambda content: content[:4] == b"RIFF" and content[8:12] == b"WEBP"),
)


def image_kind(field: str, content: bytes) -> tuple[str, str]:
    """Return Pillow's format and the extension of an image by its first bytes, whatever its name or type said. Raises
    RequestError for what is no PNG, JPEG or WebP."""
    found = next((each for each in _KINDS if each[2](content)), None)
    if found is None:
        raise RequestError(f"{field}: expected a PNG, JPEG or WebP image")
    return found[0], found[1]


def data_of_url(field: str, url: str) -> bytes:
    """Return the content of a data: URL. Raises RequestError."""
    head, comma, text = url.partition(",")
    if not comma:
        raise RequestError(f"{field}: a data: URL has a comma before its data, got {shown(url[:40])}")
    is_base64 = head.endswith(";base64")
    most = _MAX_DATA_CHARACTERS if is_base64 else _MAX_ESCAPED_CHARACTERS
    if len(text) > most:
        instead = "" if is_base64 else "; write it in base64, or send the image as a file"
        raise RequestError(f"{field}: the data: URL has {len(text)} characters, at most {most} are taken{instead}")
    try:
        content = base64.b64decode(text, validate=True) if is_base64 else unquote_to_bytes(text)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{field}: the data: URL is not base64: {error}") from error
    if len(content) > MAX_URL_BYTES:
        raise RequestError(f"{field}: the image has more than {MAX_URL_BYTES} bytes")
    return content


def fetch_image(field: str, url: str, hosts: Sequence[str], instead: str) -> bytes:
    """Fetch an image from one of `hosts`; blocks. The address that is connected to is the one that was checked, so that
    a name cannot mean another one a moment later; redirects are checked alike. instead: what to do where a host is not
    allowed, for the message, with {host}.

    Raises ForbiddenAddressError for an address that nothing may be fetched from, also where a proxy of the environment
    would connect in place of this process; RequestError for one that cannot be read.
    """
    import httpx

    ends = time.monotonic() + _ALL_SECONDS
    for _ in range(_MAX_REDIRECTS + 1):
        host, address = checked_address(field, url, hosts, instead)
        parts = urlsplit(url)
        literal = f"[{address}]" if ":" in address else address
        port = f":{parts.port}" if parts.port else ""
        target = parts._replace(netloc=f"{literal}{port}", fragment="").geturl()
        headers = {
            "host": f"{host}{port}",
            "accept": "image/png, image/jpeg, image/webp",
            "accept-encoding": "identity",
        }
        try:
            with (
                httpx.Client(timeout=_FETCH_SECONDS, trust_env=False, follow_redirects=False) as client,
                client.stream("GET", target, headers=headers, extensions={"sni_hostname": host}) as response,
            ):
                if response.is_redirect:
                    url = urljoin(url, response.headers.get("location", ""))
                    continue
                if response.status_code != 200:
                    raise RequestError(f"{field}: {host} answered {response.status_code}")
                return _read_bounded(field, response, ends)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RequestError(f"{field}: {host} cannot be read: {type(error).__name__}") from error
    raise RequestError(f"{field}: more than {_MAX_REDIRECTS} redirects")


def _read_bounded(field: str, response: httpx.Response, ends: float) -> bytes:
    """Read the bytes as they are sent: nothing is decompressed."""
    content = b""
    for part in response.iter_raw():
        content += part
        if len(content) > MAX_URL_BYTES:
            raise RequestError(f"{field}: the image has more than {MAX_URL_BYTES} bytes")
        if time.monotonic() > ends:
            raise RequestError(f"{field}: the image takes longer than {_ALL_SECONDS:g} seconds")
    return content


def checked_address(field: str, url: str, hosts: Sequence[str], instead: str) -> tuple[str, str]:
    """Return the host of a URL and the public address to connect to. instead: as in fetch_image.

    Raises ForbiddenAddressError for a host that is not allowed, for one with an address of this machine or its network,
    and for one behind a proxy; RequestError for a text that is no URL and a host that is unknown.
    """
    try:
        if len(url) > _MAX_ADDRESS:
            raise ValueError
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port or 443
    except ValueError as error:
        raise RequestError(f"{field}: {shown(url[:80])} is no URL") from error
    if parts.scheme != "https" or parts.username is not None or not host:
        # Not the URL itself: it may hold a password.
        raise ForbiddenAddressError(
            f"{field}: expected https://HOST/... without a user name, got {shown(f'{parts.scheme}://...{host}')}"
        )
    if not any(host == each.lower() or (each.startswith("*.") and host.endswith(each[1:].lower())) for each in hosts):
        allowed = f"; allowed: {', '.join(hosts)}" if hosts else ""
        raise ForbiddenAddressError(
            f"{field}: nothing is fetched from {host}{allowed}; {instead.format(host=shown(host)[1:-1])}"
        )
    if {"https", "all"} & urllib.request.getproxies().keys() and not urllib.request.proxy_bypass(host):
        raise ForbiddenAddressError(
            f"{field}: the environment names a proxy, which would connect to {host} in place of this process, so that "
            f"its address could not be checked; add {host} to NO_PROXY, or download the image"
        )
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"{field}: {host} is unknown") from error
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    for address in addresses:
        if not is_public(address):
            raise ForbiddenAddressError(f"{field}: {host} is an address of this network")
    return host, addresses[0]


def is_public(address: str) -> bool:
    """Return whether an address is one of the internet; what another stands for (v4 in v6, 6to4, NAT64) counts."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        nat64 = ipaddress.ip_network("64:ff9b::/96")
        inner = (
            parsed.ipv4_mapped
            or parsed.sixtofour
            or (ipaddress.IPv4Address(parsed.packed[-4:]) if parsed in nat64 else None)
        )
        if inner is not None:
            return is_public(str(inner))
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved
