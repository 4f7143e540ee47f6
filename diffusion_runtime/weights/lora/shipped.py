"""LoRA files inside the package, by the name that `--lora` takes."""

from __future__ import annotations

from pathlib import Path

from diffusion_runtime.untrusted.files import user_path

_ASSETS = Path(__file__).parents[2] / "assets"
# For the embedded model `emoji`: four steps without guidance (scripts/train_embedded/distill.py).
SHIPPED_LORAS = {"emoji-fast": _ASSETS / "emoji_fast"}


def lora_path(path: str, key: str = "lora") -> Path:
    """Find a LoRA: the folder of a shipped one, else the path itself, `~` expanded. Raises ConfigError for a path
    that no file can have, which `key` named."""
    shipped = SHIPPED_LORAS.get(path)
    return user_path(path, key) if shipped is None else shipped
