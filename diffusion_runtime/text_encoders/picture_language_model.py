"""Hidden states of Qwen2.5-VL (arXiv:2502.13923) for a prompt about pictures, which are part of its template.

Positions are computed here, as in training: a picture's tokens have rows and columns, and the text continues after the
larger of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.media.images import open_picture, read_image
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.language_model import PromptTemplate
from diffusion_runtime.text_encoders.loading import check_model_type, check_vocabulary, load_encoder, load_tokenizer
from diffusion_runtime.text_encoders.picture_patches import PatchPreparation, PicturePatches, read_patch_preparation
from diffusion_runtime.text_encoders.tokenized import TokenizedPrompt, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The token that each of a picture's tokens takes the place of, and the marks around them.
PICTURE = "<|image_pad|>"
AROUND = "<|vision_start|>{}<|vision_end|>"


class PictureLanguageEncoder(TextEncoder):
    """Encoder of prompts about pictures. model: the language model with its vision half. scaled: a picture's height and
    width -> those that the model sees. label: the text before the picture of a number. max_tokens: of the text of a
    prompt. keeps_pictures: whether the states of the pictures' own tokens are returned; otherwise only their positions
    are (picture_places)."""

    library = "transformers"

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerFast,
        preparation: PatchPreparation,
        template: PromptTemplate,
        scaled: Callable[[tuple[int, int]], tuple[int, int]],
        *,
        label: str,
        max_tokens: int,
        keeps_pictures: bool = True,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.template = template
        self.max_tokens = max_tokens
        self.implementation = str(model.config._attn_implementation)
        self._preparation = preparation
        self._scaled = scaled
        self._label = label
        self._keeps_pictures = keeps_pictures
        self._pictures: list[PicturePatches] = []

    def of_pictures(self, paths: Sequence[str]) -> PictureLanguageEncoder:
        return self.of_images([torch.from_numpy(read_image(path, *self._size_of(path))) for path in paths])

    def of_images(self, images: Sequence[torch.Tensor]) -> Self:
        """Return the encoder of prompts about these images, [height, width, 3], uint8, of any sizes."""
        other = copy.copy(self)
        other._pictures = [self._preparation.prepare(image) for image in images]
        return other

    def _size_of(self, path: str) -> tuple[int, int]:
        width, height = open_picture(path).size
        return self._scaled((height, width))

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode prompts. Padding comes last and is masked, and the model is causal."""
        template, device = self.template, self.model.device
        rows = self.tokenized([without_marks(prompt) for prompt in prompts])
        ids = torch.full((len(rows), max(len(row.ids) for row in rows)), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.long)
            mask[index, : len(row.ids)] = 1
        positions = torch.stack([self._positions(row.tolist()) for row in ids], dim=1)
        vision = {}
        if self._pictures:
            # The same for every prompt.
            patches = torch.cat([picture.patches for picture in self._pictures] * len(rows))
            grids = torch.tensor([picture.grid for picture in self._pictures] * len(rows))
            vision = {"pixel_values": patches.to(device), "image_grid_thw": grids.to(device)}
        hidden = self.model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            use_cache=False,
            **vision,
        ).last_hidden_state[:, template.num_cropped :]
        kept: list[torch.Tensor] = []
        places: tuple[int, ...] = ()
        ranges: tuple[tuple[int, int], ...] = ()
        for row, states in zip(rows, hidden, strict=True):
            given = torch.tensor(row.ids[template.num_cropped :], dtype=torch.long)
            is_text = given != self.model.config.image_token_id
            if self._keeps_pictures:
                ranges = self._ranges(is_text)
            else:
                places = self._places(is_text)
            kept.append(states[: len(given)] if self._keeps_pictures else states[: len(given)][is_text])
        embeddings = torch.nn.utils.rnn.pad_sequence(kept, batch_first=True)
        return Conditions(
            embeddings=embeddings,
            lengths=tuple(map(len, kept)),
            picture_places=places,
            picture_ranges=ranges,
            unknown_words=tuple(row.unknown_words for row in rows),
            num_cut_tokens=tuple(row.num_cut_tokens for row in rows),
        )

    def tokenized(self, prompts: Sequence[str]) -> list[TokenizedPrompt]:
        """Return the tokens of prompts in the template, pictures included. prompts: without marks of pictures."""
        template = self.template
        shown = "".join(
            self._label.format(index) + AROUND.format(PICTURE * picture.num_tokens)
            for index, picture in enumerate(self._pictures, start=1)
        ).lstrip()
        first = len(template.before) + len(shown)
        room = self.max_tokens + template.num_cropped + sum(picture.num_tokens for picture in self._pictures)
        return [
            tokenize(
                self.tokenizer, f"{template.before}{shown}{prompt}{template.after}", room, first, first + len(prompt)
            )
            for prompt in prompts
        ]

    def _places(self, is_text: torch.Tensor) -> tuple[int, ...]:
        """Return how many tokens of the text precede each picture. is_text: [tokens], of one prompt."""
        before, found, start = is_text.cumsum(0), [], 0
        for picture in self._pictures:
            start += int((~is_text[start:]).int().argmax())
            found.append(int(before[start]))
            start += picture.num_tokens
        return tuple(found)

    def _ranges(self, is_text: torch.Tensor) -> tuple[tuple[int, int], ...]:
        """Return the first token of each picture, with the marks around it, and the one behind its last."""
        found, start = [], 0
        for picture in self._pictures:
            start += int((~is_text[start:]).int().argmax())
            found.append((start - 1, start + picture.num_tokens + 1))
            start += picture.num_tokens
        return tuple(found)

    def _positions(self, ids: Sequence[int]) -> torch.Tensor:
        """Return [3, tokens]: time, row and column of every token of one prompt."""
        token, pictures, parts = self.model.config.image_token_id, iter(self._pictures), []
        here = index = 0
        while index < len(ids):
            if ids[index] != token:
                parts.append(torch.full((3, 1), here))
                here, index = here + 1, index + 1
                continue
            height, width = next(pictures).merged
            places = torch.cartesian_prod(torch.zeros(1, dtype=torch.long), torch.arange(height), torch.arange(width))
            parts.append(places.T + here)
            here, index = here + max(height, width), index + height * width
        return torch.cat(parts, dim=1)


