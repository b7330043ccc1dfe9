"""What is really alive: the bytes of tensor storages that operations make, followed until the last one is freed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is active, counts the storages on `device` that operations allocate, and remembers the most at once.

    Memory that no operation made (a tier's own pages, tensors from before) does not count, nor what a kernel
    allocates and frees within itself.
    """

    def __init__(self, device: str = "cpu", granularity: int = 1) -> None:
        super().__init__()
        self._device, self._granularity = device, granularity
        self._known: dict[int, int] = {}
        """Live storages by identity, with their bytes; 0 for those that are not ours."""
        self.nbytes = 0
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._see(value, ours=False)
        out = function(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._see(value, ours=True)
        return out

    def _see(self, tensor: torch.Tensor, ours: bool) -> None:
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // self._granularity) * self._granularity if ours else 0
        self._known[key] = size
        self.nbytes += size
        self.peak = max(self.peak, self.nbytes)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.nbytes -= self._known.pop(key, 0)

    def reset_peak(self) -> None:
        self.peak = self.nbytes
