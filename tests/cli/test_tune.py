"""`tune` on a tiny random model: what the file says beside generations of its own, interruption, what is refused."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import Command, tiny_arguments
from tables import table

from diffusion_runtime import AttentionConfig, GenerationRequest, load_pipeline
from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.profiling.instruments import attention_choices, watched_latents
from diffusion_runtime.tuning.measurement import Measurement
from diffusion_runtime.tuning.result import TuneResult
from diffusion_runtime.tuning.tune import tune
from diffusion_runtime.untrusted.yaml_text import read_yaml_file

# A grid of 8 x 2 x 2 tokens: two tiles of VSA.
SIZE = {"height": 32, "width": 32, "num_frames": 29, "num_inference_steps": 2}
PROMPTS = ("a red circle", "a blue star", "a green ring")
_SPARSE = '{"default": {"backend": "vsa", "extra": {"sparsity": 0.5}}}'
CELLS = ("--layer-ranges", "2", "--step-ranges", "2", "--levels", "1")


def words(folder: Path, *more: str, num_prompts: int = 3) -> tuple[str, ...]:
    size = [word for name, value in SIZE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    prompts = [word for prompt in PROMPTS[:num_prompts] for word in ("--prompt", prompt)]
    return ("tune", "--model-path", str(folder), "--device", "cpu", *prompts, *size, *more)


def latents_of(pipeline: Pipeline, prompt: str) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    with watched_latents(pipeline, lambda _, latents: kept.append(latents.clone())):
        pipeline(GenerationRequest(prompt, seed=0, **SIZE))  # type: ignore[arg-type]
    return kept[-1]


def test_the_file_holds_a_schedule_and_the_figures_of_that_schedule(
    command: Command, tiny_wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuned.yaml"
    flags = words(tiny_wan_folder, "--budget", "latent<=0.06", "--methods", "vsa", *CELLS, "-o", str(path))
    # Interrupted after some measurements: no file; the next run goes on with them.
    measured: list[Any] = []
    distance = Measurement._latents

    def ending(self: Measurement, *given: Any) -> torch.Tensor:
        measured.append(given)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return distance(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Measurement, "_latents", ending)
        interrupted = command(*flags)
    assert interrupted.code == 130
    assert "interrupted: 2 measurements are finished and kept in" in interrupted.said
    assert "the same command again goes on from them" in interrupted.said
    assert [each.name for each in tmp_path.iterdir()] == [".tuned.yaml.journal.json"]
    made = command(*flags, "--json")
    assert made.code == 0, made.err
    assert "going on with 2 measurements" in made.said
    assert list(tmp_path.iterdir()) == [path]
    content: Any = read_yaml_file(path)
    record, tuned = content["tuning"], content["tuning"]["tuned"]
    assert made.json["tuning"] == json.loads(json.dumps(record))
    assert [each["prompt"] for each in record["measured_prompts"]] == list(PROMPTS[:1])
    assert [each["prompt"] for each in record["verified_prompts"]] == list(PROMPTS[1:])
    # 4 cells with one level each.
    assert len(record["sensitivity"]) == 4
    # The share that is kept is what `explain` counts for the written file.
    attention = content["runtime"]["attention"]
    prepared = prepare(_config(tiny_wan_folder, attention))
    request = prepared.rules.resolve(GenerationRequest(PROMPTS[0], seed=0, **SIZE))  # type: ignore[arg-type]
    [part] = [part for part in explain(prepared, request).parts if part.name == "attention, self"]
    assert tuned["kept"] == pytest.approx(part.kept / part.operations, abs=1e-4)
    assert tuned["kept"] < 1.0
    assert record["setting"] == "tuned"
    # The figures are those of generations with the written schedule, and within the budget.
    dense = load_pipeline(str(tiny_wan_folder), device="cpu")
    sparse = load_pipeline(str(tiny_wan_folder), device="cpu", attention=attention)
    assert isinstance(dense, Pipeline)
    assert isinstance(sparse, Pipeline)
    found = []
    for prompt in PROMPTS[1:]:
        its = latents_of(dense, prompt)
        found.append(float((latents_of(sparse, prompt) - its).norm() / its.norm()))
    assert tuned["verified"]["latent"] == pytest.approx(sum(found) / 2, rel=1e-3)
    assert sum(found) / 2 <= 0.06
    # A cell alone, with every other one dense: the steps before it are replayed, which changes nothing.
    last = next(each for each in record["sensitivity"] if (each["layers"], each["steps"]) == ("1", "1"))
    rule = {key: last[key] for key in ("role", "layers", "steps", "backend", "extra")}
    with attention_choices(dense, AttentionConfig(schedule=(rule,))):  # type: ignore[arg-type]
        mine = latents_of(dense, PROMPTS[0])
    its = latents_of(dense, PROMPTS[0])
    assert last["latent_l2"] == pytest.approx(float((mine - its).norm() / its.norm()), rel=1e-3)
    # Uniform settings that are within the budget keep no fewer.
    for outcome in record["uniform"].values():
        assert outcome["verified"]["latent"] <= 0.06 or not outcome["budget_met"]
    # `generate` takes the file, the record included.
    planned = command("generate", "a red circle", "--config", path, "--device", "cpu", "--dry-run", "--json")
    assert planned.code == 0, planned.err
    assert {each["backend"] for each in planned.json["attention"]} == {"torch_sdpa", "video_sparse_attn"}


def test_windows_of_heads_are_tuned_as_cells(command: Command, tiny_wan_folder: Path, tmp_path: Path) -> None:
    """`tune --head-ranges` is what STA's own search is for: a window for every range of steps, layers and heads."""
    path = tmp_path / "tuned.yaml"
    flags = ("--methods", "sta", "--budget", "latent<=0.05", "--layer-ranges", "1", "--step-ranges", "1")
    flags = (*flags, "--levels", "1", "--head-ranges", "2", "-o", str(path))
    made = command(*words(tiny_wan_folder, *flags, num_prompts=2))
    assert made.code == 0, made.err
    content: Any = read_yaml_file(path)
    record = content["tuning"]
    assert {each["heads"] for each in record["sensitivity"]} == {"0-1", "2-3"}
    assert record["head_ranges"] == 2
    [rule] = content["runtime"]["attention"]["schedule"]
    windows = rule["extra"]["head_windows"]
    assert len(windows) == 4
    assert windows[0] == windows[1] != windows[2] == windows[3]
    # The share that is kept and the figures are those of the written file.
    prepared = prepare(_config(tiny_wan_folder, content["runtime"]["attention"]))
    request = prepared.rules.resolve(GenerationRequest(PROMPTS[1], **SIZE))  # type: ignore[arg-type]
    [part] = [part for part in explain(prepared, request).parts if part.name == "attention, self"]
    assert record["tuned"]["kept"] == pytest.approx(part.kept / part.operations, abs=1e-4)
    dense = load_pipeline(str(tiny_wan_folder), device="cpu")
    sparse = load_pipeline(str(tiny_wan_folder), device="cpu", attention=content["runtime"]["attention"])
    assert isinstance(dense, Pipeline)
    assert isinstance(sparse, Pipeline)
    its = latents_of(dense, PROMPTS[1])
    found = float((latents_of(sparse, PROMPTS[1]) - its).norm() / its.norm())
    assert record["tuned"]["verified"]["latent"] == pytest.approx(found, rel=1e-3)


