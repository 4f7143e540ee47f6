"""Which process this is, as launchers say it."""

from __future__ import annotations

import pytest

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.parallel.process_info import ProcessInfo, read_process_info

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "none",
}


def test_alone() -> None:
    assert read_process_info({}) is None
    assert read_process_info({"WORLD_SIZE": "4"}) is None
    assert read_process_info({"RANK": "0", "WORLD_SIZE": "1"}) is None


def test_among_others() -> None:
    assert read_process_info(TORCHRUN) == ProcessInfo(3, 4, 1, 2, "host", 1234, has_agent=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": "4"}, "RANK 4 is not below WORLD_SIZE 4"),
        ({"RANK": "-1"}, "RANK: expected a whole number of 0 or more, got '-1'"),
        ({"MASTER_PORT": ""}, "MASTER_PORT"),
        ({"MASTER_ADDR": "", "LOCAL_RANK": "0"}, "MASTER_ADDR not; start with"),
    ],
)
def test_what_contradicts_itself(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_process_info(TORCHRUN | changes)
