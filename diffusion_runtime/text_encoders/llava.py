"""Hidden states of LLaVA (Liu et al., arXiv:2304.08485) for a prompt about a picture, which is part of its template.

The transformer gets the picture's tokens first, some of them left out, and then the prompt's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.media.images import open_picture
from diffusion_runtime.text_encoders.image_preparation import PicturePreparation, read_preparation
from diffusion_runtime.text_encoders.interface import Conditions, EncoderCut, TextEncoder
from diffusion_runtime.text_encoders.language_model import PromptTemplate
from diffusion_runtime.text_encoders.loading import check_model_type, check_vocabulary, load_encoder, load_tokenizer
from diffusion_runtime.text_encoders.tokenized import TokenizedPrompt, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PICTURE = "<image>"
_HEADER_END = "<|end_header_id|>"
# The end of the prompt and the header of the answer, which the transformer does not get, up to and including its end.
_NUM_ANSWER_TOKENS = 4
# Stride of the picture's tokens for a negative prompt, which is about a black picture: every second one, in all models.
_STRIDE_OF_NEGATIVE = 2


class LlavaEncoder(TextEncoder):
    """Encoder of prompts about a picture. model: LLaVA without its last layers and its output layer. template: with one
    `<image>` before the prompt, and the header of an answer after it. stride: the transformer gets every stride-th of
    the picture's tokens. max_tokens: of a prompt with the template's text after it."""

    library = "transformers"

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerFast,
        preparation: PicturePreparation,
        template: PromptTemplate,
        *,
        stride: int,
        max_tokens: int,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.template = template
        self.max_tokens = max_tokens
        self.implementation = str(model.config._attn_implementation)
        self._preparation = preparation
        self._stride = stride
        self._pixels = torch.empty(0)

    def of_pictures(self, paths: Sequence[str]) -> LlavaEncoder:
        """Return the encoder of prompts about one image. paths: of that image."""
        (path,) = paths
        return self._seeing(torch.from_numpy(numpy.array(open_picture(path))), self._stride)

    def of_negative(self) -> LlavaEncoder:
        sides = self._preparation.height, self._preparation.width
        return self._seeing(torch.zeros(*sides, 3, dtype=torch.uint8), _STRIDE_OF_NEGATIVE)

    def _seeing(self, image: torch.Tensor, stride: int) -> LlavaEncoder:
        """Return the encoder of prompts about an image. image: [height, width, 3], uint8."""
        other = copy.copy(self)
        other._pixels, other._stride = self._preparation.prepare(image), stride
        return other

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode prompts. Padding comes last and is masked, and the model is causal."""
        template, device, first = self.template, self.model.device, len(self.template.before)
        rows = [
            tokenize(
                self.tokenizer,
                template.before + prompt + template.after,
                self.max_tokens + template.num_cropped,
                first,
                first + len(prompt),
            )
            for prompt in map(_without_marks, prompts)
        ]
        mark = self.tokenizer.convert_tokens_to_ids(_PICTURE)
        num_pictured = picture_tokens(self.model.config)
        place = rows[0].ids.index(mark)
        expanded = [[*row.ids[:place], *[mark] * num_pictured, *row.ids[place + 1 :]] for row in rows]
        ids = torch.full((len(rows), max(map(len, expanded))), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(expanded):
            ids[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        pixels = self._pixels.expand(len(rows), -1, -1, -1).to(device, self.model.dtype)
        hidden = self.model(
            input_ids=ids.to(device), attention_mask=mask.to(device), pixel_values=pixels, use_cache=False
        ).last_hidden_state
        pictured = hidden[:, place : place + num_pictured : self._stride]
        # Index of a token after the picture's.
        kept = [torch.tensor(self._kept(row)) + num_pictured - 1 for row in rows]
        lengths = tuple(pictured.shape[1] + len(places) for places in kept)
        embeddings = hidden.new_zeros(len(rows), max(lengths), hidden.shape[2])
        embeddings[:, : pictured.shape[1]] = pictured
        for index, places in enumerate(kept):
            embeddings[index, pictured.shape[1] : lengths[index]] = hidden[index, places.to(device)]
        return Conditions(
            embeddings=embeddings,
            lengths=lengths,
            unknown_words=tuple(row.unknown_words for row in rows),
            num_cut_tokens=(0,) * len(rows),
            further_cuts=(self._cuts(rows),),
        )

    def _kept(self, row: TokenizedPrompt) -> list[int]:
        """Return the indices of the prompt's tokens, and of those after the answer's header; for a prompt that is too
        long all but the last ones, as in training."""
        places = list(range(self.template.num_cropped, len(row.ids)))
        if row.num_cut_tokens:
            return places[:-_NUM_ANSWER_TOKENS]
        header = self.tokenizer.convert_tokens_to_ids(_HEADER_END)
        end = max(index for index, token in enumerate(row.ids) if token == header)
        return [place for place in places if not end - _NUM_ANSWER_TOKENS < place <= end]

    def _cuts(self, rows: Sequence[TokenizedPrompt]) -> EncoderCut:
        """Return what is cut off the prompts' own tokens."""
        behind = len(self.tokenizer(self.template.after, add_special_tokens=False).input_ids)
        cuts = [max(0, row.num_cut_tokens + _NUM_ANSWER_TOKENS - behind) if row.num_cut_tokens else 0 for row in rows]
        return EncoderCut("the language model", tuple(cuts), self.max_tokens - _NUM_ANSWER_TOKENS)


def _without_marks(prompt: str) -> str:
    """Remove picture marks from a prompt, as the template has the only one. The rest may form a mark again."""
    while _PICTURE in prompt:
        prompt = prompt.replace(_PICTURE, "")
    return prompt


def picture_tokens(config: Any) -> int:
    """Return the number of tokens that the language model sees of a picture."""
    vision = config.vision_config
    has_class = config.vision_feature_select_strategy == "full"
    return int((vision.image_size // vision.patch_size) ** 2 + has_class)


def read_llava_preparation(folder: AnyFolder) -> PicturePreparation:
    """Read how a folder's pictures are prepared, from its json alone. Raises ModelLoadError."""
    return read_preparation(folder / "image_processor" / "preprocessor_config.json")


def load_llava(
    folder: AnyFolder,
    device: torch.device,
    dtype: torch.dtype,
    template: PromptTemplate,
    *,
    stride: int,
    max_tokens: int,
    num_layers_left_out: int,
) -> LlavaEncoder:
    """Load `text_encoder/`, `tokenizer/` and `image_processor/` of a model folder, from safetensors and without a
    network. num_layers_left_out: how many of the last layers are dropped, at least one, and the final norm with them.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / "text_encoder", ("llava",))
    preparation = read_llava_preparation(folder)
    # Imported late: transformers takes seconds.
    from transformers.models.llava.modeling_llava import LlavaForConditionalGeneration

    tokenizer = load_tokenizer(folder / "tokenizer")

    def without_last_layers(whole: Any) -> Any:
        # The output layer stays on the CPU, too.
        language_model = whole.model.language_model
        language_model.layers = language_model.layers[: len(language_model.layers) - num_layers_left_out]
        language_model.norm = torch.nn.Identity()
        return whole.model

    model = load_encoder(
        folder / "text_encoder", LlavaForConditionalGeneration, device, dtype, part=without_last_layers
    )
    found = [*map(tokenizer.convert_tokens_to_ids, (_PICTURE, _HEADER_END))]
    check_vocabulary(folder / "tokenizer", len(tokenizer), model.config.text_config.vocab_size)
    if found[0] != model.config.image_token_index or tokenizer.unk_token_id in found:
        raise ModelLoadError(
            f"{folder / 'tokenizer'}: expected tokens {_PICTURE}, number {model.config.image_token_index} as in "
            f"text_encoder/config.json, and {_HEADER_END}, got {found}; the two are not of the same model"
        )
    return LlavaEncoder(model, tokenizer, preparation, template, stride=stride, max_tokens=max_tokens)
