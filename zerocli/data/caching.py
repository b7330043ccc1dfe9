"""Who of a node's ranks makes a cache file, and how the others wait for it."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from zerocli.console import progress, say
from zerocli.data import cache
from zerocli.data.documents import Moved
from zerocli.ranks.startup import STARTUP

_ROUNDS = itertools.count()


class Node:
    """A rank's part in making cache files: the first rank of each node makes them, the others wait and map them."""

    def __init__(self, leader: bool = True, shows: bool = True) -> None:
        self.leader = leader
        self.shows = shows
        """Whether this rank shows progress."""

    def wait(self) -> None:
        """Return once every rank has called this."""

    def cached(self, path: str, folder: str, name: str, build: Callable[[Path, Path], None]) -> cache.Reader:
        """Return the cache file of data at `path`; `build(folder, target)` writes it where it is missing. Collective.

        The rank that may build it compares every byte with its checksum first.
        """
        places = cache.folders(path, folder)
        reader = None
        if self.leader:
            reader, why = cache.find(places, name, verify=True)
            if why and self.shows:
                say(f"{why}: it is made again")
            reader = reader or cache.make(places, name, build)
        self.wait()
        if reader is None:
            reader, why = cache.find(places, name, verify=False)
            # The first rank's folder is not this rank's: a home folder of its own, for example.
            reader = reader or cache.make(places, name, build)
        return reader

    @contextlib.contextmanager
    def progress(self, what: str, nbytes: int) -> Iterator[Moved]:
        """Show the progress of reading `nbytes`: a bar on a terminal, a line now and then elsewhere."""
        if not self.shows:
            yield lambda moved: None
        else:
            with progress(what, nbytes, "B") as move:
                yield move


ALONE = Node()
"""One process that has nobody to wait for."""


class RankNode(Node):
    """A rank of a process group; all ranks make the same calls in one order."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._world = dist.get_world_size()
        rank = dist.get_rank()
        leader = int(os.environ.get("LOCAL_RANK", rank)) == 0
        super().__init__(leader or rank == 0, rank == 0)

    def wait(self) -> None:
        import torch.distributed as dist

        store, key = dist.distributed_c10d._get_default_store(), f"zerocli/data/{next(_ROUNDS)}"
        # Polled: a get would end with the store's timeout, and tokenising may take hours.
        with STARTUP.waiting("tokenising the data"):
            arrived, pause = store.add(key, 1), 0.005
            while arrived < self._world:
                time.sleep(pause)
                pause = min(0.5, 1.5 * pause)
                arrived = store.add(key, 0)


def this_node() -> Node:
    """Return this process' part: of its process group, or alone."""
    import torch.distributed as dist

    return RankNode() if dist.is_initialized() and dist.get_world_size() > 1 else ALONE
