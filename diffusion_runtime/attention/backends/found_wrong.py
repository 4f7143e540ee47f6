"""What self-checks of this process found wrong: a backend computes wrongly here for a head size and a dtype.

Known to the whole process, as a package that cannot be imported is: whoever selects passes such a backend over.
"""

from __future__ import annotations

_reasons: dict[tuple[str, int, str], str] = {}


def found_wrong(name: str, head_dim: int, dtype: str) -> str | None:
    """Why the backend is refused, None when nothing is known against it. name: canonical; dtype: as in `bfloat16`."""
    return _reasons.get((name, head_dim, dtype))


def remember_wrong(name: str, head_dim: int, dtype: str, reason: str) -> None:
    _reasons[name, head_dim, dtype] = reason


def forget_wrong() -> None:
    """Begin anew: for a process in which a package was exchanged."""
    _reasons.clear()
