"""`--cuda-graphs` on the command line and in Python: what is recorded, what `on` refuses before anything is loaded, and
a whole pipeline with graphs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from cli_support import Command
from recorded_capture import RecordedCapture
from tiny_models import TINY_SIZES

from diffusion_runtime import AttentionConfig, GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import FIRST, NEW_REQUEST, ForwardGraphs
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.loading.cuda_graphs import check_graphs, make_graphs


def test_the_flag_and_what_cannot_be_had(command: Command, tiny_wan_folder: Path, tmp_path: Path) -> None:
    generate = ("generate", "a star", "--model-path", str(tiny_wan_folder), "--dry-run", "--device", "cpu")
    assert command(*generate, "--json").json["runtime"]["cuda_graphs"] == "auto"
    assert command(*generate, "--cuda-graphs", "off", "--json").json["runtime"]["cuda_graphs"] == "off"
    config = tmp_path / "config.yaml"
    for written, read in (("on", "on"), ("off", "off"), ("auto", "auto")):
        config.write_text(f"runtime:\n  cuda_graphs: {written}\n")
        result = command(*generate, "--config", str(config), "--json")
        if read == "on":
            assert "needs a CUDA or ROCm GPU, got cpu" in result.said
        else:
            assert result.json["runtime"]["cuda_graphs"] == read
    for flags, said in (
        (("--cuda-graphs", "always"), "cuda_graphs: unknown value 'always'"),
        (("--cuda-graphs", "on"), "Use --cuda-graphs auto, which replays what can be and pays, or off."),
        (("--cuda-graphs", "on", "--num-gpus", "2"), "needs a CUDA or ROCm GPU, got cpu"),
        (("--cuda-graphs", "on", "--backend", "diffusers"), "diffusers' own pipeline runs its model as it is"),
    ):
        result = command(*generate, *flags)
        assert result.code != 0, flags
        assert said in " ".join(result.said.split()), result.said


def test_on_says_every_reason_of_backends_and_requests(tiny_wan_folder: Path) -> None:
    config = RuntimeConfig(
        str(tiny_wan_folder),
        device="cpu",
        cuda_graphs="on",
        attention=AttentionConfig.parse({"per_role": {"self": "sparse_video_gen_2_attn", "cross": "flex_attn"}}),
    )
    with pytest.raises(ConfigError) as refused:
        inspect_pipeline(config)
    said = str(refused.value)
    assert "self: sparse_video_gen_2_attn: its clustering starts from the clusters of the step before" in said
    assert "cross: flex_attn: its block masks are made once per request" in said
    assert said.count("flex_attn") == 1
    pipeline = load_pipeline(str(tiny_wan_folder), device="cpu")
    assert isinstance(pipeline, Pipeline)
    step_caches = dataclasses.replace(pipeline.rules.step_caches, needs_whole_passes=True)
    rules = dataclasses.replace(pipeline.rules, step_caches=step_caches)
    request = GenerationRequest("a star", **TINY_SIZES, num_inference_steps=12)
    rules.resolve(dataclasses.replace(request, step_cache="easycache"))
    with pytest.raises(RequestError, match="dbcache leaves out blocks, which a CUDA graph cannot"):
        rules.resolve(dataclasses.replace(request, step_cache="dbcache:F=1,W=1"))


def test_graphs_are_made_on_a_gpu_unless_they_are_off(tiny_wan_folder: Path) -> None:
    def made(mode: str, device: str = "cuda", is_offloaded: bool = False) -> ForwardGraphs | None:
        return make_graphs(RuntimeConfig(cuda_graphs=mode), torch.device(device), is_offloaded)

    assert made("off") is None
    assert made("auto", is_offloaded=True) is None
    with pytest.raises(ConfigError, match=r"weights are offloaded, .*--offload none"):
        made("on", is_offloaded=True)
    assert made("auto", "cpu") is None
    auto, on = made("auto"), made("on")
    assert auto is not None
    assert on is not None
    assert (auto.is_probed, on.is_probed) == (True, False)
    pipeline = load_pipeline(str(tiny_wan_folder), device="cpu")
    assert isinstance(pipeline, Pipeline)
    layers = tuple(pipeline.transformer.attention_layers())
    check_graphs(RuntimeConfig(cuda_graphs="on"), torch.device("cuda"), pipeline.transformer, layers)


def test_a_pipeline_replays_across_prompts_seeds_and_loras_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = load_pipeline("emoji", device="cpu")
    assert isinstance(pipeline, Pipeline)
    sizes = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 5}
    requests = [GenerationRequest("a red circle", seed=1, **sizes), GenerationRequest("a blue square", seed=2, **sizes)]
    expected = [pipeline(request) for request in requests]
    monkeypatch.setattr(pipeline, "parts", dataclasses.replace(pipeline.parts, graphs=ForwardGraphs(RecordedCapture())))
    found = [pipeline(request) for request in requests]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.frames == theirs.frames).all()
        assert ours.attention_report.rows == theirs.attention_report.rows
    assert (found[0].frames != found[1].frames).any()
    assert found[0].attention_report.to_dict()["graphs"]["eager"][FIRST] == 1
    assert found[1].attention_report.to_dict()["graphs"]["eager"] == {NEW_REQUEST: 1}
    assert "cuda graphs: 4 of 5 forward passes replayed" in str(found[1].attention_report)
    pipeline.set_loras(["emoji-fast"])
    switched = pipeline(requests[0])
    monkeypatch.setattr(pipeline, "parts", dataclasses.replace(pipeline.parts, graphs=None))
    plain = pipeline(requests[0])
    assert (switched.frames == plain.frames).all()
    assert (switched.frames != expected[0].frames).any()
    assert plain.attention_report.graphs is None
