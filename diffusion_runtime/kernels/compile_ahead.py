"""Kernels that a model will need, compiled and imported in threads while its weights are read.

Triton's compiler and the reading of files both leave Python's lock to others most of the time: 10 kernels of Z-Image
took 0.68 of the seconds on two threads of two busy cores. What is compiled is what the first step would compile, so
results do not depend on it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from diffusion_runtime.core.device_guard import device_guard
from diffusion_runtime.kernels.launches import ExpectedLaunch
from diffusion_runtime.startup import startup_is_on
from diffusion_runtime.startup.first_use import kernels_compiled

_MOST_THREADS = 4

_logger = logging.getLogger("diffusion_runtime.loading")


@contextlib.contextmanager
def compiling_ahead(
    launches: Iterable[ExpectedLaunch], imports: Iterable[Callable[[], object]], device: torch.device
) -> Iterator[list[str]]:
    """Context manager: compile launches and call imports in threads; at its end wait for them. Gives a list that holds,
    afterwards, a remark on what was compiled. What they raise, the first call raises again."""
    remarks: list[str] = []
    kernels = {_specialised(each): each for each in launches}.values()
    work: list[Callable[[], object]] = [*imports, *(functools.partial(_compile, each, device) for each in kernels)]
    if not work or not is_useful_on(device):
        yield remarks
        return
    before = kernels_compiled()
    with _pool() as pool:
        futures = [pool.submit(each) for each in work]
        yield remarks
        started = time.perf_counter()
        for each in futures:
            _log_failure(each)
    waited = time.perf_counter() - started
    num_kernels, seconds = (now - earlier for now, earlier in zip(kernels_compiled(), before, strict=True))
    if num_kernels:
        remarks.append(
            f"first use: {num_kernels} kernels compiled in {seconds:.1f} s while weights were read, and {waited:.1f} s "
            "waited for after that"
        )
        _logger.info("%s", remarks[-1])


def is_useful_on(device: torch.device) -> bool:
    """Return True if kernels are compiled for a device, and start-time measures are on."""
    return device.type == "cuda" and startup_is_on()


def _specialised(expected: ExpectedLaunch) -> Hashable:
    """Return all that a compiled kernel depends on: of a number Triton knows whether it is 1, a multiple of 16, and
    whether it has 32 bits."""
    kernel, _, numbers, constants, num_warps = expected.launch
    kinds = [(type(each), each == 1, each % 16 == 0, abs(each) >= 2**31) for each in numbers]
    return id(kernel), expected.dtypes, tuple(kinds), tuple(constants.items()), num_warps


@contextlib.contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Context manager: threads; where loading fails, what they have not begun is dropped."""
    pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="compiling-ahead")
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _compile(expected: ExpectedLaunch, device: torch.device) -> None:
    kernel, grid, numbers, constants, num_warps = expected.launch
    with device_guard(device):
        kernel.warmup(*expected.dtypes, *numbers, **constants, num_warps=num_warps, grid=grid)


def _log_failure(future: Future[object]) -> None:
    error = future.exception()
    if error is not None:
        _logger.debug("not compiled ahead: %s", error)
