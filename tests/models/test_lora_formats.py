"""Every format of LoRA files: W + strength * (alpha / rank * B A + diff) to 1e-6, and every key applied or named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tables import table
from tiny_flux1 import tiny_transformer
from torch import nn

from diffusion_runtime.config import LoraConfig
from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.models.registry import lora_names_of_families
from diffusion_runtime.weights.lora.binding import Lora, LoraTarget, bind
from diffusion_runtime.weights.lora.few_step import few_step_hint
from diffusion_runtime.weights.lora.keys import Names
from diffusion_runtime.weights.lora.reading import LoraFile, read_lora_file

Tensors = dict[str, torch.Tensor]
KNOWN = {names.title: names for names in lora_names_of_families()}
RANK, STRENGTH = 3, 0.7


def wan_weights() -> Tensors:
    from diffusers import WanTransformer3DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=8, ffn_dim=24, num_layers=1, freq_dim=8, text_dim=12
        )
    return {name: value.detach() for name, value in model.state_dict().items()}


def flux_weights() -> Tensors:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {name: value.detach() for name, value in tiny_transformer().state_dict().items()}


WEIGHTS: Mapping[str, Tensors] = {"Wan": wan_weights(), "FLUX.1": flux_weights()}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.3


def target(title: str, components: tuple[str, ...] = ("transformer",)) -> LoraTarget:
    shapes = {name: tuple(value.shape) for name, value in WEIGHTS[title].items()}
    return LoraTarget(KNOWN[title], dict.fromkeys(components, shapes), lora_names_of_families)


def file_of(folder: Path, tensors: Tensors, metadata: dict[str, str] | None = None, name: str = "a") -> LoraFile:
    path = folder / f"{name}.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata)
    return read_lora_file(str(path))


def merged(title: str, *loras: Lora) -> Tensors:
    """The tensors that the files change, as a checkpoint's would be."""
    names = set().union(*(lora.changed("transformer") for lora in loras))
    base = WEIGHTS[title]
    deltas = {name: [lora.delta("transformer", name, base[name]) for lora in loras] for name in names}
    return {name: base[name] + sum(one for one in deltas[name] if one is not None) for name in names}


def assert_merged(title: str, lora: Lora, expected: Tensors) -> None:
    found = merged(title, lora)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= 1e-6 * max(1.0, float(value.abs().max())), name


# --- low rank, in every spelling --------------------------------------------------------------------------------------

Q, FFN = "blocks.0.attn1.to_q", "blocks.0.ffn.net.0.proj"
SPELLINGS: Mapping[str, tuple[Names, Callable[[str, str], str]]] = {
    # A function of the module, by its original name, and of `down` or `up`.
    "diffusers": (Names.DIFFUSERS, lambda name, end: f"transformer.{DIFFUSERS[name]}.lora_{'AB'[end == 'up']}.weight"),
    "PEFT": (Names.DIFFUSERS, lambda name, end: f"base_model.model.{DIFFUSERS[name]}.lora_{'AB'[end == 'up']}.weight"),
    "DiffSynth": (Names.PLAIN, lambda name, end: f"{name}.lora_{'AB'[end == 'up']}.default.weight"),
    "an older diffusers": (Names.DIFFUSERS, lambda name, end: f"transformer.{DIFFUSERS[name]}.lora.{end}.weight"),
    "ComfyUI": (Names.ORIGINAL, lambda name, end: f"diffusion_model.{name}.lora_{end}.weight"),
    "AI toolkit": (Names.ORIGINAL, lambda name, end: f"diffusion_model.{name}.lora_{'AB'[end == 'up']}.weight"),
    "musubi-tuner": (Names.KOHYA, lambda name, end: f"lora_unet_{name.replace('.', '_')}.lora_{end}.weight"),
    # Names as files of the hub have them: dots inside a block, and what a trainer calls the transformer.
    "kohya, half with dots": (
        Names.KOHYA,
        lambda name, end: f"lora_unet_{name.replace('.', '_', 1)}.lora_{end}.weight",
    ),
    "unet": (Names.ORIGINAL, lambda name, end: f"unet.{DIFFUSERS[name]}.lora_{'AB'[end == 'up']}.weight"),
    "dit": (Names.ORIGINAL, lambda name, end: f"dit.{name}.lora_{'AB'[end == 'up']}.weight"),
    "model": (Names.ORIGINAL, lambda name, end: f"model.{name}.lora_{end}.weight"),
    # Levels that trainers, PEFT and torch.compile put around each other, in any order; and a name with a hyphen.
    "PEFT inside of diffusers": (
        Names.DIFFUSERS,
        lambda name, end: f"transformer.base_model.model.{DIFFUSERS[name]}.lora_{'AB'[end == 'up']}.weight",
    ),
    "compiled": (
        Names.DIFFUSERS,
        lambda name, end: f"transformer._orig_mod.{DIFFUSERS[name]}.lora_{'AB'[end == 'up']}.my-style.weight",
    ),
    "compiled blocks, flattened": (
        Names.KOHYA,
        lambda name, end: f"lora_unet__orig_mod_{name.replace('.', '_')}.lora_{end}.weight",
    ),
    "data-parallel, of a trainer": (
        Names.ORIGINAL,
        lambda name, end: f"module.model.dit.{name}.lora_{end}.weight",
    ),
    "kohya, diffusers' names": (
        Names.KOHYA,
        lambda name, end: f"lora_transformer_{DIFFUSERS[name].replace('.', '_')}.lora_{end}.weight",
    ),
}
DIFFUSERS = {"blocks.0.self_attn.q": Q, "blocks.0.ffn.0": FFN}


