"""Wan's image-to-video models against diffusers' WanImageToVideoPipeline on tiny weights: Wan 2.2 I2V (two experts, a
condition beside the latents), Wan 2.1 I2V (with the tokens of an image encoder) and FLF2V (of two images)."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanTransformer3DModel
from family_cases import changed
from family_parity import CPU, assert_equal_runs, load_theirs, load_transformer, record_latents, relative
from PIL import Image
from safetensors.torch import save_file
from tiny_models import IMAGE_DIM, write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.cli.app import run
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.layers.fp8_linear import Fp8Linear
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.wan.family import FAMILY
from diffusion_runtime.models.wan.weights import transformer_pieces
from diffusion_runtime.text_encoders.interface import Conditions

PROMPTS = ("a red circle moving left", "two objects: a blue star, and a green ring.")
NEGATIVE = "a yellow square"
TWO_EXPERTS = {"condition": "clip", "boundary_ratio": 0.9, "vae": "plain"}
TOKENS = {"condition": "clip and tokens"}
TWO_IMAGES = {"condition": "clip and tokens of two images"}
FolderOf = Callable[[Mapping[str, Any]], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    folders: dict[str, Path] = {}

    def folder(kind: Mapping[str, Any]) -> Path:
        name = str(kind["condition"])
        if name not in folders:
            folders[name] = write_tiny_wan(tmp_path_factory.mktemp("wan") / "model", **kind)
        return folders[name]

    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two images of the clip's size, as the keyword arguments of a request."""
    folder = tmp_path_factory.mktemp("pictures")
    for index, name in enumerate(("image_path", "last_image_path")):
        rows, columns = numpy.mgrid[0:32, 0:48]
        pixels = numpy.stack([5 * rows, 4 * columns, 255 - rows], axis=-1).astype(numpy.uint8)
        Image.fromarray(numpy.roll(pixels, 10 * index, axis=(0, 2))).save(folder / f"{name}.png")
    return {name: str(folder / f"{name}.png") for name in ("image_path", "last_image_path")}


@pytest.fixture
def our_latents(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    return record_latents(monkeypatch)


def request(**values: Any) -> GenerationRequest:
    sizes = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 4}
    fields = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVE, **sizes, "guidance_scale": 4.0, "seed": 5}
    return GenerationRequest(**(fields | values))


def load(folder: Path, **how: Any) -> Pipeline:
    pipeline = load_pipeline(str(folder), device="cpu", **how)
    assert isinstance(pipeline, Pipeline)
    return pipeline


