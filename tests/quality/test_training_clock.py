"""The clock of a training that lends its device to others."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.train_embedded import session


def test_time_while_a_file_is_there_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now, naps = tmp_path / "pause", [100.0], list[float]()
    monkeypatch.setattr(session.time, "monotonic", lambda: now[0])
    clock = session.Clock(50.0, started=100.0)
    now[0] = 110.0
    clock.wait_while(path.exists)
    assert clock.trained == 10.0
    path.touch()

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        now[0] += 30.0
        path.unlink()

    monkeypatch.setattr(session.time, "sleep", sleep)
    clock.wait_while(path.exists)
    assert len(naps) == 1
    assert (clock.trained, clock.progress) == (10.0, 0.2)
