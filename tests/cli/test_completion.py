"""Shell completion: what the declared flags and values are, completed by the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import typer.main
from cli_support import Command

from diffusion_runtime.attention.backends.registry import available_names
from diffusion_runtime.cli.completion import declared_commands
from diffusion_runtime.cli.verbs import program
from diffusion_runtime.models.published import published_models

# A line as it is typed, and what completes its last word.
LINES = {
    "ge": ["generate"],
    "bench ": ["attention", "step", "generate"],
    "bench generate --pres": ["--preset"],
    "generate --pres": ["--preset"],
    "generate 'a cat' --model-path wan2.2-t": ["wan2.2-ti2v-5b", "wan2.2-t2v-a14b"],
    "generate --preset ligh": ["lightning-4", "lightning-8"],
    "generate --attention-backend v": ["video_sparse_attn", "vmoba_attn"],
    "generate --attention-config.per_role.wan.control_s": ["--attention-config.per_role.wan.control_self.backend"],
    "generate --attention-config.per_role.cross.backend x": ["xformers"],
    "generate --sampler uni": ["unipc", "unipc_sigma"],
    "generate --log-format j": ["json"],
    "generate --config a_f": ["a_file.yaml"],
    "generate --seed ": [],
    "models download flux.1-k": ["flux.1-kontext-dev"],
    "models list --ca": ["--cached"],
    "completion ": ["bash", "zsh", "fish"],
}
BASH = """source ./script
complete_line() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    _diffusion_runtime
    echo "${COMPREPLY[*]}"
}
"""


def test_bash_completes_commands_flags_and_values(command: Command, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(command("completion", "bash").out)
    (tmp_path / "a_file.yaml").touch()
    ends = {line: ' ""' if line.endswith(" ") else "" for line in LINES}
    calls = [f"complete_line diffusion-runtime {line}{end}" for line, end in ends.items()]
    calls += [
        "complete_line diffusion-runtime generate --attention-backend fa,torch_",
        "complete_line diffusion-runtime generate --no-such",
        "complete_line diffusion-runtime generate --sampler = unip",
    ]
    shown = subprocess.run(
        ["bash", "--norc", "-c", "\n".join([BASH, *calls])], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert shown.stderr == ""
    completed = [line.split() for line in shown.stdout.splitlines()]
    assert completed == [*LINES.values(), ["fa,torch_sdpa"], [], ["unipc", "unipc_sigma"]]


def test_fish_completes_commands_flags_and_values(command: Command, tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("no fish on this machine")
    (tmp_path / "script").write_text(command("completion", "fish").out)
    (tmp_path / "a_file.yaml").touch()
    lines = [f"diffusion-runtime {line}".replace("'", "") for line in LINES]
    calls = [f"echo (complete -C '{line}' | string split -f 1 \\t)" for line in lines]
    shown = subprocess.run(
        ["fish", "--no-config", "-c", "\n".join(["source ./script", *calls])],
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [sorted(line.split()) for line in shown.stdout.splitlines()] == [sorted(each) for each in LINES.values()]


def test_zsh_reads_the_script(command: Command, tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("no zsh on this machine")
    (tmp_path / "script").write_text(command("completion", "zsh").out)
    words = (
        "compdef() { : }; source ./script; _diffusion_runtime_words bench; _diffusion_runtime_flag generate --sampler"
    )
    shown = subprocess.run(["zsh", "-f", "-c", words], cwd=tmp_path, capture_output=True, text=True, check=True)
    first, second = shown.stdout.splitlines()
    assert first.split() == ["attention", "step", "generate"]
    assert "unipc" in second


def test_every_declared_command_flag_backend_and_model_is_known() -> None:
    commands = {each.words: each for each in declared_commands(typer.main.get_command(program()))}
    assert {"", "generate", "bench attention", "models download", "config schema", "completion"} <= set(commands)
    flags = {name: flag for flag in commands["generate"].flags for name in flag.names}
    assert {"--model-path", "-o", "--output-path", "--no-self-check", "--image-path", "--step-cache"} <= set(flags)
    assert "--dotted-attention" not in flags
    assert set(available_names()) <= set(flags["--attention-backend"].values)
    assert {model.name for model in published_models()} <= set(flags["--model-path"].values)
    assert flags["--config"].takes_path
    assert not flags["--dry-run"].takes_value


def test_another_shell_is_refused(command: Command) -> None:
    assert "unknown shell 'bahs'. Did you mean 'bash'?" in command("completion", "bahs").said
