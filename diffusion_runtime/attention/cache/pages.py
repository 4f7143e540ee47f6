"""Pages: keys and values in blocks of a fixed size that several caches share, found through a block table each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from diffusion_runtime.attention.cache.copies import TokenCopy
from diffusion_runtime.attention.cache.plan import CachePlan
from diffusion_runtime.attention.cache.store import KeyStore, KeyStoreSize
from diffusion_runtime.attention.cache.stored import KeyParts, PageFormat, StoredForm, StoredKeys
from diffusion_runtime.errors import RequestError


def check_page_size(page_size: int, tokens_per_frame: int) -> None:
    """Raises RequestError for pages that a latent frame does not fill: a frame leaves the window with whole pages."""
    if page_size < 1 or tokens_per_frame % page_size:
        fitting = [size for size in range(1, tokens_per_frame + 1) if tokens_per_frame % size == 0]
        # Of those that would do the largest ones are named: a block table needs fewer of them.
        best = best_page_size(tokens_per_frame)
        raise RequestError(
            f"page_size: a latent frame has {tokens_per_frame} tokens; expected a size that divides it "
            f"({', '.join(map(str, fitting[-8:]))}), got {page_size}; use --page-size {best}"
        )


def best_page_size(tokens_per_frame: int) -> int:
    """The largest size up to 128 that divides a frame, of those in steps of 8 tokens where there are any."""
    sizes = [size for size in range(1, min(128, tokens_per_frame) + 1) if tokens_per_frame % size == 0]
    return max([size for size in sizes if size % 8 == 0] or sizes)


class PagePool:
    """Pages of page_size tokens of one layer, [2 (keys, values), pages, page_size, heads, head_dim], a list of those
    that are free, and how many block tables refer to each of the others.

    Block tables share a page until one of them writes to it. A pool with too few free pages grows by those that are
    missing, which moves the tensor: pages that are shared are not set aside twice. num_stores: those that take pages of
    it.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.keys_and_values = torch.zeros((2, num_pages, page_size, num_heads, head_dim), dtype=dtype, device=device)
        # The last one is taken first.
        self.free = list(reversed(range(num_pages)))
        self._references = [0] * num_pages
        self.num_stores = 0

    @property
    def num_pages(self) -> int:
        return len(self._references)

    @property
    def num_bytes(self) -> int:
        return self.keys_and_values.nbytes

    @property
    def bytes_per_page(self) -> int:
        return self.num_bytes // self.num_pages

    def num_references(self, page: int) -> int:
        """Block tables that have the page."""
        return self._references[page]

    def take(self) -> int:
        """A page that was free, with one reference."""
        self.reserve(1)
        page = self.free.pop()
        self._references[page] = 1
        return page

    def reserve(self, num_pages: int) -> None:
        """Make at least `num_pages` pages free."""
        num_before, more = self.num_pages, num_pages - len(self.free)
        if more <= 0:
            return
        added = self.keys_and_values.new_zeros((2, more, *self.keys_and_values.shape[2:]))
        self.keys_and_values = torch.cat([self.keys_and_values, added], dim=1)
        self.free = [*reversed(range(num_before, num_before + more)), *self.free]
        self._references += [0] * more

    def share(self, page: int) -> None:
        """One more reference to a page that is in use."""
        self._references[page] += 1

    def release(self, page: int) -> None:
        """One reference less; a page without any is free."""
        self._references[page] -= 1
        if self._references[page] == 0:
            self.free.append(page)


