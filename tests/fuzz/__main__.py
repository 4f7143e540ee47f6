"""Fuzzing by hand: `python -m tests.fuzz --kind command-lines --cases 5000`, from the root of the repository."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