def _config(folder: Path, attention: object) -> Any:
    from diffusion_runtime.config import RuntimeConfig

    return RuntimeConfig(str(folder), device="cpu", attention=attention)


def test_a_budget_that_no_setting_meets_gives_the_nearest(
    command: Command, tiny_wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[TuneResult] = []

    def kept(*given: Any) -> TuneResult:
        results.append(tune(*given))
        return results[-1]

    monkeypatch.setattr(sys.modules[tune.__module__], "tune", kept)
    path = tmp_path / "tuned.yaml"
    flags = ("--methods", "vsa", "--budget", "latent<=0.000001", "--layer-ranges", "1", "--step-ranges", "1")
    made = command(*words(tiny_wan_folder, *flags, "--levels", "1", "-o", str(path), num_prompts=2))
    assert made.code == 6, made.err
    assert "no sparse setting meets the budget; the file holds the nearest, tuned: latent 0.0" in made.said
    assert max(map(len, made.err.splitlines()[-12:])) <= 240
    record = read_yaml_file(path)["tuning"]
    assert not record["budget_met"]
    assert record["tuned"]["verified"]["latent"] > 0.000001
    assert record["tuned"]["kept"] == 0.5
    assert made.out.strip() == str(path)
    # The file holds a uniform setting where that is the best.
    other = dataclasses.replace(results[0], chosen="uniform video_sparse_attn")
    assert other.setting is other.uniform["video_sparse_attn"]
    [rule] = other.config()["runtime"]["attention"]["schedule"]
    assert set(rule) == {"role", "backend", "extra"}
    assert other.record()["setting"] == "uniform video_sparse_attn"
    assert repr(other) == "<TuneResult: uniform video_sparse_attn, 0.500 kept, not within latent<=1e-06>"


def test_choices_are_laid_over_a_loaded_pipeline_and_taken_back(tiny_wan_folder: Path) -> None:
    pipeline = load_pipeline(str(tiny_wan_folder), device="cpu")
    assert isinstance(pipeline, Pipeline)
    request = GenerationRequest(PROMPTS[0], seed=0, **SIZE)  # type: ignore[arg-type]
    with pytest.raises(BackendUnavailableError), attention_choices(pipeline, AttentionConfig.parse("fa4")):
        pytest.fail("it was chosen")
    with attention_choices(pipeline, AttentionConfig.parse("reference")):
        inside = {row.backend for row in pipeline(request).attention_report.rows}
    assert inside == {"reference"}
    assert {row.backend for row in pipeline(request).attention_report.rows} == {"torch_sdpa"}


@table(
    ("flags", "message"),
    [
        (("--methods", "vsa"), "--budget: expected what quality may cost"),
        (("--budget", "psnr>=30", "--minutes", "0"), "--minutes: expected a number above 0"),
        (("--budget", "psnr>=30", "--minutes", "2", "--methods", "vsa"), "--minutes: with --methods and no --over"),
        (("--budget", "psnr>=30", "--over", "step,cache"), "--over: unknown axis 'step'. Did you mean 'steps'?"),
        (("--budget", "psnr>=30", "--over", "resolution"), "nothing is left to search: resolution: it makes another"),
        (("--budget", "psnr>=30", "--over", "step-cache"), "step-cache: it has no choice on this machine for 2 steps"),
        (("--budget", "psnr>=30", "--over", "steps", "--num-gpus", "2"), "one process"),
        (("--budget", "psnr>=30", "--methods", "svg2"), "no ladder of densities"),
        (("--budget", "accuracy>=dense-0.02", "--methods", "vsa"), "accuracy is known for prompts of an embedded"),
        (("--budget", "clip>=dense-1", "--methods", "vsa"), "give --clip-path FOLDER"),
        (("--budget", "psnr>=30", "--methods", "vsa", "--measure-prompts", "3"), "expected 1 to 2 of the 3 prompts"),
        (("--budget", "psnr>=30", "--methods", "vsa", "--prompt-set", "shapes:4"), "leave out prompts"),
        (("--budget", "psnr>=30", "--methods", "vsa", "--step-cache", "easycache"), "step_cache"),
        (("--budget", "psnr>=30", "--methods", "vsa", "--attention-config", _SPARSE), "sparse already"),
        (("--budget", "psnr>=30", "--methods", "vsa", "--num-frames", "5"), "too small for any setting"),
        (("--budget", "psnr>=30", "--methods", "vsa,sta", "--head-ranges", "4"), "--head-ranges: video_sparse_attn"),
        (("--budget", "psnr>=30", "--methods", "vsa", "--num-gpus", "2"), "one process"),
    ],
)
def test_what_is_refused_before_weights_load(
    flags: tuple[str, ...],
    message: str,
    command: Command,
    tiny_wan_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PreparedModel, "load", lambda *_: pytest.fail("weights were loaded"))
    answer = command(*words(tiny_wan_folder, *flags, "-o", str(tmp_path / "new" / "tuned.yaml")))
    assert answer.code in (2, 3), answer.err
    assert message in answer.said
    assert "Traceback" not in answer.err
    assert list(tmp_path.iterdir()) == []


def test_the_place_of_the_file_is_checked_first(command: Command, tiny_wan_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there.yaml").write_text("request: {}\n")
    for flags, message, code in (
        ((), "expected the config file to write", 2),
        (("-o", str(tmp_path / "there.yaml")), "exists already", 1),
        (("-o", str(tmp_path / "tuned.json")), "ends with .yaml", 2),
        (("-o", str(tmp_path / "there.yaml" / "tuned.yaml")), "cannot write", 1),
    ):
        answer = command("tune", *tiny_arguments(tiny_wan_folder), "--budget", "psnr>=30", "--methods", "vsa", *flags)
        assert answer.code == code
        assert message in answer.said
    flags = ("--budget", "psnr>=30", "--methods", "vsa", "-o", str(tmp_path / "tuned.yaml"))
    answer = command(*words(tiny_wan_folder, *flags, num_prompts=1))
    assert answer.code == 2
    assert "expected two prompts or seeds or more, as some measure and the others verify, got 1" in answer.said


DOCUMENT = (Path(__file__).parents[2] / "docs" / "tune.md").read_text()


def blocks(language: str) -> list[str]:
    return [part.split("```")[0] for part in DOCUMENT.split(f"```{language}\n")[1:]]


def test_the_blocks_of_the_documentation(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reached: list[Any] = []

    def seen(tuning: Any, *_: object) -> None:
        reached.append(tuning)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[tune.__module__], "tune", seen)
    Path("prompts.txt").write_text("".join(f"a {word}\n" for word in ("cat", "dog", "cow", "hen", "fox", "owl")))
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    commands = [words[1:] for words in map(shlex.split, lines) if words[1:2] == ["tune"]]
    monkeypatch.setattr("diffusion_runtime.tuning.tune_fastest.tune_fastest", seen)
    assert [command(*words).code for words in commands] == [130] * 4
    first, second, third, fourth = reached
    assert (first.num_measured, len(first.requests), first.budgets[0].metric) == (12, 24, "accuracy")
    assert (second.num_measured, len(second.requests), second.budgets[0].metric) == (4, 6, "psnr")
    assert (third.num_measured, len(third.requests), third.budgets[0].metric) == (12, 24, "accuracy")
    assert (fourth.num_measured, fourth.methods) == (4, ("video_sparse_attn", "sliding_tile_attn"))
    # The config, as `generate` reads it.
    for text in blocks("yaml"):
        Path("tuned.yaml").write_text(text)
        made = command("generate", "a red circle", "--config", "tuned.yaml", "--dry-run", "--device", "cpu")
        assert made.code == 0, made.err
    planned = command("generate", "a red circle", "--config", "tuned.yaml", "--dry-run", "--device", "cpu", "--json")
    assert {each["backend"] for each in planned.json["attention"]} == {"torch_sdpa", "video_sparse_attn"}
    [code] = blocks("python")
    exec(compile(code, "docs/tune.md", "exec"), {})
    assert "accuracy>=dense-0.02 6" in capsys.readouterr().out
