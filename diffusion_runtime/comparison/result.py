"""The result of a comparison: one row per setting, and next to each the reference with fewer steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import BatchFailedError
from diffusion_runtime.models.lora_sources import recorded_loras
from diffusion_runtime.quality.paired_test import PairedTest, mcnemar
from diffusion_runtime.quality.shapes.scoring import Proportion
from diffusion_runtime.quality.worlds import Verdict, proportions
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.session.failures import Failure

SCHEMA = "diffusion_runtime.compare/1"
STAGES = ("text", "denoise", "decode")

Kind: TypeAlias = Literal["reference", "setting", "fewer_steps"]
# same: as another setting, so nothing was run. not_faster: fewer steps of the reference would take no less time.
State: TypeAlias = Literal["measured", "failed", "same", "not_faster"]


@dataclass(frozen=True)
class Clip:
    """One generation. latent_l2: after each step, relative to the reference's (latent_distance.ClipDistance); metrics:
    `psnr_db`, `ssim`, `lpips`; both empty for the reference. seconds: by stage. computed_share: of the forward passes,
    where a step cache leaves some out. verdict: what of the prompt the clip shows, None where that is not
    known; clip_score: None without a CLIP model. picture: the encoded clip for the page; path: of the saved one."""

    prompt: str
    seed: int
    latent_l2: tuple[float | None, ...] = ()
    final_latent_l2: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    computed_share: float = 1.0
    verdict: Verdict | None = None
    clip_score: float | None = None
    path: str | None = None
    picture: bytes | None = None
    picture_type: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "seed": self.seed,
            "latent_l2_per_step": list(self.latent_l2),
            "final_latent_l2": self.final_latent_l2,
            **{name: self.metrics.get(name) for name in ("psnr_db", "ssim", "lpips")},
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "computed_share": self.computed_share,
            "verdict": None if self.verdict is None else {**asdict(self.verdict), "joint": self.verdict.joint},
            "clip_score": self.clip_score,
            "path": self.path,
        }


@dataclass(frozen=True)
class Row:
    """One setting. beside: of `fewer_steps` the setting that takes as long, of `same` the one it equals. reason: why
    there are no figures. density: the share of attention's operations that is computed; None if unknown. is_counted:
    whether it was counted in a further clip, because the content decides.
    attention_seconds: of the transformer's attention layers, in a further clip; None if they were not timed.
    num_untimed: how many of the first clips do not count for the time, as they warm up."""

    name: str
    kind: Kind
    state: State
    num_steps: int | None = None
    beside: str | None = None
    reason: str = ""
    failure: Failure | None = None
    runtime: RuntimeConfig | None = None
    request: GenerationRequest | None = None
    clips: tuple[Clip, ...] = ()
    num_untimed: int = 0
    load_seconds: float | None = None
    density: float | None = None
    is_counted: bool = False
    attention_seconds: float | None = None
    peak_memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """By stage, the median over the clips that are timed."""
        timed = self.clips[self.num_untimed :]
        stages = [stage for stage in STAGES if timed and all(stage in clip.seconds for clip in timed)]
        return {stage: statistics.median(clip.seconds[stage] for clip in timed) for stage in stages}

    @property
    def timed_seconds(self) -> list[float]:
        """Seconds of each clip that is timed, all stages together."""
        return [sum(clip.seconds.get(stage, 0.0) for stage in STAGES) for clip in self.clips[self.num_untimed :]]

    @property
    def total_seconds(self) -> float | None:
        return sum(self.seconds.values()) or None

    @property
    def seconds_per_step(self) -> float | None:
        denoise = self.seconds.get("denoise")
        return None if denoise is None or not self.num_steps else denoise / self.num_steps

    @property
    def latent_l2(self) -> list[float | None]:
        """By step, the mean over the clips; empty where step counts differ from the reference's."""
        return [_mean(values) for values in zip(*(clip.latent_l2 for clip in self.clips), strict=True)]

    @property
    def final_latent_l2(self) -> float | None:
        return _mean([clip.final_latent_l2 for clip in self.clips])

    @property
    def computed_share(self) -> float | None:
        return _mean([clip.computed_share for clip in self.clips])

    @property
    def accuracy(self) -> Mapping[str, Proportion] | None:
        """By part of a verdict, over the prompts of which it is known what a clip must show; None without any."""
        verdicts = [clip.verdict for clip in self.clips if clip.verdict is not None]
        return proportions(verdicts) if verdicts else None

    @property
    def clip_score(self) -> float | None:
        return _mean([clip.clip_score for clip in self.clips])

    def metric(self, name: str) -> float | None:
        return _mean([clip.metrics.get(name) for clip in self.clips])

    def first_step_over(self, threshold: float) -> int | None:
        """Return the first step, from 0, whose distance is above; None without one, or if steps cannot be compared."""
        return next(
            (step for step, value in enumerate(self.latent_l2) if value is not None and value > threshold), None
        )

    def first_step_text(self, threshold: float) -> str:
        """`3`, `none` where no step is over, `-` where steps cannot be compared."""
        if self.kind == "reference" or all(value is None for value in self.latent_l2):
            return "-"
        over = self.first_step_over(threshold)
        return "none" if over is None else str(over)


