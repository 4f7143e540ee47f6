"""Few-step (distillation) LoRAs, recognised by the name and the metadata of the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# More steps than any distilled model takes: `style_3000steps` is what a trainer calls its checkpoints.
MAX_FEW_STEPS = 16
_STEPS = re.compile(r"(?<!\d)(\d{1,2})[-_ ]?steps?(?![a-z])", re.IGNORECASE)
_WORDS = re.compile(
    r"lightning|lightx2v|distill|turbo|causvid|accvid|meanflow|(?<![a-z])(?:fastwan|dmd2?|lcm|hyper)(?![a-z])",
    re.IGNORECASE,
)
# The metadata that trainers put names into.
_TITLES = ("modelspec.title", "ss_output_name", "name", "finetuned_model")


@dataclass(frozen=True)
class FewStepHint:
    """num_steps: as given by the file, None without. source: where it was found, as in `its file name says
    "4step"`."""

    num_steps: int | None
    source: str

    def remark(self, path: str, num_steps: int, *, is_guided: bool) -> str | None:
        """Return what is wrong with a request of so many steps; None where it may be intended."""
        wrong = []
        if num_steps > (MAX_FEW_STEPS if self.num_steps is None else max(2 * self.num_steps, 8)):
            wrong.append(f"{num_steps} steps")
        if is_guided:
            wrong.append("classifier-free guidance")
        if not wrong:
            return None
        steps = "a few steps" if self.num_steps is None else f"{self.num_steps} steps"
        flag = "as many as its authors say" if self.num_steps is None else str(self.num_steps)
        return (
            f"{path} looks like a LoRA for {steps} without guidance ({self.source}), and this request has "
            f"{' and '.join(wrong)}: use num_inference_steps {flag} and guidance_scale 1, or a preset made for it"
        )


def few_step_hint(name: str, metadata: Mapping[str, str]) -> FewStepHint | None:
    """name: of the file, or of the folder that holds it."""
    titles = [("its file name", name), *((f"its metadata {key}", metadata[key]) for key in _TITLES if key in metadata)]
    hints = [hint for where, text in titles if (hint := _hint_in(text[:200], where)) is not None]
    return next((hint for hint in hints if hint.num_steps is not None), hints[0] if hints else None)


def _hint_in(text: str, where: str) -> FewStepHint | None:
    steps = _STEPS.search(text)
    if steps is not None and 1 <= int(steps[1]) <= MAX_FEW_STEPS:
        return FewStepHint(int(steps[1]), f'{where} says "{steps[0]}"')
    word = _WORDS.search(text)
    return None if word is None else FewStepHint(None, f'{where} says "{word[0]}"')