class PagedStore(KeyStore):
    """Keys and values in pages of a pool, a row of the block table per sample of the batch.

    Keys and values in sight are gathered into one tensor whenever they are read, for backends that take no block table;
    others read them in place (`read_parts`).

    A frame is a whole number of pages and is written whole, so copy on write needs no copy: a page that another store
    refers to is left to it, and a free one is written in its place.
    """

    copied = "gathered"

    def __init__(self, size: KeyStoreSize, page_size: int, pool: PagePool | None = None) -> None:
        """pool: of another store of the same size, None for one of its own. page_size: as check_page_size has it."""
        per_sample = size.num_tokens // page_size
        if pool is None:
            num_pages = size.batch * per_sample
            pool = PagePool(num_pages, page_size, size.num_heads, size.head_dim, size.dtype, size.device)
        self.pool = pool
        pool.num_stores += 1
        self._is_released = False
        self._size = size
        # Page of each place of the cache; the host's copy knows those that have none yet, as -1.
        self._pages = [[-1] * per_sample for _ in range(size.batch)]
        self.block_table = torch.zeros((size.batch, per_sample), dtype=torch.int32, device=size.device)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its pages, its block table and its part of the pool. Pages that several stores share, and
        free ones, count in parts: those of all stores add up to what is allocated. 0 once it is released."""
        if self._is_released:
            return 0
        pages = [page for row in self._pages for page in row if page >= 0]
        shares = sum(1 / self.pool.num_references(page) for page in pages)
        room = len(self.pool.free) / self.pool.num_stores
        return round((shares + room) * self.pool.bytes_per_page) + self.block_table.nbytes

    @property
    def num_shared_bytes(self) -> int:
        pages = {page for row in self._pages for page in row if page >= 0 and self.pool.num_references(page) > 1}
        return len(pages) * self.pool.bytes_per_page

    def write(self, plan: CachePlan, k: torch.Tensor, v: torch.Tensor) -> None:
        size = self.pool.page_size
        # Also where it is recorded for replays, which run the operators on the device alone.
        self._own_pages([page for _, run in plan.write_copies for page in range(run.start // size, run.stop // size)])
        if plan.write_index is None:
            places = [cached for _, cached in plan.write_copies]
            table = torch.cat([self.block_table[:, _in_pages(place, size)] for place in places], dim=1)
        else:
            table = self.block_table.index_select(1, plan.write_index[::size] // size)
        for pages, x in zip(self.pool.keys_and_values, (k, v), strict=True):
            pages.index_copy_(0, table.flatten().long(), x.reshape(-1, size, *x.shape[2:]))

    def read(self, plan: CachePlan) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.pool.page_size
        if plan.read_run is not None:
            table = self.block_table[:, _in_pages(plan.read_run, size)]
        else:
            runs = [cached for _, cached in plan.read_copies]
            table = torch.cat([self.block_table[:, _in_pages(run, size)] for run in runs], dim=1)
        batch, num_tokens = table.shape[0], table.shape[1] * size
        keys, values = (
            pages.index_select(0, table.flatten()).view(batch, num_tokens, *pages.shape[2:])
            for pages in self.pool.keys_and_values
        )
        return keys, values

    def page_format(self, plan: CachePlan) -> PageFormat:  # noqa: ARG002
        return PageFormat(self.pool.page_size, self.pool.keys_and_values.dtype)

    def read_parts(self, plan: CachePlan) -> KeyParts:
        return KeyParts(self.stored(plan.read_copies))

    def stored(self, runs: Sequence[TokenCopy]) -> StoredKeys:
        """The pages of some runs of the cache, all of which have been written."""
        size = self.pool.page_size
        places = [_in_pages(run, size) for _, run in runs]
        parts = [self.block_table[:, place] for place in places]
        # Of one run it is a view, whose address a CUDA graph may hold.
        table = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        pages = tuple(tuple(page for place in places for page in row[place]) for row in self._pages)
        keys, values = self.pool.keys_and_values
        return StoredKeys(keys, values, table, StoredForm(PageFormat(size, keys.dtype), pages))

    def fork(self) -> Self:
        """Another store with the same keys and values, in the same pages until either writes to them."""
        twin = type(self)(self._size, self.pool.page_size, self.pool)
        twin._pages = [list(row) for row in self._pages]
        twin.block_table.copy_(self.block_table)
        for page in (page for row in self._pages for page in row if page >= 0):
            self.pool.share(page)
        return twin

    def release(self) -> None:
        """Return the pages to the pool, except those that forks hold, as KeyStore.release describes."""
        if self._is_released:
            return
        self._is_released = True
        self.pool.num_stores -= 1
        for row in self._pages:
            for page in row:
                if page >= 0:
                    self.pool.release(page)
            row[:] = [-1] * len(row)

    def _own_pages(self, places: Sequence[int]) -> None:
        """Make this store the only one that refers to the pages at `places`, which are about to be overwritten."""
        missing = [
            (sample, place) for sample, row in enumerate(self._pages) for place in places if self._lacks(row[place])
        ]
        self.pool.reserve(len(missing))
        for sample, place in missing:
            row = self._pages[sample]
            if row[place] >= 0:
                self.pool.release(row[place])
            row[place] = self.pool.take()
            self.block_table[sample, place] = row[place]

    def _lacks(self, page: int) -> bool:
        """Return whether writing needs another page: there is none, or a fork holds it."""
        return page < 0 or self.pool.num_references(page) > 1


def _in_pages(tokens: slice, page_size: int) -> slice:
    return slice(tokens.start // page_size, tokens.stop // page_size)
