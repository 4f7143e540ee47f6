"""FlashAttention-4's compiled kernels, kept across processes: its own persistent cache, in this project's cache folder.

Without it every process compiles every kernel again, for seconds at its first call (CuTe DSL). Triton and torch.compile
keep theirs without being told.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from diffusion_runtime.core.cache_folder import cache_root

# FlashAttention-4's own variables, read when it is imported.
ENABLED_VARIABLE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FOLDER_VARIABLE = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"

_logger = logging.getLogger("diffusion_runtime")


def keep_flash_attention_kernels() -> Path | None:
    """Switch the cache on for this process and those that it starts, before flash_attn.cute is imported; returns its
    folder, None where the user has set either variable, or the folder cannot be used.

    The package names entries by its sources, their dependencies' versions and the chip's architecture; ours separates
    chips of one architecture besides.
    """
    if ENABLED_VARIABLE in os.environ or FOLDER_VARIABLE in os.environ:
        return None
    folder = cache_root() / "flash_attention_4" / _chip()
    reason = _unusable(folder)
    if reason is not None:
        _logger.warning("%s: %s; each process compiles FlashAttention-4's kernels anew", folder, reason)
        return None
    os.environ[ENABLED_VARIABLE], os.environ[FOLDER_VARIABLE] = "1", str(folder)
    return folder


def _chip() -> str:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _unusable(folder: Path) -> str | None:
    """Return why entries cannot be kept in a folder, or None. The package locks every entry, and fails after 15 s where
    a network drive has no locks."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT)
        try:
            # Shared, as several processes try at once.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"cannot be written or locked ({error})"
    return None
