"""What holds for every family's folder: what it says from json alone, and what it may not say; see family_cases."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family_cases import CONFIG, FAMILIES, FamilyCase, Refusal, changed
from family_parity import CPU, load_transformer
from open_fields import OPEN_FIELDS
from tables import table
from tiny_families import WRITERS

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.loading.description import PipelineDescription
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.request.generation_request import GenerationRequest

# What importing diffusers' pipelines says about packages that are not here, and about guiders.
pytestmark = pytest.mark.filterwarnings("ignore")
FolderOf = Callable[[str], Path]


def _named(case: tuple[str, Refusal]) -> str:
    family, refusal = case
    return f"{family}, {refusal.file}: {dict(refusal.values)}"


@pytest.fixture(scope="module")
def json_of(tiny_folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """A family's folder without its weights. Whoever changes it puts it back: tests share it."""
    return _copies(tiny_folder_of, tmp_path_factory, "*.safetensors")


@pytest.fixture(scope="module")
def whole_of(tiny_folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """A family's folder with its weights. Whoever changes it puts it back: tests share it."""
    return _copies(tiny_folder_of, tmp_path_factory)


def _copies(folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory, *left_out: str) -> FolderOf:
    copies: dict[str, Path] = {}

    def copy(family: str) -> Path:
        if family not in copies:
            target = tmp_path_factory.mktemp("copies") / family
            shutil.copytree(folder_of(family), target, ignore=shutil.ignore_patterns(*left_out))
            copies[family] = target
        return copies[family]

    return copy


def dry_run(folder: Path) -> PipelineDescription:
    return inspect_pipeline(RuntimeConfig(model_path=str(folder), device="cpu"))


def test_every_family_has_a_case() -> None:
    # SeedVR2 makes nothing of a prompt: tests/models/seedvr2.
    assert set(FAMILIES) == set(WRITERS) - {"seedvr2"}


@table(("family", "case"), FAMILIES.items(), FAMILIES)
def test_json_alone_says_geometry_schedule_and_attention(json_of: FolderOf, family: str, case: FamilyCase) -> None:
    description = dry_run(json_of(family))
    rules, geometry = description.rules, description.rules.sampling.geometry
    found = (geometry.num_channels, geometry.spatial_factor, geometry.temporal_factor, geometry.patch)
    assert found == case.geometry
    assert rules.sampling.embeds_guidance == case.embeds_guidance
    assert ("image_path" in rules.model_fields) == case.takes_image
    assert rules.sampling.schedule.sigmas(4) == case.sigmas
    assert {row.role for row in description.attention} == case.layers.keys() | case.decoder_roles


@table(("family", "case"), FAMILIES.items(), FAMILIES)
def test_the_defaults_complete_a_request(json_of: FolderOf, family: str, case: FamilyCase) -> None:
    request = GenerationRequest(prompt="a cat").with_defaults(dry_run(json_of(family)).rules.defaults)
    open_fields = {name for name, value in request.to_dict().items() if value is None}
    assert request.flow_shift == case.flow_shift
    assert open_fields - {"flow_shift"} == OPEN_FIELDS - case.filled


REFUSALS = [(family, refusal) for family, case in FAMILIES.items() for refusal in case.refusals]
TEXT_REFUSALS = [(family, refusal) for family, case in FAMILIES.items() for refusal in case.text_refusals]
TEXT_FILES = [(family, *file) for family, case in FAMILIES.items() for file in case.text_files]


@table(("family", "refusal"), REFUSALS, map(_named, REFUSALS))
def test_what_a_folder_may_not_say_is_named(json_of: FolderOf, family: str, refusal: Refusal) -> None:
    folder = json_of(family)
    with changed(folder, refusal.file, refusal.values), pytest.raises(ModelLoadError, match=refusal.told):
        dry_run(folder)


@table(("family", "refusal"), TEXT_REFUSALS, map(_named, TEXT_REFUSALS))
def test_texts_that_do_not_fit_are_named(whole_of: FolderOf, family: str, refusal: Refusal) -> None:
    folder = whole_of(family)
    with changed(folder, refusal.file, refusal.values), pytest.raises(ModelLoadError, match=refusal.told):
        family_for_folder(folder).describe(folder).load_text_encoder(CPU, torch.float32)


@table(("family", "file", "told"), TEXT_FILES)
def test_a_missing_part_of_the_text_encoders_is_named(
    whole_of: FolderOf, tmp_path: Path, family: str, file: str, told: str
) -> None:
    folder = whole_of(family)
    (folder / file).rename(tmp_path / "away")
    try:
        with pytest.raises(ModelLoadError, match=told):
            family_for_folder(folder).describe(folder).load_text_encoder(CPU, torch.float32)
    finally:
        (tmp_path / "away").rename(folder / file)


@table(("family", "case"), FAMILIES.items(), FAMILIES)
def test_weights_of_another_size_are_named(whole_of: FolderOf, family: str, case: FamilyCase) -> None:
    folder, (values, told) = whole_of(family), case.other_size
    with changed(folder, CONFIG, values), pytest.raises(ModelLoadError) as caught:
        load_transformer(family_for_folder(folder), folder)
    assert [part for part in told if part not in str(caught.value)] == []
