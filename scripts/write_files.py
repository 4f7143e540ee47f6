"""Write every file that follows from declarations in the package: runs the other write_*.py scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# The grids of GGUF follow from the package `gguf`.
LEFT_OUT = ("write_files.py", "write_gguf_grids.py")


def main() -> None:
    for script in sorted(Path(__file__).parent.glob("write_*.py")):
        if script.name not in LEFT_OUT:
            print(script.name)
            # In a process of its own: modules of the server leave threads behind.
            subprocess.run([sys.executable, script], check=True)


if __name__ == "__main__":
    main()
