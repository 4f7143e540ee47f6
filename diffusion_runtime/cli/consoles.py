"""The consoles of this command: nothing reaches a terminal but through `printable`.

rich is imported when one is made: it takes a tenth of a second.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from diffusion_runtime.untrusted.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


def console_on_stdout(**options: Any) -> Console:
    """For tables and texts on standard output. options: of rich's Console."""
    console: Console = _class()(highlight=False, file=sys.stdout, **options)
    return console


def console_on_stderr() -> Console:
    """For lines, tables and progress on standard error; a reader that left is no error."""
    console: Console = _class()(stderr=True, highlight=False, leaves_quietly=True)
    return console


@functools.cache
def _class() -> Any:
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        """Every piece of text that is written, whatever it was made of: titles, cells, names, prompts."""

        def __init__(self, *, leaves_quietly: bool = False, **options: Any) -> None:
            super().__init__(**options)
            self._leaves_quietly = leaves_quietly

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                # Codes of rich's own come as controls, and colours as styles.
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

        def on_broken_pipe(self) -> None:
            """A reader that left: rich would end the process."""
            if not self._leaves_quietly:
                super().on_broken_pipe()
            self.quiet = True

    return PrintableConsole