@table("spelling", SPELLINGS)
def test_low_rank_in_every_spelling(spelling: str, tmp_path: Path) -> None:
    """With a fractional alpha, and without one, which is alpha = rank."""
    names, spell = SPELLINGS[spelling]
    weights = WEIGHTS["Wan"]
    for alpha in (None, 0.5):
        tensors, expected = {}, {}
        for original, module in DIFFUSERS.items():
            weight = weights[f"{module}.weight"]
            down, up = random(RANK, weight.shape[1]), random(weight.shape[0], RANK)
            tensors |= {spell(original, "down"): down, spell(original, "up"): up}
            if alpha is not None:
                prefix = spell(original, "up").partition(".lora")[0]
                tensors[f"{prefix}.alpha"] = torch.tensor(alpha)
                tensors[f"{prefix}.rank"] = torch.tensor(RANK)
            factor = 1.0 if alpha is None else alpha / RANK
            expected[f"{module}.weight"] = weight + STRENGTH * factor * up @ down
        file = file_of(tmp_path, tensors)
        assert file.names == (names,)
        assert file.ranks == (RANK,)
        lora = bind(file, LoraConfig("a", STRENGTH), target("Wan"))
        assert lora.num_applied == file.num_keys == len(tensors)
        assert_merged("Wan", lora, expected)


def fused_cases() -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """(down, up, the modules whose rows they hold)."""
    qkv = tuple(f"transformer_blocks.0.attn.to_{part}" for part in "qkv")
    text = tuple(f"transformer_blocks.0.attn.add_{part}_proj" for part in "qkv")
    single = "single_transformer_blocks.1"
    inward = (*(f"{single}.attn.to_{part}" for part in "qkv"), f"{single}.proj_mlp")
    kohya, xlabs, toolkit = "lora_unet_double_blocks_0_img_attn_qkv", "double_blocks.0.processor", "single_blocks.1"
    return {
        "kohya": (f"{kohya}.lora_down.weight", f"{kohya}.lora_up.weight", qkv),
        "XLabs": (f"{xlabs}.qkv_lora1.down.weight", f"{xlabs}.qkv_lora1.up.weight", qkv),
        "XLabs, text": (f"{xlabs}.qkv_lora2.down.weight", f"{xlabs}.qkv_lora2.up.weight", text),
        "XLabs, out": (
            f"{xlabs}.proj_lora2.down.weight",
            f"{xlabs}.proj_lora2.up.weight",
            ("transformer_blocks.0.attn.to_add_out",),
        ),
        "AI toolkit": (
            f"diffusion_model.{toolkit}.linear1.lora_A.weight",
            f"diffusion_model.{toolkit}.linear1.lora_B.weight",
            inward,
        ),
    }


@table("case", fused_cases())
def test_a_fused_map_is_split_into_rows(case: str, tmp_path: Path) -> None:
    down_key, up_key, modules = fused_cases()[case]
    weights = WEIGHTS["FLUX.1"]
    sizes = [weights[f"{module}.weight"].shape[0] for module in modules]
    down, up = random(RANK, weights[f"{modules[0]}.weight"].shape[1]), random(sum(sizes), RANK)
    lora = bind(file_of(tmp_path, {down_key: down, up_key: up}), LoraConfig("a", STRENGTH), target("FLUX.1"))
    parts = zip(modules, up.split(sizes), strict=True)
    expected = {f"{name}.weight": weights[f"{name}.weight"] + STRENGTH * rows @ down for name, rows in parts}
    assert_merged("FLUX.1", lora, expected)


def test_the_halves_of_the_last_modulation_change_places(tmp_path: Path) -> None:
    weight = WEIGHTS["FLUX.1"]["norm_out.linear.weight"]
    down, up = random(RANK, weight.shape[1]), random(weight.shape[0], RANK)
    key = "diffusion_model.final_layer.adaLN_modulation.1"
    lora = bind(
        file_of(tmp_path, {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}), LoraConfig("a"), target("FLUX.1")
    )
    shift, scale = (up @ down).chunk(2)
    assert_merged("FLUX.1", lora, {"norm_out.linear.weight": weight + torch.cat([scale, shift])})


# --- LightX2V: whole differences --------------------------------------------------------------------------------------


