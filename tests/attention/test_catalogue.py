"""The catalogue: what is usable on a machine, why not, and backends that cannot even be asked."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tables import table

from diffusion_runtime.attention import Availability, Backend, Capability, register_backend, unregister_backend
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult
from diffusion_runtime.attention.catalogue import BackendInfo, list_backends, platform_default
from diffusion_runtime.core.hardware import Hardware

H200 = Hardware("cuda", "NVIDIA H200", (9, 0), (9, 15), "2.11.0")


class UnaskableBackend(Backend):
    name = "unaskable"
    aliases = ("unask",)
    summary = "a backend of the tests"
    capability = Capability(minimum_capability=(9, 0), platforms=frozenset({"cuda"}))

    def probe(self, hardware: Hardware) -> Availability:
        raise OSError("libbroken.so: cannot open shared object file\nwith details")

    def run(self, call: AttentionCall) -> AttentionResult:
        raise AssertionError("it ran")


@pytest.fixture
def unaskable() -> Iterator[None]:
    register_backend(UnaskableBackend)
    yield
    unregister_backend("unaskable")


def info(name: str, hardware: Hardware) -> BackendInfo:
    return {info.name: info for info in list_backends(hardware)}[name]


def test_a_backend_that_raises_when_it_is_asked_is_listed_with_its_error(unaskable: None) -> None:
    broken = info("unaskable", H200)
    assert not broken.usable
    said = f"{__name__}.UnaskableBackend cannot be asked: OSError: libbroken.so: cannot open shared object file"
    assert broken.reason == said
    assert info("torch_sdpa", H200).usable


@table(
    ("hardware", "reason"),
    [
        (Hardware(), "runs on cuda, not on cpu"),
        (Hardware("cuda", "A100", (8, 0)), "needs sm_90 or newer, this is cuda sm_80, torch "),
    ],
)
def test_where_the_chip_does_not_fit_no_package_is_advised(hardware: Hardware, reason: str, unaskable: None) -> None:
    found = info("unaskable", hardware)
    assert (found.version, found.reason, found.fix) == (None, reason, "")


def test_where_the_chip_fits_the_package_is() -> None:
    found = info("fa4", H200)
    assert not found.usable
    assert "not installed" in found.reason
    assert found.fix.startswith("pip install ")


def test_spellings_of_peers_are_aliases() -> None:
    assert {"torch", "sdpa", "native", "torch_native"} <= set(info("torch_sdpa", H200).aliases)
    assert "_native_cudnn" not in info("cudnn_attn", H200).aliases


def test_the_default_and_why() -> None:
    decision = platform_default(H200)
    assert (decision.backend, decision.source) == ("torch_sdpa", "platform")
    assert [name for name, _ in decision.rejected] == ["fa"]


def test_everything_is_plain_values() -> None:
    for found in list_backends(H200):
        values = json.loads(json.dumps(found.to_dict()))
        assert values["usable"] == (values["version"] is not None)
        assert values["usable"] or values["reason"]
        assert set(values["capability"]["features"]) == found.capability.features
