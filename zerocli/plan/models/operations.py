"""Count the work of operations as they run: products, attention, bytes of other kernels, launches.

For models without a formula: `zerocli.plan.models.trace` runs them on tensors without memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from zerocli.engine.optimizer.dataflow import tensors_in
from zerocli.plan.measure import device_of
from zerocli.plan.time.compute import BACKWARD_OPS, Work

HOST_OPERATION = 14e-6
"""Seconds in which the host launches one operation, with what a model's Python and autograd do around it."""
BALANCE = {2: 160.0, 4: 12.0}
"""Operations for each byte that a matrix product reads or writes, by the bytes of a number, below which an H200 waits
for memory. Such are products with a short inner dimension: queries and keys, where attention has no kernel of its own.
"""
ATTENTION = "scaled_dot_product"
NO_KERNEL = ("empty", "new_empty", "detach", "alias", "lift", "is_", "sym_", "_unsafe_view")
"""How the names of operations begin that launch nothing."""


class Operations(TorchDispatchMode):
    """While active, adds up the work of all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work, self.again = Work(), Work()
        """Of all operations but repeated ones, and of those, which recomputation runs in backward."""
        self._in_loss = 0

    @contextlib.contextmanager
    def loss(self) -> Iterator[None]:
        """While the body runs the chunked loss, count its products and what they read and write.

        On a GPU one kernel does the rest, in place.
        """
        self._in_loss += 1
        try:
            yield
        finally:
            self._in_loss -= 1

    def take(self) -> tuple[Work, Work]:
        """Return (work, what was repeated) so far, and start from zero."""
        found, self.work, self.again = (self.work, self.again), Work(), Work()
        return found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:  # two of three calls are autograd's questions for this
            return device_of(args[0])
        out = function(*args, **(kwargs or {}))
        if _launches_nothing(function):
            return out
        work = _work_of(function, args, kwargs or {}, out)
        if self._in_loss:
            work = dataclasses.replace(work, moved=_nbytes(args, kwargs, out)) if work.products else Work()
        # Within backward, only a forward that is run again is recorded by autograd.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            self.again += work
        else:
            self.work += work
        return out


def _launches_nothing(function: Any) -> bool:
    """Return whether an operation only makes a view or uninitialised memory."""
    space, _, name = function._schema.name.partition("::")
    if space == "prim" or name.startswith(NO_KERNEL):
        return True
    returned = [each.alias_info for each in function._schema.returns]
    return any(info is not None and not info.is_write for info in returned)


def _work_of(function: Any, args: Any, kwargs: Any, out: Any) -> Work:
    name = function._schema.name
    if ATTENTION in name:
        q, k, v = args[1:4] if "backward" in name else args[:3]  # the output's gradient comes first
        causal = any(each is True for each in (*args, *kwargs.values()))
        pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (0.5 if causal else 1.0)
        operations = 2.0 * pairs * (q.shape[3] + v.shape[3])
        return Work(attention=operations * (BACKWARD_OPS if "backward" in name else 1.0), host=HOST_OPERATION)
    counted = flop_registry.get(_not_in_place(function))
    if counted is not None:
        operations = float(counted(*args, **kwargs, out_val=out))
        width = next((each.element_size() for each in tensors_in(out)), 2)  # a convolution's backward makes several
        waits = max(0.0, _nbytes(args, kwargs, out) - operations / BALANCE.get(width, BALANCE[2]))
        return Work(products=operations, moved=waits, host=HOST_OPERATION)
    return Work(moved=_nbytes(args, kwargs, out), host=HOST_OPERATION)


def _not_in_place(function: Any) -> Any:
    """Return the operation of torch's own; for one that writes into its first argument, that which makes a tensor."""
    space, _, name = function._schema.name.partition("::")
    return getattr(torch.ops.aten, name.removesuffix("_"), None) if space == "aten" else None


def _nbytes(*values: Any) -> float:
    """Return the bytes of all tensors that an operation reads or writes, each once."""
    seen = {id(each): each for each in tensors_in(values)}
    return float(sum(math.prod(each.shape) * each.element_size() for each in seen.values()))
