"""Write what the embedded model `emoji` knows into docs/quality.md: things by their names, scenes, times and motions.

python scripts/write_known_words.py           # the section in the page, made anew
python scripts/write_known_words.py --check   # exit code 1 where the page says something else
"""

from __future__ import annotations

import sys
from pathlib import Path

from diffusion_runtime.quality.emoji.things import THINGS
from diffusion_runtime.quality.emoji.wording import MOTIONS, PLACES, SCENES, SIZES, TIMES

PAGE = Path(__file__).parents[1] / "docs" / "quality.md"
START, END = "<!-- known words: scripts/write_known_words.py -->\n", "<!-- end of the known words -->\n"


def section() -> str:
    """Return the lines of every kind of word, each with two wordings of a kind; other names are in brackets."""
    things = ", ".join(
        each.name + (f" ({', '.join(each.synonyms)})" if each.synonyms else "")
        for each in sorted(THINGS, key=lambda thing: thing.name)
    )
    kinds = {"scenes": SCENES, "times": TIMES, "motions": MOTIONS, "places": PLACES, "sizes": SIZES}
    lines = [
        f"- **{kind}**: " + "; ".join(" or ".join(f'"{each}"' for each in wordings[:2]) for wordings in named.values())
        for kind, named in kinds.items()
    ]
    return "\n".join([*lines, f'- **{len(THINGS)} things**, also in the plural after "two": {things}', ""])


def written(page: str) -> str:
    """Return the page with the section made anew."""
    before, rest = page.split(START)
    return before + START + section() + END + rest.split(END)[1]


if __name__ == "__main__":
    text = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        raise SystemExit(int(written(text) != text))
    PAGE.write_text(written(text))
