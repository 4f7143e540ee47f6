"""8-bit linear layers in every family: which ones, what is computed, loading, LoRA files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fp8_products import dequantized_product
from tiny_families import WRITERS, given_to, small_request

from diffusion_runtime import Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext, StepInfo
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.fp8_rows.reference import QuantizedRows, dequantize, quantize_rows
from diffusion_runtime.layers import fp8_linear
from diffusion_runtime.layers.fp8_linear import SCALED_PRODUCT, Fp8Linear
from diffusion_runtime.layers.linear import Linear, QuantizedTokens
from diffusion_runtime.loading.preparation import inspect_pipeline
from diffusion_runtime.weights.quantization import Quantization

MODES = ("fp8", "fp8-all")


@pytest.mark.parametrize("family", WRITERS)
def test_quantised_layers_hold_the_weights_and_are_counted(family: str, tmp_path: Path) -> None:
    folder = str(WRITERS[family](tmp_path / family))
    plain = load_pipeline(folder, device="cpu")
    quantized = load_pipeline(folder, device="cpu", quantization="fp8-all")
    weights = {name: layer for name, layer in plain.transformer.named_modules() if isinstance(layer, Linear)}
    replaced = {name: layer for name, layer in quantized.transformer.named_modules() if isinstance(layer, Fp8Linear)}
    assert replaced
    assert not any("modulation" in name for name in replaced)
    for name, layer in replaced.items():
        expected = quantize_rows(weights[name].weight)
        assert torch.equal(layer.weight.float(), expected.values.float()), name
        assert torch.equal(layer.weight_scale, expected.scales), name
        x = torch.randn(2, 3, layer.in_features)
        held = dequantize(QuantizedRows(layer.weight, layer.weight_scale), torch.float32)
        assert torch.allclose(layer(x), torch.nn.functional.linear(x, held, layer.bias), atol=1e-6)
    report = quantized(small_request(quantized, 2)).attention_report
    (row,) = report.products
    assert "weights dequantised per call: cpu has no" in row.implementation
    # Two steps; a layer may run once per branch and once per stream. In FLUX.3 text runs once per request, and there is
    # no reference.
    once, left_out = (sum(name.startswith(of) for name in replaced) for of in ("text_blocks.", "reference_blocks."))
    assert row.count - once >= 2 * (len(replaced) - once - left_out)
    assert (row.count - once) % 2 == 0
    assert report.to_dict()["products"] == [{"implementation": row.implementation, "count": row.count}]


@pytest.mark.parametrize("family", WRITERS)
def test_norms_quantise_the_input_of_8_bit_layers_and_change_no_bit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with 8-bit products, with and without the quantisation of its own that a layer then leaves out."""
    monkeypatch.setattr(fp8_linear, "product_refusal", lambda *_: None)
    monkeypatch.setattr(fp8_linear, "multiply_rows", dequantized_product)
    folder = str(WRITERS[family](tmp_path / family))
    # A kept layer beside 8-bit ones; the gate of Video Sparse Attention would be another.
    ignored = ["*.self_attention.qkv"] if family == "ltx2" else []
    pipeline = load_pipeline(
        folder, device="cpu", dtype="bfloat16", quantization="fp8-all", quantization_ignored_layers=ignored
    )
    assert isinstance(pipeline, Pipeline)
    layers = {layer: name for name, layer in pipeline.transformer.named_modules() if isinstance(layer, Fp8Linear)}
    took: list[str] = []
    passes: list[int] = []
    own_pass = fp8_linear.quantize_rows

    def velocity() -> tuple[torch.Tensor, list[str]]:
        counts: list[str] = []
        next(iter(layers))._counter.start(counts.append)
        passes.clear()
        latents, timestep, inputs = given_to(pipeline)
        with torch.no_grad():
            found = pipeline.transformer(latents, timestep, inputs, AttentionContext(step=StepInfo(0, 2)))
        return found, counts

    monkeypatch.setattr(fp8_linear, "quantize_rows", lambda *a, **k: passes.append(1) or own_pass(*a, **k))
    for name in ("quantize_gated_rows", "quantize_joined_rows"):
        gated_pass = getattr(fp8_linear, name)
        monkeypatch.setattr(fp8_linear, name, lambda *a, own=gated_pass: passes.append(1) or own(*a))
    forward = Fp8Linear.forward
    monkeypatch.setattr(
        Fp8Linear,
        "forward",
        lambda layer, x: (isinstance(x, QuantizedTokens) and took.append(layers[layer])) or forward(layer, x),
    )
    one_pass, counted = velocity()
    num_passes = len(passes)
    monkeypatch.setattr(Fp8Linear, "takes_quantized", lambda *_: False)
    # And the activation of gated networks in a pass of its own.
    monkeypatch.setattr(Fp8Linear, "product_after_silu", Linear.product_after_silu)
    two_passes, counted_apart = velocity()
    assert torch.equal(one_pass, two_passes)
    # Every product is counted as before.
    assert counted == counted_apart == [SCALED_PRODUCT] * len(passes)
    # All that reads a norm: projections of q, k and v, and the first layers of feed-forward networks.
    first = ("qkv", "text_qkv", "q", "qkv_up", "qkv_gate", "up")
    read = {name for name in layers.values() if name.rpartition(".")[2] in first}
    read |= {name for name in layers.values() if name.endswith(("audio_to_video.kv", "video_to_audio.kv"))}
    if family == "ltx_video":
        # Attention to the text reads the stream itself.
        read -= {name for name in read if name.endswith("cross_attention.q")}
    if family == "flux3":
        # There is no reference.
        read -= {name for name in read if name.startswith("reference_blocks.")}
    assert set(took) == read
    # A prefix goes through layers of its own pass, too.
    assert num_passes == len(passes) - len(took)


