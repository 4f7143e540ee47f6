"""Import of FlashAttention-4 without torch's compiler, and the switch that turns all start-time measures off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_support import process_environment

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.startup import VARIABLE
from diffusion_runtime.startup.importing import import_failure
from diffusion_runtime.startup.kept_kernels import ENABLED_VARIABLE, FOLDER_VARIABLE

# A package as FlashAttention-4 stands on one (quack), and one of another name.
DECORATED = """
import torch
class Tuner:
    @torch.compiler.disable
    def add(self, a, b=1): return a + b
@torch.compiler.disable(recursive=False)
def add(a, b=1): return a + b
"""
PACKAGES = {
    "quack": DECORATED,
    "another": DECORATED,
    "flash_attn/cute": "import quack\ndef flash_attn_func(): ...\ndef flash_attn_varlen_func(): ...\n",
}


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    for name, text in PACKAGES.items():
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text(text)
    (tmp_path / "packages" / "flash_attn_4-4.0.0b36.dist-info").mkdir()
    metadata = tmp_path / "packages" / "flash_attn_4-4.0.0b36.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n")
    return tmp_path / "packages"


def run(packages: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a warm interpreter has torch's compiler."""
    cache = {"DIFFUSION_RUNTIME_CACHE": str(packages.parent / "cache"), "PYTHONPATH": str(packages)}
    environment = process_environment() | variables | cache
    # Of a process that has imported the package itself, as the tests of one worker may have.
    for variable in (ENABLED_VARIABLE, FOLDER_VARIABLE):
        environment.pop(variable, None)
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


# In one process, which has no compiler at first. Other packages get torch's own decorator, which imports it.
IMPORTS = """
import sys
import torch
from diffusion_runtime.startup.importing import _compiler_left_out, import_failure
theirs = torch.compiler.disable
assert import_failure("flash_attn.cute", "flash_attn_func") is None
assert "torch._dynamo" not in sys.modules
assert torch.compiler.disable is theirs
import quack
assert quack.add.__name__ == "add"
# Two threads that import at once: the one that ends last does not put back what the first had put there.
first, second = _compiler_left_out("quack"), _compiler_left_out("quack")
first.__enter__(), second.__enter__(), first.__exit__(None, None, None), second.__exit__(None, None, None)
assert torch.compiler.disable is theirs
assert "torch._dynamo" not in sys.modules
with _compiler_left_out("quack"):
    assert import_failure("another", "add") is None
assert "torch._dynamo" in sys.modules
assert (quack.add(1, b=2), quack.Tuner().add(2)) == (3, 3)
# The compiler does not look into what is marked so.
import torch._dynamo.testing
counted = torch._dynamo.testing.CompileCounter()
torch.compile(lambda x: quack.add(x.sin(), x), backend=counted)(torch.ones(2))
assert (counted.frame_count, counted.op_count) == (1, 1), (counted.frame_count, counted.op_count)
"""


def test_decorators_of_quack_alone_import_no_compiler(packages: Path) -> None:
    done = run(packages, IMPORTS)
    assert done.returncode == 0, done.stderr


# Each measure: whether it is taken.
MEASURES = """
import json, os, sys, torch
from diffusion_runtime.attention import select_backend
from diffusion_runtime.core.hardware import Hardware, installed_packages
from diffusion_runtime.text_encoders.ahead import encoding_ahead
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
class Encoder(TextEncoder):
    max_tokens, library, implementation = 4, "torch", "sdpa"
    def encode(self, prompts): return Conditions.of(torch.ones(len(prompts), 1, 1))
encoder = Encoder()
hopper = Hardware("cuda", "NVIDIA H200", (9, 0), (9, 15), "2.13.0", installed_packages(), is_here=True)
select_backend(head_dim=64, dtype="bfloat16", num_heads=4, device=hopper, config="fa4")
with encoding_ahead(encoder, ["a red circle"], torch.device("cpu")) as used:
    pass
print(json.dumps({
    "remembered import": "flash_attn.cute" not in sys.modules,
    "kept kernels": "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED" in os.environ,
    "compiler left out": "torch._dynamo" not in sys.modules,
    "encoding ahead": used is not encoder,
}))
"""


def test_one_variable_turns_every_measure_off(packages: Path) -> None:
    def taken(**variables: str) -> dict[str, Any]:
        done = run(packages, MEASURES, **variables)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    first, remembered = taken(), taken(DIFFUSION_RUNTIME_STARTUP="on")
    assert first == {
        "remembered import": False,
        "kept kernels": True,
        "compiler left out": True,
        "encoding ahead": True,
    }
    assert remembered == {
        "remembered import": True,
        "kept kernels": False,  # of an import that is not made
        "compiler left out": True,
        "encoding ahead": True,
    }
    assert not any(taken(DIFFUSION_RUNTIME_STARTUP="off").values())


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first import that asks, and not kept as what the import raised."""
    monkeypatch.setenv(VARIABLE, "no")
    with pytest.raises(ConfigError, match="DIFFUSION_RUNTIME_STARTUP: expected on or off, got 'no'"):
        import_failure("flash_attn.cute", "a function of this test")
