"""Verification: a file is made again from the recipe that it holds, and both are compared (proof of origin).

Frames are compared as both files show them, so that a file whose format loses something is compared with one that lost
the same. On the CPU of the same kind, with the same versions and as many threads, they are equal to the bit; elsewhere
they are alike within a bound on the PSNR.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from diffusion_runtime.comparison.frame_metrics import MAX_PSNR_DB, psnr_of_error, squared_error
from diffusion_runtime.comparison.untrusted_recipe import GivenFiles, config_of, request_of
from diffusion_runtime.core.progress import OnProgress
from diffusion_runtime.errors import NOT_REPRODUCED, OutputError, RequestError, shown
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.interface import Prepared
from diffusion_runtime.media import FileWriter, MediaFile, read_media_file, read_recipe
from diffusion_runtime.media.audio import MAX_SECONDS, Audio, has_sound, read_sound_as_it_is
from diffusion_runtime.media.clips import each_picture
from diffusion_runtime.media.formats import FORMATS_WITH_SOUND, SOUND_FORMATS
from diffusion_runtime.media.mp4_boxes import read_mp4
from diffusion_runtime.request.generation_request import GenerationRequest

SCHEMA = "diffusion_runtime.verify/1"
# Another device or dtype rounds otherwise; two clips of one prompt and different seeds are at 10 to 20 dB.
MIN_PSNR_DB = 30.0
IDENTICAL, CLOSE, DIFFERENT = "identical", "close", "different"
_FILE_OPTION = "_file_path"
_MODEL_KEYS = ("config_sha256", "family")
_MACHINE_KEYS = ("device", "dtype")
_ATTENTION_KEYS = ("role", "when", "layers", "backend")


@dataclass(frozen=True)
class Difference:
    """A value that is not as it was when the file was made. then: as the recipe holds it; now: here. of_model: whether
    it is the model's, whose frames are then others, and not the machine's, which rounds otherwise."""

    name: str
    then: str
    now: str
    of_model: bool = False


@dataclass(frozen=True)
class Verification:
    """The result. verdict: `identical` to the bit; `close`, within the bound on another machine or with other versions;
    `different`. psnr_db: of all frames and of the worst one, None where sizes or numbers of frames differ or there are
    no pictures. worst_frame: its index. sound_psnr_db: of the sound, None without. reason: in words."""

    path: Path
    verdict: str
    reason: str
    num_frames: int
    psnr_db: float | None = None
    worst_psnr_db: float | None = None
    worst_frame: int | None = None
    sound_psnr_db: float | None = None
    differences: tuple[Difference, ...] = ()
    timings: Mapping[str, float] | None = None

    @property
    def exit_code(self) -> int:
        """0 for a file that its recipe makes, NOT_REPRODUCED for any other."""
        return NOT_REPRODUCED if self.verdict == DIFFERENT else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values."""
        return {
            "schema": SCHEMA,
            **{name: value for name, value in vars(self).items() if name not in ("path", "differences")},
            "path": str(self.path),
            "differences": [asdict(each) for each in self.differences],
            "exit_code": self.exit_code,
        }


