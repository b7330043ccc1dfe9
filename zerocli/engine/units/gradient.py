"""The gradient of a flat: where it is, when it is allocated, and when its memory may be reused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offload.store import Store
from tiers.streams import current_stream

if TYPE_CHECKING:
    from zerocli.engine.units.unit import Flat


class FlatGradient:
    """Allocated on the device from backward to the update, or always; or offloaded."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self.dtype = torch.float32
        self.is_whole = False
        """Whether gradients are not partitioned: the whole one is kept until it is reduced."""
        self.stays = True
        """Whether it stays allocated on the device between steps."""
        self.awaited = False
        """Whether an update that is under way has not read all of it."""
        self.whole: torch.Tensor | None = None
        """The whole gradient, if gradients are not partitioned and it is allocated now."""
        self.held: torch.Tensor | None = None
        """The gradient of `flat.held`, reduced over the ranks at the end of backward, if it is allocated now."""
        self.store: Store | None = None
        """The gradient of `flat.own`, if gradients are offloaded; `held` is None then."""
        self.to_free: torch.Tensor | None = None
        """A gradient whose last reader is another stream: `free_used` frees it once its own stream waits for that."""
        self._stream: torch.cuda.Stream | None = None
        """The stream that its memory belongs to: backward's."""
        self._views: list[torch.Tensor] = []

    def open(self, device: torch.device) -> None:
        """Allocate it on the device unless it is there or offloaded; the padding of a whole one is zero."""
        if self.held is not None or self.store is not None:
            return
        flat = self._flat
        if self.to_free is not None:  # of a unit that forward did not use
            assert flat.written is not None
            flat.written.wait()
            self.free_used()
        self._stream = current_stream(device) if device.type == "cuda" else None
        if not self.is_whole:
            self.held = torch.empty(flat.held.numel, dtype=self.dtype, device=device)
            return
        whole = torch.empty(flat.layout.total, dtype=self.dtype, device=device)
        for gap in flat.layout.gaps():
            whole[gap.start : gap.stop].zero_()
        self.place(whole)

    def place(self, whole: torch.Tensor) -> None:
        """Keep the whole gradient in this memory."""
        self.whole, self.held = whole, whole[self._flat.held.start : self._flat.held.stop]

    def move(self, store: Store | None, device: torch.device) -> None:
        """Keep it in `store` from now on, or on the device; its values are lost, so no step may have begun."""
        if self.store is not None:
            self.store.free()
        self.free_used()
        self.store, self.held, self.whole, self._views = store, None, None, []
        if store is None and self.stays:
            self.open(device)

    def part(self, index: int) -> torch.Tensor:
        """Return a parameter's part of the whole gradient, which is allocated."""
        assert self.whole is not None
        self._views = self._views or self._flat.views(self.whole)
        return self._views[index]

    def close(self, elsewhere: bool = False) -> None:
        """Free it after its last use, unless it stays allocated.

        If another stream than its own used it last, `elsewhere`, it is freed by `free_used`, and not whenever that
        stream is done: how much memory a step takes must not depend on how far ahead the host is.
        """
        if self.held is None or self.stays:
            return
        if elsewhere and self.held.is_cuda:
            self.to_free = self.held
        self.held, self.whole, self._views = None, None, []

    def free_used(self) -> None:
        """Free the gradient of the last update, for which the current stream waits by now."""
        if self.to_free is None:
            return
        written = self._flat.written
        assert self._stream is not None and written is not None
        if current_stream(self.to_free.device).cuda_stream != self._stream.cuda_stream:  # in a stream of the user's own
            written.wait(self._stream)
        self.to_free = None

    def read(self, device: torch.device) -> torch.Tensor:
        """Return `held`, read from its tier if it is offloaded."""
        if self.held is not None:
            return self.held
        assert self.store is not None
        found = torch.empty(self._flat.held.numel, dtype=self.store.dtype, device=device)
        self.store.fetch(0, found).synchronize()
        return found
