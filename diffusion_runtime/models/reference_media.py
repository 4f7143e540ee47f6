"""Reference media: images, videos and sounds that a clip refers to, in the order of the request, as tokens of their
own sizes."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.images import picture_remarks
from diffusion_runtime.media.media_files import IMAGE, PLURALS, SOUND, MediaFile, media_file
from diffusion_runtime.request.generation_request import GenerationRequest, image_paths
from diffusion_runtime.untrusted.files import named

FIELD = "references"


@dataclass(frozen=True)
class ReferenceShape:
    """Sizes of one reference in a model. num_tokens: that the transformer sees beside those of the prompt. pictures:
    latent frames, height and width; None for a sound. num_moments: latents of its sound on each side; 0 without one.
    num_text_tokens: that stand for it among those of the prompt, at most. remarks: what is not used as it is, as
    clauses."""

    num_tokens: int
    pictures: tuple[int, int, int] | None
    num_moments: int = 0
    num_text_tokens: int = 0
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReferenceMedia:
    """Rules of a model for references. most: how many of each kind it takes; most_together: of all kinds. not_alone: a
    kind that needs one of another kind with it. shape_of: a file's sizes in a clip of a size; raises RequestError that
    says what is wrong with it, without its name. labels: what a prompt calls one of a kind, with `{}` for its number; a
    video's sound is a sound too.
    """

    most: Mapping[str, int]
    most_together: int
    not_alone: str
    shape_of: Callable[[MediaFile, ClipSize], ReferenceShape]
    labels: Mapping[str, str] = field(default_factory=dict)

    def files(self, paths: Sequence[str]) -> tuple[MediaFile, ...]:
        """Return the kinds of the files. Raises RequestError for more than the model takes, and what `media_file`
        raises."""
        if len(paths) > self.most_together:
            raise RequestError(
                f"{FIELD} (--reference): expected at most {self.most_together} files, got {len(paths)}: use "
                f"{self.most_together}"
            )
        found = tuple(media_file(path, FIELD) for path in paths)
        counts = Counter(each.kind for each in found)
        for kind, count in counts.items():
            if count > self.most.get(kind, 0):
                most = self.most.get(kind, 0)
                raise RequestError(
                    f"{FIELD} (--reference): expected at most {most} {PLURALS[kind]}, got {count}: use {most}"
                )
        if found and set(counts) == {self.not_alone}:
            others = " or ".join(
                f"an {kind}" if kind == IMAGE else f"a {kind}" for kind in self.most if kind != self.not_alone
            )
            raise RequestError(
                f"{FIELD} (--reference): expected {others} with a {self.not_alone}, got {PLURALS[self.not_alone]} alone"
            )
        return found

    def shapes(self, request: GenerationRequest, size: ClipSize) -> list[ReferenceShape]:
        """Return the sizes of a request's references. Raises RequestError for what the model cannot take."""
        found = []
        for file in self.files(image_paths(request, FIELD)):
            try:
                found.append(self.shape_of(file, size))
            except RequestError as error:
                text = str(error)
                # Readers of files name them already.
                raise RequestError(text if text.startswith(FIELD) else f"{named(FIELD, file.path)}: {text}") from error
        return found

    def remarks(self, request: GenerationRequest, size: ClipSize) -> list[str]:
        """Return what of the references is not used as it is, as sentences. Raises what `shapes` raises."""
        files, shapes = self.files(image_paths(request, FIELD)), self.shapes(request, size)
        own = [
            f"{FIELD}: {file.path}: {remark}"
            for file, shape in zip(files, shapes, strict=True)
            for remark in shape.remarks
        ]
        pictures = (picture_remarks(file.path, FIELD) for file in files if file.kind == IMAGE)
        return [*itertools.chain.from_iterable(pictures), *own, *self._unknown(request.prompt, files, shapes)]

    def _unknown(self, prompt: str, files: Sequence[MediaFile], shapes: Sequence[ReferenceShape]) -> Iterator[str]:
        """Yield a sentence on each reference that a prompt names and the request does not have."""
        counts = Counter(file.kind for file in files)
        counts[SOUND] = sum(shape.num_moments > 0 for shape in shapes)
        for kind, label in self.labels.items():
            before, after = map(re.escape, label.split("{}"))
            for number in dict.fromkeys(re.findall(f"{before}([0-9]{{1,6}}){after}", prompt)):
                if not 1 <= int(number) <= counts[kind]:
                    yield (
                        f"prompt: {label.format(number)} is no reference: there are {counts[kind]} {PLURALS[kind]}, "
                        "numbered from 1 in their order"
                    )

    def num_tokens(self, request: GenerationRequest, size: ClipSize) -> int:
        """Return the tokens of all references together, those with the prompt included. Raises what `shapes` raises."""
        return sum(each.num_tokens + each.num_text_tokens for each in self.shapes(request, size))

    def describe(self, request: GenerationRequest, size: ClipSize) -> list[str]:
        """Return a line about each reference: its kind, its path and what it becomes. Raises what `shapes` raises."""
        lines = []
        for number, (file, shape) in enumerate(
            zip(self.files(image_paths(request, FIELD)), self.shapes(request, size), strict=True), 1
        ):
            parts = [] if shape.pictures is None else ["{} x {} x {} latents".format(*shape.pictures)]
            parts += [f"{shape.num_moments} latents of sound a side"] * (shape.num_moments > 0)
            tokens = f"{shape.num_tokens} tokens, and {shape.num_text_tokens} at most with the prompt"
            lines.append(f"{number}: {file.kind} {file.path}: {', '.join(parts)}: {tokens}")
        return lines
