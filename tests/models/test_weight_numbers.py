"""Weights that nothing can be computed with end a load that names file and tensor: NaN, infinity, quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_wan

from diffusion_runtime import load_pipeline
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.weight_range import first_unusable, unusable_numbers
from diffusion_runtime.weights.lora.reading import read_lora_file
from diffusion_runtime.weights.weight_files import need_scales, refuse_quantised

# What importing diffusers' pipelines says about packages that are not here.
pytestmark = pytest.mark.filterwarnings("ignore")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_number_among_many_is_seen(dtype: torch.dtype) -> None:
    for number, said in ((NAN, "holds NaN"), (INF, "holds infinity"), (-INF, "holds infinity")):
        for place in (0, 4096, 9999):
            weight = torch.linspace(-3, 3, 10_000).to(dtype)
            weight[place] = number
            assert unusable_numbers(weight) == said
            # A tensor that is no block of memory.
            assert unusable_numbers(weight.view(100, 100).T) == said


def test_numbers_that_are_fine_are_left_alone() -> None:
    largest = torch.finfo(torch.bfloat16).max
    # Their sum is infinite, and they are not.
    assert unusable_numbers(torch.full((64,), largest, dtype=torch.bfloat16)) is None
    assert unusable_numbers(torch.zeros(0)) is None
    assert unusable_numbers(torch.tensor(7)) is None
    assert unusable_numbers(torch.ones(3, dtype=torch.bool)) is None
    assert unusable_numbers(torch.empty(3, device="meta")) is None


def test_what_a_dtype_cannot_hold_is_said() -> None:
    weight = torch.tensor([1.0, -70_000.0])
    assert unusable_numbers(weight, torch.bfloat16) is None
    assert unusable_numbers(weight, torch.float16) == (
        "holds 70000, which float16 cannot hold: use dtype bfloat16 or float32"
    )


def test_buffers_that_a_checkpoint_fills_are_seen_and_tables_of_the_class_are_not() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    # What a class computes for itself, such as a causal mask, may hold infinity.
    model.register_buffer("mask", torch.tensor([0.0, -INF]), persistent=False)
    assert first_unusable(model) is None
    model[0].running_var[1] = NAN
    assert first_unusable(model) == ("0.running_var", "holds NaN")


def poison(path: Path, number: float) -> str:
    """Puts a number into the middle of the last matrix of a file that every request needs; returns its name."""
    tensors = load_file(path)
    of_images = ("encoder.conv", "encoder.down", "encoder.mid", "quant_conv")
    name = [name for name, tensor in tensors.items() if tensor.dim() >= 2 and not name.startswith(of_images)][-1]
    flat = tensors[name].view(-1)
    flat[len(flat) // 2] = number
    save_file(tensors, path, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize(
    ("file", "number", "said"),
    [
        ("transformer/diffusion_pytorch_model.safetensors", NAN, "NaN"),
        ("vae/diffusion_pytorch_model.safetensors", INF, "infinity"),
        ("text_encoder/model.safetensors", -INF, "infinity"),
    ],
)
@pytest.mark.parametrize("backend", ["native", "diffusers"])
def test_weights_without_numbers_end_a_load(
    tiny_wan_copy: Callable[[], Path], backend: str, file: str, number: float, said: str
) -> None:
    folder = tiny_wan_copy()
    name = poison(folder / file, number)
    with pytest.raises(ModelLoadError, match=f"tensor .*{name.rpartition('.')[2]} holds {said}") as caught:
        load_pipeline(str(folder), device="cpu", backend=backend)
    named = folder / file if backend == "native" else (folder / file).parent
    assert str(named) in str(caught.value)
    assert "copy" in str(caught.value).lower()


@pytest.mark.parametrize("suffix", ["lora_A.weight", "lora_B.weight", "alpha"])
def test_a_lora_without_numbers_is_named(tmp_path: Path, suffix: str) -> None:
    name = "transformer.blocks.0.attn1.to_q"
    tensors = {f"{name}.lora_A.weight": torch.ones(2, 8), f"{name}.lora_B.weight": torch.ones(8, 2)}
    tensors[f"{name}.alpha"] = torch.tensor(2.0)
    tensors[f"{name}.{suffix}"].view(-1)[0] = NAN
    save_file(tensors, tmp_path / "style.safetensors")
    with pytest.raises(ModelLoadError, match=rf"style.safetensors: tensor {name}.{suffix} holds NaN"):
        read_lora_file(str(tmp_path / "style.safetensors"))


def test_integers_as_weights_never_become_noise(tmp_path: Path) -> None:
    """diffusers converts them to the model's dtype as they are, and the run ended with exit code 0."""
    folder = write_tiny_wan(tmp_path / "model")
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors = {
        name: (40 * tensor).round().to(torch.int8) if "attn1.to_q.weight" in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    for backend in ("native", "diffusers"):
        with pytest.raises(ModelLoadError, match=r"2 of .* tensors are stored as I8") as caught:
            load_pipeline(str(folder), device="cpu", backend=backend)
        assert str(path) in str(caught.value)
        assert "--backend diffusers" not in str(caught.value)


def test_eight_bit_floats_are_plain_numbers_where_no_scales_stand_beside_them() -> None:
    plain = {"a.weight": "F8_E4M3", "a.bias": "BF16", "scale_shift_table": "F32"}
    assert not need_scales(plain)
    refuse_quantised(Path("a.safetensors"), plain)
    for scales in ("a.weight_scale", "a.scale_weight", "scaled_fp8.scale_input"):
        assert set(need_scales({**plain, scales: "F32"})) == {"a.weight"}
        with pytest.raises(ModelLoadError, match=r"1 of 4 tensors are stored as F8_E4M3.*plain casts.*without scales"):
            refuse_quantised(Path("a.safetensors"), {**plain, scales: "F32"})
