"""Amounts of memory as text: `12GB` is 12 * 10^9 bytes, `12GiB` is 12 * 2^30."""

from __future__ import annotations

import re

from diffusion_runtime.errors import ConfigError, shown

_UNITS = {
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
# No machine of today has more, and every product with it fits into 64 bits.
_MAX_BYTES = 10**15
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([a-z]{2,3})", re.ASCII | re.IGNORECASE)


def parse_size(value: object, key: str) -> int:
    """Bytes of a text such as `12GB`, `11.5 GiB` or `800MB`. key: what was given, for the message.

    Raises ConfigError for anything else; a number without a unit is refused, because 12 could be bytes or gigabytes.
    """
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    factor = None if match is None else _UNITS.get(match[2].lower())
    if match is None or factor is None:
        raise ConfigError(f"{key}: expected a number with a unit, such as 12GB, 11.5GiB or 800MB, got {shown(value)}")
    num_bytes = int(float(match[1]) * factor)
    if not 0 < num_bytes <= _MAX_BYTES:
        raise ConfigError(f"{key}: expected more than 0 and at most 1000TB, got {shown(value)}")
    return num_bytes


def size_text(num_bytes: float) -> str:
    """`11.36 GB`, `254 MB`: decimal units, as memory is sold and as --memory-limit takes it."""
    if abs(num_bytes) >= 1e9:
        return f"{num_bytes / 1e9:.2f} GB"
    return f"{num_bytes / 1e6:.0f} MB" if abs(num_bytes) >= 1e6 else f"{num_bytes / 1e6:.2f} MB"


def limit_text(num_bytes: int) -> str:
    """`77MB`, `12.4GB`: what to give --memory-limit so that as many bytes fit."""
    if num_bytes >= 10**9:
        return f"{-(-num_bytes // 10**8) / 10:.1f}GB"
    return f"{-(-num_bytes // 10**6)}MB"
