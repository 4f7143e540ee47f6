"""What LoRA files of every family call its modules, against the conversions of diffusers: of whole checkpoints in the
authors' names, which have to know every module, where it has one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders import single_file_utils
from safetensors.torch import save_file

from diffusion_runtime.config import LoraConfig
from diffusion_runtime.models.registry import lora_names_of_families
from diffusion_runtime.weights.lora.binding import Lora, LoraTarget, bind
from diffusion_runtime.weights.lora.detection import families_of
from diffusion_runtime.weights.lora.reading import read_lora_file

LAYERS = {"num_layers": 2}
MODELS: Mapping[str, Callable[[], Any]] = {
    "Wan": lambda: diffusers.WanTransformer3DModel(**LAYERS, num_attention_heads=12, cross_attn_norm=True),
    "FLUX.1": lambda: diffusers.FluxTransformer2DModel(**LAYERS, num_single_layers=2, guidance_embeds=True),
    "LongCat-Image": lambda: diffusers.LongCatImageTransformer2DModel(**LAYERS, num_single_layers=2),
    "FLUX.2": lambda: diffusers.Flux2Transformer2DModel(**LAYERS, num_single_layers=2),
    "FLUX.3": lambda: diffusers.Flux3Transformer2DModel(**LAYERS, num_single_layers=2, flow_map=True),
    "Qwen-Image": lambda: diffusers.QwenImageTransformer2DModel(**LAYERS),
    "HunyuanVideo": lambda: diffusers.HunyuanVideoTransformer3DModel(**LAYERS, num_single_layers=2),
    "HunyuanVideo-1.5": lambda: diffusers.HunyuanVideo15Transformer3DModel(**LAYERS),
    "LTX-2": lambda: diffusers.LTX2VideoTransformer3DModel(**LAYERS),
    "LTX-Video": lambda: diffusers.LTXVideoTransformer3DModel(**LAYERS),
    "Z-Image": lambda: diffusers.ZImageTransformer2DModel(n_layers=2),
    "Krea 2": lambda: diffusers.Krea2Transformer2DModel(**LAYERS),
    "Anima": lambda: diffusers.CosmosTransformer3DModel(**LAYERS, num_attention_heads=16, extra_pos_embed_type=None),
}
# The last part of a weight's name where the authors do not call it `weight`.
SCALES = (".query_norm", ".key_norm", ".qnorm", ".knorm", ".prenorm", ".postnorm", "txtmlp.0", "last.norm")
CONVERSIONS = {
    "Wan": single_file_utils.convert_wan_transformer_to_diffusers,
    "FLUX.1": single_file_utils.convert_flux_transformer_checkpoint_to_diffusers,
    "FLUX.2": single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers,
    "FLUX.3": single_file_utils.convert_flux3_transformer_checkpoint_to_diffusers,
    "HunyuanVideo": single_file_utils.convert_hunyuan_video_transformer_to_diffusers,
    "LTX-2": single_file_utils.convert_ltx2_transformer_to_diffusers,
    "LTX-Video": single_file_utils.convert_ltx_transformer_checkpoint_to_diffusers,
    "Z-Image": single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers,
    "Krea 2": single_file_utils.convert_krea2_transformer_checkpoint_to_diffusers,
    "Anima": single_file_utils.convert_cosmos_transformer_checkpoint_to_diffusers,
}
# The largest LTX-Video has the names, the width and the number of blocks of LTX-2's pictures.
# LongCat-Image has as many single blocks as HunyuanVideo has double blocks.
ALIKE = {"LTX-Video": ("LTX-2", "LTX-Video"), "LongCat-Image": ("LongCat-Image", "HunyuanVideo")}
KNOWN = {names.title: names for names in lora_names_of_families()}


def shapes_of(title: str) -> dict[str, tuple[int, ...]]:
    """Of the model's weights, one column wide."""
    with torch.device("meta"):
        model = MODELS[title]()
    tables = [name for name, _ in model.named_parameters() if not name.endswith((".weight", ".bias"))]
    named = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return {
        name: tuple(shape) if name in tables else (shape[0], 1) if name.endswith(".weight") else (shape[0],)
        for name, shape in named.items()
    }


def originals_of(title: str) -> dict[str, Any]:
    """Every name of the authors' with its targets, for two blocks."""
    names = KNOWN[title]
    found = {}
    for name in (*names.originals, *names.same):
        for block in ("0", "1") if "{}" in name else ("",):
            spelled = name.replace("{}", block)
            found[spelled] = names.find(spelled, flattened=False)
    return found


def bound(title: str, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, Any], folder: Path) -> Lora:
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "a.safetensors")
    target = LoraTarget(KNOWN[title], {"transformer": shapes}, lora_names_of_families)
    return bind(read_lora_file(str(folder / "a.safetensors")), LoraConfig("a"), target)


