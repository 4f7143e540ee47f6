"""`--import FILE.py`: a file of the user's own that registers a backend, a role or a family, run before anything else.

The flag is read off the command line alone: no config, recipe, prompt file or environment variable can name a file to
run.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, first_line, shown_name


def import_files(paths: Sequence[str] | None) -> Sequence[str] | None:
    """Run Python files, one after the other; returns `paths`. Raises ConfigError for a path that is no Python file, and
    for an exception of the file, with its name and line."""
    for number, path in enumerate(paths or ()):
        _import_file(path, f"_imported_by_flag_{number}")
    return paths


def _import_file(given: str, name: str) -> None:
    path = Path(given)
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"--import {shown_name(given)}: expected a Python file, such as my_backend.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except DiffusionRuntimeError as error:
        raise ConfigError(f"--import {shown_name(given)}: {error}") from error
    except Exception as error:  # whatever the user's file raises
        raise ConfigError(f"--import {shown_name(given)}: {type(error).__name__}: {first_line(error)}") from error
