"""Folders in parts: `vae_path`, `text_encoder_path`, `variant`; names that files have, and what is said of others."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from original_names import as_ldm, flux1_as_authors, original_tensors
from safetensors.torch import load_file, save_file
from tables import table
from tiny_families import WRITERS, small_request
from tiny_models import write_tiny_wan

from diffusion_runtime import RuntimeConfig, load_pipeline
from diffusion_runtime.cli.app import run
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError, ModelLoadError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.loading.text_encoders import TextEncoderLoader
from diffusion_runtime.memory.offloaded_part import OffloadedPart
from diffusion_runtime.memory.transfers import Transfers
from diffusion_runtime.models.part_files import PartFile, with_parts
from diffusion_runtime.models.published_folders import published_folders
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.weights.autoencoder_names import _causal_names
from diffusion_runtime.weights.level_list_names import level_list_names

VAE, ENCODER = "diffusion_pytorch_model.safetensors", "model.safetensors"


@pytest.fixture(scope="module")
def flux1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS["flux1"](tmp_path_factory.mktemp("flux1") / "model")


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_wan(tmp_path_factory.mktemp("wan") / "model")


def bare(folder: Path, place: Path, *components: str) -> Path:
    """A copy without the weights of some components."""
    copied = shutil.copytree(folder, place)
    for component in components:
        for path in (copied / component).glob("*.safetensors"):
            path.unlink()
    return copied


def latents_and_frames(folder: Path, **paths: Any) -> torch.Tensor:
    pipeline = load_pipeline(str(folder), device="cpu", **{key: str(path) for key, path in paths.items()})
    return torch.as_tensor(pipeline(small_request(pipeline)).frames)


def test_schemes_are_those_that_diffusers_converts() -> None:
    """Every tensor of the published sizes, there and back through diffusers' own converters."""
    from diffusers import AutoencoderKL, AutoencoderKLWan
    from diffusers.loaders import single_file_utils

    with torch.device("meta"):
        video = AutoencoderKLWan()
        image = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
            latent_channels=16,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        )
    names = _causal_names(list(video.state_dict()))
    assert single_file_utils.convert_wan_vae_to_diffusers(dict(names)) == {name: name for name in names.values()}
    assert "decoder.upsamples.3.time_conv.weight" in names
    tensors = as_ldm({name: torch.empty(tensor.shape, device="meta") for name, tensor in image.state_dict().items()})
    converted = single_file_utils.convert_ldm_vae_checkpoint(tensors, dict(image.config))
    assert {name: tensor.shape for name, tensor in converted.items()} == {
        name: tensor.shape for name, tensor in image.state_dict().items()
    }


def test_levels_of_one_list_are_those_that_diffusers_converts() -> None:
    """The autoencoders of LTX-Video 0.9.0, 0.9.1 and 0.9.8, LTX-2 and its sound, by diffusers' converters."""
    from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, AutoencoderKLLTXVideo
    from diffusers.loaders import single_file_utils as theirs

    of_video, published = theirs.convert_ltx_vae_checkpoint_to_diffusers, published_folders()
    changed = {
        name: {key: value for key, value in published[name]["vae/config.json"].items() if key[0] != "_"}
        for name in ("LTX-Video-0.9.1", "LTX-Video-0.9.8-13B-distilled")
    }
    with torch.device("meta"):
        cases = [
            (AutoencoderKLLTXVideo(), of_video, "vae."),
            *((AutoencoderKLLTXVideo(**settings), of_video, "vae.") for settings in changed.values()),
            (AutoencoderKLLTX2Video(), theirs.convert_ltx2_vae_to_diffusers, "vae."),
            (AutoencoderKLLTX2Audio(), theirs.convert_ltx2_audio_vae_to_diffusers, "audio_vae."),
        ]
    for module, convert, prefix in cases:
        state = module.state_dict()
        names = level_list_names(state)
        assert len(names) == len(state)
        converted = convert({f"{prefix}{original}": state[name] for original, name in names.items()})
        assert converted.keys() == state.keys()
        assert all(converted[name] is tensor for name, tensor in state.items())


def test_the_files_that_people_have_take_the_places_of_flux1s_parts(flux1: Path, tmp_path: Path) -> None:
    """ae.safetensors, clip_l and t5xxl_fp16, with what ComfyUI adds; the same as whole folders."""
    expected = latents_and_frames(flux1)
    folder = bare(flux1, tmp_path / "bare", "vae", "text_encoder", "text_encoder_2")
    save_file(as_ldm(load_file(flux1 / "vae" / VAE)), tmp_path / "ae.safetensors")
    for component, name in (("text_encoder", "clip_l"), ("text_encoder_2", "t5xxl")):
        tensors = load_file(flux1 / component / ENCODER)
        if name == "t5xxl":
            tensors["spiece_model"] = torch.zeros(5, dtype=torch.uint8)
        else:
            tensors = {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in tensors.items()}
            tensors["text_model.embeddings.position_ids"] = torch.arange(77)[None]
        save_file(tensors, tmp_path / f"{name}.safetensors")
    paths = {
        "vae_path": tmp_path / "ae.safetensors",
        "text_encoder_path": tmp_path / "clip_l.safetensors",
        "text_encoder_2_path": tmp_path / "t5xxl.safetensors",
    }
    assert torch.equal(latents_and_frames(folder, **paths), expected)
    folders = {key: flux1 / key.removesuffix("_path") for key in paths}
    assert torch.equal(latents_and_frames(folder, **folders), expected)
    recipe = load_pipeline(str(folder), device="cpu", **{key: str(path) for key, path in paths.items()}).recipe
    assert {key: recipe["runtime"][key] for key in paths} == {key: str(path) for key, path in paths.items()}


def all_in_one(folder: Path, path: Path, *, renamed_vae: bool = True) -> Path:
    """ComfyUI's checkpoint of a FLUX.1: the transformer by its authors' names, and what it stands beside."""
    parts = {name: load_file(next((folder / name).glob("*.safetensors"))) for name in ALL_IN_ONE.values()}
    vae = as_ldm(parts["vae"]) if renamed_vae else parts["vae"]
    named = {**parts, "transformer": flux1_as_authors(parts["transformer"]), "vae": vae}
    tensors = {
        f"{prefix}{name}": tensor.clone().contiguous()
        for prefix, component in ALL_IN_ONE.items()
        for name, tensor in named[component].items()
    }
    save_file(tensors | {"text_encoders.clip_l.logit_scale": torch.ones(())}, path)
    return path


ALL_IN_ONE = {
    "model.diffusion_model.": "transformer",
    "text_encoders.clip_l.transformer.": "text_encoder",
    "text_encoders.t5xxl.transformer.": "text_encoder_2",
    "vae.": "vae",
}


def test_every_component_is_read_from_one_file_that_holds_all(flux1: Path, tmp_path: Path) -> None:
    """Each flag reads its part, to the bit; with the weights in their files too, and for a LoRA's changes."""
    expected = latents_and_frames(flux1)
    folder = bare(flux1, tmp_path / "bare", *ALL_IN_ONE.values())
    path = all_in_one(flux1, tmp_path / "all.safetensors")
    keys = [f"{component}_path" for component in ALL_IN_ONE.values()]
    assert torch.equal(latents_and_frames(folder, **dict.fromkeys(keys, path)), expected)
    for component in ("text_encoder", "text_encoder_2"):
        whole = encoder_of(flux1, component, flux1 / component).encode(["a red star"])
        for in_files in (False, True):
            found = encoder_of(flux1, component, path, in_files=in_files).encode(["a red star"])
            assert torch.equal(found.embeddings, whole.embeddings)
            assert found.pooled is not None
            assert whole.pooled is not None
            assert torch.equal(found.pooled, whole.pooled)


