"""CLIP (Radford et al. 2021, arXiv:2103.00020): the text encoder, for one pooled vector per prompt, and the image
encoder, for tokens that are attended to next to the text's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.text_encoders.image_preparation import PicturePreparation, read_preparation
from diffusion_runtime.text_encoders.interface import EncoderCut
from diffusion_runtime.text_encoders.loading import check_model_type, check_vocabulary, load_encoder, load_tokenizer
from diffusion_runtime.text_encoders.tokenized import tokenize

if TYPE_CHECKING:
    from transformers import CLIPTextModel, CLIPVisionModel, PreTrainedTokenizerFast


class CLIPPooledEncoder:
    """Encoder to the state of a prompt's end token. max_tokens: capacity, two special tokens included."""

    library = "transformers"

    def __init__(self, model: CLIPTextModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens: int = model.config.max_position_embeddings
        self.implementation = str(model.config._attn_implementation)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> tuple[torch.Tensor, EncoderCut]:
        """Encode to [batch, dim] and report truncation. In a causal model padding after the end has no effect."""
        rows = [tokenize(self.tokenizer, prompt, self.max_tokens) for prompt in prompts]
        padding = self.tokenizer.pad_token_id
        ids = torch.full((len(rows), max(len(row.ids) for row in rows)), 0 if padding is None else padding)
        for index, row in enumerate(rows):
            ids[index, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.long)
        pooled: torch.Tensor = self.model(ids.to(self.model.device)).pooler_output
        return pooled, EncoderCut("CLIP", tuple(row.num_cut_tokens for row in rows), self.max_tokens)


def load_clip(
    folder: AnyFolder,
    device: torch.device,
    dtype: torch.dtype,
    *,
    encoder: str = "text_encoder_2",
    tokenizer: str = "tokenizer_2",
) -> CLIPPooledEncoder:
    """Load CLIP from two components of a model folder, from safetensors and without a network.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / encoder, ("clip_text_model", "clip"))
    # Imported late: transformers takes seconds.
    from transformers.models.clip.modeling_clip import CLIPTextModel
    from transformers.models.clip.tokenization_clip import CLIPTokenizer

    words = load_tokenizer(folder / tokenizer, CLIPTokenizer)
    model = load_encoder(folder / encoder, CLIPTextModel, device, dtype)
    check_vocabulary(folder / tokenizer, len(words), model.config.vocab_size)
    return CLIPPooledEncoder(model, words)


_MODEL_TYPE = "clip_vision_model"
# Height and width in pixels, of models that prepare their pictures themselves.
PREPARED_SIZE = 224


class ClipImageEncoder:
    """Encoder of `image_encoder/` and `image_processor/` of a diffusers folder. preparation: None for a model that
    prepares its pictures itself."""

    library = "transformers"

    def __init__(self, model: CLIPVisionModel, preparation: PicturePreparation | None) -> None:
        self.model = model
        self.preparation = preparation
        self.implementation = str(model.config._attn_implementation)

    @torch.inference_mode()
    def encode(self, image: torch.Tensor) -> torch.Tensor:
        """Return the tokens before the last layer, [1, tokens, dim]. image: [height, width, 3], uint8, of any size."""
        assert self.preparation is not None, "this model prepares its pictures itself"
        return self.tokens(self.preparation.prepare(image))

    @torch.inference_mode()
    def tokens(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return `encode` of prepared pixels, [1, 3, height, width]."""
        states = self.model(pixels.to(self.model.device, self.model.dtype), output_hidden_states=True).hidden_states
        assert states is not None
        tokens: torch.Tensor = states[-2]
        return tokens


def check_clip_image_encoder(folder: AnyFolder, dim: int, num_tokens: int | None, *, prepares: bool = True) -> None:
    """Check from their json that a folder's image encoder and image preparation are supported.

    dim: of a token; num_tokens: of an image, None for any number. prepares: whether `image_processor` prepares them;
    else they come with 224 x 224 pixels. Raises ModelLoadError that names the file and the
    key.
    """
    check_model_type(folder / "image_encoder", (_MODEL_TYPE,))
    file = read_config(folder, "image_encoder")
    width = file.whole_number("hidden_size", 768)
    if width != dim:
        raise file.error("hidden_size", f"{dim}, the transformer's image_dim", width)
    image_size, patch_size = file.whole_number("image_size", 224), file.whole_number("patch_size", 32)
    # Plus the class token.
    found = (image_size // patch_size) ** 2 + 1
    if num_tokens is not None and found != num_tokens:
        raise file.error("image_size", f"that of {num_tokens} tokens", image_size)
    if not prepares:
        if image_size != PREPARED_SIZE:
            raise file.error("image_size", f"{PREPARED_SIZE}, the size that pictures are prepared to", image_size)
        return
    path = folder / "image_processor" / "preprocessor_config.json"
    preparation = read_preparation(path)
    if (preparation.height, preparation.width) != (image_size, image_size):
        raise ModelLoadError(
            f"{path}: expected pictures of {image_size} x {image_size}, the image_encoder's image_size, got "
            f"{preparation.height} x {preparation.width}"
        )


def load_clip_image_encoder(
    folder: AnyFolder, device: torch.device, dtype: torch.dtype, *, prepares: bool = True
) -> ClipImageEncoder:
    """Load the image encoder of a model folder, from safetensors and json and without a network. prepares: False for a
    model that prepares its pictures itself.

    Raises ModelLoadError when a file is missing, damaged, of another class, or lacks weights.
    """
    check_model_type(folder / "image_encoder", (_MODEL_TYPE,))
    path = folder / "image_processor" / "preprocessor_config.json"
    preparation = read_preparation(path) if prepares else None
    # Imported late: transformers takes seconds.
    from transformers.models.clip.modeling_clip import CLIPVisionModel

    return ClipImageEncoder(load_encoder(folder / "image_encoder", CLIPVisionModel, device, dtype), preparation)
