"""Closed vocabularies of the embedded models, for remarks on prompts."""

from __future__ import annotations

from diffusion_runtime.text_encoders.unknown_words import Vocabulary


def _strays_of_emoji(text: str) -> dict[str, str]:
    from diffusion_runtime.quality.emoji.prompt_reading import vocabulary

    return vocabulary().strays(text)


def _strays_of_shapes(text: str) -> dict[str, str]:
    from diffusion_runtime.quality.shapes.prompt_reading import VOCABULARY

    return VOCABULARY.strays(text)


# By the model's name. shapes-causal knows more motions than the reader of `shapes`, so that of it the tokenizer's words
# alone are known.
_SHAPES_PAGE = "docs/quality.md#what-shapes-knows"
_VOCABULARIES = {
    "emoji": Vocabulary("docs/quality.md#what-emoji-knows", _strays_of_emoji),
    "shapes": Vocabulary(_SHAPES_PAGE, _strays_of_shapes),
    "shapes-causal": Vocabulary(_SHAPES_PAGE, lambda _: {}),
}


def vocabulary_of(model: str) -> Vocabulary | None:
    """Return the vocabulary of a model by its name; None for one whose words are not listed, such as any folder."""
    return _VOCABULARIES.get(model)