def test_differences_of_weights_biases_and_modulations_are_added(tmp_path: Path) -> None:
    """What other runtimes drop: norms, modulations, the head."""
    weights = WEIGHTS["Wan"]
    down, up = random(RANK, 16), random(16, RANK)
    names = {
        "blocks.0.self_attn.norm_q.diff": "blocks.0.attn1.norm_q.weight",
        "blocks.0.cross_attn.norm_k.diff": "blocks.0.attn2.norm_k.weight",
        "blocks.0.self_attn.q.diff_b": "blocks.0.attn1.to_q.bias",
        "blocks.0.ffn.2.diff_b": "blocks.0.ffn.net.2.bias",
        "blocks.0.diff_m": "blocks.0.scale_shift_table",
        "head.diff_m": "scale_shift_table",
        "head.head.diff": "proj_out.weight",
        "head.head.diff_b": "proj_out.bias",
        "time_projection.1.diff_b": "condition_embedder.time_proj.bias",
        "patch_embedding.diff": "patch_embedding.weight",
    }
    differences = {key: random(*weights[name].shape) for key, name in names.items()}
    q = "diffusion_model.blocks.0.self_attn.q"
    tensors = {f"diffusion_model.{key}": value for key, value in differences.items()}
    tensors |= {f"{q}.lora_down.weight": down, f"{q}.lora_up.weight": up}
    file = file_of(tmp_path, tensors)
    assert file.kinds == ("low rank", "whole differences", "biases")
    expected = {name: weights[name] + STRENGTH * differences[key] for key, name in names.items()}
    expected["blocks.0.attn1.to_q.weight"] = weights["blocks.0.attn1.to_q.weight"] + STRENGTH * up @ down
    assert_merged("Wan", bind(file, LoraConfig("a", STRENGTH), target("Wan")), expected)


def test_image_attention_that_the_model_lacks_is_counted_and_said(tmp_path: Path) -> None:
    tensors = low_rank("diffusion_model.blocks.0.self_attn.q", 16, 16)
    tensors |= low_rank("diffusion_model.blocks.0.cross_attn.k_img", 16, 16)
    tensors |= low_rank("diffusion_model.img_emb.proj.1", 16, 16)
    tensors["diffusion_model.blocks.0.cross_attn.norm_k_img.diff"] = random(16)
    lora = bind(file_of(tmp_path, tensors), LoraConfig("a"), target("Wan"))
    assert (lora.num_applied, lora.num_keys) == (2, 7)
    (remark,) = lora.remarks
    assert "5 of its 7 keys were not applied: they are for the image attention of Wan 2.1 I2V" in remark


def test_a_patch_embedding_of_other_inputs_is_counted_and_said(tmp_path: Path) -> None:
    """A LoRA of a text-to-video model on one of image to video, or the other way round."""
    rows, *inputs = WEIGHTS["Wan"]["patch_embedding.weight"].shape
    columns = inputs[0] * inputs[1] * inputs[2] * inputs[3]
    known = low_rank("diffusion_model.blocks.0.self_attn.q", 16, 16)
    for other in (columns + 80, columns - 8):
        lora = bind(
            file_of(tmp_path, known | low_rank("diffusion_model.patch_embedding", other, rows)),
            LoraConfig("a"),
            target("Wan"),
        )
        assert (lora.num_applied, lora.num_keys) == (2, 4)
        (remark,) = lora.remarks
        assert "2 of its 4 keys were not applied: they are for the patch embedding of a model with other inp" in remark
    # Of another width, it is another model's.
    tensors = known | low_rank("diffusion_model.patch_embedding", columns, rows + 8)
    with pytest.raises(ModelLoadError, match="1 of its 2 modules have other sizes"):
        bind(file_of(tmp_path, tensors), LoraConfig("a"), target("Wan"))


def low_rank(key: str, in_dim: int, out_dim: int, rank: int = RANK) -> Tensors:
    return {f"{key}.lora_down.weight": random(rank, in_dim), f"{key}.lora_up.weight": random(out_dim, rank)}


# --- DoRA, LoKr and settings, against peft ----------------------------------------------------------------------------


