"""Attention shapes of real models, as values: tokens, heads and padding of one layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.core.model_folder import ConfigFile, read_config, read_json
from diffusion_runtime.core.spellings import resolve
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.errors import ConfigError, nearest
from diffusion_runtime.models.model_sources import EMBEDDED_FOLDERS
from diffusion_runtime.models.registry import family_for_folder

# A CPU computes this many operations in about a second.
_SMALL_OPERATIONS = 5e10
# The length of an ordinary prompt in tokens, where a model pads its text.
_PROMPT_TOKENS, _NEGATIVE_PROMPT_TOKENS = 100, 12


@dataclass(frozen=True)
class AttentionShape:
    """One attention call. layout: of the keys, and in self-attention of the queries, with the padding as lengths.

    num_queries: of a cross-attention; None in self-attention, whose queries are the keys' tokens.
    """

    name: str
    model: str
    layout: TokenLayout
    num_heads: int
    head_dim: int = 128
    batch: int = 1
    num_queries: int | None = None

    @property
    def role(self) -> str:
        return "self" if self.num_queries is None else "cross"

    @property
    def seq_q(self) -> int:
        return self.layout.num_tokens if self.num_queries is None else self.num_queries

    @property
    def seq_k(self) -> int:
        return self.layout.num_tokens

    @property
    def num_operations(self) -> float:
        """Floating-point operations of one exact call: two products over every pair of a query and a valid key."""
        real_keys = sum(stop - start for sample in range(self.batch) for start, stop in self.layout.key_ranges(sample))
        return 4.0 * self.seq_q * real_keys * self.num_heads * self.head_dim

    @property
    def is_small(self) -> bool:
        """True if a CPU computes the shape in reasonable time."""
        return self.num_operations <= _SMALL_OPERATIONS

    def describe(self) -> str:
        """`32760 tokens, 12 heads of 128`."""
        tokens = f"{self.seq_q} tokens" if self.role == "self" else f"{self.seq_q} queries, {self.seq_k} keys"
        samples = "" if self.batch == 1 else f", batch {self.batch}"
        lengths = self.layout.valid_lengths
        room = self.layout.num_text_tokens
        padding = f", {' and '.join(map(str, lengths))} of {room} text tokens real" if lengths is not None else ""
        return f"{tokens}, {self.num_heads} heads of {self.head_dim}{samples}{padding}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "model": self.model,
            "role": self.role,
            "batch": self.batch,
            "seq_q": self.seq_q,
            "seq_k": self.seq_k,
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "grid": list(self.layout.grid),
            "num_prefix_tokens": self.layout.num_prefix_tokens,
            "num_suffix_tokens": self.layout.num_suffix_tokens,
            "valid_lengths": None if self.layout.valid_lengths is None else list(self.layout.valid_lengths),
            "num_operations": self.num_operations,
        }


# Token grids: pixels over the factor of the VAE times the patch; frames are (frames - 1) / 4 + 1.
LARGE_SHAPES = (
    AttentionShape("wan-1.3b-480p", "Wan 2.1 1.3B, 81 frames of 832 x 480", TokenLayout((21, 30, 52)), 12),
    AttentionShape("wan-14b-720p", "Wan 2.1 14B, 81 frames of 1280 x 720", TokenLayout((21, 45, 80)), 40),
    AttentionShape(
        "hunyuan-720p",
        "HunyuanVideo, 129 frames of 1280 x 720",
        TokenLayout((33, 45, 80), num_suffix_tokens=256, valid_lengths=(_PROMPT_TOKENS,)),
        24,
    ),
    AttentionShape(
        "hunyuan-1.5",
        "HunyuanVideo-1.5 in length: 25996 keys, 156 of them padding",
        TokenLayout((33, 30, 26), num_suffix_tokens=256, valid_lengths=(_PROMPT_TOKENS,)),
        16,
    ),
    AttentionShape(
        "qwen-image-1024",
        "Qwen-Image, 1024 x 1024, prompt and negative prompt as one batch",
        TokenLayout((1, 64, 64), num_prefix_tokens=256, valid_lengths=(_PROMPT_TOKENS, _NEGATIVE_PROMPT_TOKENS)),
        24,
        batch=2,
    ),
    AttentionShape("flux-1024", "FLUX.1, 1024 x 1024", TokenLayout((1, 64, 64), num_prefix_tokens=512), 24),
)


def embedded_shapes() -> tuple[AttentionShape, ...]:
    """Return those of the embedded model `shapes`: self-attention of each of its presets, padded cross-attention.

    Raises ModelLoadError when its files cannot be read.
    """
    # Whose figures are documented.
    folder = EMBEDDED_FOLDERS["shapes"]
    config = read_config(folder, "transformer")
    num_heads, head_dim = config.whole_number("num_attention_heads"), config.whole_number("attention_head_dim")
    embedded = family_for_folder(folder).describe(folder)
    geometry, settings = embedded.geometry, embedded.generation
    shapes = []
    for preset, values in settings.presets.items():
        size = {**settings.defaults, **values}
        height, width, num_frames = size["height"], size["width"], size["num_frames"]
        layout = TokenLayout(geometry.grid(geometry.latent_shape(height, width, num_frames)))
        model = f"shapes, {num_frames} frames of {width} x {height}"
        shapes.append(AttentionShape(f"shapes-{preset}", model, layout, num_heads, head_dim))
    # Smallest first.
    shapes.sort(key=lambda shape: shape.seq_q)
    tokenizer = folder / "tokenizer" / "tokenizer_config.json"
    room = ConfigFile(tokenizer, read_json(tokenizer)).whole_number("model_max_length")
    largest = shapes[-1]
    text = TokenLayout.text(room, (_NEGATIVE_PROMPT_TOKENS,))
    cross = AttentionShape("shapes-cross", f"{largest.model}: text", text, num_heads, head_dim, 1, largest.seq_q)
    return (*shapes, cross)


def find_shapes(names: Iterable[str], *, small_by_default: bool) -> tuple[AttentionShape, ...]:
    """Return the shapes of these names, which may also be `small` and `all`; without any, the default.

    small_by_default: the default leaves out shapes that take a CPU more than a second per call. Raises ConfigError that
    lists the nearest names.
    """
    known = {shape.name: shape for shape in (*embedded_shapes(), *LARGE_SHAPES)}
    wanted = list(names) or ["small" if small_by_default else "all"]
    groups = {"all": list(known), "small": [name for name, shape in known.items() if shape.is_small]}
    chosen: list[str] = []
    for name in wanted:
        theirs = resolve("shape", name)
        name = name if theirs is None else theirs.means
        if name not in groups and name not in known:
            raise ConfigError(f"--shapes: unknown shape {name!r}.{nearest(name, [*known, *groups])}")
        chosen += groups.get(name, [name])
    return tuple(known[name] for name in dict.fromkeys(chosen))
