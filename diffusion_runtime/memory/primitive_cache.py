"""Bounds oneDNN's primitive cache: kernels compiled for sizes that are no longer used are freed.

oneDNN, which computes torch's convolutions and linear layers on a CPU, compiles each one for its shape and keeps the
last 1024: a decoder makes about 70 of them per size, so a process that makes many sizes grows by 170 MB. With 128 it
keeps an eighth of that, and one size takes as long as before (the embedded model, 9 frames of 64 x 96: 0.13 s of CPU
time with 128, 256 and 1024, 0.19 s with none).
"""

from __future__ import annotations

import os

_VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_CAPACITY = "128"


def bound_primitive_cache() -> None:
    """Call it before the first operator of the process runs on the CPU: oneDNN reads its variable once. A value set by
    the user stays."""
    os.environ.setdefault(_VARIABLE, _CAPACITY)
