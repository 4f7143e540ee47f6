"""Step caches in whole pipelines: the tiny Wan model, two experts, sparse attention, and diffusers' own pipelines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from tables import table
from tiny_models import TINY_SIZES, write_tiny_wan
from tiny_pipelines import write_tiny_image_pipeline, write_tiny_video_pipeline

from diffusion_runtime import AttentionConfig, GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.core.progress import Progress
from diffusion_runtime.diffusers_bridge.denoisers import denoisers_of
from diffusion_runtime.errors import Cancelled, RequestError

NUM_STEPS = 12
CACHE = "easycache:threshold=0.4,warmup=0.2"


@pytest.fixture(scope="module")
def pipeline(tiny_wan_folder: Path) -> Pipeline:
    return load_pipeline(str(tiny_wan_folder), device="cpu")


def request(prompt: str = "a red circle moving left", **values: Any) -> GenerationRequest:
    fields: dict[str, Any] = {**TINY_SIZES, "num_inference_steps": NUM_STEPS, "guidance_scale": 4.0, "seed": 1}
    return GenerationRequest(prompt, **(fields | values))


def num_calls(media: Any) -> int:
    return sum(row.count for row in media.attention_report.rows if row.role == "self")


@table("mode", ["batched", "two_pass"])
def test_reused_steps_run_no_attention_and_are_counted(pipeline: Pipeline, mode: str) -> None:
    media = pipeline(request(step_cache=CACHE, guidance_mode=mode))
    cond, uncond = media.attention_report.steps
    assert (cond.branch, uncond.branch) == ("cond", "uncond")
    assert 3 <= cond.num_computed < NUM_STEPS
    assert cond.num_computed + cond.num_reused == NUM_STEPS
    assert dataclasses.replace(uncond, branch="cond") == cond
    assert {row.steps for row in media.attention_report.rows} == {cond.computed}
    assert num_calls(media) == cond.num_computed * 2 * (2 if mode == "two_pass" else 1)
    assert json.loads(json.dumps(media.attention_report.to_dict()))["steps"][0]["reused_by"] == ["easycache"]


def test_both_guidance_modes_reuse_the_same_steps(pipeline: Pipeline) -> None:
    batched, two_pass = (pipeline(request(step_cache=CACHE, guidance_mode=mode)) for mode in ("batched", "two_pass"))
    assert [row.computed for row in batched.attention_report.steps] == [
        row.computed for row in two_pass.attention_report.steps
    ]
    assert numpy.abs(batched.frames.astype(int) - two_pass.frames.astype(int)).max() <= 1


def test_a_threshold_of_zero_is_no_cache(pipeline: Pipeline) -> None:
    plain = pipeline(request())
    cached = pipeline(request(step_cache="easycache:threshold=0,warmup=0"))
    assert numpy.array_equal(plain.frames, cached.frames)
    assert [row.num_reused for row in cached.attention_report.steps] == [0, 0]
    assert plain.attention_report.steps == ()


def test_a_batch_equals_its_single_runs(pipeline: Pipeline) -> None:
    """Decisions are each request's own, though a forward pass has one batch."""
    requests = [request("a red circle", seed=1), request("two objects: a blue star and a green ring", seed=5)]
    requests = [dataclasses.replace(each, step_cache="easycache:threshold=0.25,warmup=0.2") for each in requests]
    seen: list[Progress] = []
    together = pipeline.generate(requests, on_progress=seen.append)
    for alone, media in zip(map(pipeline, requests), together, strict=True):
        assert numpy.array_equal(alone.frames, media.frames)
        assert alone.attention_report.steps == media.attention_report.steps
        assert "the 2 requests of this batch were made one after the other" in str(media.attention_report)
    assert {progress.request_index for progress in seen} == {0, 1}
    assert len([progress for progress in seen if progress.stage == "denoise" and progress.step]) == 2 * NUM_STEPS


def test_one_of_such_a_batch_may_be_cancelled(pipeline: Pipeline) -> None:
    requests = [request(seed=seed, step_cache=CACHE) for seed in (1, 2, 3)]

    def cancel(progress: Progress) -> None:
        if progress.stage == "denoise" and progress.request_index == 0:
            raise Cancelled(request_indices=(1,))

    made = pipeline.generate(requests, on_progress=cancel)
    assert [media.recipe["request"]["seed"] for media in made] == [1, 3]


