"""Previews: pictures of the clean estimate while a job is denoised, by a linear map of latents or by the decoder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder, ModelFolder, read_json_in
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import Predict
from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.generation.frame_decoding import decode_frames, without_first
from diffusion_runtime.generation.interface import GenerationPipeline
from diffusion_runtime.loading.interface import Prepared
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.profiling.instruments import wrapped_predictions
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.batch_settings import BatchSettings

# In a model's folder: the linear map of its decoder, which scripts/fit_preview.py writes. The part is not among those
# that the folder's digest counts.
FILE = "latent_preview.json"
LINEAR, DECODE = "linear", "decode"
# Part of the steps, from the first, whose estimates are mostly noise: no preview is made of them.
_NOISY_STEPS = 0.3

# Called with the index of a step, their number and the pixels of each request's estimate, [height, width, 3], uint8.
OnPreview = Callable[[int, int, list[Any]], None]


@dataclass(frozen=True)
class LinearMap:
    """The colours that a latent stands for, fitted to a decoder. matrix: [channels, 3]; offset: [3]; both in [0, 1] of
    a pixel."""

    matrix: torch.Tensor
    offset: torch.Tensor

    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        """Return one pixel per latent, [height, width, 3], uint8 on the CPU, of latents [channels, height, width]."""
        pixels = torch.einsum("chw,cr->hwr", latents.float().cpu(), self.matrix) + self.offset
        return (pixels.clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)


def read_linear_map(folder: AnyFolder, num_channels: int) -> LinearMap | None:
    """Read the linear map of a model folder, None where it has none. Raises ModelLoadError for a file that is another
    thing."""
    path = folder / FILE
    # A decoder from elsewhere has latents of its own.
    if not path.is_file() or (isinstance(folder, ModelFolder) and "vae" in folder.parts):
        return None
    values = read_json_in(folder, FILE)
    try:
        matrix, offset = (torch.tensor(values[name], dtype=torch.float32) for name in ("matrix", "offset"))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path}: expected matrix and offset, lists of numbers") from error
    if tuple(matrix.shape) != (num_channels, 3) or tuple(offset.shape) != (3,):
        raise ModelLoadError(f"{path}: expected a matrix [{num_channels}, 3] and an offset [3]")
    return LinearMap(matrix, offset)


class Previews:
    """Previews of a model. choice: `auto`, `linear`, `decode` or `off`, as of serve. prepared: the model before its
    weights are read. method: how they are made, None for not at all; reason: why not, empty where they are. `auto`
    takes the linear map, else a tiny decoder, else the decoder of a model that makes images; the first frame of a video
    by a full decoder may need memory that no plan has counted.

    Raises ConfigError for a choice that this model does not have, and what read_linear_map raises.
    """

    def __init__(self, choice: str, prepared: Prepared) -> None:
        self.method: str | None = None
        self.reason = ""
        self._map: LinearMap | None = None
        native, config = prepared.inspectable, prepared.description.config
        if choice == "off":
            self.reason = "it was started with --preview off"
            return
        if native is None or prepared.description.degrees.num_processes > 1:
            self.reason = "several processes, and pipelines of diffusers', make none"
        elif native.model.sampling.is_causal:
            self.reason = "a causal model makes one part of the video after the other, and none of the whole"
        if self.reason:
            if choice != "auto":
                raise ConfigError(f"preview: {choice}: {self.reason}; leave out --preview")
            return
        assert native is not None
        geometry = native.rules.sampling.geometry
        self._map = None if choice == DECODE else read_linear_map(native.model.folder, geometry.num_channels)
        has_quick_decoder = config.vae_decoder not in (None, "none") or geometry.temporal_factor == 1
        if self._map is not None:
            self.method = LINEAR
        elif choice == LINEAR:
            raise ConfigError(f"preview: linear: {native.model.folder} has no {FILE}; give --preview decode")
        elif choice == DECODE or has_quick_decoder:
            self.method = DECODE
        else:
            self.reason = f"its model has no {FILE}; --preview decode takes its decoder"

    @contextlib.contextmanager
    def watching(
        self,
        pipeline: GenerationPipeline,
        requests: Sequence[GenerationRequest],
        on_preview: OnPreview | None,
        num_previews: int,
    ) -> Iterator[None]:
        """Context manager: the clean estimates of `num_previews` steps are handed over."""
        if on_preview is None or not num_previews or self.method is None or not isinstance(pipeline, Pipeline):
            yield
            return
        settings = pipeline.rules.settings(*requests)
        wanted = preview_steps(settings.num_steps, num_previews)

        def wrap(predict: Predict) -> Predict:
            def watched(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
                velocity = predict(latents, step)
                if step.index in wanted and step.sigma is not None:
                    wanted.discard(step.index)
                    estimate = latents - step.sigma * velocity.to(latents.dtype)
                    samples = (estimate[at : at + 1] for at in range(len(estimate)))
                    parts = (settings.sampling.geometry.parts(sample, settings.size).video for sample in samples)
                    pictures = [self._picture(pipeline, part, settings) for part in parts]
                    on_preview(step.index + 1, step.num_steps, pictures)
                return velocity

            return watched

        with wrapped_predictions(pipeline, wrap):
            yield

    def _picture(self, pipeline: Pipeline, video: torch.Tensor, settings: BatchSettings) -> Any:
        """Return the picture of one sample: of the frame in its middle, or of its first one by a decoder, which comes
        to the others later. video: [1, channels, frames, height, width]."""
        geometry = settings.sampling.geometry
        if self._map is not None:
            first = geometry.num_latents_before
            return self._map(video[0, :, first + (video.shape[2] - first) // 2]).numpy()
        stream = pipeline.decoder.for_request(settings.shared).stream(video)
        stream = without_first(stream, geometry.num_frames_before)
        return decode_frames(stream, settings.size.fps, {})[0].numpy()


def preview_steps(num_steps: int, num_previews: int) -> set[int]:
    """Return the indices of the steps of which previews are made: spread evenly behind the noisiest, without the last,
    whose estimate is the result."""
    first = min(int(num_steps * _NOISY_STEPS), max(0, num_steps - 2))
    steps = range(first, max(first + 1, num_steps - 1))
    count = min(num_previews, len(steps))
    return {steps[int((index + 0.5) * len(steps) / count)] for index in range(count)}