def test_the_embedded_model_keeps_attention_by_default_and_both_ends_always() -> None:
    config = RuntimeConfig("shapes", device="cpu", quantization="fp8")
    assert inspect_pipeline(config).quantization is not None
    rules = {mode: Quantization.of("wan", mode, ()) for mode in MODES}
    transformer = load_pipeline("shapes", device="cpu").transformer
    found = {}
    for mode, rule in rules.items():
        assert rule is not None
        found[mode] = {name for name, reason in rule.reasons(transformer).items() if reason is None}
    blocks = {name.split(".")[1] for name in found["fp8"]}
    assert blocks == {"1", "2", "3", "4"}
    assert all("feed_forward" in name for name in found["fp8"])
    assert set(found["fp8-all"] - found["fp8"]) == {
        f"blocks.{index}.{layer}"
        for index in range(1, 5)
        for layer in ("self_attention.qkv", "self_attention.out", "cross_attention.q", "cross_attention.out")
    }


def test_loras_can_be_switched_in_quantised_layers() -> None:
    """Bit for bit, as without quantisation."""
    fresh = load_pipeline("emoji", device="cpu", quantization="fp8-all", lora=["emoji-fast"])
    switched = load_pipeline("emoji", device="cpu", quantization="fp8-all")
    before = {name: value.clone() for name, value in switched.transformer.state_dict().items()}
    switched.set_loras(["emoji-fast"])
    for name, value in fresh.transformer.state_dict().items():
        assert torch.equal(value.float(), switched.transformer.state_dict()[name].float()), name
    switched.set_loras([])
    for name, value in before.items():
        assert torch.equal(value.float(), switched.transformer.state_dict()[name].float()), name


def test_ignored_layers_stay() -> None:
    pipeline = load_pipeline(
        "shapes", device="cpu", quantization="fp8", quantization_ignored_layers=["blocks.1.*", "*.down"]
    )
    replaced = {name for name, layer in pipeline.transformer.named_modules() if isinstance(layer, Fp8Linear)}
    assert replaced == {f"blocks.{index}.feed_forward.up" for index in (2, 3, 4)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quantization": "fp9"}, "quantization: unknown value 'fp9'.*fp8"),
        ({"quantization_ignored_layers": ["blocks.0.*"]}, "nothing is quantised; add quantization: fp8"),
        ({"quantization": "fp8", "quantization_ignored_layers": 3}, "expected up to .* names or patterns"),
        (
            {"quantization": "fp8", "quantization_ignored_layers": ["block.1.*"]},
            "'block.1.*' names no layer .* such as blocks.\\*.self_attention.qkv",
        ),
        ({"quantization": "fp8", "quantization_ignored_layers": ["*"]}, "none of the .* is left to quantise"),
        ({"quantization": "fp8", "backend": "diffusers"}, "has its own way to quantise"),
    ],
)
def test_wrong_choices_end_before_the_weights(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        inspect_pipeline(RuntimeConfig("shapes", device="cpu", **values))  # type: ignore[arg-type]