def test_the_recipe_spells_the_settings_out_and_repeats(pipeline: Pipeline) -> None:
    media = pipeline(request(step_cache="easycache:threshold=0.4", cfg_gate=0.5))
    recorded = media.recipe["request"]
    assert recorded["step_cache"] == "easycache:threshold=0.4,warmup=0.2,force=false"
    assert recorded["cfg_gate"] == 0.5
    assert numpy.array_equal(pipeline(GenerationRequest.from_dict(recorded)).frames, media.frames)


def test_the_gate_runs_one_branch_after_its_share(pipeline: Pipeline) -> None:
    media = pipeline(request(cfg_gate=0.5, guidance_mode="two_pass"))
    cond, uncond = media.attention_report.steps
    assert (cond.computed, cond.num_reused) == ("0-11", 0)
    assert (uncond.computed, uncond.reused, uncond.reused_by) == ("0-5", "6-11", ("cfg_gate",))
    assert num_calls(media) == 2 * (12 + 6)
    assert not numpy.array_equal(media.frames, pipeline(request(guidance_mode="two_pass")).frames)


def test_a_gate_without_guidance_is_said_to_be_unused(pipeline: Pipeline) -> None:
    media = pipeline(request(cfg_gate=0.5, guidance_scale=1.0))
    assert any("cfg_gate: 0.5 is not used" in note for note in media.attention_report.notes)


@table("num_steps", [1, 4, 8])
def test_few_steps_are_refused_unless_forced(pipeline: Pipeline, num_steps: int) -> None:
    with pytest.raises(RequestError, match=f"expected more than 8 steps, got {num_steps}: .*easycache:force=true"):
        pipeline.resolve(request(num_inference_steps=num_steps, step_cache="easycache"))
    forced = pipeline.resolve(request(num_inference_steps=num_steps, step_cache="easycache:force=true"))
    assert forced.step_cache == "easycache:threshold=0.05,warmup=0.2,force=true"


def test_two_experts_have_a_cache_of_their_own(tmp_path: Path) -> None:
    folder = write_tiny_wan(tmp_path / "experts", boundary_ratio=0.7)
    media = load_pipeline(str(folder), device="cpu")(request(step_cache="easycache:threshold=10,warmup=0"))
    rows = {(row.branch, row.expert): row for row in media.attention_report.steps}
    assert set(rows) == {(branch, expert) for branch in ("cond", "uncond") for expert in (0, 1)}
    first = rows["cond", 0].num_computed + rows["cond", 0].num_reused
    assert rows["cond", 0].computed == "0-1"
    # Two steps of the second expert, then its last.
    assert rows["cond", 1].computed == f"{first}-{first + 1},{NUM_STEPS - 1}"


def test_sparse_attention_plans_at_computed_steps_alone(tiny_wan_folder: Path) -> None:
    sparse = {"backend": "sparse_video_gen_2_attn", "extra": {"svg2_first_times_fp": 0.3, "svg2_first_layers_fp": 0.0}}
    config = AttentionConfig.parse({"per_role": {"self": sparse}})
    media = load_pipeline(str(tiny_wan_folder), device="cpu", attention=config)(request(step_cache=CACHE))
    [cond, _] = media.attention_report.steps
    ran = {index for row in media.attention_report.rows if row.role == "self" for index in indices(row.steps)}
    assert cond.num_reused > 0
    assert ran == indices(cond.computed)


def indices(ranges: str) -> set[int]:
    pairs = [part.partition("-") for part in ranges.split(",") if part]
    return {index for first, _, last in pairs for index in range(int(first), int(last or first) + 1)}


