"""Progressive resolution in whole pipelines: the tiny Wan model, batches, step caches, experts, images."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image
from tables import table
from tiny_models import write_tiny_wan

import diffusion_runtime
from diffusion_runtime import AttentionConfig, GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.latent_spectrum import KNOWN_SPECTRA, read_spectrum
from diffusion_runtime.request.progressive_options import LatentSpectrum

PACKAGE = Path(diffusion_runtime.__file__).parent
# The spectrum of the tiny autoencoder's latents is nobody's.
HALVED = "dct:A=3,beta=2.42,delta=0.1"


@pytest.fixture(scope="module")
def pipeline(tiny_wan_folder: Path) -> Pipeline:
    return load_pipeline(str(tiny_wan_folder), device="cpu")


def request(**values: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"height": 64, "width": 96, "num_frames": 5, "num_inference_steps": 12, "seed": 1}
    fields |= {"guidance_scale": 4.0, "guidance_mode": "two_pass", "progressive_resolution": HALVED}
    return GenerationRequest("a red circle moving left", **(fields | values))


class SeenSizes:
    """Height and width of the latents at each forward pass of a pipeline's transformer."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.sizes: list[tuple[int, ...]] = []
        self._hook = pipeline.transformer.register_forward_pre_hook(
            lambda _, inputs: self.sizes.append(tuple(inputs[0].shape[-2:]))
        )

    def __enter__(self) -> SeenSizes:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


@table("sampler", ["unipc", "flow_match_euler"])
def test_early_steps_run_at_half_the_size_and_the_report_says_so(pipeline: Pipeline, sampler: str) -> None:
    with SeenSizes(pipeline) as seen:
        media = pipeline(request(sampler=sampler))
    num_small = seen.sizes.count((4, 6)) // 2
    assert 2 <= num_small <= 10
    assert seen.sizes == [(4, 6)] * 2 * num_small + [(8, 12)] * 2 * (12 - num_small)
    assert media.frames.shape == (5, 64, 96, 3)
    note = f"progressive_resolution: steps 0-{num_small - 1} at 32 x 48, from sigma 1; steps {num_small}-11 at 64 x 96"
    assert note in str(media.attention_report)
    recorded = media.recipe["request"]
    assert recorded["progressive_resolution"] == "dct:levels=1,delta=0.1,A=3.0,beta=2.42"
    assert numpy.array_equal(pipeline(GenerationRequest.from_dict(recorded)).frames, media.frames)


def test_two_levels(pipeline: Pipeline) -> None:
    with SeenSizes(pipeline) as seen:
        pipeline(request(width=64, progressive_resolution=f"{HALVED},levels=2"))
    assert list(dict.fromkeys(seen.sizes)) == [(2, 2), (4, 4), (8, 8)]


@table("off", ["none", "dct:levels=0"])
def test_no_levels_change_no_bit(pipeline: Pipeline, off: str) -> None:
    plain, media = pipeline(request(progressive_resolution=None)), pipeline(request(progressive_resolution=off))
    assert numpy.array_equal(plain.frames, media.frames)
    assert "progressive_resolution" not in str(media.attention_report)


def test_a_batch_equals_its_single_runs(pipeline: Pipeline) -> None:
    requests = [request(seed=seed) for seed in (1, 5)]
    for alone, together in zip(map(pipeline, requests), pipeline.generate(requests), strict=True):
        assert numpy.abs(alone.frames.astype(int) - together.frames.astype(int)).max() <= 1


@table("cache", ["easycache:threshold=0.9,warmup=0.2", "dbcache:F=1,W=0,R=5", "cfg_gate"])
def test_step_caches_begin_anew_where_the_size_grows(pipeline: Pipeline, cache: str) -> None:
    fields: dict[str, Any] = {"cfg_gate": 0.1} if cache == "cfg_gate" else {"step_cache": cache}
    with SeenSizes(pipeline) as seen:
        media = pipeline(request(sampler="flow_match_euler", **fields))
    [note] = [note for note in media.attention_report.notes if note.startswith("progressive_resolution")]
    first = int(note.split("; steps ")[1].split("-")[0])
    row = media.attention_report.steps[-1]
    assert row.num_reused > 0
    assert first in indices(row.computed)
    assert (8, 12) in seen.sizes


