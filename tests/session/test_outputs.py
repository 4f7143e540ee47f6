"""Names, formats and folders of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diffusion_runtime.errors import ConfigError, OutputError
from diffusion_runtime.media.publish import publish_text
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.session.outputs import MAX_SLUG_BYTES, Outputs, make_folders, remove_empty, slug

VIDEO = GenerationRequest(prompt="A red circle, moving left!", num_frames=29, seed=7)
IMAGE = GenerationRequest(prompt="a star", num_frames=1)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("A red circle, moving left!", "a-red-circle-moving-left"),
        ("../../etc/passwd", "etc-passwd"),
        ("ein grüner Kreis", "ein-grüner-kreis"),
        ("红色的圆", "红色的圆"),
        ("!!!", "prompt"),
        ("a_b\n\x1b[31mc", "a-b-31mc"),
    ],
)
def test_a_prompt_becomes_a_name(prompt: str, expected: str) -> None:
    assert slug(prompt) == expected


def test_a_long_prompt_is_cut_between_letters() -> None:
    assert len(slug("红" * 200).encode()) <= MAX_SLUG_BYTES
    assert not slug("word " * 60).endswith("-")


@pytest.mark.parametrize(
    ("output_path", "file_format", "request_", "expected"),
    [
        (None, None, VIDEO, "outputs/a-red-circle-moving-left-seed7.mp4"),
        (None, None, IMAGE, "outputs/a-star-seed0.png"),
        (None, "gif", VIDEO, "outputs/a-red-circle-moving-left-seed7.gif"),
        ("here", None, IMAGE, "here/a-star-seed0.png"),
        ("v1.5/", "npy", IMAGE, "v1.5/a-star-seed0.npy"),
        ("here/x.webp", None, VIDEO, "here/x.webp"),
        ("X.MP4", "mp4", VIDEO, "X.MP4"),
    ],
)
def test_where_a_result_goes(
    output_path: str | None, file_format: str | None, request_: GenerationRequest, expected: str
) -> None:
    assert Outputs.parse(output_path, file_format).target(request_) == Path(expected)


def test_a_folder_with_a_dot_needs_no_slash_when_it_exists(tmp_path: Path) -> None:
    (tmp_path / "v1.5").mkdir()
    assert Outputs.parse(str(tmp_path / "v1.5"), None).folder == tmp_path / "v1.5"


@pytest.mark.parametrize(
    ("output_path", "file_format", "said"),
    [
        ("x.avi", None, "end it with a slash"),
        ("x.mp44", None, "Did you mean 'mp4'"),
        (None, "mpg4", "Did you mean 'mp4'"),
        ("x.gif", "mp4", "--format says mp4"),
    ],
)
def test_what_cannot_be_written_is_known_at_once(output_path: str | None, file_format: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Outputs.parse(output_path, file_format)


def test_a_video_in_a_png_says_what_holds_one() -> None:
    with pytest.raises(ConfigError, match="use one of mp4, gif, webp, npy"):
        Outputs.parse("x.png", None).format_for(VIDEO)


def test_a_folder_is_made_and_taken_back_when_nothing_came(tmp_path: Path) -> None:
    made = Outputs(tmp_path / "a" / "b").prepare()
    assert made == (tmp_path / "a" / "b", tmp_path / "a")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    remove_empty(made)
    assert list(tmp_path.iterdir()) == []
    made = Outputs(tmp_path / "a" / "b").prepare()
    (tmp_path / "a" / "kept").touch()
    remove_empty(made)
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["kept"]


@pytest.mark.parametrize("check", [Outputs.prepare, Outputs.check_without_writing])
def test_a_folder_below_a_file_is_refused(tmp_path: Path, check: object) -> None:
    (tmp_path / "file").touch()
    assert callable(check)
    with pytest.raises(OutputError, match="cannot write into the output folder"):
        check(Outputs(tmp_path / "file" / "a" / "b"))


def test_a_folder_that_takes_no_files_is_refused() -> None:
    with pytest.raises(OutputError, match="cannot write into the output folder /proc/self"):
        Outputs(Path("/proc/self")).prepare()


def test_predicted_names_are_the_free_ones(tmp_path: Path) -> None:
    (tmp_path / "x.mp4").touch()
    (tmp_path / "x-3.json").touch()
    names = Outputs.parse(str(tmp_path / "x.mp4"), None).predict([VIDEO, VIDEO])
    assert [name.name for name in names] == ["x-2.mp4", "x-4.mp4"]


def test_sound_alone_is_for_models_that_make_some() -> None:
    outputs = Outputs.parse("here/", "wav")
    assert outputs.target(VIDEO) == Path("here/a-red-circle-moving-left-seed7.wav")
    assert Outputs.parse("here/x.wav", None).format_for(VIDEO, has_sound=True) == "wav"
    with pytest.raises(ConfigError, match="wav holds sound, and this model makes pictures alone"):
        outputs.format_for(VIDEO, has_sound=False)
    with pytest.raises(ConfigError, match=r"x.mp4 ends in .mp4, --format says wav; use .wav"):
        Outputs.parse("x.mp4", "wav")


def test_a_folder_that_another_run_makes_at_the_same_time_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is not this run's to remove; a file of that name is."""
    real = Path.mkdir

    def beaten(self: Path, *arguments: Any, **named: Any) -> None:
        if self.name == "b":
            real(self)
        real(self, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", beaten)
    assert make_folders(tmp_path / "a" / "b" / "c") == (tmp_path / "a" / "b" / "c", tmp_path / "a")
    monkeypatch.undo()
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_folders(tmp_path / "new" / ".." / "file" / "d")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "file"]


def test_a_text_is_written_whole_where_its_folder_was_removed(tmp_path: Path) -> None:
    publish_text(tmp_path / "gone" / "x.txt", "whole")
    assert (tmp_path / "gone" / "x.txt").read_text() == "whole"
    assert [each.name for each in (tmp_path / "gone").iterdir()] == ["x.txt"]
