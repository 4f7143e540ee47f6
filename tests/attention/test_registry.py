"""Third parties: a decorator or an entry point, without touching our files."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from dense_backends import ALL
from warm_python import run_python

from diffusion_runtime.attention import (
    AttentionCall,
    AttentionConfig,
    AttentionPolicy,
    AttentionResult,
    AttentionSpec,
    Availability,
    Backend,
    Capability,
    LocalAttention,
    attention,
    register_backend,
    register_role,
    unregister_backend,
)
from diffusion_runtime.attention.backends import registry
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.errors import BackendUnavailableError, ConfigError

PLUGIN = """
from diffusion_runtime.attention import AttentionResult, Availability, Backend, Capability
from diffusion_runtime.attention.backends.reference import reference_attention

class Plugin(Backend):
    name = "plugin_attn"
    aliases = ("plug",)
    summary = "published by another package"
    capability = Capability()
    def probe(self, hardware):
        return Availability("0.3")
    def run(self, call):
        return AttentionResult(reference_attention(call.q, call.k, call.v)[0], None, "plugin kernel")
"""

SCRIPT = """
import logging, torch
logging.basicConfig(level=logging.INFO)
from diffusion_runtime.attention import AttentionSpec, attention, list_backends, select_backend
from diffusion_runtime.errors import BackendUnavailableError
q = torch.randn(1, 4, 2, 8)
print(AttentionSpec("PLUG").name, attention(q, q, q, backend="plug").shape[1])
print([info.name for info in list_backends("cpu")])
print({info.name: info.reason for info in list_backends("cpu")}["broken_attn"])
for name in ("broken_attn", "Broken-Attn,plug"):
    try:
        print(select_backend(head_dim=8, dtype="float32", device="cpu", num_heads=2, config=name).rejected)
    except BackendUnavailableError as error:
        print(error.exit_code, error.reasons)
"""


def test_a_published_backend_is_found_and_a_broken_one_is_only_reported(tmp_path: Path) -> None:
    (tmp_path / "plugin_package.py").write_text(PLUGIN)
    (tmp_path / "broken_package.py").write_text("raise OSError('libbroken.so: cannot open shared object file')")
    info = tmp_path / "plugin_package-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-package\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text(
        "[diffusion_runtime.attention_backends]\nbroken_attn = broken_package:Broken\nplugin = plugin_package:Plugin\n"
    )
    done = run_python("-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{SCRIPT}")
    assert done.returncode == 0, done.stderr
    reason = "entry point 'broken_package:Broken' of package 'plugin-package' cannot be used: OSError: libbroken.so: "
    reason += "cannot open shared object file"
    refused = [("broken_attn", reason)]
    assert done.stdout.splitlines() == [
        "plugin_attn 4",
        str([*ALL, "plugin_attn", "broken_attn"]),
        reason,
        f"3 {tuple(refused)}",
        str(refused),
    ]
    assert "broken_package:Broken" in done.stderr
    assert "libbroken.so" in done.stderr


def test_every_name_that_backends_lists_is_understood_before_any_is_imported() -> None:
    backends = [registry.find_backend(name) for name in registry._OWN_MODULES]
    names = {alias: each.name for each in backends if each is not None for alias in each.aliases}
    assert names["sol"] == "sol_attn"
    script = "from diffusion_runtime.attention.backends.registry import canonical_name\n"
    script += f"print({{name: canonical_name(name) for name in {sorted(names)}}} == {names})"
    done = run_python("-c", script)
    assert done.stdout == "True\n", done.stderr


class Impostor(Backend):
    name = "torch_sdpa"
    summary = "takes a name that is taken"
    capability = Capability()

    def probe(self, hardware: Hardware) -> Availability:
        return Availability("1")

    def run(self, call: AttentionCall) -> AttentionResult:
        raise AssertionError


def test_a_taken_name_is_refused() -> None:
    assert AttentionSpec("torch_sdpa").candidates == ("torch_sdpa",)
    with pytest.raises(ConfigError, match="'torch_sdpa' is taken by TorchSdpaBackend"):
        register_backend(Impostor)


def define(answer: float) -> str:
    """A backend of one name, defined anew as a notebook's cell does, whose result is `answer` everywhere."""

    @register_backend
    class RedefinedBackend(Backend):
        name = "redefined"
        summary = "a backend of the tests"
        capability = Capability()

        def probe(self, hardware: Hardware) -> Availability:
            return Availability("1")

        def run(self, call: AttentionCall) -> AttentionResult:
            return AttentionResult(torch.full_like(call.q, answer), None, f"answers {answer}")

    return RedefinedBackend.name


def test_a_backend_that_is_registered_again_or_taken_out_is_honoured_at_the_next_call() -> None:
    q = torch.randn(1, 4, 2, 8)
    name = define(1.0)
    layer = LocalAttention(2, 8, policy=AttentionPolicy(config=AttentionConfig.parse(name), environment=None))
    falls_back = AttentionConfig.parse(f"{name},reference")
    flexible = LocalAttention(2, 8, policy=AttentionPolicy(config=falls_back, environment=None))
    calls = (lambda: attention(q, q, q, backend=name), lambda: layer(q, q, q), lambda: flexible(q, q, q))
    try:
        assert [float(call().mean()) for call in calls] == [1.0] * 3
        define(2.0)
        assert [float(call().mean()) for call in calls] == [2.0] * 3
        replaced = weakref.ref(registry.find_backend(name))
    finally:
        unregister_backend(name)
    with pytest.raises(ConfigError, match="unknown attention backend 'redefined'"):
        calls[0]()
    with pytest.raises(BackendUnavailableError, match="redefined: this version does not have it"):
        calls[1]()
    assert torch.equal(calls[2](), attention(q, q, q, backend="reference"))
    gc.collect()
    # A layer lets go of it at its next call that settles something; the caches of the process have done so already.
    assert replaced() is None


def test_roles_need_a_category_and_keep_it() -> None:
    register_role("test.some_role", "self")
    register_role("test.some_role", "self")
    with pytest.raises(ConfigError, match="already registered"):
        register_role("test.some_role", "cross")
    with pytest.raises(ConfigError, match="unknown category"):
        register_role("test.other_role", "sideways")