class Tiny(nn.Module):
    """Modules of the tiny model, under its names."""

    def __init__(self) -> None:
        super().__init__()
        for name in (Q, FFN):
            weight = WEIGHTS["Wan"][f"{name}.weight"]
            linear = nn.Linear(weight.shape[1], weight.shape[0])
            linear.weight.data.copy_(weight)
            linear.bias.data.copy_(WEIGHTS["Wan"][f"{name}.bias"])
            parent: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = getattr(parent, part)
            parent.add_module(last, linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def peft_configs() -> dict[str, Any]:
    from peft import LoKrConfig
    from peft import LoraConfig as PeftConfig

    some = {"target_modules": ["to_q", "proj"], "r": RANK}
    lora = {**some, "init_lora_weights": False}
    return {
        "alpha": PeftConfig(**lora, lora_alpha=5),
        "rslora and patterns": PeftConfig(
            **lora, lora_alpha=5, use_rslora=True, alpha_pattern={"to_q": 7}, rank_pattern={"proj": 2}
        ),
        "dora": PeftConfig(**lora, lora_alpha=4, use_dora=True),
        "bias": PeftConfig(**lora, lora_alpha=2, lora_bias=True),
        "lokr": LoKrConfig(**some, alpha=6, init_weights=False),
        "lokr, both decomposed": LoKrConfig(**some, alpha=2, init_weights=False, decompose_both=True),
    }


# peft says that not every version of it reads the biases that it writes.
@pytest.mark.filterwarnings("ignore")
@table("kind", peft_configs())
def test_a_folder_that_peft_wrote_equals_its_merge(kind: str, tmp_path: Path) -> None:
    from peft import get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = get_peft_model(Tiny(), peft_configs()[kind])
        for name, parameter in model.named_parameters():
            if "magnitude" in name or "lora_B.default.bias" in name:
                parameter.data.add_(torch.rand_like(parameter))
    model.save_pretrained(str(tmp_path))
    theirs = {name: value.detach() for name, value in model.merge_and_unload().named_parameters()}
    if kind != "bias":
        theirs = {name: value for name, value in theirs.items() if name.endswith(".weight")}
    file = read_lora_file(str(tmp_path))
    lora = bind(file, LoraConfig("a"), target("Wan"))
    assert lora.num_applied == lora.num_keys == file.num_keys
    assert_merged("Wan", lora, theirs)


def test_dora_of_kohya_and_by_column(tmp_path: Path) -> None:
    """dora_scale [out, 1] as kohya's trainers write it; [1, in] as LyCORIS may."""
    weight = WEIGHTS["Wan"][f"{FFN}.weight"]
    tensors = low_rank("lora_unet_blocks_0_ffn_0", weight.shape[1], weight.shape[0])
    down, up = tensors.values()
    changed = weight + up @ down
    for magnitude, dim in ((random(weight.shape[0], 1).abs(), 1), (random(1, weight.shape[1]).abs(), 0)):
        file = file_of(tmp_path, {**tensors, "lora_unet_blocks_0_ffn_0.dora_scale": magnitude})
        assert file.kinds == ("low rank", "DoRA")
        whole = magnitude * changed / changed.norm(dim=dim, keepdim=True)
        lora = bind(file, LoraConfig("a", STRENGTH), target("Wan"))
        assert_merged("Wan", lora, {f"{FFN}.weight": weight + STRENGTH * (whole - weight)})


def test_fused_dora_is_split_by_row(tmp_path: Path) -> None:
    weights = WEIGHTS["FLUX.1"]
    names = [f"transformer_blocks.0.attn.to_{part}.weight" for part in "qkv"]
    weight = torch.cat([weights[name] for name in names])
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = low_rank(key, weight.shape[1], weight.shape[0])
    down, up = tensors.values()
    magnitude = random(weight.shape[0], 1).abs()
    lora = bind(file_of(tmp_path, {**tensors, f"{key}.dora_scale": magnitude}), LoraConfig("a"), target("FLUX.1"))
    changed = weight + up @ down
    whole = magnitude * changed / changed.norm(dim=1, keepdim=True)
    assert_merged("FLUX.1", lora, dict(zip(names, whole.chunk(3), strict=True)))
    by_column = {**tensors, f"{key}.dora_scale": random(1, weight.shape[1])}
    with pytest.raises(ModelLoadError, match="a DoRA magnitude per column over several matrices"):
        bind(file_of(tmp_path, by_column), LoraConfig("a"), target("FLUX.1"))


def test_lokr_of_lycoris_whole_decomposed_and_fused(tmp_path: Path) -> None:
    """Only decomposed factors are scaled by alpha / rank; the fused product is cut into rows."""
    key, weights = "lycoris_transformer_blocks_0_attn_to_q", WEIGHTS["FLUX.1"]
    name = "transformer_blocks.0.attn.to_q.weight"
    first, second, a, b = random(4, 2), random(8, 16), random(8, RANK), random(RANK, 16)
    alpha = {f"{key}.alpha": torch.tensor(1.5)}
    file = file_of(tmp_path, {f"{key}.lokr_w1": first, f"{key}.lokr_w2": second, **alpha})
    assert (file.names, file.kinds) == ((Names.LYCORIS,), ("LoKr",))
    assert_merged(
        "FLUX.1", bind(file, LoraConfig("a"), target("FLUX.1")), {name: weights[name] + torch.kron(first, second)}
    )
    file = file_of(tmp_path, {f"{key}.lokr_w1.default": first, f"{key}.lokr_w2_a": a, f"{key}.lokr_w2_b": b, **alpha})
    product = torch.kron(first, a @ b) * 1.5 / RANK
    assert_merged("FLUX.1", bind(file, LoraConfig("a"), target("FLUX.1")), {name: weights[name] + product})
    key = "diffusion_model.double_blocks.0.img_attn.qkv"
    # 96 rows in blocks of 12: the three parts begin inside a block.
    first, second = random(8, 2), random(12, 16)
    lora = bind(
        file_of(tmp_path, {f"{key}.lokr_w1": first, f"{key}.lokr_w2": second}), LoraConfig("a"), target("FLUX.1")
    )
    parts = torch.kron(first, second).chunk(3)
    names = [f"transformer_blocks.0.attn.to_{part}.weight" for part in "qkv"]
    assert_merged("FLUX.1", lora, {name: weights[name] + part for name, part in zip(names, parts, strict=True)})


def test_loha_of_lycoris_plain_fused_and_of_a_convolution(tmp_path: Path) -> None:
    """(w1_a w1_b) * (w2_a w2_b) * alpha / rank, in float64; a convolution's halves may meet in a core (Tucker)."""
    key, weights = "lycoris_transformer_blocks_0_attn_to_q", WEIGHTS["FLUX.1"]
    name = "transformer_blocks.0.attn.to_q.weight"

    def loha(key: str, rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
        halves = [random(rows, RANK), random(RANK, columns), random(rows, RANK) + 0.1, random(RANK, columns) - 0.2]
        a, b, c, d = (half.double() for half in halves)
        ends = ("w1_a", "w1_b", "w2_a", "w2_b")
        return {f"{key}.hada_{end}": half for end, half in zip(ends, halves, strict=True)}, (a @ b) * (c @ d)

    tensors, product = loha(key, 32, 32)
    for alpha, factor in (({}, 1.0), ({f"{key}.alpha": torch.tensor(1.5)}, 1.5 / RANK)):
        file = file_of(tmp_path, tensors | alpha)
        assert (file.names, file.kinds, file.ranks) == ((Names.LYCORIS,), ("LoHa",), ())
        lora = bind(file, LoraConfig("a", STRENGTH), target("FLUX.1"))
        assert lora.num_applied == len(tensors | alpha)
        assert_merged("FLUX.1", lora, {name: weights[name] + STRENGTH * factor * product})
    tensors, product = loha("diffusion_model.double_blocks.0.img_attn.qkv", 96, 32)
    names = [f"transformer_blocks.0.attn.to_{part}.weight" for part in "qkv"]
    expected = {name: weights[name] + part for name, part in zip(names, product.chunk(3), strict=True)}
    assert_merged("FLUX.1", bind(file_of(tmp_path, tensors), LoraConfig("a"), target("FLUX.1")), expected)
    weight = WEIGHTS["Wan"]["patch_embedding.weight"]
    halves = {f"w{index}_{end}": random(RANK, weight.shape["ab".index(end)]) for index in (1, 2) for end in "ab"}
    cores = {f"t{index}": random(RANK, RANK, *weight.shape[2:]) + index for index in (1, 2)}
    first, second = (
        torch.einsum(
            "ijxyz,ip,jc->pcxyz",
            *(part.double() for part in (cores[f"t{index}"], halves[f"w{index}_a"], halves[f"w{index}_b"])),
        )
        for index in (1, 2)
    )
    tensors = {f"diffusion_model.patch_embedding.hada_{end}": value for end, value in (halves | cores).items()}
    lora = bind(file_of(tmp_path, tensors), LoraConfig("a"), target("Wan"))
    assert_merged("Wan", lora, {"patch_embedding.weight": weight + first * second})


@pytest.mark.filterwarnings("ignore")
def test_loha_of_peft_is_what_peft_merges(tmp_path: Path) -> None:
    from peft import LoHaConfig, get_peft_model

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.ModuleDict({"attn1": nn.ModuleDict({"to_q": nn.Linear(16, 16)})})])

    model = Model()
    weight = WEIGHTS["Wan"][f"{Q}.weight"]
    with torch.no_grad():
        model.get_submodule(Q).weight.copy_(weight)
    adapted = get_peft_model(model, LoHaConfig(r=4, alpha=6, target_modules=["to_q"], init_weights=False))
    adapted.save_pretrained(str(tmp_path))
    lora = bind(read_lora_file(str(tmp_path)), LoraConfig("a"), target("Wan"))
    merged = adapted.merge_and_unload().get_submodule(Q).weight.detach()
    assert float((merged - weight).abs().max()) > 1e-2
    assert_merged("Wan", lora, {f"{Q}.weight": merged})


