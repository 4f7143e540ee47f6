"""Scores readings of streams: how many survive, drift, show seams, and follow new prompts; what misses its target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch

from diffusion_runtime.quality.shapes.attributes import COLOUR_NAMES
from diffusion_runtime.quality.shapes.scoring import Proportion, wilson
from scripts.shapes.long_reading import StreamReading, SwitchReading, WindowReading

SURVIVAL_SECONDS = (5, 15, 30, 60, 180)
MAX_AREA_DRIFT, MAX_COLOUR_DRIFT, MAX_BACKGROUND_DRIFT, MAX_SOFTNESS_DRIFT = 0.25, 0.10, 0.08, 0.6
"""Of one stream, at its worst window: logarithm of areas, colour and tones from 0 to 1, logarithm of softness."""
MAX_SEAM = 1.5
MAX_SWITCH_DELAY = 2
"""In chunks."""


@dataclass(frozen=True)
class LongScore:
    """Of many streams. Proportions have 95 % Wilson intervals; None where nothing was to be read."""

    survival: dict[int, Proportion]
    """Seconds -> streams of that length whose windows up to there are all right."""
    right: dict[int, Proportion]
    """Seconds -> streams whose last window before is right."""
    windows: Proportion
    """Windows that are right."""
    parts: dict[str, Proportion]
    """Windows in which one thing is right: count, colour, shape, background, motion, continuous."""
    same_windows: Proportion
    """Windows that have not drifted too far from their stream's first one."""
    seamless_windows: Proportion
    """Windows without a jump between chunks."""
    same: Proportion
    """Streams that never drift too far from their own first window."""
    area_drift: float
    """Median over streams of the last window's area over the first's, less 1."""
    seamless: Proportion
    """Streams without jumps between chunks, by the 95th percentile of all their borders."""
    followed: Proportion | None
    """Switches followed within MAX_SWITCH_DELAY chunks."""
    kept: Proportion | None
    """Switches that left alone what the prompt left alone."""

    def to_dict(self) -> dict[str, object]:
        """Plain numbers for JSON."""
        return asdict(self)

    def misses(self, target: float = 0.95) -> tuple[str, ...]:
        """What is below the target; empty where streams are as they should be."""
        proportions = {
            "windows": self.windows,
            **{f"survival at {seconds} s": each for seconds, each in self.survival.items()},
            "same object and background": self.same,
            "seamless": self.seamless,
            "switches followed": self.followed,
            "switches leave the rest alone": self.kept,
        }
        return tuple(name for name, each in proportions.items() if each is not None and each.rate < target)


def score_streams(readings: Sequence[StreamReading], fps: int = 12) -> LongScore:
    """Score streams of any lengths. Raises ValueError where there is no window to judge."""
    windows = [window for each in readings for window in each.windows]
    if not windows:
        raise ValueError("expected one stream or more, with a window between two switches")
    survival, right = {}, {}
    for seconds in SURVIVAL_SECONDS:
        long = [each for each in readings if each.num_frames >= seconds * fps]
        if long:
            before = [
                [w for w in each.windows if w.first_frame + each.settings.window <= seconds * fps] for each in long
            ]
            survival[seconds] = wilson(sum(all(w.right for w in windows) for windows in before), len(before))
            right[seconds] = wilson(sum(bool(windows) and windows[-1].right for windows in before), len(before))
    parts = {
        name: wilson(sum(getattr(window, name) for window in windows), len(windows))
        for name in ("count", "colour", "shape", "background", "motion", "continuous")
    }
    switches = [switch for each in readings for switch in each.switches]
    followed = sum(map(is_followed, switches))
    last = torch.tensor([each.windows[-1].drift.area for each in readings if each.windows])
    return LongScore(
        survival,
        right,
        wilson(sum(window.right for window in windows), len(windows)),
        parts,
        wilson(sum(map(has_not_drifted, windows)), len(windows)),
        wilson(sum(map(has_no_seam, windows)), len(windows)),
        wilson(sum(is_same(each) for each in readings), len(readings)),
        float(last.median().exp()) - 1,
        wilson(sum(max(each.seam_motion, each.seam_flicker) <= MAX_SEAM for each in readings), len(readings)),
        wilson(followed, len(switches)) if switches else None,
        wilson(sum(switch.kept for switch in switches), len(switches)) if switches else None,
    )


def is_followed(switch: SwitchReading) -> bool:
    """Whether a new prompt was followed in time."""
    return switch.delay is not None and switch.delay <= MAX_SWITCH_DELAY


def is_same(reading: StreamReading) -> bool:
    """Whether no window of a stream has drifted too far."""
    return all(map(has_not_drifted, reading.windows))


def has_not_drifted(window: WindowReading) -> bool:
    """Whether a window still shows the object and the background of the first one."""
    drift = window.drift
    return (
        abs(drift.area) <= MAX_AREA_DRIFT
        and drift.colour <= MAX_COLOUR_DRIFT
        and drift.background <= MAX_BACKGROUND_DRIFT
        and abs(drift.softness) <= MAX_SOFTNESS_DRIFT
    )


def has_no_seam(window: WindowReading) -> bool:
    """Whether nothing jumps between two chunks of a window."""
    return window.seam <= MAX_SEAM


def window_record(reading: StreamReading) -> dict[str, object]:
    """Every window of a stream, for JSON: its first frame, and a 1 or a 0 per window and question.

    wrong_motion: by first frame, windows whose motion is wrong and whose number of objects never changes for long: per
    object, and frame in which it is seen, (frame, colour, x, y, left, right, upper and lower edge, area).
    """

    def row(answers: Iterable[bool]) -> str:
        return "".join("1" if answer else "0" for answer in answers)

    return {
        "frames": reading.num_frames,
        "motions": [list(each) for each in reading.motions],
        "first_frames": [window.first_frame for window in reading.windows],
        "right": row(window.right for window in reading.windows),
        **{
            name: row(getattr(window, name) for window in reading.windows)
            for name in ("motion", "background", "colour", "shape")
        },
        "same": row(map(has_not_drifted, reading.windows)),
        "seamless": row(map(has_no_seam, reading.windows)),
        "wrong_motion": {
            str(window.first_frame): [
                [
                    [seen.frame, COLOUR_NAMES[seen.colour]]
                    + [round(each, 3) for each in (seen.x, seen.y, *seen.edges, seen.cells)]
                    for seen in track
                ]
                for track in window.tracks
            ]
            for window in reading.windows
            if window.tracks
        },
    }
