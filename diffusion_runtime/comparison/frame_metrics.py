"""PSNR, SSIM and LPIPS of a clip compared with the reference's. Frames: uint8 RGB [num_frames, height, width, 3]."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

# Equal clips have no noise; this stands for it, as in the figures of benchmarks/.
MAX_PSNR_DB = 100.0
# LPIPS is published with AlexNet as the network that is closest to people's judgement (arXiv:1801.03924).
_LPIPS_TRUNK = "alexnet-owt-7be5be79.pth"


def psnr_db(frames: numpy.ndarray, reference: numpy.ndarray) -> float:
    """Return the PSNR from the mean squared error over the whole clip, in dB, at most MAX_PSNR_DB."""
    # Frame by frame: a clip as float64 would take eight times its memory.
    errors = [squared_error(mine, its) for mine, its in zip(frames, reference, strict=True)]
    return psnr_of_error(sum(errors) / len(errors))


def squared_error(frame: numpy.ndarray, reference: numpy.ndarray) -> float:
    """Return the mean squared error of a frame, uint8 [height, width, 3]."""
    return float(numpy.square(frame.astype(numpy.float32) - reference.astype(numpy.float32)).mean(dtype=numpy.float64))


def psnr_of_error(error: float) -> float:
    """Return the PSNR of a mean squared error of values in [0, 255], in dB, at most MAX_PSNR_DB."""
    return MAX_PSNR_DB if error == 0 else min(MAX_PSNR_DB, float(10 * numpy.log10(255.0**2 / error)))


class FrameMetrics:
    """The metrics of this machine. unavailable: by name, why one cannot be computed and what to type."""

    def __init__(self) -> None:
        self._ssim, self._lpips = _find_ssim(), _find_lpips()
        found = {"ssim": self._ssim, "lpips": self._lpips}
        self.unavailable = {name: each for name, each in found.items() if isinstance(each, str)}

    def of(self, frames: numpy.ndarray, reference: numpy.ndarray) -> dict[str, float | None]:
        """`psnr_db`, `ssim` and `lpips` of two clips of one shape; None for what is unavailable."""
        values: dict[str, float | None] = {"psnr_db": psnr_db(frames, reference)}
        for name, metric in (("ssim", self._ssim), ("lpips", self._lpips)):
            values[name] = (
                None
                if isinstance(metric, str)
                else sum(metric(mine, its) for mine, its in zip(frames, reference, strict=True)) / len(frames)
            )
        return values


def _find_ssim() -> Callable[[numpy.ndarray, numpy.ndarray], float] | str:
    """SSIM of two frames, or why there is none."""
    if importlib.util.find_spec("skimage") is None:
        return "scikit-image is not installed: pip install 'diffusion-runtime[metrics]'"
    from skimage.metrics import structural_similarity

    def ssim(frame: numpy.ndarray, reference: numpy.ndarray) -> float:
        # The window must fit: 7 by default.
        window = min(7, *frame.shape[:2])
        window -= 1 - window % 2
        return float(structural_similarity(frame, reference, channel_axis=-1, data_range=255, win_size=window))

    return ssim


def _find_lpips() -> Callable[[numpy.ndarray, numpy.ndarray], float] | str:
    """LPIPS of two frames, or why there is none. Its network's weights are never downloaded here."""
    if importlib.util.find_spec("lpips") is None:
        return "lpips is not installed: pip install lpips"
    if not (Path(torch.hub.get_dir()) / "checkpoints" / _LPIPS_TRUNK).is_file():
        return "lpips has no AlexNet weights yet; to download them: python -c 'import lpips; lpips.LPIPS(net=\"alex\")'"
    network = _lpips_network()

    @torch.inference_mode()
    def lpips(frame: numpy.ndarray, reference: numpy.ndarray) -> float:
        mine, its = (torch.from_numpy(each).permute(2, 0, 1)[None].float() / 127.5 - 1 for each in (frame, reference))
        return float(network(mine, its))

    return lpips


@functools.cache
def _lpips_network() -> Any:
    import lpips

    return lpips.LPIPS(net="alex", verbose=False).eval()
