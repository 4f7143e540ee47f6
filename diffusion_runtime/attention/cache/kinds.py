"""Kinds of key stores: what a request asks for, as the stores of its layers are made."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.attention.cache.pages import PagedStore
from diffusion_runtime.attention.cache.quantised import Fp8Store
from diffusion_runtime.attention.cache.store import KeyStore, KeyStoreSize, RingStore


@dataclass(frozen=True)
class StoreKind:
    """Makes the store of a layer. is_fp8: what commits leave is stored in 8 bits. page_size: tokens of a page, None for
    one tensor in a row."""

    is_fp8: bool = False
    page_size: int | None = None

    def __call__(self, size: KeyStoreSize) -> KeyStore:
        """An empty store."""
        return Fp8Store(size, self._plain) if self.is_fp8 else self._plain(size)

    def _plain(self, size: KeyStoreSize) -> KeyStore:
        return RingStore(size) if self.page_size is None else PagedStore(size, self.page_size)