def indices(ranges: str) -> set[int]:
    pairs = [part.partition("-") for part in ranges.split(",") if part]
    return {index for first, _, last in pairs for index in range(int(first), int(last or first) + 1)}


def test_two_experts_sparse_attention_and_an_image(tmp_path: Path) -> None:
    sparse = {"backend": "sparse_video_gen_2_attn", "extra": {"svg2_first_times_fp": 0.0, "svg2_first_layers_fp": 0.0}}
    config = AttentionConfig.parse({"per_role": {"self": sparse}})
    folder = write_tiny_wan(tmp_path / "experts", boundary_ratio=0.7)
    media = load_pipeline(str(folder), device="cpu", attention=config)(request())
    assert "sparse_video_gen_2_attn" in {row.backend for row in media.attention_report.rows}
    folder = write_tiny_wan(tmp_path / "image", takes_image=True)
    image = load_pipeline(str(folder), device="cpu")
    picture = tmp_path / "a.png"
    Image.new("RGB", (96, 64), (200, 30, 30)).save(picture)
    with SeenSizes(image) as seen:
        image(request(image_path=str(picture), height=64, width=96))
    assert list(dict.fromkeys(seen.sizes)) == [(4, 6), (8, 12)]


@table(
    ("values", "message"),
    [
        ({"progressive_resolution": "dct"}, r"the spectrum of this model's latents is not known; say it, dct:A="),
        ({"height": 80}, r"height: expected a multiple of 32, got 80; use 64 or 96, or leave out progressive_res"),
        ({"progressive_resolution": f"{HALVED},levels=2"}, r"width: expected a multiple of 64, got 96; use 64 or 128"),
        ({"sampler": "dmd"}, r"progressive_resolution: dmd cannot change the size; .*flow_match_euler or unipc"),
        ({"num_inference_steps": 1}, r"progressive_resolution: the last size begins at a noise level of "),
    ],
)
def test_requests_that_cannot_be(pipeline: Pipeline, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pipeline.resolve(request(**values))


def test_a_calibration_at_one_size_is_refused(pipeline: Pipeline, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text("{}")
    with pytest.raises(RequestError, match="magcache is calibrated at one size"):
        pipeline.resolve(request(step_cache=f"magcache:file={file}"))


def test_known_autoencoders_are_recognised_by_their_numbers(tmp_path: Path) -> None:
    flux, wan = KNOWN_SPECTRA[:2]
    for known in (flux, wan):
        vae = tmp_path / str(known.settings["_class_name"]) / "vae"
        vae.mkdir(parents=True)
        (vae / "config.json").write_text(json.dumps(dict(known.settings)))
        assert read_spectrum(vae.parent) == known.spectrum
        other = {**known.settings, "scaling_factor": 0.36, "latents_std": [1.0] * 16}
        (vae / "config.json").write_text(json.dumps(other))
        assert read_spectrum(vae.parent) is None


def test_the_embedded_model_s_spectrum_is_known() -> None:
    assert read_spectrum(PACKAGE / "assets" / "shapes") == LatentSpectrum(15.96, 2.022)


def test_a_known_spectrum_is_filled_in(pipeline: Pipeline) -> None:
    rules = dataclasses.replace(pipeline.rules, spectrum=KNOWN_SPECTRA[1].spectrum)
    resolved = rules.resolve(request(progressive_resolution="dct"))
    assert resolved.progressive_resolution == "dct:levels=1,delta=0.01,A=219.484718,beta=2.422687"