def test_alphas_of_the_metadata(tmp_path: Path) -> None:
    tensors = low_rank("blocks.0.self_attn.q", 16, 16)
    down, up = tensors.values()
    weight = WEIGHTS["Wan"][f"{Q}.weight"]
    for metadata, factor in (
        ({"lora_alpha": "1.5"}, 1.5 / RANK),
        ({"network_alpha": "0.25"}, 0.25 / RANK),
        # A module's own one, by name before by an expression that comes later, and the other way round.
        ({"lora_adapter_metadata": json.dumps({"alpha_pattern": {"attn.q": 5, "self_attn.q": 2, ".*q": 3}})}, 2 / RANK),
        ({"lora_adapter_metadata": json.dumps({"alpha_pattern": {r".*\.(q|k)": 3, "q": 2}})}, 1.0),
        (
            {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 2, "transformer.use_rslora": True})},
            2 / RANK**0.5,
        ),
        ({"format": "pt"}, 1.0),
    ):
        lora = bind(file_of(tmp_path, tensors, metadata), LoraConfig("a"), target("Wan"))
        assert_merged("Wan", lora, {f"{Q}.weight": weight + factor * up @ down})


def test_several_files_add_up_whatever_their_order(tmp_path: Path) -> None:
    """DoRA too is taken of the weight without the others."""
    one = low_rank("blocks.0.self_attn.q", 16, 16)
    two = {**low_rank("blocks.0.self_attn.q", 16, 16, rank=2), "blocks.0.self_attn.q.dora_scale": random(16, 1).abs()}
    loras = [
        bind(file_of(tmp_path, tensors, name=str(index)), LoraConfig("a", strength), target("Wan"))
        for index, (tensors, strength) in enumerate(((one, 0.5), (two, -2.0)))
    ]
    forth, back = merged("Wan", *loras), merged("Wan", *reversed(loras))
    assert torch.allclose(forth[f"{Q}.weight"], back[f"{Q}.weight"], atol=1e-6)
    down, up = one.values()
    alone = merged("Wan", loras[1])[f"{Q}.weight"]
    assert torch.allclose(forth[f"{Q}.weight"], alone + 0.5 * up @ down, atol=1e-6)


