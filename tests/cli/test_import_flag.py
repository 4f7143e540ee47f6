"""`--import FILE.py`: typed by the user alone."""

from __future__ import annotations

from pathlib import Path

from cli_support import Command

from diffusion_runtime.attention import unregister_backend

BACKEND = """
from diffusion_runtime.attention import AttentionCall, AttentionResult, Availability, Backend, Capability
from diffusion_runtime.attention import register_backend


@register_backend
class Typed(Backend):
    name = "typed_attn"
    summary = "for a test"
    capability = Capability(platforms=frozenset({"cpu", "cuda"}))

    def probe(self, hardware):
        return Availability("1")

    def run(self, call: AttentionCall) -> AttentionResult:
        raise NotImplementedError
"""


def test_a_file_that_is_typed_registers_a_backend(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "typed.py"
    path.write_text(BACKEND)
    try:
        shown = command("backends", "--import", str(path))
        assert (shown.code, "typed_attn" in shown.out) == (0, True), shown.err
    finally:
        unregister_backend("typed_attn")


def test_nothing_but_the_command_line_names_a_file_to_run(command: Command, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    path = tmp_path / "typed.py"
    path.write_text(f"open({str(ran)!r}, 'w')")
    for text in (f"import: {path}", f"runtime: {{import: {path}}}", f"runtime: {{import_files: [{path}]}}"):
        (tmp_path / "c.yaml").write_text(text)
        assert command("generate", "a", "--config", str(tmp_path / "c.yaml"), "--dry-run").code == 2
    assert command("generate", "a", "--set", f"runtime.import={path}", "--dry-run").code == 2
    assert not ran.exists()


def test_files_that_cannot_be_run_are_named(command: Command, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    for given, said in (("broken.py", "ZeroDivisionError: division by zero"), ("x.py", "expected a Python file")):
        refused = command("backends", "--import", str(tmp_path / given))
        assert (refused.code, said in refused.said) == (2, True), refused.err
