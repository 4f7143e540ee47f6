"""Publishing: a result appears whole or not at all, whatever stops its writing, and one of several gets a name."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from diffusion_runtime.errors import DiskFullError, OutputError
from diffusion_runtime.media.publish import publish_pair, publish_text, published, take_name


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


def test_a_link_stays_and_the_file_that_it_leads_to_is_written_whole(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    link = tmp_path / "latest.json"
    link.symlink_to("runs/first.json")
    for text in ("made", "replaced"):
        publish_text(link, text)
        assert link.is_symlink()
        assert (tmp_path / "runs" / "first.json").read_text() == text
    (tmp_path / "to-folder").symlink_to("runs", target_is_directory=True)
    with pytest.raises(OutputError, match="it is a folder"):
        publish_text(tmp_path / "to-folder", "text")
    assert (tmp_path / "to-folder").is_symlink()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputError, match="a link that leads to itself"):
        publish_text(tmp_path / "loop", "text")


def test_a_pair_is_written_over_files_alone(tmp_path: Path) -> None:
    """And no half of it where one name is not a file's."""
    media, sidecar = tmp_path / "media.partial", tmp_path / "sidecar.partial"
    os.mkfifo(tmp_path / "fifo.npy")
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "other.json").mkdir()
    for name in ("fifo.npy", "folder.npy", "other.npy"):
        media.write_text("media")
        sidecar.write_text("sidecar")
        with pytest.raises(OutputError):
            publish_pair(media, sidecar, tmp_path / name, overwrite=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["fifo.npy", "folder.npy", "media.partial", "other.json", "sidecar.partial"]


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
