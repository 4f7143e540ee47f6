"""The command as a process of its own: streams, signals, a full disk."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from cli_support import command_process, process_environment, tiny_arguments
from warm_python import start_python


def test_paths_on_standard_output_and_prompts_from_standard_input(tiny_wan_folder: Path, tmp_path: Path) -> None:
    arguments = ("generate", *tiny_arguments(tiny_wan_folder), "--prompt-file", "-", "--format", "npy")
    result = command_process(*arguments, cwd=tmp_path, input_text="a star\n# no\na red ring\n", warm=False)
    assert result.code == 0, result.err
    assert result.out == "outputs/a-star-seed0.npy\noutputs/a-red-ring-seed0.npy\n"
    assert numpy.load(tmp_path / "outputs" / "a-star-seed0.npy").shape == (5, 32, 32, 3)
    assert "denoise: step 2/2" in result.err
    assert "\x1b" not in result.err
    assert "Warning" not in result.err

    # The process that repeats a file makes the same frames.
    repeated = ("generate", "--from", "outputs/a-red-ring-seed0.npy", "--format", "npy", "--json")
    again = command_process(*repeated, cwd=tmp_path)
    assert again.code == 0, again.err
    path = again.json["items"][0]["path"]
    assert path == "outputs/a-red-ring-seed0-2.npy"
    assert numpy.array_equal(numpy.load(tmp_path / path), numpy.load(tmp_path / "outputs" / "a-red-ring-seed0.npy"))


def test_an_interrupted_batch_keeps_what_is_finished(tiny_wan_folder: Path, tmp_path: Path) -> None:
    arguments = ("generate", "a star", *tiny_arguments(tiny_wan_folder), "--seed", "1-50")
    steps = ("--num-inference-steps", "60")
    with start_python(
        "-m", "diffusion_runtime", *arguments, *steps, cwd=tmp_path, env=process_environment()
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=600)
    assert process.returncode == 130
    finished = [first, *rest.split()]
    assert f"interrupted: {len(finished)} of 50 finished" in said
    assert f"\n  {first}" in said
    assert "Traceback" not in said
    expected = [tmp_path / name for path in finished for name in (path, path.replace(".mp4", ".json"))]
    assert sorted((tmp_path / "outputs").iterdir()) == sorted(expected)


def test_a_disk_that_fills_up_ends_the_batch(tiny_wan_folder: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], capture_output=True).returncode:
        pytest.skip("no right to mount a small file system here")
    try:
        arguments = (
            "generate",
            "a star",
            *tiny_arguments(tiny_wan_folder),
            "--seed",
            "1-6",
            "--json",
            "--format",
            "npy",
        )
        result = command_process(*arguments, "-o", small, cwd=tmp_path)
        assert result.code == 5, result.err
        written = [item for item in result.json["items"] if "path" in item]
        failed = [item for item in result.json["items"] if "path" not in item]
        assert written
        (full,) = failed
        assert full["kind"] == "DiskFullError"
        assert "no space left" in full["error"].lower()
        left = 6 - len(written) - 1
        assert left > 0
        assert f"{left} of 6 were not begun: make room, and --resume goes on" in " ".join(result.err.split())
        assert result.err.count("error: ") == result.err.lower().count("no space left") == 1
        # The latents of the clip that did not fit are smaller, and kept where there is room for them.
        kept = f"a-star-seed{len(written) + 1}.latents.safetensors"
        whole = {Path(item[name]).name for item in written for name in ("path", "sidecar")}
        assert {path.name for path in small.iterdir()} - {kept} == whole
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_reader_that_leaves_is_no_error(tiny_wan_folder: Path, tmp_path: Path) -> None:
    arguments = ("-m", "diffusion_runtime", "generate", "a star", *tiny_arguments(tiny_wan_folder))
    with start_python(*arguments, cwd=tmp_path, env=process_environment()) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert (tmp_path / "outputs" / "a-star-seed0.mp4").is_file()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_interrupted_while_loading_leaves_nothing(number: int, tiny_wan_folder: Path, tmp_path: Path) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("hang-ups are ignored here, as under nohup, and stay so")
    arguments = ("-m", "diffusion_runtime", "generate", "a star", *tiny_arguments(tiny_wan_folder), "--json")
    with start_python(*arguments, cwd=tmp_path, env=process_environment()) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"loading {tiny_wan_folder}\n"
        process.send_signal(number)
        told, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "interrupted: nothing was finished" in said
    assert json.loads(told)["kind"] == "Interrupted"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_interrupted_while_blocks_are_streamed_leaves_nothing(tmp_path: Path) -> None:
    flags = ("--device", "cpu", "--memory-limit", "36MB", "--height", "64", "--width", "64", "--num-frames", "5")
    arguments = ("-m", "diffusion_runtime", "generate", "a star", *flags, "--num-inference-steps", "500", "--json")
    with start_python(*arguments, cwd=tmp_path, env=process_environment()) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("denoise: step" in line for line in lines)
        process.send_signal(signal.SIGINT)
        told, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "interrupted: 0 of 1 finished" in said
    assert json.loads(told)["interrupted"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("x.npy", 1, "error: cannot write to standard output: No space left on device\n"),
        ("missing.npy", 2, "error: missing.npy: no such file\n"),
    ],
)
def test_a_full_standard_output_is_one_error(name: str, code: int, said: str, tmp_path: Path) -> None:
    numpy.save(tmp_path / "x.npy", numpy.zeros((2, 8, 8, 3), numpy.uint8))
    with Path("/dev/full").open("w") as full:
        finished = subprocess.run(
            [sys.executable, "-m", "diffusion_runtime", "info", name, "--json"],
            cwd=tmp_path,
            env=process_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=600,
        )
    assert (finished.returncode, finished.stderr) == (code, said)