@dataclass(frozen=True)
class Regeneration:
    """A file and what makes it again, known before any weight is read. differences: known so far."""

    media: MediaFile
    prepared: Prepared
    request: GenerationRequest
    differences: tuple[Difference, ...]

    @classmethod
    def of(
        cls, path: str, *, inputs: Sequence[str] = (), model_path: str | None = None, device: str = "auto"
    ) -> Regeneration:
        """Read the recipe of a file and open its model. inputs: files that it was made with; model_path: None for the
        hub's cache.

        Raises OutputError for a file without a recipe, ConfigError for what is not taken from one, and what opening a
        model and resolving a request raise.
        """
        recipe = read_recipe(path)
        media = read_media_file(path)
        given = GivenFiles(inputs)
        config, request = config_of(recipe, given, model_path, device), request_of(recipe, given)
        prepared = prepare(config)
        request = prepared.rules.resolve(request)
        _check_size(media, request)
        found = tuple(differences_of(recipe, prepared.description.to_dict()))
        return cls(media, prepared, request, found)

    def verify(
        self,
        min_psnr_db: float = MIN_PSNR_DB,
        *,
        on_stage: Callable[[str], None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Verification:
        """Generate and compare. Raises what a generation raises, and RequestError for a file that cannot be decoded."""
        pipeline = self.prepared.load(on_stage, [self.request])
        path = self.media.path
        with tempfile.TemporaryDirectory(prefix="diffusion-runtime-verify-") as folder:
            target = Path(folder) / f"made.{self.media.format}"
            with FileWriter(target) as writer:
                made = pipeline(self.request, on_progress=on_progress, open_sink=writer.open)
                made.save(target, writer=writer)
            differences = (*self.differences, *_encoders(path, target))
            frames = None if self.media.format in SOUND_FORMATS else _compare_frames(path, target)
            sound = None if made.audio is None else _compare_sound(path, target, made.audio)
        verdict, reason = _verdict(frames, sound, differences, min_psnr_db)
        return Verification(
            path=path,
            verdict=verdict,
            reason=reason,
            num_frames=self.media.num_frames,
            psnr_db=None if frames is None else frames.psnr_db,
            worst_psnr_db=None if frames is None else frames.worst_psnr_db,
            worst_frame=None if frames is None else frames.worst_frame,
            sound_psnr_db=None if sound is None else sound.psnr_db,
            differences=differences,
            timings=made.timings,
        )


def differences_of(recipe: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield what is not as it was. recipe: of a stranger; now: of PipelineDescription.to_dict."""

    def differ(name: str, before: Any, after: Any, *, of_model: bool = False) -> Iterator[Difference]:
        if before != after:
            yield Difference(name, _text(before), _text(after), of_model)

    then, model = _mapping(recipe.get("model")), now["model"]
    for key in _MODEL_KEYS:
        yield from differ(f"model {key}", then.get(key), model[key], of_model=True)
    before, after = _mapping(recipe.get("weights")), _mapping(now.get("weights"))
    commits = then.get("commit"), model.get("commit")
    if None not in commits:
        yield from differ("model commit", *commits, of_model=True)
    elif commits != (None, None):
        # A commit names the weights of the one, a fingerprint those of the other.
        yield from differ("model commit", *commits)
    for key in dict.fromkeys((*before, *after)):
        if key != "lora_commits" and not (key == "model_path" and commits != (None, None)):
            yield from differ(f"weights of {key}", before.get(key), after.get(key), of_model=True)
    yield from differ("diffusion_runtime", recipe.get("version"), now["version"])
    for key in _MACHINE_KEYS:
        yield from differ(key, then.get(key), model[key])
    versions, here = _mapping(recipe.get("made_with")), now["made_with"]
    for key in dict.fromkeys((*versions, *here)):
        yield from differ(key, versions.get(key), here.get(key))
    yield from differ("attention", _attention(recipe), _attention(now))
    yield from differ("processes", recipe.get("parallel"), now.get("parallel"))


def _attention(values: Mapping[str, Any]) -> list[Any]:
    """Return what of the rows of attention decides about rounding, without the names of files."""
    found = values.get("attention")
    rows = [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
    return [
        [
            *(row.get(key) for key in _ATTENTION_KEYS),
            {name: value for name, value in _mapping(row.get("options")).items() if not name.endswith(_FILE_OPTION)},
        ]
        for row in rows
    ]


@dataclass(frozen=True)
class _Likeness:
    """The likeness of two clips or sounds. is_equal: to the bit. psnr_db: None for other sizes or lengths, which
    `reason` names."""

    is_equal: bool
    psnr_db: float | None
    reason: str = ""
    worst_psnr_db: float | None = None
    worst_frame: int | None = None


def _check_size(media: MediaFile, request: GenerationRequest) -> None:
    """Raises OutputError for a recipe that makes something of another size: it is not that of the file."""
    if media.format in SOUND_FORMATS or request.height is None or request.width is None:
        return
    # An mp4 has an even number of pixels across and down.
    odd = 1 if media.format == "mp4" else 0
    num_frames = (request.num_frames or 0) * (request.interpolate or 1)
    made = (request.width + odd * (request.width % 2), request.height + odd * (request.height % 2), num_frames)
    if (media.width, media.height, media.num_frames) != made and request.num_frames is not None:
        raise OutputError(
            f"{media.path}: its recipe makes {num_frames} frames of {request.width} x {request.height}, and it "
            f"has {media.num_frames} of {media.width} x {media.height}: the recipe is of another file"
        )


def _compare_frames(path: Path, made: Path) -> _Likeness:
    errors: list[float] = []
    is_equal = True
    most = read_media_file(made).num_frames + 1
    both = [each_picture(str(each), "verify", most) for each in (path, made)]
    for mine, other in itertools.zip_longest(*both):
        if mine is None or other is None:
            return _Likeness(False, None, "the recipe makes another number of frames")
        if mine.size != other.size:
            return _Likeness(False, None, f"the recipe makes frames of {other.size[0]} x {other.size[1]}")
        one, two = (numpy.asarray(each, dtype=numpy.uint8) for each in (mine, other))
        is_equal = is_equal and bool((one == two).all())
        errors.append(squared_error(one, two))
    worst = max(range(len(errors)), key=errors.__getitem__)
    return _Likeness(
        is_equal,
        psnr_of_error(sum(errors) / len(errors)),
        worst_psnr_db=psnr_of_error(errors[worst]),
        worst_frame=worst,
    )


def _compare_sound(path: Path, made: Path, audio: Audio) -> _Likeness | None:
    """Compare the sound of a file that carries it; None where it is another file's."""
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in (*FORMATS_WITH_SOUND, *SOUND_FORMATS):
        return None
    if suffix in FORMATS_WITH_SOUND and not has_sound(str(path), "verify"):
        return _Likeness(False, None, "the recipe makes sound, and the file has none")
    seconds = min(MAX_SECONDS - 1, audio.seconds + 1)
    one, two = (
        read_sound_as_it_is(str(each), "verify", seconds, audio.sample_rate, audio.num_channels).samples
        for each in (path, made)
    )
    if one.shape != two.shape:
        return _Likeness(False, None, "the recipe makes sound of another length")
    error = float(numpy.square(one - two).mean(dtype=numpy.float64))
    # Samples are in [-1, 1].
    decibels = MAX_PSNR_DB if error == 0 else min(MAX_PSNR_DB, float(10 * numpy.log10(4.0 / error)))
    return _Likeness(bool((one == two).all()), decibels)


def _verdict(
    frames: _Likeness | None, sound: _Likeness | None, differences: Sequence[Difference], min_psnr_db: float
) -> tuple[str, str]:
    """Return the verdict and its reason."""
    compared = [each for each in (frames, sound) if each is not None]
    if not compared:
        raise RequestError("verify: the model made no sound this time, and the file holds nothing else")
    for each in compared:
        if each.psnr_db is None:
            return DIFFERENT, each.reason
    if all(each.is_equal for each in compared):
        return IDENTICAL, "equal to the bit"
    lowest = min(each.psnr_db for each in compared if each.psnr_db is not None)
    if any(each.of_model for each in differences):
        return DIFFERENT, f"{lowest:.1f} dB apart, made by another model or other weights"
    if not differences:
        return DIFFERENT, f"{lowest:.1f} dB apart, where the same versions on the same processor make equal bits"
    if lowest < min_psnr_db:
        return DIFFERENT, f"{lowest:.1f} dB apart, below {min_psnr_db:g} dB"
    return CLOSE, f"{lowest:.1f} dB apart, at least {min_psnr_db:g} dB, which other versions or devices explain"


def _encoders(path: Path, made: Path) -> Iterator[Difference]:
    """Yield the difference of the programs that wrote two videos; their pictures are then not the same to the bit."""
    if path.suffix.lower() != ".mp4":
        return
    before, after = (read_mp4(each).encoder for each in (path, made))
    if before != after:
        yield Difference("ffmpeg", _text(before), _text(after))


def _text(value: Any) -> str:
    return "unknown" if value is None else value if isinstance(value, str) and value.isprintable() else shown(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
