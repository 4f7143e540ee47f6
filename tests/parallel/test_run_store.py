"""The run store: whose reason counts, and runs that meet at one port."""

from __future__ import annotations

import dataclasses
import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError
from diffusion_runtime.parallel import run_store
from diffusion_runtime.parallel.failure import RankFailure
from diffusion_runtime.parallel.process_info import ProcessInfo
from diffusion_runtime.parallel.run_store import RunStore, connect

SECONDS = timedelta(seconds=5)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> ProcessInfo:
    """The first of two processes, that meet at a free port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # Only the ProcessInfo says where.
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return ProcessInfo(0, 2, 0, 2, "localhost", port)


def test_the_first_reason_counts() -> None:
    store = RunStore(dist.HashStore(), "run/")
    assert store.ending() is None
    first, second = RankFailure(1, "KeyError", "first", 4, "trace"), RankFailure(0, "OSError", "second")
    assert store.end(first)
    assert not store.end(second)
    assert store.ending() == first


def test_a_wait_can_be_given_up() -> None:
    store = RunStore(dist.HashStore(), "run/")
    store.set("a", "1")
    assert store.wait(["a"], lambda: True)
    assert not store.wait(["a", "b"], lambda: True)
    assert store.get(["a"]) == ["1"]


def test_a_rank_that_is_started_twice_at_one_port(place: ProcessInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    # The store that torchrun keeps: both runs' processes reach it.
    store = dist.TCPStore("localhost", place.port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    connect(place, SECONDS)
    with pytest.raises(ConfigError, match=r"rank 0 was started twice at localhost:\d+: another run meets there"):
        connect(place, SECONDS)
    # Processes that a launcher starts again after a failure are no second run.
    connect(dataclasses.replace(place, attempt=1), SECONDS)
    del store


def test_a_port_that_somebody_else_has(place: ProcessInfo) -> None:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("", place.port))
        taken.listen()
        with pytest.raises(ConfigError, match=f"MASTER_PORT {place.port} is in use"):
            connect(place, SECONDS)


def test_nobody_answers(place: ProcessInfo) -> None:
    with pytest.raises(
        DiffusionRuntimeError, match=f"rank 1: no rendezvous store answers at localhost:{place.port} after 1 s"
    ):
        connect(dataclasses.replace(place, rank=1), timedelta(seconds=1))


def errors_of(*places: ProcessInfo) -> list[BaseException | None]:
    """What each of several ranks meets, that connect at the same time."""
    found: list[BaseException | None] = [None] * len(places)
    # Rank 0's ends with it, while others may still ask.
    stores: list[RunStore] = []

    def join(index: int) -> None:
        try:
            stores.append(connect(places[index], SECONDS))
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=join, args=(index,)) for index in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_that_were_given_different_world_sizes_are_all_told(place: ProcessInfo) -> None:
    others = [dataclasses.replace(place, rank=rank, world_size=3) for rank in (1, 2)]
    for error in errors_of(place, *others):
        assert isinstance(error, ConfigError)
        assert "WORLD_SIZE differs between ranks: rank" in str(error)
        assert "has 2" in str(error)
        assert "has 3" in str(error)


def test_ranks_that_agree_meet(place: ProcessInfo) -> None:
    assert errors_of(place, dataclasses.replace(place, rank=1)) == [None, None]


def test_a_rank_that_does_not_come_is_named(place: ProcessInfo) -> None:
    with pytest.raises(DiffusionRuntimeError, match=r"rank 0: ranks 1 of 2 did not come to localhost:\d+ within 1 s"):
        connect(place, timedelta(seconds=1))


def test_a_port_that_another_program_holds_and_never_answers(
    place: ProcessInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_store, "HANDSHAKE_SECONDS", 0.5)
    with socket.socket() as taken:
        taken.bind(("localhost", place.port))
        taken.listen()
        with pytest.raises(ConfigError, match=r"rank 1: something listens at .* and is no rendezvous store"):
            connect(dataclasses.replace(place, rank=1), timedelta(seconds=60))


def test_an_address_that_nobody_knows(place: ProcessInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_store, "RESOLVE_SECONDS", 0.5)
    for rank in (0, 1):
        unknown = dataclasses.replace(place, rank=rank, address="machine.invalid")
        with pytest.raises(ConfigError, match=f"rank {rank}: MASTER_ADDR 'machine.invalid' cannot be resolved"):
            connect(unknown, timedelta(seconds=60))


def test_a_wait_ends_a_quarter_late_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("diffusion_runtime.parallel.run_store.time.sleep", slept.append)
    store = RunStore(dist.HashStore(), "")  # type: ignore[attr-defined]
    for happens in (0.001, 0.009, 0.04, 0.3):
        slept.clear()
        monkeypatch.setattr(store, "has", lambda *_, happens=happens: sum(slept) >= happens)
        assert store.wait(["x"], give_up=lambda: False)
        assert happens <= sum(slept) <= 1.25 * happens + 0.001
