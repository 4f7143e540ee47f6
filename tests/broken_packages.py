"""Folders for PYTHONPATH that hold packages which are installed and do not work, and backends that are wrong."""

from __future__ import annotations

from pathlib import Path

BACKENDS = """
from diffusion_runtime.attention import AttentionResult, Availability, Backend, Capability
from diffusion_runtime.attention.backends.packages import PackageBackend
from diffusion_runtime.attention.backends.reference import reference_attention

class WrongScale(Backend):
    name = "wrong_scale"
    summary = "softmax with the wrong scale"
    capability = Capability(dtypes=frozenset({"float32"}))
    def probe(self, hardware):
        return Availability("0.3")
    def run(self, call):
        return AttentionResult(reference_attention(call.q, call.k, call.v, scale=0.1)[0], None, "wrong kernel")

class OnSage(PackageBackend):
    name = "on_sage"
    summary = "needs sageattention, on a CPU too"
    distribution, module, install = "sageattention", "sageattention", "pip install sageattention"
    capability = Capability()
    def run(self, call):
        raise AssertionError("it ran on a package that cannot be imported")

class OnXformers(OnSage):
    name = "on_xformers"
    distribution, module, install = "xformers", "xformers.ops", "pip install xformers"
"""


def publish_backends(folder: Path) -> None:
    """A package whose entry points are the three backends above."""
    (folder / "published_backends.py").write_text(BACKENDS)
    names = {"wrong": "WrongScale", "sage": "OnSage", "xformers": "OnXformers"}
    lines = [f"{key} = published_backends:{name}" for key, name in names.items()]
    _distribution(folder, "published-backends", "0.3")
    entry_points = "\n".join(["[diffusion_runtime.attention_backends]", *lines])
    (folder / "published_backends-0.3.dist-info" / "entry_points.txt").write_text(entry_points)


def install_broken_sage(folder: Path) -> None:
    """sageattention 1.0.6, whose import raises."""
    _distribution(folder, "sageattention", "1.0.6")
    (folder / "sageattention.py").write_text("raise OSError('libbroken.so: cannot open shared object file')\n")


def install_crashing_xformers(folder: Path) -> None:
    """xformers 0.0.35, whose import kills the process."""
    _distribution(folder, "xformers", "0.0.35")
    (folder / "xformers").mkdir()
    (folder / "xformers" / "__init__.py").write_text("")
    (folder / "xformers" / "ops.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")


def _distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
