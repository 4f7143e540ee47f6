"""Qwen-Image with a ControlNet against diffusers' QwenImageControlNetModel and QwenImageControlNetPipeline on tiny
weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import QwenImageControlNetModel, QwenImageControlNetPipeline, QwenImageTransformer2DModel
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from family_parity import assert_equal_runs, load_theirs, load_transformer, record_latents, relative
from PIL import Image
from tiny_encoders import HIDDEN
from tiny_qwen_image import CHANNELS, TINY_SIZES

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.config import ParallelConfig
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, ModelLoadError, RequestError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.explanation.text_map import schedule_map
from diffusion_runtime.loading import inspect_pipeline, prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.qwen_image.controlnet import ROLE
from diffusion_runtime.models.qwen_image.family import FAMILY
from diffusion_runtime.text_encoders.interface import Conditions

NEGATIVE = "a yellow square, and a star"
NUM_BLOCKS = 2


@pytest.fixture(scope="module")
def controlnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a ControlNet alone, of fewer blocks than the transformer."""
    folder = tmp_path_factory.mktemp("models") / "net"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = QwenImageControlNetModel(
            in_channels=4 * CHANNELS,
            out_channels=CHANNELS,
            num_layers=NUM_BLOCKS,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=HIDDEN,
            axes_dims_rope=(4, 6, 6),
        )
        for name, parameter in net.named_parameters():
            # What diffusers starts from zero would hide the control.
            if name.startswith("controlnet_"):
                torch.nn.init.normal_(parameter, std=0.3)
            elif parameter.dim() == 2:
                parameter.data.mul_(2.0)
    net.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(tiny_qwen_image_folder: Path, controlnet: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline's folder with the ControlNet in it."""
    folder = tmp_path_factory.mktemp("models") / "whole"
    shutil.copytree(tiny_qwen_image_folder, folder)
    shutil.copytree(controlnet, folder / "controlnet")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {
        "_class_name": "QwenImageControlNetPipeline",
        "controlnet": ["diffusers", "QwenImageControlNetModel"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A control image of another size than what is made."""
    path = tmp_path_factory.mktemp("pictures") / "edges.png"
    rows, columns = numpy.mgrid[0:40, 0:60]
    Image.fromarray((255 * ((rows // 8 + columns // 8) % 2)).astype(numpy.uint8)).convert("RGB").save(path)
    return str(path)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    # What is computed here is the mode of the encoder's distribution.
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda given, generator=None: given.mode())
    return record_latents(monkeypatch)


def asked(edges: str, **values: Any) -> GenerationRequest:
    fields = {"prompt": "a red circle", "negative_prompt": NEGATIVE, **TINY_SIZES, "seed": 5, "num_inference_steps": 3}
    return GenerationRequest(**{**fields, "image_path": edges, **values})


def load(folder: Path, **how: Any) -> Pipeline:
    pipeline = load_pipeline(str(folder), device="cpu", **how)
    assert isinstance(pipeline, Pipeline)
    return pipeline


def theirs_of(whole: Path) -> Any:
    return load_theirs(QwenImageControlNetPipeline, whole)


def compare(ours: Pipeline, theirs: Any, requests: list[GenerationRequest], kept: list[torch.Tensor]) -> None:
    def run_theirs(resolved: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        first, latents = resolved[0], []
        batch, channels, _, height, width = noise.shape

        def keep(_: Any, __: int, ___: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            latents.append(theirs._unpack_latents(values["latents"], height, width, vae_scale_factor=1))
            return {}

        given = {
            "controlnet_conditioning_scale": first.conditioning_scale,
            "control_guidance_start": first.control_guidance_start,
            "control_guidance_end": first.control_guidance_end,
        }
        images = theirs(
            **{name: value for name, value in given.items() if value is not None},
            control_image=Image.open(first.image_path).copy(),
            prompt=[each.prompt for each in resolved],
            negative_prompt=[each.negative_prompt for each in resolved],
            true_cfg_scale=first.guidance_scale,
            height=first.height,
            width=first.width,
            num_inference_steps=first.num_inference_steps,
            latents=theirs._pack_latents(noise[:, :, 0], batch, channels, height, width),
            callback_on_step_end=keep,
            output_type="np",
        ).images
        return latents, images[:, None]

    assert_equal_runs(ours, requests, kept, run_theirs)


def test_the_transformer_equals_diffusers(whole: Path) -> None:
    """Texts of two lengths; one residual for two blocks; in the other branch, with the prompt for the ControlNet."""
    ours = load_transformer(FAMILY, whole)
    theirs = QwenImageTransformer2DModel.from_pretrained(whole / "transformer").eval()
    net = QwenImageControlNetModel.from_pretrained(whole / "controlnet").eval()
    pack, unpack = QwenImageControlNetPipeline._pack_latents, QwenImageControlNetPipeline._unpack_latents
    generator = torch.Generator().manual_seed(1)
    height, width, lengths, batch = 8, 12, (4, 9), 2
    latents, control = torch.randn(2, batch, CHANNELS, 1, height, width, generator=generator)
    texts = torch.randn(2, batch, 11, HIDDEN, generator=generator)
    timestep, scale = torch.tensor([937.3, 12.0]), 0.7
    prompt, negative = (Conditions.of(each, lengths) for each in texts)
    for text in (prompt, negative):
        given = {
            "timestep": timestep / 1000,
            "encoder_hidden_states_mask": torch.arange(11)[None] < torch.tensor(lengths)[:, None],
            "img_shapes": [[(1, height // 2, width // 2)]] * batch,
            "return_dict": False,
            "hidden_states": pack(latents[:, :, 0], batch, CHANNELS, height, width),
        }
        with torch.no_grad():
            residuals = net(
                **given,
                controlnet_cond=pack(control[:, :, 0], batch, CHANNELS, height, width),
                conditioning_scale=scale,
                encoder_hidden_states=prompt.embeddings,
            )
            out = theirs(**given, encoder_hidden_states=text.embeddings, controlnet_block_samples=residuals)[0]
            plain = theirs(**given, encoder_hidden_states=text.embeddings)[0]
        expected, without = (unpack(each, height, width, vae_scale_factor=1) for each in (out, plain))
        request = GenerationRequest("a", conditioning_scale=scale)
        size = ClipSize(height, width, 1, 1)
        inputs = DenoiserInputs(text, size, image=ImageCondition(control), request=request, prompt=prompt)
        found = ours(latents, timestep, inputs, AttentionContext())
        assert relative(found, expected) < 1e-5
        assert relative(without, expected) > 1e-2
    # Both branches in one pass, for which the ControlNet runs once.
    both = dataclasses.replace(
        inputs,
        text=Conditions.of(texts.flatten(0, 1), lengths * 2),
        image=inputs.image.repeat(2) if inputs.image else None,
    )
    context = AttentionContext(step=StepInfo(branch="both"))
    found = ours(latents.repeat(2, 1, 1, 1, 1), timestep.repeat(2), both, context)
    assert relative(found[batch:], expected) < 1e-5


def test_a_generation_equals_diffusers(
    whole: Path, tiny_qwen_image_folder: Path, controlnet: Path, edges: str, kept: list[torch.Tensor]
) -> None:
    """A batch of prompts of two lengths; both guidance modes; some of the steps; the ControlNet inside the folder, and
    elsewhere."""
    theirs, ours = theirs_of(whole), load(whole)
    prompts = (("a red circle moving left", 5), ("two objects: a blue star, and a green ring.", 6))
    compare(ours, theirs, [asked(edges, prompt=prompt, seed=seed) for prompt, seed in prompts], kept)
    given = {"conditioning_scale": 0.6, "control_guidance_start": 0.3, "control_guidance_end": 0.7}
    compare(ours, theirs, [asked(edges, guidance_mode="two_pass", num_inference_steps=4, **given)], kept)
    elsewhere = load(tiny_qwen_image_folder, controlnet_path=str(controlnet))
    compare(elsewhere, theirs, [asked(edges, guidance_scale=1.0)], kept)


def test_image_scales_and_steps_matter_and_the_report_has_the_role(
    whole: Path, edges: str, kept: list[torch.Tensor], tmp_path: Path
) -> None:
    ours, found = load(whole, attention={"per_role": {ROLE: "reference"}, "default": "torch_sdpa"}), {}
    other = tmp_path / "other.png"
    Image.open(edges).transpose(Image.Transpose.ROTATE_180).point(lambda x: 255 - x // 2).save(other)
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "image": {"image_path": str(other)},
        "scales": {"conditioning_scale": (1.0, 0.2)},
        "steps": {"control_guidance_end": 0.4},
        "none": {"conditioning_scale": 0.0},
    }
    for name, values in cases.items():
        media = ours(asked(edges, **values))
        found[name] = kept[-1]
        calls = {row.role: (row.backend, row.count) for row in media.attention_report.rows}
        # Both branches are one pass; blocks of the transformer, three steps.
        assert calls["self"] == ("torch_sdpa", 9), calls
        in_steps = {"steps": 1, "none": 0}.get(name, 3)
        assert calls.get(ROLE) == (("reference", NUM_BLOCKS * in_steps) if in_steps else None), calls
    for one, latents in found.items():
        assert one == "plain" or (latents - found["plain"]).norm() > 1e-3 * found["plain"].norm(), one


def test_memory_counts_the_weights_of_the_controlnet(whole: Path, tiny_qwen_image_folder: Path, edges: str) -> None:
    totals = []
    for folder in (tiny_qwen_image_folder, whole):
        prepared = prepare(RuntimeConfig(str(folder), device="cpu", offload="none"))
        image = edges if folder == whole else None
        prepared = prepared.planned_for([prepared.rules.resolve(asked(edges, image_path=image))])
        assert prepared.description.memory is not None
        (part,) = prepared.description.memory.demand.transformers
        totals.append(part.total)
    net = QwenImageControlNetModel.from_pretrained(whole / "controlnet")
    assert totals[1] - totals[0] == sum(each.nbytes for each in net.parameters())


def test_memory_and_costs_are_those_of_the_steps_in_which_the_controlnet_runs(whole: Path, edges: str) -> None:
    """However few they are, they decide what a generation has to hold; both branches in one pass share one run."""
    prepared = prepare(RuntimeConfig(str(whole), device="cpu", offload="none"))
    assert isinstance(prepared, PreparedModel)

    def explained(**values: Any) -> tuple[dict[str, float], Any, int]:
        request = prepared.rules.resolve(asked(edges, **values))
        planned = prepared.planned_for([request])
        found = explain(planned, request)
        assert found.description.memory is not None
        rows = {row.role: row.letters for row in schedule_map(found.schedule).rows}
        held = found.description.memory.demand.step_activations
        return {part.name: part.operations for part in found.parts}, rows, held

    name = f"attention, {ROLE}"
    every, rows, held = explained()
    assert rows == {ROLE: "AAA", "self": "AAA"}
    first, rows, held_in_first = explained(control_guidance_end=0.4)
    assert rows == {ROLE: "ABB", "self": "AAA"}
    assert held_in_first == held
    assert first[name] == pytest.approx(every[name] / 3)
    none, rows, _ = explained(conditioning_scale=0.0)
    assert rows == {"self": "AAA"}
    products = [each["linear layers"] for each in (none, first, every)]
    assert products[1] - products[0] == pytest.approx((products[2] - products[0]) / 3)
    assert first["attention, self"] == every["attention, self"]
    apart, _, _ = explained(guidance_mode="two_pass")
    assert apart[name] == pytest.approx(2 * every[name])


def test_what_cannot_be_controlled_is_said_before_the_weights_load(
    whole: Path, tiny_qwen_image_folder: Path, controlnet: Path, edges: str, tmp_path: Path
) -> None:
    def changed(**values: Any) -> str:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        place.mkdir()
        config = json.loads((controlnet / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, **values}))
        return str(place)

    rules = inspect_pipeline(RuntimeConfig(str(whole), device="cpu")).rules
    plain = inspect_pipeline(RuntimeConfig(str(tiny_qwen_image_folder), device="cpu")).rules
    (tmp_path / "clip.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    for of, given, told in (
        (rules, {"image_path": None}, "image_path: this model makes images from an image; give one: --image-path"),
        (rules, {"image_path": (edges, edges)}, "image_path: expected one image, got 2"),
        (rules, {"image_path": str(tmp_path / "clip.mp4")}, "image_path: .*clip.mp4"),
        (rules, {"height": 64}, "image_path: .* is 60 x 40 .*ratio of the sides must agree"),
        (rules, {"conditioning_scale": (1.0, 1.0, 1.0)}, "expected one number, or 2, one for each ControlNet block"),
        (rules, {"control_guidance_start": 0.6, "control_guidance_end": 0.6}, "control_guidance_start: expected less"),
        (plain, {}, "image_path: "),
        (
            plain,
            {"image_path": None, "control_guidance_end": 0.5},
            "control_guidance_end: this model has no ControlNet",
        ),
    ):
        with pytest.raises(RequestError, match=told):
            of.resolve(asked(edges, **given))
    resolved = rules.resolve(asked(edges, height=None, width=None))
    assert (resolved.height, resolved.width) == (832, 1248)
    errors: tuple[tuple[str, type[DiffusionRuntimeError], str], ...] = (
        (str(tmp_path / "none"), DiffusionRuntimeError, "controlnet_path: .*none"),
        (str(whole), ModelLoadError, "is the folder of a whole model: give .*/controlnet"),
        (str(whole / "vae"), ModelLoadError, "holds 'AutoencoderKLQwenImage', expected 'QwenImageControlNetModel'"),
        (str(whole / "tokenizer"), ModelLoadError, "expected the folder of a ControlNet, with config.json"),
        (changed(_class_name="FluxControlNetModel"), ModelLoadError, "holds 'FluxControlNetModel', expected"),
        (changed(extra_condition_channels=4), ModelLoadError, "'extra_condition_channels': expected 0.*inpainting"),
        (changed(num_attention_heads=4), ModelLoadError, "'num_attention_heads': expected 2, as in this model's"),
        (changed(axes_dims_rope=[8, 4, 4]), ModelLoadError, r"'axes_dims_rope': expected \[4, 6, 6\]"),
        (changed(num_layers=4), ModelLoadError, "'num_layers': expected 3, the transformer's blocks, or fewer"),
        (changed(attention_mode="wide"), ModelLoadError, "'attention_mode' is unknown"),
    )
    for path, error, told in errors:
        with pytest.raises(error, match=told):
            inspect_pipeline(RuntimeConfig(str(tiny_qwen_image_folder), device="cpu", controlnet_path=path))
    # Attention that processes share by heads, and weights, which they do not.
    shared = RuntimeConfig(str(whole), device="cpu", parallel=ParallelConfig(num_gpus=2, ulysses_degree=2))
    assert inspect_pipeline(shared).degrees.ulysses == 2
    shared = RuntimeConfig(str(whole), device="cpu", parallel=ParallelConfig(num_gpus=2, tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="tensor_parallel_size: the weights of a controlnet are not shared"):
        inspect_pipeline(shared)
    with pytest.raises(ConfigError, match="controlnet_path: wan models run without a ControlNet in this version"):
        inspect_pipeline(RuntimeConfig("shapes", device="cpu", controlnet_path=str(controlnet)))
    # No weights beside the settings: said where they are looked for, before any is read.
    with pytest.raises(ModelLoadError, match="safetensors"):
        load(tiny_qwen_image_folder, controlnet_path=changed())
