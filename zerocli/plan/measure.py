"""Measure live memory: the bytes of tensor storages that operations allocate, until they are freed."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerocli.engine.optimizer.dataflow import tensors_in
from zerocli.engine.optimizer.optim import At, FlatOptimizer, Group


class LiveBytes(TorchDispatchMode):
    """While active, counts the storages in host memory that operations allocate, and their peak.

    Memory that no operation made (a tier's pages, earlier tensors) is not counted, nor what a kernel allocates and
    frees internally.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, int] = {}
        """Bytes of live storages by identity; 0 for those that are not counted."""
        self.nbytes = 0
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs or {})):
            self._see(tensor, ours=False)
        out = function(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._see(tensor, ours=True)
        return out

    def _see(self, tensor: torch.Tensor, ours: bool) -> None:
        if device_of(tensor).type != "cpu":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if ours else 0
        self._known[key] = size
        self.nbytes += size
        self.peak = max(self.peak, self.nbytes)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.nbytes -= self._known.pop(key, 0)


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return a tensor's device; a fake tensor is asked for its own record, as its `device` is an operation."""
    found: torch.device = getattr(tensor, "fake_device", None) or tensor.device
    return found


def update_arrays(rule: FlatOptimizer) -> tuple[int, int]:
    """Return how many fp32 arrays as long as a piece `rule` allocates at once: in the first update, and in later ones.

    Both are 0 for a rule that needs whole parameters: it is not called on pieces.
    """
    if rule.whole:
        return 0, 0
    numel, most = 1 << 14, []
    master, states = torch.ones(numel), {name: torch.zeros(numel) for name in rule.state_names}
    for count in (1.0, 2.0):
        grad = torch.ones(numel)
        with LiveBytes() as live:
            rule.update(
                master, grad, None, states, Group(1e-3, 0.1, rule.defaults), At(torch.tensor(count), torch.zeros(()))
            )
        most.append(round(live.peak / grad.nbytes))
    rule.forget()
    first, later = most
    return first, later
