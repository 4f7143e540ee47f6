"""CPU memory: glibc's allocator set up for tensors (huge pages), and a bound on oneDNN's primitive cache.

**Allocator**: freed blocks are kept and reused, and the heap lies on huge pages. By default glibc maps large blocks
from the kernel and gives them back when they are freed, so each activation of a decoder is page-faulted in again, one
4 KiB page after another. Decoding 29 frames of 256 x 256 on two cores (median of three processes): 3.4 s for the first
clip and 2.8 s for the next, a million page faults each, by default; 2.8 s and 1.7 s, four thousand faults and none, set
up like this. Peak memory rises from 0.7 to 1.2 GB.

**Primitive cache**: oneDNN, which computes torch's convolutions and linear layers on a CPU, compiles each one for its
shape and keeps the last 1024. A decoder makes about 70 of them per size, so a process that makes many sizes grows by
170 MB. With 128 it keeps an eighth of that, and one size takes as long as before (the embedded model, 9 frames of
64 x 96: 0.13 s of CPU time with 128, 256 and 1024, 0.19 s with none).
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

# glibc's malloc.h, Linux's mman.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 * 2**20
# How much of the heap is on huge pages: what a decode takes. Below the trim threshold, or freeing it would return it.
_HUGE_HEAP = 3 * 2**29
_PRIMITIVE_CACHE_VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_PRIMITIVE_CACHE_CAPACITY = "128"


def tune_cpu_allocator() -> bool:
    """Keep freed memory in the process; returns whether this libc supports that (Linux with glibc does).

    It holds for the whole process, whose memory stays at its peak from then on; that suits a program that generates and
    ends. The application decides: a program calls this (the `generate` command does) and the library never does. Call
    it before the first tensor is made. Settings made with MALLOC_* variables are left alone.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    if any(name in os.environ for name in ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")):
        return False
    libc = ctypes.CDLL(None)
    if not (libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)):
        return False
    _lay_heap_on_huge_pages(libc)
    return True


def _lay_heap_on_huge_pages(libc: ctypes.CDLL) -> None:
    """Grow the heap once, ask the kernel for huge pages there (madvise), free it again: addresses only, no memory is
    taken.

    Only advice: where the kernel has no huge pages, or the process may not grow so far, nothing changes.
    """
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(_HUGE_HEAP)
    if block is None:
        return
    first_page = -(-block // _HUGE_PAGE) * _HUGE_PAGE
    length = (block + _HUGE_HEAP - first_page) // _HUGE_PAGE * _HUGE_PAGE
    libc.madvise(first_page, length, _MADV_HUGEPAGE)
    libc.free(block)


def bound_primitive_cache() -> None:
    """Free kernels that oneDNN compiled for sizes no longer used.

    Call it before the first operator of the process runs on the CPU: oneDNN reads its variable once. A value set by
    the user stays.
    """
    os.environ.setdefault(_PRIMITIVE_CACHE_VARIABLE, _PRIMITIVE_CACHE_CAPACITY)
