"""The option --switch-weights of scripts that sample streams."""

from __future__ import annotations

import argparse
import math

from scripts.shapes.streams import SWITCHES, StreamSettings


def add_switch_weights(parser: argparse.ArgumentParser) -> None:
    """Declare it; what is no weight is refused."""
    parser.add_argument(
        "--switch-weights",
        type=weight,
        nargs=len(SWITCHES),
        default=StreamSettings.switch_weights,
        metavar=tuple(name.upper() for name in SWITCHES),
        help="how often a switch changes each, relative to the others",
    )


def weight(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"a weight from 0 on, got {text}")
    return number