def low_ranks(rows: Mapping[str, int], generator: torch.Generator) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(down, up) of rank 2 over one column, by name."""
    return {
        name: (torch.randn(2, 1, generator=generator), torch.randn(count, 2, generator=generator))
        for name, count in rows.items()
    }


def converts(title: str, name: str, shapes: Mapping[str, Any], num_rows: int) -> bool:
    """Whether the conversion knows this spelling. That of FLUX.1 needs all of its names at once."""
    if title == "FLUX.1":
        return "processor" not in name and "in.mlp" not in name
    suffix = "scale" if name.endswith(SCALES) else "weight"
    try:
        converted = CONVERSIONS[title]({f"{name}.{suffix}": torch.zeros(num_rows, 1)})
    except (KeyError, ValueError):
        return False
    return bool(converted) and converted.keys() <= shapes.keys()


@pytest.mark.parametrize("title", CONVERSIONS)
def test_the_authors_names_are_those_of_their_checkpoints(title: str, tmp_path: Path) -> None:
    shapes, generator = shapes_of(title), torch.Generator().manual_seed(0)
    rows, tables, others = {}, {}, []
    for name, targets in originals_of(title).items():
        weights = [f"{target.module}.weight" for target in targets]
        if targets[0].module in shapes:
            tables[name] = torch.randn(shapes[targets[0].module], generator=generator)
        elif set(weights) <= shapes.keys():
            count = sum(shapes[weight][0] // target.of for weight, target in zip(weights, targets, strict=True))
            if converts(title, name, shapes, count):
                rows[name] = count
            else:
                others.append(targets)
    factors = low_ranks(rows, generator)
    suffixes = {name: "scale" if name.endswith(SCALES) else "weight" for name in rows}
    checkpoint = {f"{name}.{suffixes[name]}": up @ down for name, (down, up) in factors.items()}
    if title == "FLUX.1":
        checkpoint |= {f"{name}.bias": up[:, 0] for name, (_, up) in factors.items()}
    theirs = CONVERSIONS[title]({**checkpoint, **tables})
    expected = {name: value for name, value in theirs.items() if not name.endswith(".bias")}

    tensors = {f"diffusion_model.{name}.lora_down.weight": down for name, (down, _) in factors.items()}
    tensors |= {f"diffusion_model.{name}.lora_up.weight": up for name, (_, up) in factors.items()}
    tensors |= {f"diffusion_model.{name}.diff": table for name, table in tables.items()}
    lora = bound(title, tensors, shapes, tmp_path)
    assert lora.num_applied == lora.num_keys == len(tensors)
    assert lora.changed("transformer") == expected.keys()
    for name, value in expected.items():
        found = lora.delta("transformer", name, torch.zeros(shapes[name]))
        assert found is not None
        assert torch.allclose(found.reshape(value.shape), value, rtol=1e-6, atol=1e-6), name
    assert [name for name in shapes if not name.endswith(".bias") and name not in expected] == []
    # Other spellings, of ComfyUI and of trainers, stand for what one of the authors' stands for.
    originals = originals_of(title)
    parts = {target for name in rows for target in originals[name]}
    assert [targets for targets in others if not parts.issuperset(targets)] == []


def test_every_module_of_every_model_is_listed_and_tells_its_family(tmp_path: Path) -> None:
    """Dotted and flattened: by its own name the module itself, and no family has more of them."""
    for title in MODELS:
        shapes = {name: shape for name, shape in shapes_of(title).items() if not name.endswith(".bias")}
        names = KNOWN[title]
        for flattened in (False, True):
            modules = [name.removesuffix(".weight") for name in shapes]
            for module in modules:
                spelled = module.replace(".", "_") if flattened else module
                assert [each.module for each in names.find(spelled, flattened=flattened)] == [module], (title, spelled)
        blocks = {name: shape for name, shape in shapes.items() if "blocks.0." in name or "layers.0." in name}
        width, last = max(names.widths), max(names.num_blocks) - 1
        tensors = {}
        for name in blocks:
            if len(shapes[name]) == 2:
                module = re.sub(r"\b0\b", str(last), name.removesuffix(".weight"), count=1)
                tensors[f"transformer.{module}.lora_A.weight"] = torch.zeros(1, width)
                tensors[f"transformer.{module}.lora_B.weight"] = torch.zeros(shapes[name][0], 1)
        save_file(tensors, tmp_path / "a.safetensors")
        found = families_of(read_lora_file(str(tmp_path / "a.safetensors")).modules, KNOWN.values())
        assert found == ALIKE.get(title, (title,)), (title, found)


def test_names_of_hunyuan_video_15() -> None:
    """Its conversion is a script that no package holds; read there."""
    names = KNOWN["HunyuanVideo-1.5"]
    for name, expected in {
        "double_blocks.7.img_attn_q": "transformer_blocks.7.attn.to_q",
        "double_blocks.7.txt_attn_v": "transformer_blocks.7.attn.add_v_proj",
        "double_blocks.7.txt_attn_proj": "transformer_blocks.7.attn.to_add_out",
        "double_blocks.7.img_mod.linear": "transformer_blocks.7.norm1.linear",
        "double_blocks.7.txt_mlp.fc2": "transformer_blocks.7.ff_context.net.2",
        "byt5_in.fc3": "context_embedder_2.linear_3",
        "vision_in.proj.3": "image_embedder.linear_2",
        "cond_type_embedding": "cond_type_embed",
        "time_in.mlp.2": "time_embed.timestep_embedder.linear_2",
        "txt_in.c_embedder.linear_1": "context_embedder.time_text_embed.text_embedder.linear_1",
        "txt_in.individual_token_refiner.blocks.1.mlp.fc1": (
            "context_embedder.token_refiner.refiner_blocks.1.ff.net.0.proj"
        ),
    }.items():
        for flattened in (False, True):
            spelled = name.replace(".", "_") if flattened else name
            assert [rows.module for rows in names.find(spelled, flattened=flattened)] == [expected]
