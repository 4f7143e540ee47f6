"""What is made of a text is made once a request and branch, and anew for another text."""

from __future__ import annotations

import torch

from diffusion_runtime.attention import AttentionContext, StepInfo
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request


def test_one_make_for_each_text_branch_and_name() -> None:
    made: list[torch.Tensor] = []

    def ask(name: str, embeddings: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        def make() -> torch.Tensor:
            made.append(embeddings * 2)
            return made[-1]

        return cached_for_prompt(name, embeddings, context, make)

    text, other = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    cond = AttentionContext(step=StepInfo(branch="cond"))
    uncond = AttentionContext(step=StepInfo(branch="uncond"), state=cond.state)
    assert torch.equal(ask("a", text, cond), text * 2)
    assert ask("a", text, cond) is made[0]
    assert torch.equal(ask("a", other, uncond), other * 2)
    assert ask("a", text, cond) is made[0]
    assert len(made) == 2
    assert torch.equal(ask("a", other, cond), other * 2)
    assert len(made) == 3
    ask("b", other, cond)
    ask("a", text, AttentionContext())
    assert len(made) == 5


def test_what_depends_on_sizes_alone_is_made_once_per_request_for_both_branches() -> None:
    made: list[tuple[int, ...]] = []

    def ask(sizes: tuple[int, ...], context: AttentionContext) -> None:
        cached_for_request("rotations", sizes, context, lambda: made.append(sizes))

    cond = AttentionContext(step=StepInfo(branch="cond"))
    uncond = AttentionContext(step=StepInfo(index=1, branch="uncond"), state=cond.state)
    for context in (cond, uncond):
        ask((2, 4, 4), context)
    assert made == [(2, 4, 4)]
    ask((2, 4, 6), cond)
    ask((2, 4, 4), AttentionContext())
    assert made == [(2, 4, 4), (2, 4, 6), (2, 4, 4)]
