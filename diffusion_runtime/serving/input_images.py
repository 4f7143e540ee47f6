"""Images that come with a request: sniffed, bounded, and fetched from hosts that the operator allows."""

from __future__ import annotations

import base64
import binascii
import io
import ipaddress
import socket
import warnings
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

from diffusion_runtime.errors import shown
from diffusion_runtime.serving.api_errors import invalid

_MAX_URL_BYTES = 20 * 2**20
_MAX_REDIRECTS = 3
_FETCH_SECONDS = 10.0
# Format of Pillow, extension, and how its files begin.
_KINDS = (
    ("PNG", "png", lambda content: content.startswith(b"\x89PNG\r\n\x1a\n")),
    ("JPEG", "jpg", lambda content: content.startswith(b"\xff\xd8\xff")),
    ("WEBP", "webp", lambda content: content[:4] == b"RIFF" and content[8:12] == b"WEBP"),
)


def check_image(field: str, content: bytes, max_pixels: int) -> str:
    """Return the extension of an image by its first bytes, whatever its name or type said. Nothing is decoded: its
    header says how large it is.

    Raises ApiError for what is no PNG, JPEG or WebP and for one of more than max_pixels.
    """
    found = next((each for each in _KINDS if each[2](content)), None)
    if found is None:
        raise invalid(field, f"{field}: expected a PNG, JPEG or WebP image")
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=(found[0],)) as image:
                width, height = image.size
    # Any exception: a decoder may raise anything on untrusted bytes.
    except Exception as error:
        raise invalid(field, f"{field}: the image is damaged: {type(error).__name__}") from error
    if width * height > max_pixels:
        raise invalid(field, f"{field}: the image has {width} x {height} pixels, at most {max_pixels} are taken")
    return found[1]


def data_of_url(field: str, url: str) -> bytes:
    """Return the content of a data: URL. Raises ApiError."""
    head, comma, text = url.partition(",")
    if not comma:
        raise invalid(field, f"{field}: a data: URL has a comma before its data, got {shown(url[:40])}")
    try:
        if head.endswith(";base64"):
            return base64.b64decode(text, validate=True)
        return unquote_to_bytes(text)
    except (binascii.Error, ValueError) as error:
        raise invalid(field, f"{field}: the data: URL is not base64: {error}") from error


def fetch_image(field: str, url: str, hosts: Sequence[str]) -> bytes:
    """Fetch an image from a host that the operator allows; blocks. The address that is connected to is the one that was
    checked, so that a name cannot mean another one a moment later; redirects are checked alike.

    Raises ApiError.
    """
    import httpx

    for _ in range(_MAX_REDIRECTS + 1):
        host, address = checked_address(field, url, hosts)
        parts = urlsplit(url)
        literal = f"[{address}]" if ":" in address else address
        port = f":{parts.port}" if parts.port else ""
        target = parts._replace(netloc=f"{literal}{port}").geturl()
        headers = {"host": f"{host}{port}", "accept": "image/png, image/jpeg, image/webp"}
        try:
            with (
                httpx.Client(timeout=_FETCH_SECONDS, trust_env=False, follow_redirects=False) as client,
                client.stream("GET", target, headers=headers, extensions={"sni_hostname": host}) as response,
            ):
                if response.is_redirect:
                    url = urljoin(url, response.headers.get("location", ""))
                    continue
                if response.status_code != 200:
                    raise invalid(field, f"{field}: {host} answered {response.status_code}")
                return _read_bounded(field, response)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise invalid(field, f"{field}: {host} cannot be read: {type(error).__name__}") from error
    raise invalid(field, f"{field}: more than {_MAX_REDIRECTS} redirects")


def _read_bounded(field: str, response: Any) -> bytes:
    content = b""
    for part in response.iter_bytes():
        content += part
        if len(content) > _MAX_URL_BYTES:
            raise invalid(field, f"{field}: the image has more than {_MAX_URL_BYTES} bytes")
    return content


def checked_address(field: str, url: str, hosts: Sequence[str]) -> tuple[str, str]:
    """Return the host of a URL and the public address to connect to. Raises ApiError for a host that is not allowed,
    and for one with an address of this machine or its network."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port or 443
    except ValueError as error:
        raise invalid(field, f"{field}: {shown(url[:80])} is no URL") from error
    if parts.scheme != "https" or parts.username is not None or not host:
        raise invalid(field, f"{field}: expected https://HOST/..., got {shown(url[:80])}", "forbidden_parameter")
    if not any(host == each or (each.startswith("*.") and host.endswith(each[1:])) for each in hosts):
        allowed = f"; allowed: {', '.join(hosts)}" if hosts else ""
        raise invalid(
            field, f"{field}: this server fetches nothing from {host}{allowed}; send the image", "forbidden_parameter"
        )
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise invalid(field, f"{field}: {host} is unknown") from error
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    for address in addresses:
        if not is_public(address):
            raise invalid(field, f"{field}: {host} is an address of this network", "forbidden_parameter")
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
