"""Imports of optional packages that succeeded on this machine, kept on disk: choosing a backend then needs none.

FlashAttention-4 imports CuTe and torch's symbolic shapes, 6 s of the 13 s that one H200 took to a first step; a choice
needs to know that its package imports, and nothing of the package itself. A check that failed is not kept: the package
may be built again under the same version.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.core.cache_folder import cache_root, complete_file
from diffusion_runtime.startup import startup_is_on
from diffusion_runtime.untrusted.json_text import read_json_file

SCHEMA = "diffusion_runtime.import/1"
# The name at the start of a requirement such as `quack-kernels>=0.5; extra == "x"`.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_logger = logging.getLogger("diffusion_runtime")


@dataclass(frozen=True)
class ImportCheck:
    """The import of a module on a device of this machine.

    distribution: as the package index names the package. functions: what the module must have. chip: what the device is
    and which torch is there, `cuda sm_90, torch 2.11.0`.
    """

    distribution: str
    module: str
    functions: tuple[str, ...]
    chip: str

    @property
    def path(self) -> Path:
        """File that records that the check passed."""
        chip = re.sub(r"[^A-Za-z0-9_.]+", "_", self.chip)
        return cache_root() / "imports" / f"{self.module}-{chip}.json"


def is_remembered(check: ImportCheck) -> bool:
    """Return True if the check passed on this machine, and neither the package, its requirements, torch nor Python has
    changed since. Imports nothing."""
    facts = _facts(check)
    if facts is None:
        return False
    try:
        # Its errors are ConfigErrors, which are ValueErrors.
        values = read_json_file(check.path) if check.path.is_file() else None
    except (OSError, ValueError) as error:
        _logger.warning("%s cannot be read (%s); %s is imported to check it", check.path, error, check.module)
        return False
    return values == {"schema": SCHEMA, "facts": facts}


def remember(check: ImportCheck) -> None:
    """Remember that the check passed. A folder that cannot be written costs a log line, and the next process an
    import."""
    facts = _facts(check)
    if facts is None:
        return
    try:
        check.path.parent.mkdir(parents=True, exist_ok=True)
        with complete_file(check.path, json.dumps({"schema": SCHEMA, "facts": facts}, indent=1) + "\n") as complete:
            os.replace(complete, check.path)
    except OSError as error:
        _logger.warning("%s cannot be kept (%s): each process imports %s first", check.path, error, check.module)


def forget(module: str) -> None:
    """Drop what is known of a module, on any chip: it failed."""
    for path in (cache_root() / "imports").glob(f"{module}-*.json"):
        path.unlink(missing_ok=True)


def _facts(check: ImportCheck) -> dict[str, Any] | None:
    """Return all that the outcome depends on, as it is read back from a file, or None if the module's file is not found
    or nothing is to be remembered."""
    file = _file_of(check.module) if startup_is_on() else None
    if file is None:
        return None
    stat = file.stat()
    return {
        "distribution": check.distribution,
        "module": check.module,
        "functions": list(check.functions),
        "chip": check.chip,
        "file": str(file),
        "size": stat.st_size,
        "modified_ns": stat.st_mtime_ns,
        "versions": _versions(check.distribution),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _file_of(module: str) -> Path | None:
    """Return the file that an import of the module would read first of its own; found without importing its parents."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest:
        return None if spec.origin is None else _existing(Path(spec.origin))
    for folder in spec.submodule_search_locations or ():
        place = Path(folder, *rest)
        for candidate in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if candidate.is_file():
                return candidate
    return None


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None


@functools.cache
def _versions(distribution: str) -> dict[str, str]:
    """Versions of the distribution and of those installed among what it requires."""
    versions = {}
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    names = [found.group() for found in map(_NAME.match, requirements) if found is not None]
    for name in sorted({distribution, *names}):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
