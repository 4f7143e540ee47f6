"""Publishing: a result appears whole or not at all, whatever stops its writing, and one of several gets a name."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from diffusion_runtime.errors import DiskFullError, OutputError
from diffusion_runtime.media.publish import publish_text, published, take_name


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new" / "result.json"
    publish_text(target, "first")

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(DiskFullError, match=r"--output-path: cannot write .*nothing was left behind"):
            publish_text(target, "second", "--output-path")

    def interrupted() -> None:
        with published(target) as partial:
            partial.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in target.parent.iterdir()] == ["result.json"]
    assert target.read_text() == "first"
    publish_text(target, "second")
    assert target.read_text() == "second"


def test_no_special_file_is_written_or_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "folder", "n" * 300):
        with pytest.raises(OutputError):
            publish_text(tmp_path / name, "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "folder"]


def test_one_of_several_gets_the_name(tmp_path: Path) -> None:
    """Of files and of folders, which come with all that is in them."""
    for kind in ("file", "folder"):
        won, start = [], threading.Barrier(8)

        def take(number: int, kind: str = kind, won: list[int] = won, start: threading.Barrier = start) -> None:
            source = tmp_path / f"{kind}-{number}"
            if kind == "folder":
                source.mkdir()
                (source / "inside").write_text(str(number))
            else:
                source.write_text(str(number))
            start.wait()
            if take_name(source, tmp_path / kind):
                won.append(number)

        threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        made = tmp_path / kind / "inside" if kind == "folder" else tmp_path / kind
        assert [made.read_text()] == [str(number) for number in won]
        assert len(list(tmp_path.glob(f"{kind}-*"))) == 7
