"""The step of every family at tiny sizes: ours and diffusers' compute the same, operations and kinds are counted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_capture import RecordedCapture
from tables import table

from diffusion_runtime.attention import AttentionContext, AttentionPolicy, RequestCache
from diffusion_runtime.benchmark.device_time import kind_of
from diffusion_runtime.benchmark.operations import count_operations
from diffusion_runtime.benchmark.replayed_step import ReplayedStep, steps_around
from diffusion_runtime.benchmark.step import StepChoice, StepEffort, benchmark_step
from diffusion_runtime.benchmark.step_model import StepModel, open_step_model, with_size
from diffusion_runtime.benchmark.step_result import StepBenchmark
from diffusion_runtime.denoising.cuda_graphs.captured_forward import ForwardPass
from diffusion_runtime.errors import ConfigError, DeviceMemoryError
from diffusion_runtime.explanation.forward_cost import count_forward
from diffusion_runtime.models.published import published_models
from diffusion_runtime.report.attention_report import AttentionRecorder

CPU = torch.device("cpu")
EFFORT = StepEffort(num_samples=2, matmul_size=64)


def small(opened: StepModel, batch: int = 2) -> StepModel:
    """At 64 x 64 pixels, two latent frames of a video."""
    geometry = opened.model.geometry
    # A model may make no clip as short as its rule allows.
    fewest, _ = getattr(geometry, "frame_limits", (1, None))
    num_frames = max(fewest, sum(geometry.frame_rule))
    return with_size(opened, height=64, width=64, num_frames=num_frames, batch=batch)


def tiny(batch: int = 2, num_layers: int | None = None) -> StepModel:
    """The embedded model's sizes."""
    return small(open_step_model("shapes", num_layers), batch)


def run(choice: StepChoice, opened: StepModel | None = None) -> StepBenchmark:
    return benchmark_step(opened or tiny(), choice, CPU, torch.float32, EFFORT)


