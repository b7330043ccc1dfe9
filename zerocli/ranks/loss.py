"""A lost rank: how torch reports it, and what this process says of it."""

from __future__ import annotations

import re

import torch.distributed as dist

from zerocli.ranks import deadlock


class Severed(RuntimeError):
    """A collective that cannot be finished: another rank is gone, or can no longer be reached."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason
        self.missing = ""
        """The ranks that are gone, if known."""

    def __str__(self) -> str:
        self.missing = self.missing or deadlock.ended_ranks()
        return f"{self.what} failed, another rank was lost: {self.missing or self.reason}"


def severed(error: BaseException, what: str = "a collective") -> Severed | None:
    """Return a Severed if the error means that a rank was lost, else None.

    gloo reports it only in the message text; its "enforce fail" errors are mistakes of the caller instead.
    """
    text = str(error)
    if isinstance(error, Severed):
        return error
    if not isinstance(error, RuntimeError):
        return None
    by_gloo = "/gloo/transport/" in text and "enforce fail" not in text
    by_nccl = isinstance(error, dist.DistBackendError) and ("RemoteError" in text or "remote process exited" in text)
    if not (by_gloo or by_nccl or isinstance(error, dist.DistNetworkError | dist.DistStoreError)):
        return None
    words = re.sub(r"\[[^][]*/[^][]*:\d+\]\s*", "", text).strip().partition(". This is")[0]
    return Severed(what, (words.splitlines() or [type(error).__name__])[0][:200])
