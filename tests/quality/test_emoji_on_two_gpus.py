"""The run of everything on two GPUs: its parts that need no GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_embedded" / "emoji_on_two_gpus.sh"


def test_what_is_trained_is_packed_while_later_parts_have_not_begun(tmp_path: Path) -> None:
    (tmp_path / "continued").mkdir()
    for name in ("progress.txt", "continued.txt", "continued/transformer.pt", "continued/transformer_log.jsonl"):
        (tmp_path / name).write_text(f"{name}\n")
    done = subprocess.run(
        ["bash", "-c", f"{SCRIPT} watch 0 && {SCRIPT} pack transformer"],
        env={**os.environ, "STATE": str(tmp_path), "OUT": str(tmp_path / "out")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "-- continued\ncontinued.txt\n" in done.stdout
    packed = b"".join(part.read_bytes() for part in sorted((tmp_path / "out").glob("transformer.tar.*")))
    names = subprocess.run(["tar", "t"], input=packed, capture_output=True, check=True).stdout.decode().split()
    assert "continued/transformer.pt" in names
