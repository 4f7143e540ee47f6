"""`compare`: figures against values computed here from the clips that it saved, rows, and what it refuses."""

from __future__ import annotations

import itertools
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from cli_support import Command
from tables import table
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.comparison import frame_metrics
from diffusion_runtime.comparison.attention_figures import weighted_density
from diffusion_runtime.comparison.compare import Choices, compare
from diffusion_runtime.comparison.frame_metrics import FrameMetrics, psnr_db
from diffusion_runtime.comparison.latent_distance import LatentComparison
from diffusion_runtime.comparison.result import Clip, Row, State, steps_at_the_same_time
from diffusion_runtime.comparison.setting import Setting
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.profiling.instruments import timed_attention, watched_latents
from diffusion_runtime.report.attention_density import LayerDensity

PROMPTS = ("a red circle moving left", "a blue star")
SIZE = ("--model-path", "shapes", "--preset", "draft", "--num-frames", "5", "--device", "cpu")
SHARED = ("compare", "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], *SIZE, "--num-inference-steps", "4")
SPARSE = "sparse: --attention-backend video_sparse_attn --attention-config.default.extra.sparsity 0.75"
REQUEST: dict[str, Any] = {"height": 128, "width": 128, "num_frames": 5, "num_inference_steps": 4}


def test_figures_are_those_of_the_clips(command: Command, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("request: {num_inference_steps: 2}\n")
    settings = ("dense:", SPARSE, str(tmp_path / "two.yaml"), "again: --attention-backend torch_sdpa",
                "missing: --attention-backend fa4")  # fmt: skip
    texts = [word for text in settings for word in ("--setting", text)]
    page, clips = tmp_path / "page.html", tmp_path / "clips"
    made = command(*SHARED, *texts, "--threshold", "0.05", "--json", "--html", page, "-o", clips, "--format", "npy")
    assert made.code == 5, made.err
    values = made.json
    assert values["schema"] == "diffusion_runtime.compare/1"
    rows = {row["name"]: row for row in values["rows"]}
    dense, sparse, two = rows["dense"], rows["sparse"], rows["two"]
    assert [row["kind"] for row in values["rows"][:2]] == ["reference", "setting"]
    assert [rows[name]["state"] for name in ("dense", "again", "missing")] == ["measured", "same", "failed"]
    assert rows["again"]["beside"] == "dense"
    assert "again resolves to the same as dense" in made.said
    assert "flash-attn-4" in rows["missing"]["reason"]
    assert rows["missing"]["failure"]["kind"] == "BackendUnavailableError"
    # Beside each setting that was measured stands the reference with fewer steps.
    assert [row["beside"] for row in values["rows"] if row["kind"] == "fewer_steps"] == ["sparse", "two"]
    assert sparse["attention_density"] < dense["attention_density"] == 1.0
    assert not sparse["attention_density_is_counted"]
    assert [row["attention_seconds"] is not None for row in (dense, sparse, two, rows["again"])] == [*[True] * 3, False]

    def saved(row: dict[str, Any]) -> list[numpy.ndarray]:
        return [numpy.load(clip["path"]) for clip in row["clips"]]

    for row in (sparse, two):
        expected = []
        for mine, its in zip(saved(row), saved(dense), strict=True):
            error = numpy.mean((mine.astype(float) - its.astype(float)) ** 2)
            expected.append(10 * math.log10(255**2 / error))
        assert row["psnr_db"] == pytest.approx(sum(expected) / 2, rel=1e-6)
        assert [clip["psnr_db"] for clip in row["clips"]] == pytest.approx(expected, rel=1e-6)
    # Latents, of generations of their own.
    attention = {"per_role": {"self": {"backend": "video_sparse_attn", "extra": {"sparsity": 0.75}}}}
    tracks = [latents_of(None), latents_of(attention)]
    distances = [float((b - a).norm() / a.norm()) for a, b in zip(*tracks, strict=True)]
    found = sparse["clips"][0]["latent_l2_per_step"]
    assert found == pytest.approx(distances, rel=1e-4, abs=1e-6)
    assert sparse["clips"][0]["final_latent_l2"] == pytest.approx(distances[-1], rel=1e-4)
    mean = sparse["latent_l2_per_step"]
    assert sparse["first_step_over_threshold"] == next(step for step, value in enumerate(mean) if value > 0.05)
    assert (two["num_inference_steps"], two["latent_l2_per_step"]) == (2, [])
    assert two["final_latent_l2"] > 0.05
    # The first clip of a setting warms up, so the time is the second one's.
    assert dense["seconds"] == dense["clips"][1]["seconds"]
    assert two["speedup"] == pytest.approx(dense["total_seconds"] / two["total_seconds"])
    assert page.stat().st_size < 2**20
    assert page.read_text().count("data:video/mp4") == 2 * sum(bool(row["clips"]) for row in values["rows"])
    assert list(tmp_path.glob(".*")) == []


def test_a_model_that_makes_chunks_is_compared_by_its_frames(command: Command, tmp_path: Path) -> None:
    """What a watcher sees last are the latents of the last chunk, and steps begin anew with every chunk."""
    folder = write_tiny_wan(tmp_path / "causal", causal={"num_frames_per_block": 1})
    size = ("--height", "16", "--width", "16", "--num-frames", "9", "--num-inference-steps", "1")
    settings = ("--setting", "one:", "--setting", "two: --chunk-frames 2")
    made = command("compare", "a red circle", "--model-path", folder, *size, *settings, "--no-warm-up", "--json")
    assert made.code == 0, made.err
    two = made.json["rows"][1]
    assert two["clips"][0]["final_latent_l2"] is None
    assert two["psnr_db"] is not None
    assert "clips are compared by their frames" in str(made.json["remarks"])


def test_attention_is_timed_call_by_call_and_density_is_counted_where_the_content_decides(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = "--attention-backend svg2 --attention-config.default.extra.svg2_first_layers_fp 0"
    size = ("--device", "cpu", "--height", "64", "--width", "64", "--num-frames", "5", "--num-inference-steps", "1")
    flags = (*size, "--no-warm-up", "--no-attn-time", "--json")
    made = command("compare", PROMPTS[0], *flags, "--setting", "dense:", "--setting", f"svg2: {sparse}")
    assert made.code == 0, made.err
    dense, svg2 = made.json["rows"][:2]
    assert (dense["attention_density"], dense["attention_density_is_counted"]) == (1.0, False)
    assert svg2["attention_density_is_counted"]
    assert dense["attention_seconds"] is None
    assert 0 < svg2["attention_density"] < 1
    assert any(remark.startswith("density: counted") and "svg2" in remark for remark in made.json["remarks"])

    pipeline = load_pipeline("shapes", device="cpu")
    assert isinstance(pipeline, Pipeline)
    request = GenerationRequest(PROMPTS[0], **{**REQUEST, "num_frames": 1, "num_inference_steps": 1})
    hooks = [len(module._forward_hooks) for module in pipeline.transformer.modules()]
    ticks = itertools.count()
    with timed_attention(pipeline) as clock:
        monkeypatch.setattr("diffusion_runtime.profiling.attention_clock.time.perf_counter", lambda: float(next(ticks)))
        media = pipeline(request)
        monkeypatch.undo()
    # One tick from the begin of a call to its end.
    assert clock.seconds() == clock.num_calls == media.attention_report.num_calls > 0
    assert [len(module._forward_hooks) for module in pipeline.transformer.modules()] == hooks


def test_the_weighted_density_of_roles() -> None:
    layers = [
        LayerDensity("self", 0, (0.2, None)),
        LayerDensity("self", 1, (0.4, 0.6)),
        LayerDensity("cross", 0, (1.0,)),
    ]
    assert weighted_density(layers, {"self": 3.0, "cross": 1.0}) == pytest.approx((3 * 0.4 + 1) / 4)
    assert weighted_density(layers, {"self": 3.0, "text": 1.0}) is None
    assert weighted_density(layers, {}) is None


def latents_of(attention: object) -> list[torch.Tensor]:
    pipeline = load_pipeline("shapes", device="cpu", attention=attention)
    assert isinstance(pipeline, Pipeline)
    kept: list[torch.Tensor] = []
    with watched_latents(pipeline, lambda _, latents: kept.append(latents.clone())):
        pipeline(GenerationRequest(PROMPTS[0], **REQUEST))
    pipeline(GenerationRequest(PROMPTS[0], **{**REQUEST, "num_inference_steps": 1}))
    assert len(kept) == 4, "watched after the block"
    return kept


def test_a_table_of_at_most_100_columns(command: Command, tiny_flags: tuple[str, ...]) -> None:
    long = "a name of twenty-eight chars"
    shown = command(
        "compare",
        "a cat",
        *tiny_flags,
        "--device",
        "cpu",
        "--setting",
        f"{long}:",
        "--setting",
        "1: --guidance-scale 3",
    )
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith(long) for line in lines)
    assert "SSIM" in shown.out
    # One clip is made twice, and the second is timed.
    assert f"{long}: warm-up" in shown.err


@table(
    ("texts", "message"),
    [
        ((), "--setting: expected two or more"),
        (("dense:",), "got 1"),
        (("dense", "b:"), "expected NAME: FLAGS or FILE.yaml"),
        (("a:", "a:"), "the name 'a' is given twice"),
        (("a:", "b: --sed 3"), "--setting b: No such option"),
        (("a:", "b: --quantization fp9"), "--setting b: quantization: unknown value 'fp9'"),
        (("a:", "b: 'x"), "--setting b: the quotes"),
        (("a:", "b: --json"), "--setting b: No such option"),
        (("a:", "b: -o x"), "--setting b: No such option: -o is no part of how a clip is made"),
        (("a:", "b: --seed 5"), "--setting b: seed: expected 0, as the first setting has, got 5"),
        (("a:", "b: --seed 0-1"), "--setting b: expected the 2 generations"),
        (("a:", "b: --height 32"), "--setting b: height: expected 128"),
        (("a:", "b: --preset large"), "--setting b: height: expected 128"),
        (("a:", "b: --prompt 'a ring'"), "--setting b: expected the 2 generations"),
        (("a:", "b: --model-path wan2.1-1.3b"), "--setting b: model_path: expected 'shapes'"),
        (("a:", "b: --num-gpus 2"), "compare runs one process"),
        (("a:", "none.yaml"), "none.yaml is not a file"),
        (("a: --attention-backend fa4", "b:"), "--setting a: no attention backend"),
        (("a" * 29 + ":", "b:"), "a name of 1 to 28"),
    ],
)
def test_what_is_refused_before_weights_load(
    texts: tuple[str, ...], message: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreparedModel, "load", lambda *_: pytest.fail("weights were loaded"))
    answer = command(*SHARED, *(word for text in texts for word in ("--setting", text)))
    assert answer.code in (2, 3), answer.err
    assert message in answer.said
    assert "Traceback" not in answer.err


def test_other_flags_are_checked(command: Command, tmp_path: Path) -> None:
    two = ("--setting", "a:", "--setting", "b: --guidance-scale 1")
    for flags, message in (
        (("--threshold", "0"), "--threshold: expected a number above 0"),
        (("--html", str(tmp_path)), "it is a folder"),
        (("--html", f"{tmp_path}/new/"), "it is a folder"),
        (("--format", "npy"), "add it"),
    ):
        answer = command(*SHARED, *two, *flags)
        assert answer.code in (1, 2)
        assert message in answer.said
    places = ("-o", str(tmp_path / "new" / "clips"), "--html", str(tmp_path / "pages" / "page.html"))
    answer = command(*SHARED, "--setting", "a: --attention-backend fa4", "--setting", "b:", *places)
    assert answer.code == 3
    assert list(tmp_path.iterdir()) == []


def test_a_setting_that_fails_is_a_row_and_a_model_is_loaded_once(
    tiny_wan_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    load = PreparedModel.load

    def counted(self: PreparedModel, *arguments: Any, **named: Any) -> Pipeline:
        loads.append(str(self.description.attention[0].decision.backend))
        return load(self, *arguments, **named)

    call = Pipeline.__call__

    def failing(self: Pipeline, request: GenerationRequest, **named: Any) -> Any:
        if request.guidance_scale == 3.0:
            raise RuntimeError("it broke")
        return call(self, request, **named)

    monkeypatch.setattr(PreparedModel, "load", counted)
    monkeypatch.setattr(Pipeline, "__call__", failing)
    monkeypatch.setattr(sys.modules[compare.__module__], "steps_at_the_same_time", lambda *_: 1)
    own = RuntimeConfig(str(tiny_wan_folder), device="cpu")
    other = RuntimeConfig(str(tiny_wan_folder), device="cpu", attention="reference")

    def requests(**values: Any) -> tuple[GenerationRequest, ...]:
        size = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}
        return tuple(GenerationRequest(prompt, **{**size, **values}) for prompt in PROMPTS)

    settings = [
        Setting("dense", own, requests()),
        Setting("other", other, requests()),
        Setting("breaks", own, requests(guidance_scale=3.0)),
        Setting("one", own, requests(num_inference_steps=1)),
    ]
    result = compare(settings, choices=Choices(threshold=0.1))
    states = {row.name: row.state for row in result.rows}
    assert states == {
        "dense": "measured", "other": "measured", "dense, 1 steps": "measured", "breaks": "failed", "one": "measured"
    }  # fmt: skip
    assert "it broke" in next(row.reason for row in result.rows if row.name == "breaks")
    # The reference's model once more: what takes as long as others is known after them; and "one" is what it makes.
    assert loads == ["torch_sdpa", "reference"]
    assert result.exit_code == 5


@table(
    ("total", "expected"),
    # Text and decoding take 1 s, each of 10 steps 1 s.
    [(6.0, 5), (5.6, 5), (1.2, 1), (0.5, 1), (11.0, None), (10.4, 9), (20.0, None)],
)
def test_fewer_steps_take_the_same_time(total: float, expected: int | None) -> None:
    measured: State = "measured"
    clip = Clip("a", 0, seconds={"text": 0.4, "denoise": 10.0, "decode": 0.6})
    reference = Row("dense", "reference", measured, 10, clips=(clip,))
    row = Row("fast", "setting", measured, 10, clips=(Clip("a", 0, seconds={"denoise": total}),))
    assert steps_at_the_same_time(reference, row) == expected


def test_latents_at_other_noise_levels_are_not_compared() -> None:
    latents = LatentComparison(1)
    keep = latents.keep()
    for index, sigma in enumerate((1.0, 0.5)):
        keep(StepInfo(index, 2, sigma=sigma), torch.full((1, 4), 2.0))
    watcher = latents.beside(0)
    for index, sigma in enumerate((1.0, 0.6)):
        watcher(StepInfo(index, 2, sigma=sigma), torch.full((1, 4), 3.0))
    assert watcher.distance is not None
    assert watcher.distance.relative_l2 == (0.5, None)
    assert watcher.distance.final == 0.5
    larger = latents.beside(0)
    larger(StepInfo(0, 1, sigma=1.0), torch.ones(1, 6))
    assert larger.distance is not None
    assert (larger.distance.relative_l2, larger.distance.final) == ((), None)


def test_metrics_of_frames(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reference = numpy.zeros((2, 8, 8, 3), numpy.uint8)
    assert psnr_db(reference, reference) == 100.0
    assert psnr_db(reference + 5, reference) == pytest.approx(10 * math.log10(255**2 / 25))
    # LPIPS without its network's weights is not downloaded, and said.
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    seen: list[tuple[float, ...]] = []

    class Network:
        def eval(self) -> Network:
            return self

        def __call__(self, mine: torch.Tensor, its: torch.Tensor) -> torch.Tensor:
            assert mine.shape == its.shape == (1, 3, 8, 8)
            seen.append((float(mine.max()), float(its.min())))
            return (mine - its).abs().mean()

    package = types.ModuleType("lpips")
    package.__spec__ = types.SimpleNamespace(name="lpips")  # type: ignore[assignment]
    package.LPIPS = lambda net, verbose: Network()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lpips", package)
    assert "AlexNet" in FrameMetrics().unavailable["lpips"]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "alexnet-owt-7be5be79.pth").touch()
    frame_metrics._lpips_network.cache_clear()
    metrics = FrameMetrics()
    assert "lpips" not in metrics.unavailable
    assert metrics.of(reference + 255, reference)["lpips"] == 2.0
    assert seen[0] == (1.0, -1.0)
    frame_metrics._lpips_network.cache_clear()


def test_ssim_of_frames() -> None:
    metrics = pytest.importorskip("skimage.metrics")
    first = numpy.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), numpy.uint8)
    second = numpy.clip(first.astype(int) + 9, 0, 255).astype(numpy.uint8)
    expected = [
        metrics.structural_similarity(a, b, channel_axis=2, data_range=255) for a, b in zip(first, second, strict=True)
    ]
    assert FrameMetrics().of(first, second)["ssim"] == pytest.approx(sum(expected) / 2)
    assert FrameMetrics().of(first, first)["ssim"] == pytest.approx(1.0)
