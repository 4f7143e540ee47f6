"""Files of Anima as its authors publish them: one of the transformer with its text conditioner, and LoRAs for both."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_anima_lora_to_diffusers
from family_parity import record_latents, relative
from safetensors.torch import load_file, save_file
from tiny_families import small_request

from diffusion_runtime import RuntimeConfig, load_pipeline
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.found_files import with_found_files

pytestmark = pytest.mark.filterwarnings("ignore")
WEIGHTS = "diffusion_pytorch_model.safetensors"
# By diffusers' names, the authors', longer ones first.
NAMES = {
    **{
        "transformer_blocks.": "blocks.",
        "patch_embed.proj.": "x_embedder.proj.1.",
        "time_embed.norm.": "t_embedding_norm.",
    },
    **{"time_embed.t_embedder.": "t_embedder.1.", "proj_out.": "final_layer.linear.", ".to_out.0.": ".output_proj."},
    **{f"norm_out.linear_{index}.": f"final_layer.adaln_modulation.{index}." for index in (1, 2)},
    **{f".norm1.linear_{index}.": f".adaln_modulation_self_attn.{index}." for index in (1, 2)},
    **{f".norm2.linear_{index}.": f".adaln_modulation_cross_attn.{index}." for index in (1, 2)},
    **{f".norm3.linear_{index}.": f".adaln_modulation_mlp.{index}." for index in (1, 2)},
    **{
        ".attn1.": ".self_attn.",
        ".attn2.": ".cross_attn.",
        ".ff.net.0.proj.": ".mlp.layer1.",
        ".ff.net.2.": ".mlp.layer2.",
    },
    **{f".to_{part}.": f".{part}_proj." for part in "qkv"},
    **{f".norm_{part}.": f".{part}_norm." for part in "qk"},
}
Tensors = Mapping[str, torch.Tensor]


def as_authors(name: str) -> str:
    """The authors' name of a tensor of transformer/."""
    for theirs, own in NAMES.items():
        name = name.replace(theirs, own)
    return name


def tensors_of(folder: Path, component: str) -> dict[str, torch.Tensor]:
    found = {
        name: each for file in (folder / component).glob("*.safetensors") for name, each in load_file(file).items()
    }
    return {name: each.clone() for name, each in found.items()}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    kept = record_latents(monkeypatch)

    def run(**how: Any) -> torch.Tensor:
        pipeline = load_pipeline(str(how.pop("model_path")), device="cpu", dtype="float32", **how)
        kept.clear()
        pipeline(small_request(pipeline))
        return kept[-1].clone()

    return run


def test_one_file_has_the_transformer_and_its_text_conditioner(
    tiny_folder_of: Callable[[str], Path],
    run: Callable[..., torch.Tensor],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As the file of the hub: the conditioner within, and tables that nothing reads."""
    folder = tiny_folder_of("anima")
    own = {as_authors(name): each for name, each in tensors_of(folder, "transformer").items()}
    conditioner = {f"llm_adapter.{name}": each for name, each in tensors_of(folder, "text_conditioner").items()}
    tables = {"pos_embedder.seq": torch.zeros(3), "pos_embedder.dim_spatial_range": torch.zeros(2)}
    root = tmp_path / "models"
    for place, tensors in {
        "diffusion_models/anima": {f"net.{name}": each for name, each in {**own, **conditioner, **tables}.items()},
        "text_encoders/qwen_3_06b_base": {
            f"model.{name}": each for name, each in tensors_of(folder, "text_encoder").items()
        },
        "vae/qwen_image_vae": tensors_of(folder, "vae"),
    }.items():
        (root / place).parent.mkdir(parents=True)
        save_file(tensors, root / f"{place}.safetensors")
    settings = shutil.copytree(folder, tmp_path / "settings", ignore=shutil.ignore_patterns("*.safetensors"))
    file = root / "diffusion_models" / "anima.safetensors"
    with caplog.at_level(logging.INFO):
        config = with_found_files(RuntimeConfig(str(file), like=str(settings)))
    assert f"text_conditioner: {file}" in caplog.text
    assert Path(config.text_encoder_path or "").stem == "qwen_3_06b_base"
    expected = run(model_path=str(folder))
    assert torch.equal(run(model_path=str(file), like=str(settings)), expected)
    # Without the conditioner it is the folder's, where there is one.
    save_file({f"net.{name}": each for name, each in own.items()}, file)
    assert torch.equal(run(model_path=str(folder), transformer_path=str(file)), expected)
    with pytest.raises(ModelLoadError, match=r"(?s)are missing:\n  text_conditioner"):
        with_found_files(RuntimeConfig(str(file), like=str(settings)))
    (settings / "t5_tokenizer" / "tokenizer.json").unlink()
    save_file({f"net.{name}": each for name, each in {**own, **conditioner}.items()}, file)
    with pytest.raises(ModelLoadError, match=r"t5_tokenizer: .* \(tokenizer.json of google/t5-v1_1-xxl\)"):
        with_found_files(RuntimeConfig(str(file), like=str(settings)))


def test_a_lora_changes_the_transformer_and_the_text_conditioner(
    tiny_folder_of: Callable[[str], Path], run: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    """On every linear map of both, by the authors' names and by those that diffusers makes of them."""
    folder, generator = tiny_folder_of("anima"), torch.Generator().manual_seed(0)
    changed = Path(shutil.copytree(folder, tmp_path / "changed"))
    lora: dict[str, torch.Tensor] = {}
    for component, prefix in (("transformer", ""), ("text_conditioner", "llm_adapter.")):
        tensors = tensors_of(folder, component)
        for name, weight in tensors.items():
            if weight.dim() == 2 and not name.startswith("embed."):
                module = as_authors(f"{name}") if component == "transformer" else name
                module = f"diffusion_model.{prefix}{module.removesuffix('.weight')}"
                down = torch.randn(3, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
                up = 0.1 * torch.randn(weight.shape[0], 3, generator=generator)
                weight += up @ down
                lora |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
        save_file(tensors, changed / component / WEIGHTS)
    converted = _convert_non_diffusers_anima_lora_to_diffusers(dict(lora))
    assert {name.partition(".")[0] for name in converted} == {"transformer", "text_conditioner"}
    expected, plain = run(model_path=str(changed)), run(model_path=str(folder))
    for index, tensors in enumerate((lora, converted)):
        path = str(tmp_path / f"{index}.safetensors")
        save_file({name: each.contiguous() for name, each in tensors.items()}, path)
        assert relative(run(model_path=str(folder), lora=[path]), expected) < 1e-5 < 1e-3 < relative(plain, expected)