def test_scales_in_one_file_that_holds_all_stay_with_their_parts(flux1: Path, tmp_path: Path) -> None:
    """An 8-bit transformer beside a plain autoencoder; an 8-bit text encoder beside both."""
    tensors = load_file(all_in_one(flux1, tmp_path / "all.safetensors"))
    meant = dict(tensors)
    for name, tensor in tensors.copy().items():
        if re.search(r"(diffusion_model\.double.*mlp|t5xxl.*SelfAttention)\..*weight$", name) and tensor.dim() == 2:
            scale = tensor.abs().amax() / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[f"{name.removesuffix('weight')}weight_scale"] = scale
            meant[name] = tensors[name].float() * scale
    found = []
    for kind, content in (("scaled", tensors), ("meant", meant)):
        path = tmp_path / f"{kind}.safetensors"
        save_file(content, path)
        found.append(encoder_of(flux1, "text_encoder_2", path).encode(["a red star"]).embeddings)
        for key in ("transformer_path", "vae_path", "text_encoder_path"):
            load_pipeline(str(flux1), device="cpu", **{key: str(path)})
    assert torch.equal(*found)


def test_info_lists_every_part_of_a_file(flux1: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = all_in_one(flux1, tmp_path / "all.safetensors")
    assert run(["info", str(path), "--json", "--model-path", str(flux1)]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    found = {part["prefix"]: (part["holds"], part["component"], part["families"]) for part in parts}
    assert found == {
        "model.diffusion_model.": (None, "", ["FLUX.1"]),
        "text_encoders.clip_l.transformer.": ("a CLIP text encoder", "text_encoder", []),
        "text_encoders.t5xxl.transformer.": ("a T5 text encoder", "text_encoder", []),
        "vae.": ("an autoencoder of images, with its authors' names", "vae", []),
        "": ("what no component here reads", "", []),
    }
    assert run(["info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert all(prefix in shown for prefix in ALL_IN_ONE)


def test_what_would_change_the_numbers_and_is_not_applied_is_refused_by_its_name(flux1: Path, tmp_path: Path) -> None:
    """In transformers and text encoders: unknown formats, settings and scales; the scales of inputs are not needed."""
    int8, scales = {"format": "int8_tensorwise"}, {"weight_scale": torch.ones(())}
    cases: list[tuple[dict[str, Any], dict[str, torch.Tensor], str | None]] = [
        ({"format": "asym_w4a8_int8", "group_size": 16}, {}, "comfy_quant: expected format .* got 'asym_w4a8_int8'"),
        ({"format": "svdquant_w4a4", "act_unsigned": True}, {}, "comfy_quant: .*weight: act_unsigned: inputs of this"),
        ({**int8, "transposed": True}, scales, "comfy_quant: key 'transposed': expected none but"),
        ({**int8, "transposed": False}, {**scales, "input_scale": torch.ones(())}, None),
    ]
    for component, key in (("transformer", "transformer_path"), ("text_encoder_2", "text_encoder_2_path")):
        given = load_file(next((flux1 / component).glob("*.safetensors")))
        name = next(each for each, tensor in given.items() if tensor.dim() == 2)
        layer, path = name.removesuffix("weight"), tmp_path / f"{component}.safetensors"
        for settings, beside, said in cases:
            mark = torch.frombuffer(bytearray(json.dumps(settings).encode()), dtype=torch.uint8)
            of_layer = {f"{layer}{suffix}": tensor for suffix, tensor in {**beside, "comfy_quant": mark}.items()}
            save_file({**given, name: given[name].to(torch.int8), **of_layer}, path)
            with nullcontext() if said is None else pytest.raises(ModelLoadError, match=re.escape(layer) + said):
                inspect_pipeline(RuntimeConfig(str(flux1), device="cpu", **{key: str(path)}))


def test_a_plain_cast_to_eight_bits_is_read(flux1: Path, wan: Path, tmp_path: Path) -> None:
    """t5xxl_fp8_e4m3fn and the like: what the numbers are, in the model's dtype; and mixed dtypes in one file."""
    for folder, component, key in (
        (flux1, "text_encoder_2", "text_encoder_2_path"),
        (wan, "text_encoder", "text_encoder_path"),
    ):
        tensors = load_file(folder / component / ENCODER)
        cast = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items() if "SelfAttention" in name}
        half = {name: tensor.to(torch.float16) for name, tensor in tensors.items() if "DenseReluDense" in name}
        save_file({**tensors, **half, **cast}, tmp_path / f"{folder.parent.name}-fp8.safetensors")
        meant = {**tensors, **{name: tensor.float() for name, tensor in (half | cast).items()}}
        save_file(meant, tmp_path / f"{folder.parent.name}.safetensors")
        fp8, plain = (
            latents_and_frames(folder, **{key: tmp_path / f"{folder.parent.name}{suffix}.safetensors"})
            for suffix in ("-fp8", "")
        )
        assert torch.equal(fp8, plain)
        assert not torch.equal(fp8, latents_and_frames(folder))


def encoder_of(folder: Path, component: str, path: Path, *, in_files: bool = False) -> TextEncoder:
    """The text encoders of a folder, one of them out of a file. in_files: read by the unit of streaming."""
    opened = with_parts(ModelFolder(folder), [PartFile(str(path), f"{component}_path", component)], None, ())
    model, cpu = family_for_folder(opened).describe(opened), torch.device("cpu")
    loader = TextEncoderLoader(model, cpu, torch.float32, None, model.text_changes())
    encoder = loader.read(torch.device("meta") if in_files else cpu)
    if in_files:
        for module, home in model.keep_text_in_files(encoder, cpu, torch.float32).items():
            OffloadedPart("text_encoder", module, home, Transfers(cpu), 0).enter()
    return encoder


def as_comfyui_stores_mistral(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """mistral_3_small_flux2: the language model's first 30 layers alone."""
    names = {each: re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", each) for each in tensors}
    left_out = re.compile(r"vision|projector|lm_head|model\.norm|layers\.30\.")
    return {name: tensors[each] for each, name in names.items() if not left_out.search(name)}


def test_scales_of_text_encoders_in_eight_bits_are_multiplied_in(
    tiny_folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """t5xxl_fp8_e4m3fn_scaled, umt5_xxl_fp8_e4m3fn_scaled, qwen_2.5_vl_7b_fp8_scaled, mistral_3_small_flux2_fp8: the
    numbers times the scales, of one tensor or of each row, in a module of ours and in transformers'."""
    for family, name, key in (
        ("flux1", "text_encoder_2", "weight_scale"),
        ("wan", "text_encoder", "scale_weight"),
        ("qwen_image", "text_encoder", "scale_weight"),
        ("flux2", "text_encoder", "weight_scale"),
    ):
        folder = tiny_folder_of(family)
        tensors = load_file(next((folder / name).glob("*.safetensors")))
        if family == "flux2":
            tensors = as_comfyui_stores_mistral(tensors)
        stored, meant = dict(tensors), dict(tensors)
        for each, tensor in tensors.items():
            if tensor.dim() == 2 and re.search(r"(SelfAttention|self_attn|mlp)\..*weight$", each):
                largest = tensor.abs().amax(-1, keepdim=True) if "q" in each else tensor.abs().amax()
                scale = largest / 448
                stored[each] = (tensor / scale).to(torch.float8_e4m3fn)
                meant[each] = stored[each].float() * scale
                stored[f"{each.removesuffix('.weight')}.{key}"] = scale
        stored |= {"scaled_fp8": torch.zeros(0).to(torch.float8_e4m3fn), "spiece_model": torch.zeros(3).to(torch.uint8)}
        assert len(stored) > len(tensors) + 4
        found = []
        for kind, content in (("scaled", stored), ("meant", meant)):
            save_file(content, tmp_path / f"{family}-{kind}.safetensors")
            encoder = encoder_of(folder, name, tmp_path / f"{family}-{kind}.safetensors")
            found.append(encoder.encode(["a red star"]))
            is_said = "8-bit floats, dequantised at load: " in encoder.implementation
            assert is_said == (kind == "scaled")
            streamed = encoder_of(folder, name, tmp_path / f"{family}-{kind}.safetensors", in_files=True)
            assert ("8-bit floats, dequantised as it is read" in streamed.implementation) == is_said
            found.append(streamed.encode(["a red star"]))
        assert all(torch.equal(found[0].embeddings, each.embeddings) for each in found[1:])
    # Of two tensors that may be a parameter's, none is.
    twice = {f"x.{each}": tensor.clone() for each, tensor in stored.items() if ".layers.0.self_attn" in each}
    save_file({**stored, **twice}, tmp_path / "both.safetensors")
    with pytest.raises(
        ModelLoadError,
        match=r"both\.safetensors: .* cannot be read: .* may each be its layers\.0\.self_attn.*expected one tensor",
    ):
        encoder_of(folder, name, tmp_path / "both.safetensors")
    path = {"text_encoder_path": str(tmp_path / "wan-scaled.safetensors")}
    loaded = load_pipeline(str(tiny_folder_of("wan")), device="cpu", **path)
    assert "8-bit floats, dequantised" in loaded.text_encoder.implementation


def test_wans_own_names_and_a_sharded_folder(wan: Path, tmp_path: Path) -> None:
    """Wan2.1_VAE.safetensors in float16 mixed with float32; a text encoder in shards under another name."""
    tensors = load_file(wan / "vae" / VAE)
    names = {theirs: ours for ours, theirs in _causal_names(tensors).items()}
    stored = {names[name]: tensor for name, tensor in tensors.items()}
    assert "decoder.middle.0.residual.2.weight" in stored
    save_file(stored, tmp_path / "Wan2.1_VAE.safetensors")
    encoder = load_file(wan / "text_encoder" / ENCODER)
    halves = [dict(list(encoder.items())[start::2]) for start in (0, 1)]
    shards = tmp_path / "encoder"
    shards.mkdir()
    for index, half in enumerate(halves):
        save_file(half, shards / f"model-0000{index + 1}-of-00002.safetensors")
    weight_map = {
        name: f"model-0000{index + 1}-of-00002.safetensors" for index, half in enumerate(halves) for name in half
    }
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    folder = bare(wan, tmp_path / "bare", "vae", "text_encoder")
    frames = latents_and_frames(folder, vae_path=tmp_path / "Wan2.1_VAE.safetensors", text_encoder_path=shards)
    assert torch.equal(frames, latents_and_frames(wan))


# Of diffusers' names the authors', the other way round than diffusers' script for this model renames.
HUNYUAN_15_VAE = (
    (r"(down|up)_blocks\.(\d+)\.resnets\.(\d+)\.", r"\1.\2.block.\3."),
    (r"(down|up)_blocks\.(\d+)\.(down|up)samplers\.0\.", r"\1.\2.\3sample."),
    (r"mid_block\.resnets\.0\.", "mid.block_1."),
    (r"mid_block\.resnets\.1\.", "mid.block_2."),
    (r"mid_block\.attentions\.0\.to_([qkv])\.", r"mid.attn_1.\1."),
    (r"mid_block\.attentions\.0\.", "mid.attn_1."),
)


def renamed(tensors: dict[str, torch.Tensor], patterns: tuple[tuple[str, str], ...]) -> dict[str, torch.Tensor]:
    def of(name: str) -> str:
        for pattern, other in patterns:
            name = re.sub(pattern, other, name)
        return name

    return {of(name): tensor for name, tensor in tensors.items()}


def test_the_autoencoders_of_hunyuan_video_by_their_authors_names(
    tiny_folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """HunyuanVideo-1.5's have names of their own, with a decoder that counts forwards; HunyuanVideo's are diffusers',
    with a prefix."""
    for family in ("hunyuan_video_15", "hunyuan_video"):
        folder = tiny_folder_of(family)
        tensors = load_file(folder / "vae" / VAE)
        stored = {f"vae.{name}": tensor for name, tensor in tensors.items()}
        if family == "hunyuan_video_15":
            stored = renamed(tensors, HUNYUAN_15_VAE)
            assert "decoder.up.0.upsample.conv.conv.weight" in stored
        save_file(stored, tmp_path / f"{family}.safetensors")
        path = {"vae_path": tmp_path / f"{family}.safetensors"}
        expected = latents_and_frames(folder)
        assert torch.equal(latents_and_frames(bare(folder, tmp_path / family, "vae"), **path), expected)


def test_a_variant_is_read_where_a_component_has_one(wan: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(wan, tmp_path / "both")
    half = {}
    for component, stem in (("transformer", "diffusion_pytorch_model"), ("text_encoder", "model")):
        half[component] = {
            name: tensor.half() for name, tensor in load_file(folder / component / f"{stem}.safetensors").items()
        }
        save_file(half[component], folder / component / f"{stem}.fp16.safetensors")
    pipeline = load_pipeline(str(folder), device="cpu", variant="fp16")
    weights = pipeline.transformer.state_dict()
    plain = load_pipeline(str(wan), device="cpu").transformer.state_dict()
    assert all(torch.equal(weights[name], plain[name].half().float()) for name in weights)
    assert not all(torch.equal(weights[name], plain[name]) for name in weights)
    assert pipeline.recipe["runtime"]["variant"] == "fp16"
    with pytest.raises(ConfigError, match=r"variant: 'bf16': no component of .* has such files"):
        inspect_pipeline(RuntimeConfig(str(folder), device="cpu", variant="bf16"))


Given = Callable[[Path, Path], RuntimeConfig]


def given(key: str, tensors: Callable[[Path], dict[str, torch.Tensor]], name: str = "given.safetensors") -> Given:
    def make(folder: Path, place: Path) -> RuntimeConfig:
        save_file(tensors(folder), place / name)
        return RuntimeConfig(str(folder), device="cpu", **{key: str(place / name)})

    return make


def path_of(key: str, path: Callable[[Path], Path]) -> Given:
    return lambda folder, _: RuntimeConfig(str(folder), device="cpu", **{key: str(path(folder))})


def component(
    name: str, **changed: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Path], dict[str, torch.Tensor]]:
    def tensors(folder: Path) -> dict[str, torch.Tensor]:
        own = load_file(next((folder / name).glob("*.safetensors")))
        return {
            each: next((change(tensor) for part, change in changed.items() if part in each), tensor)
            for each, tensor in own.items()
        }

    return tensors


def another_folder(folder: Path, place: Path) -> RuntimeConfig:
    other = shutil.copytree(folder / "text_encoder_2", place / "other")
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**values, "num_heads": 2}))
    return RuntimeConfig(str(folder), device="cpu", text_encoder_2_path=str(other))


# How a file or folder is given to FLUX.1, and what is said of it.
REFUSED: list[tuple[str, Given, type[DiffusionRuntimeError], str]] = [
    (
        "CLIP where T5 belongs",
        given("text_encoder_2_path", component("text_encoder")),
        ModelLoadError,
        r"holds a CLIP text encoder, expected .*'t5': give it by --text-encoder-path, or",
    ),
    (
        "T5 where CLIP belongs",
        given("text_encoder_path", component("text_encoder_2")),
        ModelLoadError,
        r"holds a T5 text encoder, expected .*'clip_text_model': give it by --text-encoder-2-path, or",
    ),
    (
        "a text encoder as VAE",
        given("vae_path", component("text_encoder")),
        ModelLoadError,
        r"holds a CLIP text encoder, expected an autoencoder: give it by --text-encoder-path",
    ),
    (
        "a transformer as VAE",
        given("vae_path", lambda _: original_tensors("z_image")),
        ModelLoadError,
        r"holds the transformer of Z-Image, expected an autoencoder",
    ),
    (
        "a LoRA as VAE",
        given("vae_path", lambda _: {"a.lora_A.weight": torch.ones(1, 1)}),
        ModelLoadError,
        r"holds a LoRA, expected an autoencoder",
    ),
    (
        "the VAE of another size",
        given("vae_path", component("vae", conv_in=lambda each: each[:1])),
        ModelLoadError,
        r"given\.safetensors: the weights do not fit config\.json .*another shape",
    ),
    (
        "half a VAE",
        given(
            "vae_path",
            lambda folder: {name: each for name, each in component("vae")(folder).items() if "conv_out" not in name},
        ),
        ModelLoadError,
        r"tensors are missing: decoder\.conv_out",
    ),
    (
        "T5 of another width",
        given("text_encoder_2_path", component("text_encoder_2", shared=lambda each: each[:, :8].clone())),
        ModelLoadError,
        r"holds a T5 text encoder with embeddings \[\d+, 8\], expected \[\d+, 32\]",
    ),
    (
        "scaled fp8",
        given(
            "text_encoder_2_path",
            lambda folder: {
                **component("text_encoder_2", wo=lambda each: each.to(torch.float8_e4m3fn))(folder),
                "a.scale_weight": torch.ones(1),
            },
        ),
        ModelLoadError,
        r"a\.scale_weight is a scale, and a\.weight is missing",
    ),
    (
        "whole numbers",
        given("text_encoder_2_path", component("text_encoder_2", wo=lambda each: each.to(torch.int64))),
        ModelLoadError,
        r"stored as I64, expected BF16, F16 or F32: .*wo\.weight",
    ),
    ("booleans", given("vae_path", component("vae", conv_in=lambda each: each > 0)), ModelLoadError, "stored as BOOL"),
    (
        "other settings",
        another_folder,
        ModelLoadError,
        r"1 settings differ from the model's own: num_heads is 2, here 4",
    ),
    (
        "a whole model",
        path_of("vae_path", lambda folder: folder),
        ModelLoadError,
        r"folder of a whole model: give .*/vae",
    ),
    ("nothing", path_of("vae_path", lambda folder: folder / "lost"), ModelLoadError, "no such file or folder"),
    (
        "GGUF",
        given("text_encoder_2_path", component("text_encoder_2"), "t5.gguf"),
        ModelLoadError,
        "does not start with GGUF",
    ),
    ("a pickle", given("vae_path", component("vae"), "ae.ckpt"), ModelLoadError, r"expected a \.safetensors file"),
]


@table(("name", "make", "error", "said"), REFUSED, [name for name, *_ in REFUSED])
def test_what_cannot_be_a_part_says_what_it_is(
    name: str, make: Given, error: type[DiffusionRuntimeError], said: str, flux1: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said) as caught:
        inspect_pipeline(make(flux1, tmp_path))
    # What was named, never the folder of links.
    assert "diffusion_runtime_parts" not in str(caught.value)


def test_a_component_that_a_model_lacks(wan: Path, tmp_path: Path) -> None:
    config = RuntimeConfig(str(wan), device="cpu", text_encoder_2_path=str(wan / "text_encoder"))
    with pytest.raises(ConfigError, match="text_encoder_2_path: the model has no text_encoder_2; leave out --text-enc"):
        inspect_pipeline(config)
    with pytest.raises(ConfigError, match="vae_path: diffusers' own pipeline reads the weights of its folder"):
        inspect_pipeline(RuntimeConfig(str(wan), device="cpu", backend="diffusers", vae_path=str(wan / "vae")))


def test_a_transformer_whose_weights_are_whole_numbers_is_refused(flux1: Path, tmp_path: Path) -> None:
    make = given("transformer_path", component("transformer", proj_out=lambda each: each.to(torch.int32)))
    with pytest.raises(ModelLoadError, match=r"stored as I32, expected BF16, F16 or F32: .*proj_out"):
        inspect_pipeline(make(flux1, tmp_path))


def test_a_variant_behind_diffusers_own_pipeline(wan: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(wan, tmp_path / "both")
    path = folder / "transformer" / VAE
    tensors = {name: 2 * tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path.with_name("diffusion_pytorch_model.fp16.safetensors"))
    pipeline: Any = load_pipeline(str(folder), device="cpu", backend="diffusers", variant="fp16")
    assert torch.equal(pipeline.pipeline.transformer.state_dict()["proj_out.bias"], tensors["proj_out.bias"])
    with pytest.raises(ConfigError, match=r"variant: 'bf16': no component"):
        inspect_pipeline(RuntimeConfig(str(folder), device="cpu", backend="diffusers", variant="bf16"))
