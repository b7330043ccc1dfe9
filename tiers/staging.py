"""A fixed number of page-aligned buffers for bytes that cannot move directly to or from the disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tiers.pages import Pages, Registrar


class Staging:
    """At most `count` buffers of `nbytes`, made when first needed and then reused; callers wait if none is free.

    Memory that is not pinned is in RAM only as far as it was used, so a buffer that was used as far before is reused
    first: small transfers keep the others small. A transfer waits for such a buffer that is lent to a smaller one: so
    no more buffers are used as far as some number of bytes than transfers of that size have been under way at once.
    """

    def __init__(self, count: int, nbytes: int, registrar: Registrar) -> None:
        self.refusal: str | None = None
        self._nbytes = nbytes
        self._registrar = registrar
        self.made: list[Pages] = []
        """The buffers made so far, lent or not."""
        self._turns = asyncio.Semaphore(count)
        self._free: list[Pages] = []
        self._used: dict[Pages, int] = {}
        """How many bytes of each buffer, from its start, were ever lent."""
        self._lent: dict[Pages, int] = {}
        """How many bytes of each buffer that is lent are used now."""
        self._awaited: dict[Pages, asyncio.Future[None]] = {}
        """Buffers that are lent on when they come back."""

    @asynccontextmanager
    async def buffer(self, nbytes: int, pinned: bool = False) -> AsyncIterator[Pages]:
        """Lend a buffer whose first `nbytes` are used; `pinned` for bytes of a GPU (unpinned where that is refused)."""
        async with self._turns:
            pages = await self._take_back(nbytes, pinned) or self._take(nbytes)
            self._lent[pages] = nbytes
            try:
                if pinned and self.refusal is None and self._registrar.available:
                    self.refusal = pages.pin(self._registrar)
                yield pages
            finally:
                del self._lent[pages]
                waiting = self._awaited.pop(pages, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(None)
                else:
                    self._free.append(pages)

    async def _take_back(self, nbytes: int, pinned: bool) -> Pages | None:
        """Return a buffer that was used as far as `nbytes`, once a smaller transfer has given it back; None if none."""
        if pinned or any(self._used[pages] >= nbytes for pages in self._free):
            return None
        lent = [pages for pages, now in self._lent.items() if now < nbytes <= self._used[pages]]
        for pages in sorted(lent, key=self._used.__getitem__):
            if pages not in self._awaited:
                self._awaited[pages] = asyncio.get_running_loop().create_future()
                await self._awaited[pages]
                return pages
        return None

    def _take(self, nbytes: int) -> Pages:
        """Return the free buffer that was used least of those used as far as `nbytes`; else the one used most."""
        fitting = [pages for pages in self._free if self._used[pages] >= nbytes]
        used = self._used.__getitem__
        pages = min(fitting, key=used) if fitting else max(self._free, key=used, default=None)
        if pages is not None:
            self._free.remove(pages)
        else:
            pages = Pages(self._nbytes)
            self.made.append(pages)
        self._used[pages] = max(nbytes, self._used.get(pages, 0))
        return pages

    def release(self) -> None:
        """Release the buffers' memory; none may be lent."""
        for pages in self.made:
            pages.release()
        self.made, self._free, self._used = [], [], {}
