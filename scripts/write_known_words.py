"""Write what the embedded models know into docs/quality.md: of `emoji` its things, scenes, times and motions; of
`shapes` its shapes, colours, motions and backgrounds.

python scripts/write_known_words.py           # the section in the page, made anew
python scripts/write_known_words.py --check   # exit code 1 where the page says something else
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from diffusion_runtime.quality.emoji.things import THINGS
from diffusion_runtime.quality.emoji.wording import MOTIONS, PLACES, SCENES, SIZES, TIMES
from diffusion_runtime.quality.shapes.captions import BACKGROUND_WORDS, COLOUR_WORDS, MOTION_WORDS, SHAPE_WORDS

PAGE = Path(__file__).parents[1] / "docs" / "quality.md"
START, END = "<!-- known words: scripts/write_known_words.py -->\n", "<!-- end of the known words -->\n"


def section() -> str:
    """Return the lines of every kind of word, each with two wordings of a kind; other names are in brackets."""
    things = ", ".join(
        each.name + (f" ({', '.join(each.synonyms)})" if each.synonyms else "")
        for each in sorted(THINGS, key=lambda thing: thing.name)
    )
    emoji = {"scenes": SCENES, "times": TIMES, "motions": MOTIONS, "places": PLACES, "sizes": SIZES}
    shapes = {
        "shapes": SHAPE_WORDS,
        "colours": COLOUR_WORDS,
        "motions": MOTION_WORDS,
        "backgrounds": BACKGROUND_WORDS,
    }
    return "\n".join(
        [
            *_lines(emoji),
            f'- **{len(THINGS)} things**, also in the plural after "two": {things}',
            "",
            "## What `shapes` knows",
            "",
            "One or two objects and a background; `shapes-causal` also objects that move around, back and forth, or up",
            "and down.",
            "",
            *_lines(shapes),
            "",
        ]
    )


def _lines(kinds: Mapping[str, Mapping[str, Sequence[str]]]) -> list[str]:
    return [
        f"- **{kind}**: " + "; ".join(" or ".join(f'"{each}"' for each in wordings[:2]) for wordings in named.values())
        for kind, named in kinds.items()
    ]


def written(page: str) -> str:
    """Return the page with the section made anew."""
    before, rest = page.split(START)
    return before + START + section() + END + rest.split(END)[1]


if __name__ == "__main__":
    text = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        raise SystemExit(int(written(text) != text))
    PAGE.write_text(written(text))