@dataclass(frozen=True)
class Comparison:
    """rows: the reference first; each other setting is followed by its `fewer_steps`. version: of this package.
    unavailable: metrics that this machine lacks, and why. latents_dtype: in which they were kept, None for a model that
    does not show them."""

    rows: tuple[Row, ...]
    threshold: float
    device: str
    version: str
    unavailable: Mapping[str, str]
    latents_dtype: str | None
    remarks: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return one line: the clips hold whole videos."""
        others = ", ".join(row.name for row in self.rows[1:])
        return f"<Comparison: {others} beside {self.reference.name}, on {self.device}>"

    @property
    def reference(self) -> Row:
        return self.rows[0]

    @property
    def exit_code(self) -> int:
        return BatchFailedError.exit_code if any(row.state == "failed" for row in self.rows) else 0

    def speedup(self, row: Row) -> float | None:
        """Return the reference's time of one clip over the row's."""
        its, mine = self.reference.total_seconds, row.total_seconds
        return None if its is None or mine is None else its / mine

    def speed_text(self, row: Row) -> str:
        """`2.33x (2.10 to 2.50)`: the speedup and its range over clips; of a single one, that it is from one."""
        speedup = self.speedup(row)
        if speedup is None:
            return "-"
        if row is self.reference:
            return f"{speedup:.2f}x"
        pairs = list(zip(self.reference.timed_seconds, row.timed_seconds, strict=False))
        if len(pairs) < 2:
            return f"{speedup:.2f}x (from one clip)"
        ratios = [its / mine for its, mine in pairs]
        return f"{speedup:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"

    def paired_test(self, row: Row) -> PairedTest | None:
        """Return the paired test of the reference and another row on the prompts judged for both, or None without
        any."""
        pairs = [
            (its.verdict.joint, mine.verdict.joint)
            for its, mine in zip(self.reference.clips, row.clips, strict=False)
            if its.verdict is not None and mine.verdict is not None
        ]
        if row is self.reference or not pairs:
            return None
        return mcnemar([first for first, _ in pairs], [second for _, second in pairs])

    def to_dict(self) -> dict[str, Any]:
        request = self.reference.request
        assert request is not None
        return {
            "schema": SCHEMA,
            "version": self.version,
            "model": None if self.reference.runtime is None else self.reference.runtime.model_path,
            "device": self.device,
            "reference": self.reference.name,
            "size": {name: getattr(request, name) for name in ("height", "width", "num_frames", "fps")},
            "prompts": [{"prompt": clip.prompt, "seed": clip.seed} for clip in self.reference.clips],
            "threshold": self.threshold,
            "unavailable": dict(self.unavailable),
            "latents_dtype": self.latents_dtype,
            "rows": [self._row(row) for row in self.rows],
            "remarks": list(self.remarks),
            "exit_code": self.exit_code,
        }

    def _row(self, row: Row) -> dict[str, Any]:
        accuracy, paired = row.accuracy, self.paired_test(row)
        return {
            "name": row.name,
            "kind": row.kind,
            "state": row.state,
            "beside": row.beside,
            "reason": row.reason,
            "failure": None if row.failure is None else row.failure.to_dict(),
            "num_inference_steps": row.num_steps,
            "computed_share": row.computed_share,
            "latent_l2_per_step": row.latent_l2,
            "first_step_over_threshold": row.first_step_over(self.threshold),
            "final_latent_l2": row.final_latent_l2,
            **{name: row.metric(name) for name in ("psnr_db", "ssim", "lpips")},
            "accuracy": None if accuracy is None else {name: asdict(each) for name, each in accuracy.items()},
            "mcnemar": None if paired is None else asdict(paired),
            "clip_score": row.clip_score,
            "seconds": {name: round(value, 4) for name, value in row.seconds.items()},
            "total_seconds": row.total_seconds,
            "seconds_per_step": row.seconds_per_step,
            "speedup": self.speedup(row),
            "num_untimed_clips": row.num_untimed,
            "load_seconds": row.load_seconds,
            "attention_seconds": row.attention_seconds,
            "attention_density": row.density,
            "attention_density_is_counted": row.is_counted,
            "peak_memory": dict(row.peak_memory),
            "runtime": None if row.runtime is None else _plain(row.runtime),
            "request": None if row.request is None else row.request.recorded(),
            "clips": [clip.to_dict() for clip in row.clips],
        }


def _plain(runtime: RuntimeConfig) -> dict[str, Any]:
    values = {**vars(runtime)}
    for name in ("attention", "attention_override"):
        given = values[name]
        values[name] = given.to_dict() if hasattr(given, "to_dict") else given
    values["parallel"] = asdict(runtime.parallel)
    values["lora"] = recorded_loras(runtime.lora)
    values["quantization_ignored_layers"] = list(runtime.quantization_ignored_layers)
    return values


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean, or None if one is missing or there are none."""
    known = list(values)
    return None if not known or None in known else statistics.fmean(value for value in known if value is not None)


def steps_at_the_same_time(reference: Row, row: Row) -> int | None:
    """Return how many steps of the reference take as long as a clip of `row`, from the reference's measured seconds per
    step and the time of its other stages; at least 1. None if that is not fewer than it has, or nothing was timed."""
    total, per_step, its = row.total_seconds, reference.seconds_per_step, reference.seconds
    if total is None or per_step is None or reference.num_steps is None:
        return None
    others = sum(its.values()) - its["denoise"]
    count = max(1, round((total - others) / per_step))
    return count if count < reference.num_steps else None


def filled_columns(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return names and cells of a table without the columns that hold `-` in every row."""
    kept = [number for number in range(len(columns)) if any(row[number] != "-" for row in rows)]
    return [columns[number] for number in kept], [[row[number] for number in kept] for row in rows]
