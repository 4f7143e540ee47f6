"""Which family loads a folder, by the class of its transformer."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from diffusion_runtime.attention.roles import role_category
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.family import ModelFamily
from diffusion_runtime.models.registry import (
    family_for_folder,
    is_supported,
    lora_names_of_families,
    register_family,
    supported_transformer_classes,
)
from diffusion_runtime.models.wan.family import FAMILY


def folder_with(tmp_path: Path, transformer_class: str) -> Path:
    (tmp_path / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", transformer_class]}))
    return tmp_path


def test_a_wan_folder_is_of_the_wan_family(tiny_wan_folder: Path) -> None:
    family = family_for_folder(tiny_wan_folder)
    assert family.name == "wan"
    assert set(family.files.transformer_classes) <= set(supported_transformer_classes())


def test_an_unsupported_class_is_named_with_the_ones_there_are(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        family_for_folder(folder_with(tmp_path, "MochiTransformer3DModel"))
    assert "diffusers MochiTransformer3DModel" in str(caught.value)
    assert "Supported: WanTransformer3DModel" in str(caught.value)
    assert not is_supported("MochiTransformer3DModel")


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"model_index.json is missing"):
        family_for_folder(tmp_path)


def test_another_family_can_be_registered_and_its_roles_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = dataclasses.replace(FAMILY, name="registered", roles=(("registered.sound_to_picture", "cross"),))
    monkeypatch.setattr("diffusion_runtime.models.registry._families", {})
    register_family("RegisteredTransformer", lambda: registered)
    family = family_for_folder(folder_with(tmp_path, "RegisteredTransformer"))
    assert isinstance(family, ModelFamily)
    assert family.name == "registered"
    assert role_category("registered.sound_to_picture") == "cross"


def test_a_family_declared_from_another_one_shares_its_names_in_lora_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each title once: a file for both would be taken for one of two families that nothing tells apart."""
    monkeypatch.setattr("diffusion_runtime.models.registry._families", {})
    register_family("WanTransformer3DModel", lambda: FAMILY)
    register_family("DeclaredFromWan", lambda: dataclasses.replace(FAMILY, name="declared"))
    assert [names.title for names in lora_names_of_families()] == [FAMILY.weights.lora_names.title]


def test_names_in_lora_files_are_known_without_importing_a_family() -> None:
    script = """
import sys
from diffusion_runtime.models.registry import lora_names_of_families
assert len(lora_names_of_families()) > 9
of_families = [name for name in sys.modules if name.startswith("diffusion_runtime.models.") and name.count(".") == 3]
imported = [name for name in of_families if name.endswith(".family")]
assert not imported and "diffusers" not in sys.modules, imported
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def test_roles_of_every_family_are_known_before_a_model_is_loaded() -> None:
    script = """
from diffusion_runtime import AttentionConfig, force_attention_backend
from diffusion_runtime.attention.roles import is_role, known_roles
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.models.registry import _families, family_for_folder
assert known_roles() == ("self", "cross"), known_roles()
AttentionConfig(per_role={"self": "reference"})
assert known_roles() == ("self", "cross"), "families were imported for nothing"
AttentionConfig.parse({"per_role.ltx2.audio_to_video.backend": "reference", "per_role.diffusers.text": "reference"})
with force_attention_backend("reference", role="z_image.text_refiner"):
    pass
for registered in _families.values():
    assert all(is_role(role) for role, _ in registered.load().roles)
try:
    AttentionConfig(per_role={"ltx2.audio_to_vidoe": "reference"})
except ConfigError as error:
    assert "Did you mean 'ltx2.audio_to_video'" in str(error), error
else:
    raise AssertionError("no error")
"""
    ran = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_no_family_is_imported_before_a_folder_asks() -> None:
    script = (
        "import sys, diffusion_runtime.models.registry as registry; registry.supported_transformer_classes();"
        "sys.exit(any(name in sys.modules for name in ('diffusion_runtime.models.wan', 'diffusers', 'safetensors')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
