"""`generate --attention-plot` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

from cli_support import Command
from PIL import Image


def test_a_picture_beside_the_clip(command: Command, tiny_flags: tuple[str, ...], tmp_path: Path) -> None:
    out, plot = tmp_path / "a.gif", tmp_path / "plot.png"
    window = ("--attention-config.per_role.self.backend", "sliding_tile_attn")
    window += ("--attention-config.per_role.self.extra.window", "[1,1,1]")
    window += ("--attention-config.per_role.self.extra.tile_size", "[1,1,1]")
    made = command("generate", "a star", *tiny_flags, *window, "-o", out, "--attention-plot", plot, "--json")
    assert made.code == 0, made.err
    assert "density of attention" in made.said
    with Image.open(plot) as picture:
        assert picture.format == "PNG"
    report = json.loads(out.with_suffix(".json").read_text())["attention_report"]
    assert report == made.json["items"][0]["attention_report"]
    shares = [share for row in report["density"] if row["role"] == "self" for share in row["steps"]]
    assert len(shares) == 4
    assert all(share < 0.5 for share in shares)
    assert report["plan"]["cells"][0].startswith("90")


def test_a_place_that_cannot_be_written_ends_it_before_the_model_is_looked_for(
    command: Command, tmp_path: Path
) -> None:
    for name, code in (("none/plot.png", 1), ("plot.jpg", 2)):
        refused = command("generate", "x", "--model", "no-such-model", "--attention-plot", tmp_path / name)
        assert refused.code == code
        assert "error: --attention-plot:" in refused.said
    assert list(tmp_path.iterdir()) == []
