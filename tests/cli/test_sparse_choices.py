"""Wrong sparse choices from the command line: the exit code, what is said, and that no weight was read for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import Command, command_process, tiny_arguments

# (arguments, exit code, what is said). The strategy files are those of `folder`.
WRONG = [
    ("video_sparse_attn", "sparsity=1.5", 2, "options of video_sparse_attn: sparsity must lie in [0, 1], got 1.5"),
    ("sliding_tile_attn", "window=[3,0,3]", 2, "window: expected three whole numbers of 1 or more"),
    ("sliding_tile_attn", "tile_size=[2,2,2]", 2, "Give window=[3,3,5], in tiles"),
    ("sliding_tile_attn", "mask_strategy_file_path=missing.json", 2, "missing.json: no such file"),
    ("sliding_tile_attn", "mask_strategy_file_path=malformed.json", 2, "malformed.json is not valid JSON"),
    ("sliding_tile_attn", "mask_strategy_file_path=layers.json", 2, "is for 3 layers (its largest index and one more)"),
    ("sliding_tile_attn", "mask_strategy_file_path=heads.json", 2, "is for 5 heads"),
    ("sliding_tile_attn", "mask_strategy_file_path=steps.json", 2, "is for 9 steps and this run has 2"),
    ("sliding_tile_attn", "sta_mode=STA_tuning,search_log_folder=logs", 2, "tune --methods sliding_tile_attn"),
    ("vmoba_attn", "moba_select_mode=topk,moba_threshold_type=block", 2, "topk has no moba_threshold_type block"),
    ("vmoba_attn", "spatial_chunk_size=[0,4]", 2, "spatial_chunk_size must be 1 or more along every axis, got [0, 4]"),
    ("sparse_video_gen_2_attn", "svg2_top_p_kmeans=90", 2, "expected a share from 0 to 1, got 90"),
]
BY_ROLE = "per_role.cross.backend=video_sparse_attn"


@pytest.fixture
def folder(tiny_wan_copy: Callable[[], Path]) -> Path:
    """A model folder whose weight files hold none."""
    folder = tiny_wan_copy()
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(b"not weights")
    return folder


def write_strategies() -> None:
    """Into the working folder. The tiny model has 2 layers of 4 heads, its command asks for 2 steps."""
    for name, steps, layers, heads in (("layers", 2, 3, 4), ("heads", 2, 2, 5), ("steps", 9, 2, 4), ("fits", 2, 2, 4)):
        windows = {f"{s}_{layer}_{h}": [1, 1, 1] for s in range(steps) for layer in range(layers) for h in range(heads)}
        Path(f"{name}.json").write_text(json.dumps(windows))
    Path("malformed.json").write_text("{")


@pytest.mark.parametrize(("backend", "options", "code", "said"), WRONG, ids=[row[1] for row in WRONG])
@pytest.mark.parametrize("way", [[], ["--dry-run"], ["--json"]], ids=["", "dry-run", "json"])
def test_wrong_choices_end_before_the_weights(
    backend: str, options: str, code: int, said: str, way: list[str], command: Command, folder: Path
) -> None:
    write_strategies()
    before = sorted(Path.cwd().iterdir())
    choice = ("--attention-backend", backend, "--attention-backend-config", options)
    result = command("generate", "a star", *tiny_arguments(folder), *choice, *way)
    assert result.code == code, result.err
    assert said in (result.json["error"] if way == ["--json"] else result.said)
    assert "loading the text encoder" not in result.err
    assert "Traceback" not in result.err
    assert sorted(Path.cwd().iterdir()) == before


@pytest.mark.parametrize("way", [[], ["--dry-run"]], ids=["", "dry-run"])
def test_cross_attention_by_role_ends_with_three(way: list[str], command: Command, folder: Path) -> None:
    result = command("generate", "a star", *tiny_arguments(folder), "--attention-config", BY_ROLE, *way)
    assert result.code == 3
    assert "video_sparse_attn: serves self attention, not role 'cross'" in result.said
    assert "loading the text encoder" not in result.err


def test_what_is_right_reaches_the_weights(command: Command, folder: Path) -> None:
    write_strategies()
    choice = ("--attention-backend", "sta", "--attention-backend-config", "mask_strategy_file_path=fits.json")
    result = command("generate", "a star", *tiny_arguments(folder), *choice)
    assert result.code == 1
    assert "model.safetensors is cut off" in result.err
    assert command("generate", "a star", *tiny_arguments(folder), *choice, "--dry-run").code == 0


def test_a_general_choice_says_what_it_passed_over(command: Command, tiny_flags: tuple[str, ...]) -> None:
    choice = ("--attention-backend", "video_sparse_attn", "--attention-backend-config", "sparsity=0.5")
    plan = command("generate", "a star", *tiny_flags, *choice, "--dry-run", "--json").json["attention"]
    assert [(row["role"], row["backend"]) for row in plan] == [("self", "video_sparse_attn"), ("cross", "torch_sdpa")]
    assert plan[1]["rejected"][0][1] == "default: not made for role 'cross', the next choice decides"
    assert (plan[0]["dense"]["backend"], plan[0]["dense"]["source"]) == ("torch_sdpa", "platform")
    assert "dense" not in plan[1]
    result = command("generate", "a star", *tiny_flags, *choice)
    assert result.code == 0, result.err
    assert "cross: video_sparse_attn not used: default: not made for role 'cross'" in result.said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ("--attention-backend", "vsa", "--attention-backend-config", "sparsity=1.5"),
            2,
            "must lie in [0, 1], got 1.5",
        ),
        pytest.param(
            ("--attention-backend", "sta", "--dry-run"), 2, "needs to know its windows", marks=pytest.mark.slow
        ),
        (("--attention-config", BY_ROLE), 3, "serves self attention, not role 'cross'"),
    ],
)
def test_as_a_process(arguments: tuple[str, ...], code: int, said: str, folder: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    result = command_process("generate", "a star", *tiny_arguments(folder), *arguments, cwd=here)
    assert result.code == code, result.err
    assert said in result.said
    assert result.out == ""
    assert "loading the" not in result.err
    assert "Traceback" not in result.err
    assert list(here.iterdir()) == []


def test_a_choice_that_leaves_out_nothing_is_said_by_every_command(command: Command, tmp_path: Path) -> None:
    size = ("--height", "64", "--width", "64", "--num-frames", "5", "--num-inference-steps", "1", "--device", "cpu")
    flags = (*size, "--attention-backend", "vmoba_attn", "--attention-config.default.extra.first_full_step", "1")
    expected = "vmoba_attn computes every pair in all of its layers at all 1 steps"
    answers = [
        command("generate", "a star", *flags, "--dry-run"),
        command("explain", *flags, "--html", str(tmp_path / "page.html")),
        command("generate", "a star", *flags, "-o", str(tmp_path / "star.mp4")),
    ]
    for answer in answers:
        assert answer.code == 0, answer.err
        assert expected in answer.said
    assert expected in (tmp_path / "page.html").read_text()
    assert expected in (tmp_path / "star.json").read_text()
