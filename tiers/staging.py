"""A fixed number of page-aligned buffers for bytes that cannot move directly to or from the disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tiers.pages import Pages, Registrar


class Staging:
    """At most `count` buffers of `nbytes`, made when first needed and then reused; callers wait if none is free."""

    def __init__(self, count: int, nbytes: int, registrar: Registrar) -> None:
        self.refusal: str | None = None
        self._nbytes = nbytes
        self._registrar = registrar
        self.made: list[Pages] = []
        """The buffers made so far, lent or not."""
        # LIFO: the buffer used last is reused first, so buffers that are never needed are never made.
        self._free: asyncio.LifoQueue[Pages | None] = asyncio.LifoQueue()
        for _ in range(count):
            self._free.put_nowait(None)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the buffers made so far."""
        return sum(pages.nbytes for pages in self.made)

    @asynccontextmanager
    async def buffer(self, pinned: bool = False) -> AsyncIterator[Pages]:
        """Lend a buffer; `pinned` for bytes that come from or go to a GPU (unpinned where that is refused)."""
        pages = await self._free.get()
        try:
            if pages is None:
                pages = Pages(self._nbytes)
                self.made.append(pages)
            if pinned and self.refusal is None and self._registrar.available:
                self.refusal = pages.pin(self._registrar)
            yield pages
        finally:
            self._free.put_nowait(pages)

    def release(self) -> None:
        """Release the buffers' memory; none may be lent."""
        for pages in self.made:
            pages.release()
        self.made = []
