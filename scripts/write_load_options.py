"""Write diffusion_runtime/loading/load_options.py: the keywords of `load_pipeline`, which editors show, from
RuntimeConfig."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.loading.preparation import NOT_KEYWORDS

FILE = Path(__file__).parents[1] / "diffusion_runtime" / "loading" / "load_options.py"
START = '''"""Keywords of `load_pipeline`, which editors show. Written by scripts/write_load_options.py from
RuntimeConfig, whose docstring explains each."""

from __future__ import annotations

from typing import Any, TypedDict


class LoadOptions(TypedDict, total=False):
    """Options of RuntimeConfig by name; in comments, the defaults."""

'''


def file_text() -> str:
    """Return the file."""
    fields = [field for field in dataclasses.fields(RuntimeConfig) if field.name not in NOT_KEYWORDS]
    return START + "".join(f"    {field.name}: {field.type}  # {field.default!r}\n" for field in fields)


if __name__ == "__main__":
    FILE.write_text(file_text(), encoding="utf-8")
