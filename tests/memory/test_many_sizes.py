"""A process that makes many sizes keeps what the last ones need."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_support import process_environment

from diffusion_runtime.memory.cpu_memory import bound_primitive_cache

SCRIPT = Path(__file__).with_name("sizes_script.py")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch computes without oneDNN")
def test_sizes_that_are_not_used_again_are_given_back(tiny_wan_folder: Path) -> None:
    environment = process_environment(ONEDNN_VERBOSE="profile_create")
    environment.pop("ONEDNN_PRIMITIVE_CACHE_CAPACITY", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tiny_wan_folder)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^size (\w+) (\[.*\])$", done.stdout, flags=re.MULTILINE)[1:]
    kept = [json.loads(text) for text in parts[1::3]]
    compiled = [text.count("create:cache_miss,cpu,convolution") for text in parts[2::3]]
    # The first size was compiled, and is compiled again: in between it was given back.
    assert compiled[0] > 5
    assert compiled[-2] > 5
    # What Python keeps is no more after sixteen sizes than after eight.
    assert kept[-1][0] <= kept[8][0]
    assert kept[-1][1] <= 8


def test_a_users_own_bound_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    bound_primitive_cache()
    import os

    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
