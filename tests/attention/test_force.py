"""force_attention_backend: inside and nowhere else, for functions, coroutines, generators, tasks and threads."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import pytest

from diffusion_runtime.attention import Decision, force_attention_backend, select_backend
from diffusion_runtime.attention.force import current_force
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.errors import BackendUnavailableError, ConfigError, DiffusionRuntimeError


def choose(role: str = "self", **levels: Any) -> Decision:
    machine = Hardware(torch_version="2.13.0")
    return select_backend(role, device=machine, **{"head_dim": 64, "dtype": "float32", "num_heads": 4, **levels})


def forced() -> str:
    """The names that are forced here, the innermost last."""
    return ",".join(choice.spec.name for choice in current_force())


def test_force_nests_by_role_and_restores_on_errors() -> None:
    with force_attention_backend("reference"):
        with force_attention_backend("torch_sdpa", role="cross"):
            assert choose("self").backend == "reference"
            assert choose("cross", cli="reference").backend == "torch_sdpa"
            assert choose("cross").source == "force"
        with pytest.raises(BackendUnavailableError), force_attention_backend("torch_sdpa"):
            choose("self", head_dim=0)
        assert choose().backend == "reference"
    assert choose().source == "platform"


def test_force_is_a_reentrant_decorator_for_functions_and_coroutines() -> None:
    @force_attention_backend("reference")
    def backend_at(depth: int) -> str:
        return backend_at(depth - 1) if depth else choose().backend

    @force_attention_backend("reference")
    async def backend_later() -> str:
        await asyncio.sleep(0)
        return choose().backend

    assert backend_at(2) == "reference"
    assert asyncio.run(backend_later()) == "reference"
    assert choose().source == "platform"


def test_force_is_invisible_to_other_threads_and_tasks() -> None:
    seen: dict[str, str] = {}
    with force_attention_backend("reference"):
        thread = threading.Thread(target=lambda: seen.update(thread=choose().source))
        thread.start()
        thread.join()

    async def hold(name: str, entered: asyncio.Event, other: asyncio.Event) -> None:
        with force_attention_backend(name):
            entered.set()
            await other.wait()
            seen[name] = choose().backend

    async def both() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        await asyncio.gather(hold("reference", first, second), hold("torch_sdpa", second, first))

    asyncio.run(both())
    assert seen == {"thread": "platform", "reference": "reference", "torch_sdpa": "torch_sdpa"}


def test_forcing_nonsense_fails_at_once() -> None:
    with pytest.raises(ConfigError, match="unknown attention backend"):
        force_attention_backend("nonsense")
    with pytest.raises(ConfigError, match="'crss'"):
        force_attention_backend("reference", role="crss")


# --- generators -------------------------------------------------------------------------------------------------------


@force_attention_backend("reference")
def counting(stop: int) -> Generator[str, str | None, str]:
    said = None
    for number in range(stop):
        try:
            with force_attention_backend("torch_sdpa"):
                said = yield f"{number} {said} {forced()}"
        except KeyError:
            said = f"caught {forced()}"
    return f"end {forced()}"


def test_a_decorated_generator_holds_it_at_each_resume_and_not_between() -> None:
    numbers = counting(3)
    assert inspect.isgeneratorfunction(counting)
    assert (next(numbers), forced()) == ("0 None reference,torch_sdpa", "")
    with force_attention_backend("cudnn_attn"):
        assert numbers.send("sent") == "1 sent cudnn_attn,reference,torch_sdpa"
        assert forced() == "cudnn_attn"
    assert numbers.throw(KeyError("thrown")) == "2 caught reference reference,torch_sdpa"
    with pytest.raises(StopIteration) as end:
        next(numbers)
    assert (end.value.value, forced()) == ("end reference", "")


def test_a_generator_that_is_left_or_raises_holds_it_to_the_end_and_restores() -> None:
    seen = []

    @force_attention_backend("reference")
    def steps() -> Iterator[int]:
        try:
            yield 1
            raise KeyError("step")
        finally:
            seen.append(forced())

    left, raising = steps(), steps()
    next(left)
    left.close()
    next(raising)
    with pytest.raises(KeyError, match="step"):
        next(raising)
    assert (seen, forced()) == (["reference"] * 2, "")


def test_interleaved_generators_and_threads_hold_their_own() -> None:
    def names(name: str) -> Iterator[str]:
        @force_attention_backend(name)
        def numbers() -> Iterator[str]:
            while True:
                yield forced()

        return numbers()

    one, other = names("reference"), names("torch_sdpa")
    assert [next(one), next(other), next(one), forced()] == ["reference", "torch_sdpa", "reference", ""]
    seen = run_in_threads(lambda: next(one), 1)
    assert (seen, next(one)) == (["reference"], "reference")


def test_what_a_plain_function_returns_to_be_run_later_holds_it_too() -> None:
    @force_attention_backend("reference")
    def lazily() -> Iterator[str]:
        return (f"{number} {forced()}" for number in range(2))

    assert (list(lazily()), forced()) == (["0 reference", "1 reference"], "")


def test_a_decorated_async_generator_holds_it_at_each_resume_and_not_between() -> None:
    seen = []

    @force_attention_backend("reference")
    async def stream(stop: int) -> AsyncIterator[str]:
        try:
            for number in range(stop):
                await asyncio.sleep(0)
                try:
                    yield f"{number} {forced()}"
                except KeyError:
                    await asyncio.sleep(0)
                    yield f"caught {forced()}"
        finally:
            await asyncio.sleep(0)
            seen.append(f"closed {forced()}")

    async def use() -> None:
        numbers: Any = stream(3)
        seen.append(await anext(numbers))
        seen.append(forced())
        seen.append(await numbers.athrow(KeyError()))
        await numbers.aclose()
        seen.extend([item async for item in stream(1)])
        seen.append(forced())

    assert inspect.isasyncgenfunction(stream)
    asyncio.run(use())
    closed = "closed reference"
    assert seen == ["0 reference", "", "caught reference", closed, closed, "0 reference", ""]


# --- one instance, many users -----------------------------------------------------------------------------------------


def run_in_threads(work: Callable[[], str], count: int) -> list[str]:
    seen: list[str] = []
    threads = [threading.Thread(target=lambda: seen.append(work())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def test_one_instance_serves_nested_uses_tasks_and_threads() -> None:
    shared = force_attention_backend("reference")
    with shared, shared:
        with shared:
            assert forced() == "reference,reference,reference"
        assert forced() == "reference,reference"
    assert forced() == ""

    async def hold(mine: asyncio.Event, others: asyncio.Event) -> str:
        with shared:
            mine.set()
            await others.wait()
            return forced()

    async def both() -> list[str]:
        first, second = asyncio.Event(), asyncio.Event()
        return [*await asyncio.gather(hold(first, second), hold(second, first)), forced()]

    assert asyncio.run(both()) == ["reference", "reference", ""]
    barrier = threading.Barrier(4)

    def enter() -> str:
        with shared:
            barrier.wait(timeout=60)
            inside = forced()
        return f"{inside} then {forced() or 'nothing'}"

    assert run_in_threads(enter, 4) == ["reference then nothing"] * 4


def test_uses_that_end_in_another_order_take_their_own_away() -> None:
    first, second = force_attention_backend("reference"), force_attention_backend("torch_sdpa")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert forced() == "torch_sdpa"
    second.__exit__(None, None, None)
    assert forced() == ""
    with pytest.raises(DiffusionRuntimeError, match="leave it where it was entered"):
        second.__exit__(None, None, None)