@table(
    "name, metadata, expected",
    [
        ("Wan21_I2V_14B_lightx2v_cfg_step_distill_lora_rank64", {}, None),
        ("wan2.2_i2v_A14b_low_noise_lora_rank64_lightx2v_4step_1022", {}, 4),
        ("Qwen-Image-Lightning-8steps-V1.1", {}, 8),
        ("unnamed", {"ss_output_name": "turbo-4-steps"}, 4),
    ],
)
def test_few_steps_are_read_off_names(name: str, metadata: dict[str, str], expected: int | None) -> None:
    hint = few_step_hint(name, metadata)
    assert hint is not None
    assert hint.num_steps == expected
    assert hint.remark("a", 50, is_guided=True) is not None
    assert hint.remark("a", expected or 4, is_guided=False) is None


@table("name", ["style_3000steps", "anime", "hyperion-portrait-e10", "step_1500", "my-stepsister"])
def test_other_names_say_nothing_of_few_steps(name: str) -> None:
    assert few_step_hint(name, {}) is None


# --- bad input --------------------------------------------------------------------------------------------------------

Q_KEY = "diffusion_model.blocks.0.self_attn.q"
FUSED = "lora_unet_double_blocks_0_img_attn_qkv"
BAD: Mapping[str, tuple[str, Tensors, str]] = {
    "another family": (
        "FLUX.1",
        low_rank("diffusion_model.blocks.3.self_attn.q", 5120, 5120),
        r"this LoRA is for Wan, and the model is FLUX.1: 1 of its 1 modules .*: blocks.3.self_attn.q",
    ),
    "another family, known by its sizes": (
        "Wan",
        low_rank("transformer.transformer_blocks.59.attn.to_q", 3072, 3072),
        "this LoRA is for Qwen-Image, and the model is Wan",
    ),
    "one key that matches nothing": (
        "Wan",
        {**low_rank(Q_KEY, 16, 16), **low_rank("diffusion_model.blocks.0.self_attn.qq", 16, 16)},
        "for another Wan model: 1 of its 2 modules are not in this model's: blocks.0.self_attn.qq",
    ),
    "no family's names": ("Wan", low_rank("down_blocks_1_attn", 16, 16), "of no family that is known here"),
    "all for parts that the model lacks": (
        "Wan",
        low_rank("diffusion_model.blocks.0.cross_attn.k_img", 16, 16),
        "all are for parts that it does not have",
    ),
    "another size": (
        "Wan",
        low_rank(Q_KEY, 32, 16),
        r"q is \[16, 16\], the LoRA's \[16, 32\]. Use a LoRA that was made",
    ),
    "a fused map whose parts differ": (
        "FLUX.1",
        low_rank(FUSED, 32, 90),
        r"qkv is \[96, 32\] \(.*to_q.weight 32 \+ .*to_k.weight 32 \+ .*\), the LoRA's \[90, 32\]",
    ),
    "a rank that does not fit": (
        "Wan",
        {f"{Q_KEY}.lora_down.weight": random(3, 16), f"{Q_KEY}.lora_up.weight": random(16, 4)},
        r"q has a rank that does not fit: lora_A is \[3, 16\] and lora_B \[16, 4\]",
    ),
    "NaN": (
        "Wan",
        {**low_rank(Q_KEY, 16, 16), f"{Q_KEY}.diff_b": torch.full((16,), torch.nan)},
        "tensor diffusion_model.blocks.0.self_attn.q.diff_b holds NaN",
    ),
    "one half": ("Wan", {f"{Q_KEY}.lora_down.weight": random(3, 16)}, "only one of lora_A .* the file is incomplete"),
    "float64 that float32 cannot hold": (
        "Wan",
        {f"{Q_KEY}.diff": torch.full((16, 16), 1e200, dtype=torch.float64)},
        "holds infinity",
    ),
    "4-bit floats": (
        "Wan",
        {f"{Q_KEY}.diff": torch.zeros(16, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
        "float4_e2m1fn_x2 cannot be read; save the file in bfloat16",
    ),
    "control characters in a name": (
        "Wan",
        {"transformer.\x1b[31mq\n.lora_down.weight": random(3, 16)},
        r"safetensors: '\\x1b\[31mq\\n' has only one of lora_A",
    ),
    "control characters in a key": ("Wan", {"\x1b[31mq": random(3, 16)}, r"1 of 1 keys are others: '\\x1b\[31mq'"),
    "a LoKr factor twice": (
        "Wan",
        {f"{Q_KEY}.lokr_w1": random(4, 4), f"{Q_KEY}.lokr_w1_a": random(4, 2), f"{Q_KEY}.lokr_w2": random(4, 4)},
        "lokr_w1 beside lokr_w1_a: leave one out",
    ),
    # Each factor takes 40 GB, were it multiplied out before its size is compared.
    "a LoKr of another size, factored": (
        "Wan",
        {
            f"{Q_KEY}.lokr_w1_a": torch.ones(10**5, 1),
            f"{Q_KEY}.lokr_w1_b": torch.ones(1, 10**5),
            f"{Q_KEY}.lokr_w2_a": torch.ones(10**5, 1),
            f"{Q_KEY}.lokr_w2_b": torch.ones(1, 10**5),
        },
        r"q is \[16, 16\], the LoRA's \[10000000000, 10000000000\]",
    ),
    "half a LoKr": ("Wan", {f"{Q_KEY}.lokr_w1": random(4, 4)}, "neither lokr_w2 nor both of"),
    "an alpha alone": ("Wan", {f"{Q_KEY}.alpha": torch.tensor(1.0)}, "only alpha, which changes nothing"),
    "a magnitude alone": ("Wan", {f"{Q_KEY}.dora_scale": random(16)}, "a DoRA magnitude without"),
    "a key of no format": (
        "Wan",
        {f"{Q_KEY}.strange_w1": random(4, 4), f"{Q_KEY}.alpha": torch.tensor(1.0)},
        "2 of 2 keys are others: .*strange_w1",
    ),
    "half a LoHa": ("Wan", {f"{Q_KEY}.hada_w1_a": random(16, 4)}, "has no hada_w1_b; the file is incomplete"),
    "a LoHa whose factors differ": (
        "Wan",
        {
            f"{Q_KEY}.hada_w{i}_{end}": random(*(s, 2) if end == "a" else (2, s))
            for i, s in ((1, 16), (2, 8))
            for end in "ab"
        },
        "two LoHa factors that do not fit",
    ),
    **{
        method: (
            "Wan",
            {f"{Q_KEY}.{end}": random(4, 4), f"{Q_KEY}.alpha": torch.tensor(1.0)},
            f"1 of its keys are of {method}, which this runtime does not apply: .*merge_and_unload",
        )
        for end, method in (("oft_blocks", "OFT"), ("oft_R.weight", "OFT"), ("boft_R", "BOFT"), ("ia3_l", "IA3"))
    },
    "a text encoder": (
        "Wan",
        {**low_rank(Q_KEY, 16, 16), **low_rank("lora_te1_text_model", 4, 4)},
        "2 of its 4 keys change a text encoder, and none of this Wan model's",
    ),
    "twice": ("Wan", {**low_rank(Q_KEY, 16, 16), **low_rank(f"transformer.{Q}", 16, 16)}, "are both for .*to_q.weight"),
    "twice, by prefix": (
        "Wan",
        {**low_rank(f"transformer.{Q}", 16, 16), **low_rank(f"base_model.model.{Q}", 16, 16)},
        "are both the down of",
    ),
    "whole numbers": (
        "Wan",
        {f"{Q_KEY}.diff": torch.ones(16, 16, dtype=torch.int8)},
        "expected floating-point numbers",
    ),
    "a bias that is not there": (
        "FLUX.1",
        {"transformer_blocks.0.attn.norm_q.diff_b": random(16)},
        "the model's transformer_blocks.0.attn.norm_q.bias is not there",
    ),
}


@table("case", BAD)
def test_bad_files_are_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    title, tensors, told = BAD[case]
    with pytest.raises(ModelLoadError, match=told) as caught:
        bind(file_of(tmp_path, tensors), LoraConfig("a"), target(title))
    assert "a.safetensors" in str(caught.value)


def test_a_file_for_one_transformer_of_two_says_which(tmp_path: Path) -> None:
    two = target("Wan", ("transformer", "transformer_2"))
    tensors = low_rank(Q_KEY, 16, 16)
    file = file_of(tmp_path, tensors, name="style_low_noise")
    with pytest.raises(
        ModelLoadError, match=r"two transformers.*transformer_2=FILE. Its name says 'low_noise': transformer_2"
    ):
        bind(file, LoraConfig("a"), two)
    for component, changed in (
        ("transformer", [True, False]),
        ("transformer_2", [False, True]),
        ("both", [True, True]),
    ):
        lora = bind(file, LoraConfig("a", component=component), two)
        assert [bool(lora.changed(each)) for each in two.shapes] == changed
    with pytest.raises(ModelLoadError, match="this LoRA is for transformer_2, and the model has transformer alone"):
        bind(file, LoraConfig("a", component="both"), target("Wan"))
    named = file_of(tmp_path, {**low_rank(f"transformer_2.{Q}", 16, 16), **low_rank(f"transformer.{Q}", 16, 16)})
    assert [bool(bind(named, LoraConfig("a"), two).changed(each)) for each in two.shapes] == [True, True]
    flat = file_of(tmp_path, low_rank(f"lora_transformer_2_{Q.replace('.', '_')}", 16, 16))
    assert [bool(bind(flat, LoraConfig("a"), two).changed(each)) for each in two.shapes] == [False, True]


def test_an_alpha_of_whole_numbers_and_one_of_the_whole_file_for_both_transformers(tmp_path: Path) -> None:
    """kohya's trainers save the rank as it is where no alpha was given."""
    tensors, two = low_rank(f"transformer_2.{Q}", 16, 16), target("Wan", ("transformer", "transformer_2"))
    whole = {f"{Q_KEY}.alpha": torch.tensor(6), **low_rank(Q_KEY, 16, 16)}
    once = low_rank(Q_KEY, 16, 16)[f"{Q_KEY}.lora_up.weight"] @ low_rank(Q_KEY, 16, 16)[f"{Q_KEY}.lora_down.weight"]
    weight = WEIGHTS["Wan"][f"{Q}.weight"]
    lora = bind(file_of(tmp_path, whole), LoraConfig("a"), target("Wan"))
    assert_merged("Wan", lora, {f"{Q}.weight": weight + 2 * once})
    for metadata in ({"lora_alpha": "6"}, {"lora_adapter_metadata": json.dumps({"lora_alpha": 6})}):
        delta = bind(file_of(tmp_path, tensors, metadata), LoraConfig("a"), two).delta(
            "transformer_2", f"{Q}.weight", weight
        )
        assert delta is not None
        torch.testing.assert_close(delta, 2 * once)


def test_the_settings_in_a_folder_count_whatever_its_file_is_called(tmp_path: Path) -> None:
    tensors = low_rank(Q, 16, 16)
    save_file(tensors, tmp_path / "mine.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 6, "r": 3}))
    weight = WEIGHTS["Wan"][f"{Q}.weight"]
    lora = bind(read_lora_file(str(tmp_path)), LoraConfig("a"), target("Wan"))
    down, up = tensors.values()
    assert_merged("Wan", lora, {f"{Q}.weight": weight + 2 * up @ down})


def test_settings_of_a_stranger_are_checked_at_once(tmp_path: Path) -> None:
    """Expressions that take years to match are refused; names of modules may be any number."""
    tensors = low_rank(Q_KEY, 16, 16)
    for settings, told in (
        ({"alpha_pattern": {r"(\w+)+!": 1}}, "alpha_pattern: expected names, or regular expressions of at most"),
        ({"alpha_pattern": {"(q|q)*!": 1}}, "none of a group"),
        ({"alpha_pattern": {"(.|.)" * 30: 1}}, "6 alternatives"),
        ({"rank_pattern": {f".{index}": 3 for index in range(20)}}, None),
        ({"rank_pattern": {f"x{index}*": 3 for index in range(20)}}, "at most 16 regular expressions, got 20"),
        ({"alpha_pattern": {"(?i)q": 1}}, r"'\(\?i\)q': global flags"),
        ({"r": 3.5}, "r: expected a whole number of 1 or more, got 3.5"),
        ({"rank_pattern": {"q": "3"}}, "rank_pattern: expected a whole number of 1 or more, got '3'"),
        ({"use_rslora": "true"}, "use_rslora: expected true or false, got 'true'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4' takes its first values off"),
        ({"init_lora_weights": "gaussian"}, None),
    ):
        metadata = {"lora_adapter_metadata": json.dumps(settings)}
        if told is None:
            file_of(tmp_path, tensors, metadata)
            continue
        with pytest.raises(ModelLoadError, match=told) as caught:
            file_of(tmp_path, tensors, metadata)
        assert "its lora_adapter_metadata: " in str(caught.value)
    metadata = {"lora_adapter_metadata": json.dumps({"alpha_pattern": {".*q": 1}})}
    with pytest.raises(ModelLoadError, match="a module name of at most 120 characters beside regular expressions"):
        file_of(tmp_path, low_rank("a." * 80, 4, 4), metadata)


def test_folders_that_hold_no_lora(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected adapter_model.safetensors or .*, found none"):
        read_lora_file(str(tmp_path))
    save_file(low_rank(Q, 16, 16), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 8}))
    with pytest.raises(ModelLoadError, match="a rank that does not fit: its settings say 8, its tensors have 3"):
        read_lora_file(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"use_dora": True}))
    with pytest.raises(ModelLoadError, match="use_dora: expected magnitudes"):
        read_lora_file(str(tmp_path))
    assert load_file(tmp_path / "adapter_model.safetensors").keys()
