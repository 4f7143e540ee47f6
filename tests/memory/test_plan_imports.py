"""A memory plan is made at every start on a GPU: it imports no library whose part a module of ours takes."""

from __future__ import annotations

import subprocess
import sys

from cli_support import process_environment

CHILD = """
import sys
from diffusion_runtime import RuntimeConfig
from diffusion_runtime.loading import prepare
plan = prepare(RuntimeConfig(device="cpu", memory_limit="64GB")).planned_for(()).description.memory
assert plan is not None and plan.demand.decode_activations > 0
print([name for name in ("diffusers", "transformers", "peft") if name in sys.modules])
"""


def test_the_plan_of_the_embedded_model_imports_neither_diffusers_nor_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=process_environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