def without_marks(prompt: str) -> str:
    """Remove from a prompt the token that marks a picture: its words are no pictures."""
    return prompt.replace(PICTURE, "")


def read_preparation_of_pictures(folder: AnyFolder) -> PatchPreparation:
    """Read the picture preparation of a model folder, from its json alone: a file of its own, or a part of the
    processor's since transformers 5. Raises ModelLoadError."""
    own = folder / "processor" / "preprocessor_config.json"
    whole = folder / "processor" / "processor_config.json"
    if whole.is_file() and not own.is_file():
        return read_patch_preparation(whole, "image_processor")
    return read_patch_preparation(own)


def has_preparation_of_pictures(folder: AnyFolder) -> bool:
    """Return whether a model folder has either file."""
    return any((folder / "processor" / f"{name}_config.json").is_file() for name in ("preprocessor", "processor"))


def load_picture_language_model(
    folder: AnyFolder,
    device: torch.device,
    dtype: torch.dtype,
    template: PromptTemplate,
    scaled: Callable[[tuple[int, int]], tuple[int, int]],
    *,
    label: str,
    max_tokens: int,
) -> PictureLanguageEncoder:
    """Load `text_encoder/`, `tokenizer/` and `processor/` of a model folder, from safetensors and without a network.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / "text_encoder", ("qwen2_5_vl",))
    preparation = read_preparation_of_pictures(folder)
    # Imported late: transformers takes seconds.
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

    tokenizer = load_tokenizer(folder / "tokenizer", Qwen2Tokenizer)
    # The output layer stays on the CPU.
    model = load_encoder(
        folder / "text_encoder", Qwen2_5_VLForConditionalGeneration, device, dtype, part=lambda whole: whole.model
    )
    check_vocabulary(folder / "tokenizer", len(tokenizer), model.config.text_config.vocab_size)
    return PictureLanguageEncoder(model, tokenizer, preparation, template, scaled, label=label, max_tokens=max_tokens)
