"""Write the table of docs/backends.md from what every attention backend declares.

python scripts/write_backend_table.py           # the table in the page, made anew
python scripts/write_backend_table.py --check   # exit code 1 where the page says something else
"""

from __future__ import annotations

import sys
from pathlib import Path

from diffusion_runtime.attention.backends.capability import FEATURES, Capability
from diffusion_runtime.attention.backends.interface import Backend
from diffusion_runtime.attention.backends.registry import available_names, find_backend
from diffusion_runtime.attention.roles import CATEGORIES
from diffusion_runtime.core.hardware import PLATFORMS

PAGE = Path(__file__).parents[1] / "docs" / "backends.md"
START, END = "<!-- table of capabilities: scripts/write_backend_table.py -->\n", "<!-- end of the table -->\n"
WORDS = {
    "key_padding": "padding",
    "gqa": "GQA",
    "lse": "LSE",
    "boolean_mask": "boolean masks",
    "additive_mask": "additive masks",
    "block_mask": "block masks",
}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
HEADER = "| backend | runs on | head sizes | dtypes | can do | result |\n|---|---|---|---|---|---|\n"
# Those that every backend here has: the page says so once.
OF_ALL = frozenset({"key_padding", "gqa"})


def row(backend: Backend) -> str:
    can = backend.capability
    cells = (
        f"`{backend.name}`",
        machines(can),
        "any" if str(can.head_sizes) == "1" else str(can.head_sizes),
        " ".join(short for name, short in DTYPES.items() if name in can.dtypes),
        ", ".join(WORDS.get(name, name) for name in FEATURES if name in can.features - OF_ALL),
        result(backend),
    )
    return f"| {' | '.join(cells)} |\n"


def machines(can: Capability) -> str:
    """Platforms, and the chips of CUDA among them."""
    if can.platforms == frozenset(PLATFORMS):
        text = "everywhere"
    else:
        text = ", ".join(
            {"cpu": "CPU", "cuda": "CUDA", "rocm": "ROCm"}.get(name, name) for name in sorted(can.platforms)
        )
    low, high = can.minimum_capability, can.maximum_capability
    if low is None:
        return text
    if high is None:
        return f"{text}; sm_{low[0]}{low[1]} and newer"
    if low == high:
        return f"{text}; sm_{low[0]}{low[1]} alone"
    return f"{text}; sm_{low[0]}{low[1]} to sm_{high[0]}{high[1]}"


def result(backend: Backend) -> str:
    """What a result may differ by, and which roles alone are served."""
    if backend.error_bound is not None:
        text = f"rounded: error up to {backend.error_bound:g}"
    else:
        text = "exact" if backend.lossless else "leaves pairs out"
    served = backend.capability.categories
    return text if served == frozenset(CATEGORIES) else f"{text}; {', '.join(sorted(served))}-attention alone"


def table() -> str:
    backends = [backend for name in available_names() if (backend := find_backend(name)) is not None]
    assert all(backend.capability.features >= OF_ALL for backend in backends), "take it out of OF_ALL"
    return HEADER + "".join(row(backend) for backend in backends)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(START)
    written, _, after = rest.partition(END)
    if "--check" in sys.argv:
        sys.exit(0 if written == table() else f"{PAGE} is not what the backends declare; run: python {sys.argv[0]}")
    PAGE.write_text(before + START + table() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
