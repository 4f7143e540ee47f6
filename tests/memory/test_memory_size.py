"""Amounts of memory as text."""

from __future__ import annotations

import pytest
from tables import table

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.core.memory_size import parse_size, size_text
from diffusion_runtime.errors import ConfigError

SIZES = {
    "12GB": 12 * 10**9,
    "12 GB": 12 * 10**9,
    "12gib": 12 * 2**30,
    "11.5GiB": int(11.5 * 2**30),
    "800MB": 8 * 10**8,
    "1TB": 10**12,
    "0.5kb": 500,
}
NO_SIZES = (
    "12",
    "12e9",
    "",
    "GB",
    "-1GB",
    "0GB",
    "1e3GB",
    "12 G",
    "12GBs",
    "9999TB",
    "٣GB",
    12,
    12.0,
    True,
    None,
    b"1GB",
    "1" * 99,
)


@table(("text", "num_bytes"), SIZES.items(), SIZES)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text, "memory_limit") == num_bytes


@table("value", NO_SIZES)
def test_what_is_no_size_is_named(value: object) -> None:
    with pytest.raises(ConfigError, match=r"memory_limit: expected .*got "):
        parse_size(value, "memory_limit")


def test_a_config_refuses_what_is_no_size_or_mode() -> None:
    with pytest.raises(ConfigError, match="number with a unit, such as 12GB"):
        RuntimeConfig(memory_limit="12")
    with pytest.raises(ConfigError, match=r"offload: unknown value 'layer'\. Did you mean 'layers'"):
        RuntimeConfig(offload="layer")
    assert RuntimeConfig(memory_limit="2GB").memory_limit_bytes == 2 * 10**9


def test_sizes_are_shown_in_the_unit_the_flag_takes() -> None:
    assert [size_text(each) for each in (11.36e9, 254e6, 5000)] == ["11.36 GB", "254 MB", "0.01 MB"]