def compare(ours: Pipeline, theirs: Any, requests: list[GenerationRequest], kept: list[torch.Tensor]) -> None:
    def run_theirs(resolved: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        first, latents = resolved[0], []

        def keep(_: Any, __: int, ___: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            latents.append(values["latents"].clone())
            return {}

        assert first.image_path is not None
        last = None if first.last_image_path is None else Image.open(first.last_image_path)
        frames = theirs(
            image=Image.open(first.image_path),
            last_image=last,
            prompt=[request.prompt for request in resolved],
            negative_prompt=[request.negative_prompt for request in resolved],
            height=first.height,
            width=first.width,
            num_frames=first.num_frames,
            num_inference_steps=first.num_inference_steps,
            guidance_scale=first.guidance_scale,
            guidance_scale_2=first.guidance_scale_2,
            latents=noise.clone(),
            max_sequence_length=ours.text_encoder.max_tokens,
            callback_on_step_end=keep,
            output_type="np",
        ).frames
        return latents, frames

    assert_equal_runs(ours, requests, kept, run_theirs)


CASES: dict[str, tuple[Mapping[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "two experts": (TWO_EXPERTS, ("image_path",), {"guidance_scale": 4.0, "guidance_scale_2": 2.5}),
    "two experts, two images": (TWO_EXPERTS, ("image_path", "last_image_path"), {"guidance_scale": 1.0}),
    "tokens": (TOKENS, ("image_path",), {"guidance_mode": "two_pass"}),
    "tokens of two images": (TWO_IMAGES, ("image_path", "last_image_path"), {}),
}


@pytest.fixture(scope="module")
def large_pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two images of twice the clip's size, with detail that the clip's size does not have."""
    folder, generator = tmp_path_factory.mktemp("large"), numpy.random.default_rng(0)
    for name in ("image_path", "last_image_path"):
        pixels = generator.integers(0, 256, (64, 96, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return {name: str(folder / f"{name}.png") for name in ("image_path", "last_image_path")}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", ["of the clip's size", "of twice its size"])
def test_a_generation_equals_diffusers(
    folder_of: FolderOf,
    pictures: dict[str, str],
    large_pictures: dict[str, str],
    our_latents: list[torch.Tensor],
    name: str,
    size: str,
) -> None:
    """Of larger images too, which the image encoder of Wan 2.1 sees at their own size and the clip's encoder scaled."""
    kind, images, values = CASES[name]
    folder = folder_of(kind)
    given = {field: (pictures if size == "of the clip's size" else large_pictures)[field] for field in images}
    requests = [
        request(prompt=prompt, seed=seed, **given, **values) for prompt, seed in zip(PROMPTS, (5, 6), strict=True)
    ]
    compare(load(folder), load_theirs(WanImageToVideoPipeline, folder), requests, our_latents)


def test_both_images_matter(
    folder_of: FolderOf, pictures: dict[str, str], our_latents: list[torch.Tensor], tmp_path: Path
) -> None:
    """Ten times as much as the comparisons above allow, or they could not tell whether one of them went astray."""
    for kind in (TWO_EXPERTS, TWO_IMAGES):
        ours = load(folder_of(kind))
        ours(request(**pictures))
        clips = [our_latents[-1]]
        for name in pictures:
            other = tmp_path / f"{name}.png"
            Image.open(pictures[name]).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(other)
            ours(request(**{**pictures, name: str(other)}))
            clips.append(our_latents[-1])
        for index, first in enumerate(clips):
            for second in clips[index + 1 :]:
                assert (second - first).norm() > 1e-3 * first.norm()


def image_inputs(kind: Mapping[str, Any], grid: tuple[int, int, int]) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """Latents, timesteps and inputs of our transformer, and the keyword arguments of theirs for the same step."""
    generator = torch.Generator().manual_seed(1)
    num_tokens = {"clip": 0, "clip and tokens": 5, "clip and tokens of two images": 10}[kind["condition"]]
    latents, condition = (torch.randn(2, channels, *grid, generator=generator) for channels in (16, 20))
    text, timestep = torch.randn(2, 512, 32, generator=generator), torch.tensor([937.3, 12.0])
    tokens = torch.randn(2, num_tokens, IMAGE_DIM, generator=generator) if num_tokens else None
    size = ClipSize(8 * grid[1], 8 * grid[2], 4 * grid[0] - 3, 16)
    inputs = DenoiserInputs(Conditions.of(text), size, image=ImageCondition(condition, tokens))
    theirs = {
        "hidden_states": torch.cat([latents, condition], dim=1),
        "timestep": timestep,
        "encoder_hidden_states": text,
        # Of two images, one after the other in the batch.
        "encoder_hidden_states_image": tokens if num_tokens != 10 else tokens.view(4, 5, IMAGE_DIM),
        "return_dict": False,
    }
    return (latents, timestep, inputs), text, theirs


@pytest.mark.parametrize("kind", [TWO_EXPERTS, TOKENS, TWO_IMAGES], ids=lambda kind: kind["condition"])
def test_a_forward_pass_equals_diffusers(folder_of: FolderOf, kind: Mapping[str, Any]) -> None:
    folder = folder_of(kind)
    whole = load_transformer(FAMILY, folder)
    ours = whole.expert(0) if kind is TWO_EXPERTS else whole
    theirs = WanTransformer3DModel.from_pretrained(folder / "transformer").eval()
    for grid in ((1, 4, 4), (3, 6, 8)):
        given, _, their_arguments = image_inputs(kind, grid)
        before = given[0].clone(), given[2].image.latents.clone()
        found = ours(*given, AttentionContext())
        with torch.no_grad():
            assert relative(found, theirs(**their_arguments)[0]) < 1e-5
        assert found.shape == given[0].shape
        assert torch.equal(given[0], before[0])
        assert torch.equal(given[2].image.latents, before[1])


def test_parameters_have_the_dtypes_they_have_in_diffusers(folder_of: FolderOf) -> None:
    folder = folder_of(TWO_IMAGES)
    ours = load_transformer(FAMILY, folder, torch.bfloat16)
    theirs = WanTransformer3DModel.from_pretrained(folder / "transformer", dtype=torch.bfloat16)
    dtypes = {key: value.dtype for key, value in theirs.state_dict().items()}
    pieces = dict(transformer_pieces(ours.config))
    for key, value in ours.state_dict().items():
        assert {dtypes.pop(piece.name) for piece in pieces[key]} == {value.dtype}, key
    assert not dtypes


def test_the_condition_is_what_diffusers_makes_of_the_images(folder_of: FolderOf, pictures: dict[str, str]) -> None:
    """Mask, encoded clip and tokens; of a clip, the fast mode's as well."""
    folder = folder_of(TWO_IMAGES)
    theirs = load_theirs(WanImageToVideoPipeline, folder)
    opened = [Image.open(path).convert("RGB") for path in pictures.values()]
    pixels = [torch.from_numpy(numpy.array(image)) for image in opened]
    conditioner = FAMILY.describe(folder).load_image_conditioner(CPU, torch.float32)
    for last in (0, 1):
        for num_frames in (5, 9):
            made = [theirs.video_processor.preprocess(image, height=32, width=48) for image in opened]
            with torch.no_grad():
                _, expected = theirs.prepare_latents(
                    made[0], 1, 16, 32, 48, num_frames, torch.float32, CPU, None, None, made[1] if last else None
                )
                tokens = theirs.encode_image(opened[: 1 + last], CPU)
            size, last_image = ClipSize(32, 48, num_frames, 16), pixels[1] if last else None
            found, quick = (each.encode(pixels[0], size, last_image) for each in (conditioner, conditioner.fast()))
            assert found.latents.shape == expected.shape == (1, 20, 1 + num_frames // 4, 4, 6)
            assert torch.equal(found.latents[:, :4], expected[:, :4])
            assert relative(found.latents, expected) < 1e-5
            embeddings = conditioner.embed(torch.from_numpy(numpy.array(each)) for each in opened[: 1 + last])
            assert relative(embeddings, tokens.flatten(0, 1)[None]) < 1e-5
            assert relative(quick.latents, expected) < 1e-4
    assert [part.component for part in conditioner.libraries] == ["vae encoder", "image_encoder"]


def test_the_image_is_attended_to_in_a_role_of_its_own_and_encoded_once(
    folder_of: FolderOf, pictures: dict[str, str], tmp_path: Path
) -> None:
    plan = {"per_role": {"wan.image_cross": "reference"}, "default": "torch_sdpa"}
    ours = load(folder_of(TWO_IMAGES), attention=plan)
    calls: list[str] = []
    for name in ("image_embedding", "text_embedding"):
        ours.transformer.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    media = ours(request(**pictures, guidance_mode="two_pass"))
    assert sorted(calls) == ["image_embedding"] * 2 + ["text_embedding"] * 2
    rows = {(row.role, row.backend): row.count for row in media.attention_report.rows}
    assert rows == {("self", "torch_sdpa"): 16, ("cross", "torch_sdpa"): 16, ("wan.image_cross", "reference"): 16}
    libraries = {part.component: part.library for part in media.attention_report.libraries}
    assert libraries["image_encoder"] == "transformers"
    assert libraries["vae encoder"] == "diffusers"


@pytest.mark.slow
def test_quantised_and_cached_steps_run_on_image_tokens(folder_of: FolderOf, pictures: dict[str, str]) -> None:
    plain = load(folder_of(TWO_IMAGES))
    asked = request(**pictures, guidance_mode="two_pass", num_inference_steps=5)
    expected = plain(asked)
    for cache in ("easycache:threshold=0,force=true", "dbcache:F=1,R=0,W=0,force=true"):
        assert numpy.array_equal(plain(dataclasses.replace(asked, step_cache=cache)).frames, expected.frames)
    growing = dataclasses.replace(asked, progressive_resolution="dct:delta=0.1,A=200,beta=2.4", height=64, width=96)
    assert numpy.isfinite(plain(growing).frames).all()
    quantised = load(folder_of(TWO_IMAGES), quantization="fp8-all", quantization_ignored_layers=["*.out"])
    names = {name for name, layer in quantised.transformer.named_modules() if isinstance(layer, Fp8Linear)}
    assert names
    assert not any("image" in name for name in names)
    assert numpy.isfinite(quantised(asked).frames).all()


def test_what_cannot_be_made_of_images_is_said_before_the_weights_load(
    folder_of: FolderOf, pictures: dict[str, str], tmp_path: Path
) -> None:
    first, last = ({name: path} for name, path in pictures.items())
    wide = tmp_path / "wide.png"
    Image.new("RGB", (96, 32)).save(wide)
    for kind, given, told in (
        (TOKENS, {}, "image_path: this model makes videos from an image; give one: --image-path FILE"),
        (TOKENS, last, "last_image_path: this model takes no image to end with"),
        (TOKENS, pictures, "last_image_path: this model takes no image to end with"),
        (TWO_EXPERTS, last, "image_path: this model makes videos from an image"),
        (TWO_IMAGES, first, "last_image_path: this model makes videos between two images"),
        (
            TWO_IMAGES,
            {**pictures, "num_frames": 1},
            "num_frames: expected 5 or more for a video between two images, got 1",
        ),
        (TWO_IMAGES, {**first, "last_image_path": str(wide)}, r"last_image_path: .*wide.png is 96 x 32"),
        (TWO_IMAGES, {**first, "last_image_path": "none.png"}, "last_image_path: none.png: no such file"),
    ):
        rules = inspect_pipeline(RuntimeConfig(str(folder_of(kind)), device="cpu")).rules
        with pytest.raises(RequestError, match=told):
            rules.resolve(request(**given))


def test_what_an_image_encoder_may_not_say_is_named(folder_of: FolderOf, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folder_of(TWO_IMAGES), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    processor = "image_processor/preprocessor_config.json"
    for file, values, told in (
        (
            "image_encoder/config.json",
            {"model_type": "siglip_vision_model"},
            "model_type: expected 'clip_vision_model'",
        ),
        (
            "image_encoder/config.json",
            {"hidden_size": 32},
            "key 'hidden_size': expected 24, the transformer's image_dim",
        ),
        ("image_encoder/config.json", {"image_size": 42}, "key 'image_size': expected that of 5 tokens"),
        (processor, {"size": {"shortest_edge": 14}}, "key 'size': expected a shortest_edge of 28 pixels or more"),
        (processor, {"crop_size": {"height": 20, "width": 20}}, "expected pictures of 28 x 28"),
        ("model_index.json", {"expand_timesteps": True}, "key 'expand_timesteps': expected false in a model with 36"),
    ):
        with changed(folder, file, values), pytest.raises(ModelLoadError, match=told):
            inspect_pipeline(RuntimeConfig(str(folder), device="cpu"))


def test_experts_of_unlike_inputs_are_refused(folder_of: FolderOf, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folder_of(TWO_EXPERTS), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    told = r"transformer_2/config.json: key 'in_channels': expected the inputs of the first expert, 36 channels, got 16"
    with changed(folder, "transformer_2/config.json", {"in_channels": 16}), pytest.raises(ModelLoadError, match=told):
        inspect_pipeline(RuntimeConfig(str(folder), device="cpu"))


def test_a_lora_of_the_text_model_says_what_applied(
    folder_of: FolderOf, pictures: dict[str, str], tmp_path: Path
) -> None:
    tensors = {}
    for name, rows, columns in (("blocks.0.attn1.to_q", 64, 64), ("patch_embedding", 64, 64)):
        tensors[f"transformer.{name}.lora_A.weight"] = torch.randn(2, columns)
        tensors[f"transformer.{name}.lora_B.weight"] = torch.randn(rows, 2)
    save_file(tensors, tmp_path / "text.safetensors")
    ours = load(folder_of(TOKENS), lora=[str(tmp_path / "text.safetensors")])
    media = ours(request(image_path=pictures["image_path"]))
    (remark,) = [note for note in media.attention_report.notes if "text.safetensors" in note]
    assert "2 of its 4 keys were not applied: they are for the patch embedding of a model with other inputs" in remark


def test_explain_needs_no_image(folder_of: FolderOf, capsys: pytest.CaptureFixture[str]) -> None:
    """Images of the clip's size stand for those that are missing; one that is given is taken, or refused."""
    words = ["explain", "--model-path", str(folder_of(TWO_IMAGES)), "--device", "cpu", "--num-inference-steps", "1"]
    words += ["--height", "32", "--width", "32", "--num-frames", "5"]
    assert run([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    request = json.loads(out)["request"]
    assert (request["image_path"], request["last_image_path"]) == (None, None)
    for name in ("image_path", "last_image_path"):
        assert f"{name}: none was given; counted with one of the size of what is made" in err
    assert run([*words, "--image-path", "missing.png"]) == 2
    assert "missing.png" in capsys.readouterr().err