@pytest.fixture(scope="module", params=["video", "image", "wan"])
def passthrough(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """CogVideoX and SD 1.5 (both branches in one batch), and Wan (one after the other)."""
    folder = tmp_path_factory.mktemp("passthrough") / request.param
    writers: dict[str, Any] = {
        "video": write_tiny_video_pipeline,
        "image": write_tiny_image_pipeline,
        "wan": write_tiny_wan,
    }
    return load_pipeline(str(writers[request.param](folder)), backend="diffusers", device="cpu")


@pytest.mark.filterwarnings("ignore:.*requires torchvision")
def test_a_diffusers_pipeline_is_cached_too(passthrough: Any) -> None:
    sizes = {"height": 16, "width": 16, "num_inference_steps": NUM_STEPS}
    plain = GenerationRequest("a red circle", seed=3, **sizes)
    if passthrough.rules.interface.makes_video:
        plain = dataclasses.replace(plain, num_frames=9)
    expected = passthrough(plain)
    assert expected.attention_report.steps == ()
    exact = passthrough(dataclasses.replace(plain, step_cache="easycache:threshold=0,warmup=0"))
    assert numpy.array_equal(exact.frames, expected.frames)
    media = passthrough(dataclasses.replace(plain, step_cache="easycache:threshold=0.9,warmup=0.2"))
    rows = media.attention_report.steps
    assert rows[0].num_reused > 0
    assert rows[0].computed.startswith("0-2")
    assert rows[0].computed.endswith(str(NUM_STEPS - 1))
    assert len({row.computed for row in rows}) == 1
    # No attention at the others, and the model is as it was.
    assert {row.steps for row in media.attention_report.rows if row.role == "self"} == {rows[0].computed}
    assert media.recipe["request"]["step_cache"].startswith("easycache:threshold=0.9")
    assert all("forward" not in model.__dict__ for model in denoisers_of(passthrough.pipeline).values())
    with pytest.raises(RequestError, match="cfg_gate"):
        passthrough.resolve(dataclasses.replace(plain, cfg_gate=0.5))
    with pytest.raises(RequestError, match="more than 8 steps"):
        passthrough.resolve(dataclasses.replace(plain, num_inference_steps=4, step_cache="easycache"))


# --- DBCache ----------------------------------------------------------------------------------------------------------


class CountingBlocks:
    """How often the blocks behind the first of the transformer ran, by step and branch of a two-pass run."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.blocks = [0] * len(pipeline.transformer.blocks)
        self._hooks = [
            block.register_forward_hook(lambda *_, index=index: self._count(index))
            for index, block in enumerate(pipeline.transformer.blocks)
        ]

    def _count(self, index: int) -> None:
        self.blocks[index] += 1

    def __enter__(self) -> CountingBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def test_dbcache_leaves_out_the_blocks_behind_the_first(pipeline: Pipeline) -> None:
    with CountingBlocks(pipeline) as counted:
        media = pipeline(request(step_cache="dbcache:F=1,W=3,R=2,MC=2"))
    cond, uncond = media.attention_report.steps
    assert cond.num_reused > 0
    assert cond.reused_by == ("dbcache",)
    assert cond.computed.startswith("0-2,5,8")
    assert counted.blocks == [2 * NUM_STEPS, cond.num_computed + uncond.num_computed]
    assert media.recipe["request"]["guidance_mode"] == "two_pass"
    assert "run one after the other (two_pass)" in str(media.attention_report)


@table("taylor", [0, 1, 2])
def test_dbcache_that_reuses_nothing_changes_no_bit(pipeline: Pipeline, taylor: int) -> None:
    plain = pipeline(request(guidance_mode="two_pass"))
    cached = pipeline(request(step_cache=f"dbcache:F=1,W=0,R=0,taylor={taylor}"))
    assert numpy.array_equal(plain.frames, cached.frames)
    assert [row.num_reused for row in cached.attention_report.steps] == [0, 0]


@table(
    ("options", "message"),
    [
        ("dbcache:F=2", r"expected F \+ B below this model's 2 blocks, got F=2, B=0"),
        ("dbcache:F=1,B=1", r"expected F \+ B below this model's 2 blocks"),
        ("dbcache:mask=[1,1,0]", "dbcache.mask: expected 12 steps, got 3"),
        ("dbcache:mask=fst", "mask: unknown value 'fst'.*'fast'"),
        ("dbcache:mask=[1,2]", "mask: expected 1 for a computed step"),
        ("dbcache:policy=static", "policy: static needs a mask"),
        ("dbcache:taylor=3", "taylor: expected an order from 0 to 2, got 3"),
        ("dbcache:F=0", "F: expected 1 or more, got 0"),
    ],
)
def test_dbcache_settings_that_cannot_be(pipeline: Pipeline, options: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pipeline(request(step_cache=options))


def test_a_static_mask_says_which_steps_are_reused(pipeline: Pipeline) -> None:
    mask = "[1,1,1,0,1,0,0,1,0,0,0,1]"
    media = pipeline(request(step_cache=f"dbcache:F=1,W=0,mask={mask},policy=static"))
    assert {row.reused for row in media.attention_report.steps} == {"3,5-6,8-10"}
    named = pipeline(request(num_inference_steps=28, step_cache="dbcache:F=1,W=0,mask=fast,policy=static"))
    # Runs of 6, 1, 1, 1, 1, 1 computed steps, and of 1, 3, 4, 5, 4 others between them.
    assert {row.computed for row in named.attention_report.steps} == {"0-5,7,11,16,22,27"}


def test_dbcache_is_refused_where_no_block_can_be_reached(passthrough: Any) -> None:
    with pytest.raises(RequestError, match=r"dbcache reads the blocks of a native model, .* expected easycache"):
        passthrough.resolve(GenerationRequest("a red circle", num_inference_steps=20, step_cache="dbcache"))