_WAN = {"num_layers": 1, "num_attention_heads": 2, "ffn_dim": 64, "text_dim": 32}
_JOINT = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "joint_attention_dim": 32}
_HUNYUAN = {"num_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 2, "text_embed_dim": 32}
_HUNYUAN_POOLED = {**_HUNYUAN, "num_single_layers": 1, "pooled_projection_dim": 32}
_GLYPHS = {**_HUNYUAN, "text_embed_2_dim": 32, "image_embed_dim": 32}
# Published models with two heads and a block of each kind.
NARROW: dict[str, dict[str, Any]] = {
    "wan2.1-1.3b": _WAN,
    "wan2.2-i2v-a14b": _WAN,
    "anyflow-1.3b": _WAN,
    # Blocks that read the control video stand behind the first.
    "wan2.1-vace-14b": {**_WAN, "num_layers": 6, "vace_layers": [0, 5]},
    "wan2.1-flf2v-14b-720p": {**_WAN, "added_kv_proj_dim": 256, "image_dim": 32},
    "z-image-turbo": {
        "n_layers": 1,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "dim": 256,
        "cap_feat_dim": 32,
    },
    "flux.1-dev": {**_JOINT, "pooled_projection_dim": 32},
    "flux.1-schnell": {**_JOINT, "pooled_projection_dim": 32},
    "flux.1-kontext-dev": {**_JOINT, "pooled_projection_dim": 32},
    "longcat-image": {**_JOINT, "pooled_projection_dim": 32},
    "flux.2-dev": _JOINT,
    "flux.2-klein-4b": _JOINT,
    "flux.3-image-klein": _JOINT,
    "flux.3-image-klein-base": _JOINT,
    "qwen-image": {"num_layers": 1, "num_attention_heads": 2, "joint_attention_dim": 32},
    "qwen-image-edit": {"num_layers": 1, "num_attention_heads": 2, "joint_attention_dim": 32},
    "qwen-image-2.1": {"num_layers": 1, "num_attention_heads": 2, "context_in_dim": 32},
    "hunyuan-video": _HUNYUAN_POOLED,
    "hunyuan-video-i2v": _HUNYUAN_POOLED,
    "hunyuan-video-i2v-33ch": _HUNYUAN_POOLED,
    "hunyuan-video-1.5-t2v": _GLYPHS,
    "hunyuan-video-1.5-i2v": _GLYPHS,
    "ltx-video-0.9.1": {
        "num_layers": 1,
        "num_attention_heads": 2,
        "cross_attention_dim": 128,
        "caption_channels": 32,
    },
    "ltx-video-0.9.7-dev": {
        "num_layers": 1,
        "num_attention_heads": 2,
        "cross_attention_dim": 256,
        "caption_channels": 32,
    },
    "ltx-2": {
        "num_layers": 1,
        "num_attention_heads": 2,
        "cross_attention_dim": 256,
        "audio_num_attention_heads": 2,
        "audio_cross_attention_dim": 128,
        "caption_channels": 32,
    },
    "ltx-2.3": {
        "num_layers": 1,
        "num_attention_heads": 2,
        "cross_attention_dim": 256,
        "audio_num_attention_heads": 2,
        "audio_cross_attention_dim": 128,
    },
}


@table(("name", "changes"), NARROW.items(), NARROW)
@torch.inference_mode()
def test_both_sides_get_the_same_weights_and_the_same_inputs(name: str, changes: dict[str, Any]) -> None:
    opened = small(open_step_model(name, changes=changes))
    inputs = opened.inputs(CPU, torch.float32)
    ours, _ = opened.build(AttentionPolicy(), CPU, torch.float32)
    theirs = opened.build_theirs(CPU, torch.float32)
    step = steps_around(inputs.ours[1], 3)[1]
    found = ours(*inputs.ours, AttentionContext(step=step))
    expected = inputs.forward_of_theirs(theirs)()
    assert found.shape == (2, *opened.model.geometry.sample_shape(opened.size))
    assert expected.std() > 0.01
    assert float((found - expected).norm() / expected.norm()) < 1e-4


# Classes that diffusers does not have, one that it runs in parts, and one whose text another model makes.
WITHOUT_TWIN = {"CausalWanTransformer3DModel", "MOSSImageTransformer"}
WITHOUT_TWIN |= {"AnyFlowFARTransformer3DModel", "CosmosTransformer3DModel", "WanAnimate2Transformer3DModel"}
WITHOUT_TWIN |= {"SeedVR2Transformer3DModel", "SCAIL2Model"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_part_of_every_published_model_has_inputs_and_a_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights that hold nothing, since a block of some takes 1.6 GB."""
    monkeypatch.setattr("diffusion_runtime.diffusers_bridge.random_transformer.draw_weight", lambda *_: None)
    meta, left_out, of_one_block = torch.device("meta"), set(), set()
    for published in published_models():
        for num_layers in (1, 2):
            opened = small(open_step_model(published.name, num_layers), batch=1)
            # One block is built once for each class.
            if num_layers == 1 and opened.transformer_class in of_one_block:
                continue
            of_one_block.add(opened.transformer_class)
            if opened.transformer_class in WITHOUT_TWIN:
                left_out.add(opened.transformer_class)
                continue
            inputs = opened.inputs(CPU, torch.bfloat16)
            assert (inputs.ours[2].image is not None) == needs_image(opened), published.name
            with meta:
                theirs = opened.build_theirs(meta, torch.bfloat16)
            own = opened.model.build_transformer(AttentionPolicy())
            # diffusers has no gates of FastH3.
            counts = [
                sum(
                    each.numel() for key, each in module.named_parameters() if not key.endswith("attention.gate.weight")
                )
                for module in (own, theirs)
            ]
            assert counts[0] == pytest.approx(counts[1], rel=1e-3), published.name
    assert left_out == WITHOUT_TWIN


def needs_image(opened: StepModel) -> bool:
    """Whether a step of the model has more than latents and text: an image to start from or to edit, or a control."""
    names = ("-i2v", "-flf2v", "vace", "edit", "kontext", "fill", "canny", "depth")
    return any(name in opened.name for name in names)


def test_every_published_model_opens_without_the_network() -> None:
    for published in published_models():
        opened = open_step_model(published.name)
        assert opened.num_tokens > 1000, published.name
        transformers = [size for name, size in published.parameters if name.startswith("transformer")]
        assert opened.num_parameters() / 1e9 == pytest.approx(transformers[0], rel=0.01), published.name


def test_random_weights_have_no_parts_that_only_a_checkpoint_tells_of() -> None:
    """Such as VSA's gates: 2.1 GB in Wan 14B that the memory plan of a folder without them does not count."""
    opened = open_step_model("wan2.1-1.3b", changes=_WAN)
    transformer, _ = opened.build(AttentionPolicy(environment=None), CPU, torch.float32, "none")
    assert not any("gate" in name for name in transformer.state_dict())
    assert sum(parameter.numel() for parameter in transformer.parameters()) == opened.num_parameters()


def test_a_part_has_its_kinds_of_blocks_in_proportion() -> None:
    opened = open_step_model("flux.1-dev", 4)
    assert (opened.config["num_layers"], opened.config["num_single_layers"]) == (2, 4)
    assert (opened.num_blocks, opened.whole_blocks) == (6, 57)
    with pytest.raises(ConfigError, match="--layers: expected 1 to 38 for this model, got 39"):
        open_step_model("flux.1-dev", 39)


@table(
    ("name", "said"),
    [
        ("shapes-causal", "diffusers .* has no CausalWanTransformer3DModel"),
        ("anyflow-far-1.3b", "diffusers' AnyFlowFARTransformer3DModel generates chunk by chunk"),
    ],
)
def test_a_model_without_a_twin_is_timed_alone(name: str, said: str) -> None:
    result = run(StepChoice(("eager",)), small(open_step_model(name, changes={**_WAN, "attention_head_dim": 64})))
    ours, theirs = result.rows
    assert (ours.state, theirs.name, theirs.state) == ("measured", "diffusers, eager", "left out")
    assert re.match(said, theirs.reason)
    assert result.exit_code == 0


def test_rows_of_one_run() -> None:
    result = run(StepChoice(("eager", "fp8")), tiny(num_layers=4))
    assert [row.name for row in result.rows] == ["ours, eager", "ours, fp8", "diffusers, eager"]
    assert result.exit_code == 0
    assert result.scale == pytest.approx(6 / 4)
    for row in result.rows:
        assert row.shares is not None
        assert row.milliseconds is not None
        assert row.shares.total == pytest.approx(row.milliseconds)
        assert min(row.shares.attention, row.shares.linear, row.shares.rest) > 0
        assert row.idle_ms is None
    first, fp8, theirs = result.rows
    assert first.difference == 0
    assert fp8.difference is not None
    assert 1e-4 < fp8.difference < 0.1
    assert theirs.difference is not None
    assert theirs.difference < 1e-5


def test_what_fails_and_what_differs_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_weights(opened: StepModel, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
        theirs = build_theirs(opened, device, dtype)
        next(theirs.parameters()).mul_(3.0)
        return theirs

    build_theirs = StepModel.build_theirs
    monkeypatch.setattr(StepModel, "build_theirs", other_weights)
    row = run(StepChoice(("eager",))).rows[-1]
    assert row.state == "wrong"
    assert "relative L2" in row.reason

    def no_package(*_: object) -> torch.nn.Module:
        raise ImportError("no such package")

    monkeypatch.setattr(StepModel, "build_theirs", no_package)
    result = run(StepChoice(("eager",)))
    assert (result.rows[-1].state, result.rows[-1].reason) == ("failed", "ImportError: no such package")
    assert result.rows[0].state == "measured"
    assert result.exit_code == 1


def test_weights_that_do_not_fit_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_runtime.benchmark.step._memory_room", lambda _: 10**9)
    with pytest.raises(DeviceMemoryError, match=r"23.8 GB of weights in bfloat16, cpu has 1.0 GB; --layers 4 builds"):
        benchmark_step(open_step_model("flux.1-dev"), StepChoice(("eager",)), CPU, torch.bfloat16, EFFORT)


@torch.inference_mode()
def test_a_replayed_step_has_the_velocity_of_the_eager_one() -> None:
    """With recorded operators in the place of a CUDA graph."""
    opened = tiny(num_layers=2)
    model, _ = opened.build(AttentionPolicy(), CPU, torch.float32)
    latents, timestep, inputs = opened.inputs(CPU, torch.float32).ours
    state, capture = RequestCache(), RecordedCapture()

    def make_pass(recorder: AttentionRecorder) -> ForwardPass:
        return ForwardPass(latents, timestep, inputs, AttentionContext(state=state, recorder=recorder))

    replayed = ReplayedStep(capture, model, make_pass)
    expected = model(latents, timestep, inputs, AttentionContext())
    assert torch.equal(replayed(), expected)
    assert torch.equal(replayed(), expected)
    assert replayed.difference == 0
    assert capture.calls == ["warm up", "capture", "replay", "replay", "replay"]

    failing = ReplayedStep(RecordedCapture(failure=RuntimeError("out of addresses")), model, make_pass)
    with pytest.raises(RuntimeError, match="was not captured: the capture failed: out of addresses"):
        failing()


def test_modes_that_cannot_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before a model is built where they are asked for, rows of their own where they are not."""
    monkeypatch.setattr(StepModel, "build", None)
    with pytest.raises(ConfigError, match=r"(?s)--mode graphs,.*needs a CUDA or ROCm GPU, got cpu.*Use some of eager"):
        run(StepChoice(("graphs", "fp8+graphs")))
    monkeypatch.undo()
    monkeypatch.setattr("diffusion_runtime.benchmark.step.replay_refusals", lambda *_: ("self: a reason",))
    monkeypatch.setattr("diffusion_runtime.benchmark.step._default_modes", lambda _: ("eager", "graphs"))
    result = run(StepChoice(None, with_diffusers=False), tiny(num_layers=1))
    assert [(row.name, row.state, row.reason) for row in result.rows[1:]] == [
        ("ours, graphs", "left out", "self: a reason")
    ]
    assert result.exit_code == 0


@torch.inference_mode()
def test_operations_are_those_of_products_and_valid_pairs() -> None:
    opened = tiny(batch=1)
    model, _ = opened.build(AttentionPolicy(), CPU, torch.float32)
    latents, timestep, inputs = opened.inputs(CPU, torch.float32).ours
    counted = count_operations(model, lambda: model(latents, timestep, inputs, AttentionContext()))
    tokens, dim, text, wide, blocks = opened.num_tokens, 256, 64, opened.config["ffn_dim"], 6
    # Of each block: four projections and two of text, the feed-forward, attention over tokens and over text.
    products = 2 * (tokens * (6 * dim * dim + 2 * dim * wide) + text * 2 * dim * dim)
    pairs = 4 * dim * tokens * (tokens + text)
    assert counted == pytest.approx(blocks * (products + pairs), rel=0.05)
    assert counted > blocks * (products + pairs)


def _with_a_gelu(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The feed-forward's first product on a GPU (Linear.forward_gelu)."""
    out: torch.Tensor = torch.ops.aten._addmm_activation(total[0], left, right, use_gelu=True)
    return out


# In place: the second half of a product of two tensors side by side (Linear.forward_pair).
UNCOUNTED_BY_TORCH = {"a GELU in the epilogue": _with_a_gelu, "in place": torch.Tensor.addmm_}


@table(("what", "product"), UNCOUNTED_BY_TORCH.items(), UNCOUNTED_BY_TORCH)
def test_products_that_torch_does_not_count(what: str, product: Callable[..., torch.Tensor]) -> None:
    """By `bench step` and by `explain`."""
    for device in (CPU, torch.device("meta")):
        given = [torch.zeros(size, device=device) for size in ((3, 5), (3, 7), (7, 5))]
        assert count_operations(torch.nn.Module(), lambda given=given: product(*given)) == 2 * 3 * 7 * 5, what
    assert count_forward([], lambda: product(*given)).products == 2 * 3 * 7 * 5, what


KINDS = {
    "flash_fwd_sm90_kernel_cutlass": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "attend_lists": "attention",
    "nvjet_tst_128x256_64x4": "linear",
    "cutlass::device_kernel<gemm>": "linear",
    "aten::addmm": "linear",
    "modulated_norm": "rest",
    "aten::add": "rest",
}


@table(("name", "kind"), KINDS.items(), KINDS)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind
